"""`ScriptProgram`: the step and the state of an existing script, as the program of a run.

The state keeps its type and its shardings. A run sees its arrays as a `TrainState`; their paths in it are those of the
checkpoint. The step is called as it is. It is traced once more for the plan, if it is a `jax.jit` function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmdkit import compat, data
from spmdkit.config import Config
from spmdkit.errors import ConfigError
from spmdkit.foundation.trees import is_key, named_leaves
from spmdkit.mesh.layout import LeafPlacement
from spmdkit.mesh.mesh import AXES
from spmdkit.program.program import Program
from spmdkit.program.task import Task
from spmdkit.step import trace_context
from spmdkit.step.state import TrainState
from spmdkit.step.step import Batch, StepChecks

MAX_STEPS = 2**31 - 1


class ScriptState:
    """The parts of a script's state: one pytree, or several in a plain tuple. Leaves that are no arrays are constants.

    The paths of the leaves are `params/...` and `opt_state/...` if the state has fields of these names, with all
    others in `model_state/...`. Of a tuple the first part is `params`, the others are `opt_state/<number>/...`.
    """

    def __init__(self, state: Any):
        self._is_tuple = type(state) is tuple
        self.parts: list[Any] = list(state) if self._is_tuple else [state]
        paths = [[path for path, _ in named_leaves(part)] for part in self.parts]
        has_params = not self._is_tuple and any(path.partition("/")[0] == "params" for path in paths[0])
        self._names = [self._named(number, path, has_params) for number, of in enumerate(paths) for path in of]
        self._first = [leaf for part in self.parts for leaf in jax.tree.leaves(part)]
        self._saved = [_is_array(leaf) for leaf in self._first]
        self._structures = [jax.tree.structure(part) for part in self.parts]
        self._found: tuple[int, list[int]] | None = None
        if not any(self._saved):
            raise ConfigError(
                "sk.start_run: the state holds no arrays. It is what the step receives and returns: a train state, or "
                "a tuple (params, opt_state). Pass that."
            )

    @staticmethod
    def _named(number: int, path: str, has_params: bool) -> tuple[str, str]:
        if number:
            return "opt_state", f"{number}/{path}" if path else str(number)
        field, _, name = path.partition("/")
        if not has_params:
            return "params", path
        return (field, name) if field in ("params", "opt_state") else ("model_state", path)

    def as_given(self, parts: Sequence[Any]) -> Any:
        """Returns the state in the form that the script passed: one pytree or a tuple."""
        return tuple(parts) if self._is_tuple else parts[0]

    def fields(self, parts: Sequence[Any], step: Any, rng: Any) -> TrainState:
        """Returns the arrays of a state, by path."""
        fields: dict[str, dict[str, Any]] = {"params": {}, "opt_state": {}, "model_state": {}}
        leaves = [leaf for part in parts for leaf in jax.tree.leaves(part)]
        for (field, name), is_saved, leaf in zip(self._names, self._saved, leaves, strict=True):
            if is_saved:
                fields[field][name] = leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
        whole = {field: of[""] if list(of) == [""] else of for field, of in fields.items()}
        return TrainState(
            step=step,
            params=whole["params"],
            opt_state=whole["opt_state"],
            model_state=whole["model_state"] or None,
            ema=None,
            rng=rng,
            optimizer=_NO_OPTIMIZER,
        )

    def parts_of(self, state: TrainState) -> list[Any]:
        """Returns the parts of a state from its arrays by path, in the form of the first state: a leaf that was a
        number is one again, and an array that was on no particular device is on none."""
        leaves = []
        for (field, name), is_saved, first in zip(self._names, self._saved, self._first, strict=True):
            of = getattr(state, field)
            leaves.append(_like(first, of[name] if isinstance(of, dict) else of) if is_saved else first)
        parts, start = [], 0
        for part in self.parts:
            end = start + len(jax.tree.leaves(part))
            parts.append(jax.tree.unflatten(jax.tree.structure(part), leaves[start:end]))
            start = end
        return parts

    def find(self, results: Any) -> tuple[list[int], list[Any]]:
        """Returns (position of each part in the results of a step, the results).

        Raises:
            ConfigError: the step does not return the state, or further values that look like it.
        """
        returned = list(results) if type(results) in (tuple, list) else [results]
        if self._found is not None and len(returned) == self._found[0]:  # 0.5 ms less for a state of 100 leaves
            positions = self._found[1]
            structures = [jax.tree.structure(returned[i]) for i in positions]
            if structures == self._structures:
                return positions, returned
        forms, wanted = [_form(x) for x in returned], [_form(part) for part in self.parts]
        positions = []
        for number, form in enumerate(wanted):
            found = [i for i, other in enumerate(forms) if other == form]
            if len(found) != wanted.count(form):
                what = f"part {number} of the state" if self._is_tuple else "the state"
                raise ConfigError(
                    f"the step returned {len(returned)} values, and {len(found) or 'none'} of them "
                    f"{'have' if len(found) > 1 else 'has'} the structure and shapes of {what} "
                    f"({_describe(self.parts[number])}). A run saves what the step returns, and must find it. Return "
                    "the new state once, other arrays inside a dict, and pass all parts of the state to sk.start_run."
                )
            positions.append(found[wanted[:number].count(form)])
        self._found = len(returned), positions
        return positions, returned


_NO_OPTIMIZER = optax.with_extra_args_support(optax.identity())


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex)


def _form(tree: Any) -> Any:
    return jax.tree.structure(tree), [np.shape(x) if _is_array(x) else None for x in jax.tree.leaves(tree)]


def _describe(tree: Any) -> str:
    return f"{type(tree).__name__} with {len(jax.tree.leaves(tree))} leaves"


def _like(first: Any, value: jax.Array) -> Any:
    """Returns a restored array in the form of the leaf that the script made."""
    if not isinstance(first, jax.Array):
        host = np.asarray(value)
        return host.astype(np.asarray(first).dtype) if isinstance(first, np.ndarray) else type(first)(host.item())
    is_committed = getattr(first, "committed", True)
    if getattr(first, "weak_type", False) and not first.shape:
        value = jnp.asarray(np.asarray(value).item())
        return jax.device_put(value, first.sharding) if is_committed else value
    if is_committed:
        return value
    if is_key(value):
        return jax.random.wrap_key_data(
            jnp.asarray(np.asarray(jax.random.key_data(value))), impl=jax.random.key_impl(value)
        )
    return jnp.asarray(np.asarray(value))


class ScriptProgram(Program):
    """The program of a script. Only the attributes of `Program` that a run and a plan use are defined.

    Attributes:
        own: converts the state of the script.
        train_step: the script's step.
    """

    def __init__(self, config: Config, task: Task, train_step: Callable[..., Any], state: Any):
        self.config, self.task, self.train_step, self.own = config, task, train_step, ScriptState(state)
        leaves = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
        _check_leaves(state)
        self.mesh = _mesh_of(leaves)
        self._devices = list(self.mesh.devices.flat)
        self.sizes = dict(self.mesh.shape) | {axis: 1 for axis in AXES if axis not in self.mesh.shape}
        self.form, self.zero, self.microbatches = "plain", 3, 1
        self.notes, self.compile_log, self.checks = [], [], StepChecks(None, None)
        self.may_be_donated, self.groups, self.limit = False, None, None
        self._eval_feeds, self._eval_params, self._state_groups = dict[str, Any](), None, None
        self.skipped_rows = [data.SkippedRows(0)]
        self.schedule = data.Schedule(MAX_STEPS, 1, shuffle=False, what="the script's data")
        self.feed: Any = SimpleNamespace(
            in_memory=False,
            schedule=self.schedule,
            position=lambda step: None,
            restore=lambda *_: None,
            epoch=lambda step: None,
        )
        self._replicated = NamedSharding(self.mesh, PartitionSpec())
        self._step_context = trace_context.Context(
            trace_context.ShardingSpec(mesh=self.mesh, sizes=self.sizes), trace_context.StepOptions()
        )
        self._rng = self._constant(np.zeros(2, np.uint32))
        first = self.fields(self.own.parts, 0)
        self.layout = [_placement(path, leaf) for path, leaf in named_leaves(first)]
        self.state_sharding = jax.tree.map(lambda x: x.sharding, first)
        self.abstract_state = self._abstract_state = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), first
        )
        self._traced_step: jax.stages.Traced | None = None

    def _constant(self, value: Any) -> jax.Array:
        host = np.asarray(value)
        return jax.make_array_from_callback(host.shape, self._replicated, lambda index: host[index])

    def fields(self, parts: Sequence[Any], step: int) -> TrainState:
        """Returns the state of `step` as a run saves it."""
        return self.own.fields(parts, self._constant(np.int32(step)), self._rng)

    def init(self) -> TrainState:
        """Returns the state that the script passed."""
        return self.fields(self.own.parts, 0)

    def non_finite_leaf(self, current: TrainState) -> str | None:
        """Returns the path of the first leaf of the state with a NaN or an infinity, or None. Waits for the device."""
        floats = [(path, x) for path, x in named_leaves(current) if jnp.issubdtype(x.dtype, jnp.inexact)]
        checks = [(path, _is_finite(x)) for path, x in floats]  # leaves may be on different devices
        return next((path for path, ok in checks if not ok), None)

    def all_finite(self, current: TrainState) -> bool:
        """Returns whether all leaves of the state are finite. Waits for the device."""
        return self.non_finite_leaf(current) is None

    # ---- the plan

    def trace(self, parts: Sequence[Any], args: Sequence[Any], kwargs: Any) -> None:
        """Traces the step for the plan, with the state as its first arguments. Does nothing for a step that is no
        `jax.jit` function: tracing would run its side effects.

        Args:
            parts: the state that `args` contain.
        """
        if not hasattr(self.train_step, "lower"):
            self.notes.append("no plan: the step is not a jax.jit function")
            return
        leaves, structure = jax.tree.flatten((tuple(args), dict(kwargs)))
        arrays = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray | np.generic)]
        numbers = {id(x): number for number, x in enumerate(x for part in parts for x in jax.tree.leaves(part))}
        order = sorted(arrays, key=lambda i: numbers.get(id(leaves[i]), len(numbers) + i))

        def step(*values: Any) -> Any:
            full = list(leaves)
            for i, value in zip(order, values, strict=True):
                full[i] = value
            own_args, own_kwargs = jax.tree.unflatten(structure, full)
            positions, returned = self.own.find(self.train_step(*own_args, **own_kwargs))
            rest = [x for i, x in enumerate(returned) if i not in positions]
            outputs = jax.tree.leaves(([returned[i] for i in positions], rest))
            return [x for x in outputs if isinstance(x, jax.Array)]

        shapes = [_abstract(leaves[i]) for i in order]
        traced = jax.jit(step, keep_unused=True).trace(*shapes)
        donated = donated_arguments(traced.jaxpr.jaxpr)
        self._traced_step = jax.jit(step, keep_unused=True, donate_argnums=donated).trace(*shapes)
        inputs = [x for x, i in zip(shapes, order, strict=True) if id(leaves[i]) not in numbers]
        self.abstract_batch = Batch([x if x.sharding else x.update(sharding=self._replicated) for x in inputs])

    @property
    def can_plan(self) -> bool:
        """Whether the step was traced."""
        return self._traced_step is not None

    @property
    def traced(self) -> jax.stages.Traced:
        """The step traced on its shardings."""
        assert self._traced_step is not None
        return self._traced_step

    @property
    def phases(self) -> tuple[Any, ...]:
        """A script has one program."""
        return ()

    @property
    def row_table(self) -> list[Any]:
        """The rows of a script's batch are not analyzed."""
        return []

    @property
    def narrow_leaves(self) -> list[str]:
        """Updates are not measured."""
        return []

    @property
    def computes_twice(self) -> bool:
        """Unknown: the arithmetic of the step is that of the model."""
        return False

    @property
    def batch_shards(self) -> int:
        """The number of shards of the largest array of a batch."""
        largest = max(self.abstract_batch.examples, key=lambda x: x.size, default=None)
        if largest is None or not largest.size:
            return 1
        return int(np.prod(largest.shape)) // max(1, int(np.prod(largest.sharding.shard_shape(largest.shape))))

    def _compile(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        return lowered.compile()


def _check_leaves(state: Any) -> None:
    for path, leaf in named_leaves(state):
        if isinstance(leaf, jax.core.Tracer):
            raise ConfigError(f"sk.start_run: '{path}' is traced. Call sk.start_run outside of jax.jit.")
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise ConfigError(
                f"sk.start_run: '{path}' was donated to an earlier step. Pass the state that this step returned."
            )
        if jax.process_count() > 1 and _is_array(leaf) and _is_local(leaf):
            raise ConfigError(
                f"sk.start_run: '{path}' is an array of this process alone, and the job has {jax.process_count()} "
                "processes. A checkpoint holds global arrays. Put it on all devices: jax.device_put(x, "
                "NamedSharding(mesh, PartitionSpec()))."
            )


def _is_local(leaf: Any) -> bool:
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable


def _mesh_of(leaves: Sequence[jax.Array]) -> Mesh:
    """Returns the largest mesh of the leaves; of one device if no leaf is on a mesh."""
    meshes = [x.sharding.mesh for x in leaves if isinstance(x.sharding, NamedSharding)]
    largest = max(meshes, key=lambda mesh: mesh.size, default=None)
    if isinstance(largest, Mesh):
        return largest
    device = next((d for x in leaves for d in x.sharding.device_set), None) or jax.local_devices()[0]
    return compat.auto_mesh(np.array([device], dtype=object), ("data",))


def _placement(path: str, leaf: jax.Array) -> LeafPlacement:
    spec = leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else PartitionSpec()
    return LeafPlacement(path, leaf.shape, leaf.dtype, spec, "device", "sharding of the script")


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    array = leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
    sharding = array.sharding if getattr(array, "committed", False) else None
    weak_type = getattr(array, "weak_type", False)  # keys have neither
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding, weak_type=weak_type)


def donated_arguments(jaxpr: Any) -> tuple[int, ...]:
    """Returns the arguments that jitted functions inside a jaxpr donate."""
    donated = {
        id(var)
        for eqn in jaxpr.eqns
        for var, is_donated in zip(eqn.invars, eqn.params.get("donated_invars", ()), strict=False)
        if is_donated
    }
    return tuple(i for i, var in enumerate(jaxpr.invars) if id(var) in donated)


@jax.jit
def _is_finite(x: jax.Array) -> jax.Array:
    return jnp.isfinite(x).all()
