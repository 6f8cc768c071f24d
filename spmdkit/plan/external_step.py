"""`sk.plan_step`, `sk.bill`: the plan and the bill of a step that does not use spmdkit, by the user's own mesh axes.

    plan = sk.plan_step(train_step, state, batch)          # jitted; arrays, or ShapeDtypeStructs with shardings
    plan = sk.plan_step(make, target="tpu:v5p:2x2x2")      # a step that needs the devices of the target
    print(plan)

The mesh is the largest in the step and in the shardings of its arguments. An argument is state if the step
returns arrays of its structure and shapes. The first state is the parameters, unless a state has a field `params`; all
arguments that are not state are inputs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmdkit import compat
from spmdkit.config import Config
from spmdkit.errors import ConfigError, SpmdkitError
from spmdkit.foundation.files import write_requested
from spmdkit.foundation.formatting import format_bytes
from spmdkit.foundation.jaxprs import equations
from spmdkit.foundation.trees import named_leaves
from spmdkit.foundation.user_code import call_user, load, shortened, user_frame
from spmdkit.mesh.layout import LeafPlacement
from spmdkit.mesh.mesh import AXES, describe_mesh, spec_axes
from spmdkit.plan.collectives_bill import Bill, read_bill
from spmdkit.plan.document import Document, plan_program
from spmdkit.plan.findings import Finding
from spmdkit.plan.hlo.text import parse
from spmdkit.plan.machine.calibrate import with_measured
from spmdkit.plan.machine.compiler_process import in_compiler_process
from spmdkit.plan.machine.links import crossing_axes
from spmdkit.plan.machine.target import Target, open_target, parse_target, substitute_notes, target_of
from spmdkit.plan.trace import write_trace
from spmdkit.program import memory
from spmdkit.program.script_program import ScriptProgram, donated_arguments
from spmdkit.step import trace_context
from spmdkit.step.step import Batch

Make = Callable[[np.ndarray], tuple[Callable[..., Any], Sequence[Any]]]

MIN_BYTES = 2**16
_LABELS = {"params": "parameters", "opt_state": "optimizer state", "state": "other state", "inputs": "inputs"}
_CONSTRAINT = "jax.lax.with_sharding_constraint"
_FIXES = {
    "does-not-fit": "Shard the state or the batch over more devices, donate the state, or use jax.checkpoint.",
    "exposed-communication": "More examples per device, or fewer devices on this axis.",
    "full-rematerialization": (
        f"Shard the array in between with {_CONSTRAINT}, with one dim unsharded, or shard the producer and the "
        "consumer along the same dim."
    ),
    "host-callback": "Remove it from the step, or guard it by a static flag.",
    "many-small-all-reduces": "Collect the values and reduce them together: one psum of the stacked array.",
    "padded-dim": "",
    "padding-waste": "",
    "quadratic-scores": "jax.nn.dot_product_attention(implementation='cudnn') on GPU, splash attention on TPU.",
    "recompilation-risk": "",
    "repeated-work": f"Shard it by its first dim, where it is created: {_CONSTRAINT}(x, P(axis)).",
}
"""Code of a finding that applies to a step without a config -> its repair; empty: the detector's."""


class StepPlan:
    """The plan of a step; `str` returns the table of `spmdkit plan`.

    Attributes:
        document: the keys of `spmdkit plan --json`.
    """

    def __init__(self, document: Document):
        self.document = document

    def __str__(self) -> str:
        from rich.console import Console

        from spmdkit.plan.table import WIDTH, show

        text = io.StringIO()
        show(self.document, Console(file=text, width=WIDTH, highlight=False))
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    def write_page(self, path: Path | str) -> None:
        """Writes the plan as an HTML page."""
        from spmdkit.metrics.report.plan import plan_page

        write_requested("write_page", Path(path), plan_page(self.document))

    def write_timeline(self, path: Path | str) -> None:
        """Writes the timeline of an iteration of the longest loop, or of the step, for ui.perfetto.dev."""
        write_trace(self.document, Path(path))


def plan_step(step: Callable[..., Any] | Make, *arguments: Any, target: str | None = None) -> StepPlan:
    """Returns the plan of a jitted step. Runs no step.

    Args:
        step: a `jax.jit` or `eqx.filter_jit` function; or `make(devices) -> (step, arguments)`, which receives a numpy
            array of the target's devices.
        arguments: of the step: arrays, or `jax.ShapeDtypeStruct`s with shardings. None for `make`.
        target: as in `spmdkit plan --target`; None: the devices of the step.

    Raises:
        ConfigError: the step is not jitted, its devices are not those of the target, or the compiler rejects it.
        UserCodeError: a function raised.
    """
    is_made = not hasattr(step, "lower")
    if is_made and (arguments or not callable(step)):
        raise ConfigError(
            f"sk.plan_step received {_name(step)}, which is not jitted, with {len(arguments)} arguments. A step has to "
            "be a jax.jit function; only make(devices) is not, and it has no arguments. Pass jax.jit(step)."
        )
    parsed = parse_target(target or "here")
    machine = open_target(parsed) if is_made else None
    if machine is not None and not machine.devices:
        return StepPlan(in_compiler_process(_plan_made, machine, step))
    with jax.transfer_guard("allow"):
        program = _open(step, arguments, machine, getattr(jax.sharding, "get_mesh", lambda: None)())
        machine, call_s = with_measured(_on_devices_of(program, parsed) if machine is None else machine)
        return _plan(program, machine, call_s)


def bill(compiled: Any, mesh: Mesh | None = None) -> Bill:
    """Returns the bill of the collectives of a compiled program, `jax.jit(step).lower(...).compile()`.

    Args:
        mesh: names the axes; None: the largest mesh in the program's shardings.

    Raises:
        ConfigError: not a compiled program, or a mesh of another size.
    """
    compiled = getattr(compiled, "compiled", compiled)  # of equinox
    text = compiled.as_text() if isinstance(compiled, jax.stages.Compiled) else None
    if text is None:
        raise ConfigError(
            f"sk.bill received {_name(compiled)}. It reads a compiled program with a text. Pass "
            "jax.jit(step).lower(*arguments).compile()."
        )
    module = parse(text)
    mesh = mesh or _mesh_of(_shardings(compiled), module.num_partitions)
    if mesh is not None and mesh.size != module.num_partitions:
        raise ConfigError(
            f"sk.bill: the program has {module.num_partitions} devices, mesh has {mesh.size} "
            f"({describe_mesh(mesh.shape)}). Both are the same devices. Pass the mesh that the step was jitted for."
        )
    return read_bill(module, {"devices": module.num_partitions} if mesh is None else dict(mesh.shape))


def plan_make(text: str, target: str | None) -> StepPlan:
    """Returns the plan of `file.py:make` or `module:make`."""
    machine = open_target(parse_target(target or "here"))  # before the file creates JAX's devices
    if not machine.devices:
        return StepPlan(in_compiler_process(_plan_named, machine, text))
    return StepPlan(_plan_named(machine, text))


def _plan_named(machine: Target, text: str) -> Document:
    if str(Path.cwd()) not in sys.path:  # as with `python -m`
        sys.path.insert(0, str(Path.cwd()))
    make = load(text, "plan", Path.cwd())
    if not callable(make) or hasattr(make, "lower"):
        raise ConfigError(
            f"plan: {text} is {_name(make)}. It must be a function make(devices) that returns the jitted step and "
            "its arguments. Write def make(devices): ...; return step, (state, batch)."
        )
    return _plan_made(machine, make) | {"source": text}


def _plan_made(machine: Target, make: Make) -> Document:
    return _plan(_open(make, (), machine, None), *with_measured(machine)).document


def _name(found: Any) -> str:
    return getattr(found, "__qualname__", None) or type(found).__name__


# ---- the step --------------------------------------------------------------------------------------------------------


def _open(step: Any, arguments: Sequence[Any], machine: Target | None, mesh: Any) -> ExternalProgram:
    """Traces a step, in the mesh context of the caller or of `make`."""

    def trace() -> tuple[str, Any, Sequence[Any]]:
        own_step, own_arguments = step, arguments
        if machine is not None:
            _check_call(step, (machine.devices,), "It is called as make(devices). Write def make(devices): ...")
            own_step, own_arguments = _made(step(np.array(machine.devices, dtype=object)))
        elif mesh is not None and not mesh.empty:
            jax.set_mesh(mesh)  # until the call ends: `call_user` restores the context
        _check_call(own_step, own_arguments, "Pass the positional arguments of one step.")
        with _accepted():
            return own_step, _trace(own_step, own_arguments), own_arguments

    own_step, traced, own_arguments = call_user(trace, "the step" if machine is None else "make")
    return ExternalProgram(own_step, traced, own_arguments)


def _check_call(fn: Any, arguments: Sequence[Any], repair: str) -> None:
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ConfigError(
            f"{_name(fn)}{signature} does not take {len(arguments)} positional arguments: {error}. {repair}"
        ) from None


@contextlib.contextmanager
def _accepted() -> Iterator[None]:
    """Context in which JAX may reject the arguments of a step."""
    try:
        yield
    except (SpmdkitError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:
        if user_frame(error) is not None:  # raised by a line of the step
            raise
        raise ConfigError(
            f"JAX rejects the arguments of the step: {type(error).__name__}: {shortened(error)}\nThey must be arrays "
            "or jax.ShapeDtypeStruct, with shardings that divide their shapes. Fix that argument."
        ) from error


def _made(pair: Any) -> tuple[Any, Sequence[Any]]:
    is_pair = isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], tuple | list)
    if not is_pair or not hasattr(pair[0], "lower"):
        found = ", ".join(map(_name, pair)) if isinstance(pair, tuple) else type(pair).__name__
        raise ConfigError(
            f"make(devices) returned {found}. It must return the jitted step and a tuple of its arguments. Write "
            "return jax.jit(step), (state, batch)."
        )
    return pair[0], pair[1]


def _trace(step: Any, arguments: Sequence[Any]) -> jax.stages.Traced:
    if hasattr(step, "trace"):
        return step.trace(*arguments)  # type: ignore[no-any-return]
    leaves, structure = jax.tree.flatten(tuple(arguments))  # eqx.filter_jit: leaves that are not arrays are constants
    arrays = [n for n, leaf in enumerate(leaves) if _is_array(leaf)]

    def call(*values: Any) -> Any:
        given = list(leaves)
        for n, value in zip(arrays, values, strict=True):
            given[n] = value
        results = step(*jax.tree.unflatten(structure, given))
        return jax.tree.map(lambda x: x if isinstance(x, jax.Array) else None, results)

    call.__name__ = _name(step)
    values = [leaves[n] for n in arrays]
    donated = donated_arguments(jax.jit(call).trace(*values).jaxpr.jaxpr)
    return jax.jit(call, donate_argnums=donated).trace(*values)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic)


@dataclasses.dataclass(frozen=True)
class _Argument:
    """A leaf of the arguments: its path (`params/...`, `opt_state/...`, `state/...`, `inputs/...`), and its name in the
    compiled program."""

    path: str
    name: str
    aval: Any
    sharding: Any
    is_donated: bool

    @property
    def field(self) -> str:
        """The first part of the path."""
        return self.path.partition("/")[0]

    @property
    def device_bytes(self) -> int:
        """Bytes of its shard."""
        return memory.shard_bytes(self.aval.shape, self.aval.dtype, self.sharding)


class ExternalProgram(ScriptProgram):
    """A step that does not use spmdkit. Only the attributes of `Program` that a plan uses are defined."""

    def num_tokens(self, batch: Any) -> int:
        """Returns 0: the tokens of a batch are not declared."""
        return 0

    def __init__(self, step: Any, traced: jax.stages.Traced, arguments: Sequence[Any]):
        self._traced_step = traced
        self.notes, self.compile_log = [], []
        given = [getattr(x, "sharding", None) for x in jax.tree.leaves(tuple(arguments)) if _is_array(x)]
        flat = jax.tree.leaves(traced.args_info)
        given = given if len(given) == len(flat) else [None] * len(flat)  # static arguments
        inside = [s for eqn in equations(traced.jaxpr) for s in _shardings_in(eqn)]
        final: Sequence[Any] = ()
        with _accepted(), contextlib.suppress(jax.errors.JaxRuntimeError):  # the latter is reported by plan_program
            final = _shardings(self.compiled)
        mesh = _mesh_of([*inside, *given, *final])
        if mesh is None:
            devices = next((s.device_set for s in (*given, *final) if s is not None), {jax.devices()[0]})
            mesh = compat.auto_mesh(np.array(sorted(devices, key=lambda d: d.id), dtype=object), ("devices",))
        self.mesh = mesh
        self._devices = list(mesh.devices.flat)
        self.sizes = dict(mesh.shape) | {axis: 1 for axis in AXES if axis not in mesh.shape}
        self.form, self.zero, self.microbatches, self.groups = "plain", 3, 1, None
        if len(final) >= len(flat):
            given = [a if b is None else b for a, b in zip(given, final, strict=False)]
        replicated = NamedSharding(mesh, PartitionSpec())
        paths, invars = _paths(step, traced, arguments), traced.jaxpr.jaxpr.invars
        names = traced.jaxpr.jaxpr.debug_info.arg_names
        self.arguments = [
            _Argument(path, name or "", var.aval, sharding or replicated, leaf.donated)
            for path, name, leaf, var, sharding in zip(paths, names, flat, invars, given, strict=True)
        ]
        self.layout = [_placement(a, mesh) for a in self.arguments]
        self.argument_names = {a.path: a.name for a in self.arguments}
        inputs = [a for a in self.arguments if a.field == "inputs"]
        self.abstract_batch = Batch([jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in inputs])
        self.abstract_state: Any = SimpleNamespace(params=[a.aval for a in self.arguments if a.field == "params"])
        self._abstract_state: Any = {a.path: a.aval for a in self.arguments if a.field != "inputs"}
        self._batch = max(inputs, key=lambda a: (len(a.aval.shape) > 0, math.prod(a.aval.shape)), default=None)
        rows = self._batch.aval.shape[:1] if self._batch else ()
        self.config = Config(task="step.py:make", batch_size=max([*rows, 1]))
        sharding = trace_context.ShardingSpec(mesh=mesh, sizes=self.sizes)
        self._step_context = trace_context.Context(sharding, trace_context.StepOptions())

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The mesh axes that shard the first dim of the inputs."""
        sharding = self._batch.sharding if self._batch else None
        spec = sharding.spec if isinstance(sharding, NamedSharding) else ()
        return tuple(axis for axis in spec_axes(spec[:1]) if axis in self.mesh.shape)

    @property
    def batch_shards(self) -> int:
        """The number of shards of the first dim of the inputs."""
        if self._batch is None:
            return 1
        shape = self._batch.aval.shape
        return int(math.prod(shape[:1]) // max(1, math.prod(self._batch.sharding.shard_shape(shape)[:1])))

    @property
    def input_bytes(self) -> memory.InputBytes:
        """The arguments of the step, in bytes per device."""
        device, host = {"inputs": 0}, dict[str, int]()
        for a in self.arguments:
            name, where = _LABELS[a.field], host if _is_on_host(a.sharding) else device
            where[name] = where.get(name, 0) + a.device_bytes
        return memory.InputBytes(device, host)


def _is_on_host(sharding: Any) -> bool:
    return "host" in (sharding.memory_kind or "") and next(iter(sharding.device_set)).platform != "cpu"


def _placement(a: _Argument, mesh: Mesh) -> LeafPlacement:
    """Returns the placement of an argument. One on another mesh of the same devices has no spec."""
    spec = a.sharding.spec if isinstance(a.sharding, NamedSharding) else PartitionSpec()
    spec = spec if {*spec_axes(spec)} <= {*mesh.axis_names} else PartitionSpec()
    kind = "pinned_host" if _is_on_host(a.sharding) else "device"
    return LeafPlacement(a.path, a.aval.shape, a.aval.dtype, spec, kind, "sharding of the step")


def _shardings(compiled: jax.stages.Compiled) -> list[Any]:
    """Returns the shardings of the arguments, in order, and of the results. None: an argument that is not read."""
    is_leaf: Callable[[Any], bool] = lambda x: x is None
    given = jax.tree.leaves(compiled.input_shardings, is_leaf=is_leaf)
    return [*given, *jax.tree.leaves(compiled.output_shardings)]


def _shardings_in(eqn: Any) -> Iterator[Any]:
    """Yields the shardings in an equation: of a constraint, of a jit, and the mesh of a `shard_map`."""
    if eqn.primitive.name == "shard_map" and isinstance(eqn.params["mesh"], Mesh):
        yield NamedSharding(eqn.params["mesh"], PartitionSpec())
    yield eqn.params.get("sharding")
    yield from eqn.params.get("in_shardings") or ()


def _mesh_of(shardings: Sequence[Any], num_devices: int | None = None) -> Mesh | None:
    """Returns the largest mesh of the shardings, of several the first with most axes."""
    meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding) and isinstance(s.mesh, Mesh)]
    meshes = [mesh for mesh in meshes if num_devices in (None, mesh.size)]
    return max(meshes, key=lambda mesh: (mesh.size, sum(n > 1 for n in mesh.shape.values())), default=None)


def _paths(step: Any, traced: jax.stages.Traced, arguments: Sequence[Any]) -> list[str]:
    """Returns the path of every leaf of the arguments."""
    if hasattr(step, "trace"):
        arguments = traced.args_info[0]  # static arguments are left out
    named = [[(path, x) for path, x in named_leaves(a) if hasattr(x, "shape")] for a in arguments]
    forms = [_form(part) for part in _parts(traced.out_info, 3)]
    is_state = [bool(of) and _form(a) in forms for of, a in zip(named, arguments, strict=True)]
    is_state = is_state if any(is_state) else [n == 0 for n in range(len(arguments))]
    with_params = [n for n, of in enumerate(named) if is_state[n] and any(path.startswith("params/") for path, _ in of)]
    first = next((n for n, s in enumerate(is_state) if s and not with_params), None)
    names = _argument_names(step, traced, [len(of) for of in named])

    def path_of(n: int, path: str) -> str:
        field, rest = "state", f"{names[n]}/{path}"
        if not is_state[n]:
            field = "inputs"
        elif n in with_params:
            within, _, inner = path.partition("/")
            is_field = within in ("params", "opt_state")
            field, rest = (within, inner) if is_field else ("state", path)
            rest = rest if len(with_params) == 1 else f"{names[n]}/{rest}"
        elif n == first or names[n].startswith("opt"):
            field, rest = ("params" if n == first else "opt_state"), path
        return f"{field}/{rest}".rstrip("/")

    return [path_of(n, path) for n, of in enumerate(named) for path, _ in of]


def _argument_names(step: Any, traced: jax.stages.Traced, num_leaves: Sequence[int]) -> list[str]:
    if not hasattr(step, "trace"):
        return [*inspect.signature(step).parameters, *map(str, range(len(num_leaves)))]
    names = [re.split(r"[.\[]", name or "")[0] for name in traced.jaxpr.jaxpr.debug_info.arg_names]
    first = [sum(num_leaves[:n]) for n in range(len(num_leaves))]
    return [names[n] if n < len(names) else "" for n in first]


def _form(tree: Any) -> Any:
    return [(path, tuple(x.shape), str(x.dtype)) for path, x in named_leaves(tree) if hasattr(x, "shape")]


def _parts(tree: Any, depth: int) -> Iterator[Any]:
    """Yields a tree and its subtrees."""
    yield tree
    children = jax.tree_util.default_registry.flatten_one_level(tree) if depth else None
    for child in () if children is None else children[0]:
        yield from _parts(child, depth - 1)


# ---- the plan --------------------------------------------------------------------------------------------------------


def _on_devices_of(program: ExternalProgram, target: Target) -> Target:
    """Returns the target with the devices of a step."""
    devices = tuple(program.mesh.devices.flat)
    if target.name == "here":
        return target_of(devices)
    own, num = target_of(devices).chip.name, len(devices)
    is_compiled_for = target.compiler == "cpu" if devices[0].platform == "cpu" else target.chip.name == own
    if target.num_devices != num or not is_compiled_for:
        raise ConfigError(
            f"target {target.name} is {target.num_devices} devices of {target.chip.name}, the step has {num} of {own} "
            f"({describe_mesh(program.mesh.shape)}). A step is compiled for its own devices; CPU devices replace "
            "as many GPUs. Pass make(devices), which creates the mesh from the target's devices and returns the jitted "
            "step and its arguments."
        )
    limit = memory.memory_limit(devices) if target.chip.kind == "cpu" else None
    notes = (*target.notes, *substitute_notes(target)) if devices[0].platform == "cpu" else target.notes
    return dataclasses.replace(target, devices=devices, limit_bytes=limit, notes=notes)


def _plan(program: ExternalProgram, machine: Target, call_s: float) -> StepPlan:
    if program.mesh.size != len(machine.devices):
        raise ConfigError(
            f"the step of make(devices) runs on {program.mesh.size} of the {len(machine.devices)} devices of target "
            f"{machine.name}. Its arguments have to be on a mesh of all devices. Give them shardings: "
            "jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))."
        )
    document = plan_program(program, machine, call_s)
    document["mesh"] = dict(program.mesh.shape)
    document["wire"]["least"] = {}
    for row, argument in zip(document["layout"], program.arguments, strict=True):
        row["device_bytes"] = argument.device_bytes
    document["config"] = ""
    apply = [f for f in document["findings"] if f["code"] in _FIXES]
    document["findings"] = [{**f, "fix": _FIXES[f["code"]] or f["fix"]} for f in apply]
    document["findings"] += map(vars, [*_not_donated(program), *_crossing(program, machine, document)])
    return StepPlan(document)


def _not_donated(program: ExternalProgram) -> Iterator[Finding]:
    """Yields a finding if state that the step returns is not donated."""
    state = [a for a in program.arguments if a.field != "inputs"]
    kept = [a for a in state if not a.is_donated]
    total = sum(a.device_bytes for a in kept)
    if total >= MIN_BYTES and any(a.field != "params" for a in state):  # otherwise it may return a gradient
        largest = max(kept, key=lambda a: a.device_bytes).path
        more = f" and {len(kept) - 1} more" if len(kept) > 1 else ""
        yield Finding(
            "donation-not-used",
            (
                f"{largest}{more} ({format_bytes(total)} of each device) are not donated: the old and the new arrays "
                "exist during a step"
            ),
            None,
            "Donate the state: jax.jit(step, donate_argnums=0).",
        )


def _crossing(program: ExternalProgram, machine: Target, document: Document) -> Iterator[Finding]:
    """Yields a finding for each axis with collectives that cross hosts or slices, other than those of the batch."""
    axes = crossing_axes(machine, program.mesh) - {*program.data_axes} if machine.num_slices > 1 else ()
    for axis in sorted(axes):
        rows = [r for r in document["collectives"] if axis in r["axes"] and r["crosses"] and r["counted"]]
        sent = sum(row["bytes_at_least"] for row in rows)
        if sent >= max(MIN_BYTES, document["collective_bytes_at_least"] // 50):
            kind = "hosts" if machine.chip.kind == "gpu" else "slices"
            yield Finding(
                "axis-crosses-slow-links",
                f"{axis} ({program.sizes[axis]}) spans {kind}: {format_bytes(sent)} a step and device over "
                f"{machine.chip.outer.name}",
                max(rows, key=lambda row: row["bytes_at_least"])["source"],
                "Order the devices of the mesh so that the axis lies within one of them: the last axis varies fastest.",
            )
