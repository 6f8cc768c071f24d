"""The task's part of the train state before any array exists: its checked and traced variables, and its optimizer."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from spmdkit.compat.user_mesh import mesh_in_context
from spmdkit.config import Config
from spmdkit.data.dtypes import narrow
from spmdkit.errors import ConfigError, UserCodeError
from spmdkit.foundation.formatting import nearest
from spmdkit.foundation.trees import canonical_dtype, common_dtype, is_narrow, named_leaves, path_name
from spmdkit.foundation.user_code import call_user
from spmdkit.mesh.annotations import (
    Annotations,
    Rules,
    constrained_outputs,
    describe_rules,
    joined,
    rules_in_context,
)
from spmdkit.mesh.layout import logical_axes
from spmdkit.mesh.mesh import make_mesh, resolve
from spmdkit.ops import float8
from spmdkit.program import parameter_groups
from spmdkit.program.task import Task, check_arity
from spmdkit.step import trace_context
from spmdkit.step.explicit import needs_explicit_axes
from spmdkit.step.gradient import is_cast
from spmdkit.step.leaf_roles import Declared
from spmdkit.step.rng import abstract_key
from spmdkit.step.state import Initial, Variables
from spmdkit.step.user_state import UserState, view_of, with_fixed


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Dtypes:
    """The (path, dtype) of each leaf that `init` returned. JAX without 64-bit types may halve the dtypes."""

    of_leaves: tuple[tuple[str, Any], ...]


class AbstractInit(NamedTuple):
    """What `init` returns, before any array exists.

    Attributes:
        init: `init` that always returns `Initial`, with parameters in `precision.params`.
        params, state: the abstract parameters and model state.
        annotations: shardings that the user's code names.
        notes: notes for the user.
    """

    init: Callable[[jax.Array], Initial]
    params: Any
    state: Any
    annotations: Annotations
    notes: list[str]


def _call_init(task: Task, key: jax.Array) -> Any:
    context = trace_context.current()

    def init(key: jax.Array) -> Any:
        state = task.init(key)
        return state if task.state is None else with_fixed(state)

    if task.axis_name is not None:  # batch normalization over the replicas names them in `init` too
        init = jax.vmap(init, None, None, axis_name=task.axis_name, axis_size=1)
    if task.sharding != "explicit":
        try:
            return init(key)
        except Exception as error:
            if not needs_explicit_axes(error, context.sharding.roles):
                raise
    with mesh_in_context(trace_context.user_mesh(context) or context.sharding.mesh):
        return jax.sharding.explicit_axes(task.init, in_sharding=(PartitionSpec(),))(key)


def init_on_one_device(task: Task, config: Config) -> tuple[Any, Callable[[jax.Array], Any], set[Rules]]:
    """Returns (the abstract result of `init`, `init` in the context of one device, flax's rules of a `with` in it)."""
    abstract, context = _traced(functools.partial(_call_init, task), config, None)

    def init(key: jax.Array) -> Any:
        with trace_context.tracing(context):
            return _call_init(task, key)

    return abstract, init, context.usage.flax_rules - {context.options.flax_rules}


def _traced(init: Callable[[jax.Array], Any], config: Config, mesh: Mesh | None) -> tuple[Any, trace_context.Context]:
    """Returns (the abstract result of `init`, the context of its trace).

    flax's rules in this context are those of the user. Without any, they are the table of logical axes, since nnx
    (flax 0.12.8) shards a variable when it is created, and no rules if `init` raises under the table.
    """
    sharding = trace_context.ShardingSpec(mesh=mesh or make_mesh(resolve({}, 1), jax.devices()[:1]), roles=config.roles)
    user = joined(rules_in_context(), config.roles, config.layout.axes)
    table = logical_axes(config.roles, user, config.layout.axes)
    choices: list[Rules] = [user] if user else [tuple(table.items()), ()]
    choices = choices if "flax" in sys.modules else [()]
    for rules in choices:
        float8 = config.precision.matmul == "float8"
        options = trace_context.StepOptions(float8=float8, logical_axes=table, flax_rules=rules)
        context = trace_context.Context(sharding, options)

        def traced(key: jax.Array, context: trace_context.Context = context) -> Any:
            with trace_context.tracing(context):
                return init(key)

        try:
            return call_user(functools.partial(jax.eval_shape, traced, abstract_key()), "init"), context
        except (ConfigError, UserCodeError):
            if rules == choices[-1]:
                raise
    raise AssertionError


def _rules_of(context: trace_context.Context, config: Config) -> Rules:
    """Returns the user's rules during the trace of `init`, with the rows of `layout.axes`; empty if there are none.

    Raises:
        ConfigError: the rules contradict `layout.axes` or each other.
    """
    around = context.options.flax_rules
    inside = sorted(context.usage.flax_rules - {around, ()}, key=str)  # of a `with` in `init`
    if len(inside) > 1:
        raise ConfigError(
            f"init uses two sets of logical axis rules of flax: {describe_rules(inside[0])}, and "
            f"{describe_rules(inside[1])}. The layout has one. Use the same rules for all parameters."
        )
    if inside:
        return joined(inside[0], config.roles, config.layout.axes)
    return around if rules_in_context() else ()


def with_user_state(task: Task, config: Config, mesh: Mesh | None = None) -> Task:
    """Returns a task with functions on the fields of a `TrainState`, if `init` returns a user-defined train state;
    any other task unchanged.

    Raises:
        ConfigError: the step is in `shard_map`, or the config has an optimizer, which the step would not use.
    """
    if task.train_step is None or (task.state is None and "flax" not in sys.modules):
        return task

    abstract, _ = _traced(functools.partial(_call_init, task), config, mesh)
    if (view := view_of(abstract, task.state)) is None:
        return task
    if task.is_manual:
        raise ConfigError(
            "Task.view is 'replica' without axis_name, and init returns a user-defined train state. Its step names "
            "the replicas: pass axis_name='batch', and reduce with lax.pmean(grads, 'batch')."
        )
    for name in ("optimizer", "clip_norm", "groups", "train_only"):
        if getattr(config, name):
            raise ConfigError(
                f"{name} has no effect: init returns a {type(abstract).__name__}, which holds its own optimizer. "
                f"Configure it there, or remove {name}."
            )
    for name in ("eval_fn", "predict_fn"):
        check_arity(name, getattr(task, name), ("state", "batch"))
    state = UserState(abstract, view)
    return dataclasses.replace(
        task,
        init=lambda key: state.split(task.init(key)),
        train_step=state.step_of(task.train_step),
        eval_fn=None if task.eval_fn is None else state.evaluation_of(task.eval_fn),
        predict_fn=None if task.predict_fn is None else state.evaluation_of(task.predict_fn),
        optimizer=optax.identity(),
        state=None,
    )


def abstract_init(task: Task, config: Config, mesh: Mesh | None = None) -> AbstractInit:
    """Returns what `init` returns, traced.

    Args:
        mesh: the mesh of bare `PartitionSpec`s in `init`; default: of one device.

    Raises:
        ConfigError: `init` returns no arrays, or arrays that cannot be trained or saved.
    """

    def init(key: jax.Array) -> tuple[Initial, _Dtypes]:
        out = _call_init(task, key)
        variables = out if isinstance(out, Initial) else Initial(*(out if isinstance(out, Variables) else (out,)))
        for path, leaf in named_leaves(variables):
            if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
                raise ConfigError(
                    f"init returned {type(leaf).__name__} at '{path}'. Every leaf of the parameters is an array. Use "
                    "jnp.asarray for numbers, and remove everything that is not an array from the pytree."
                )
        narrowed = jax.tree.map_with_path(lambda path, x: jnp.asarray(_narrowed(path_name(path), x)), variables)
        return narrowed, _Dtypes(tuple((path, leaf.dtype) for path, leaf in named_leaves(variables)))

    def init_as_stored(key: jax.Array) -> Initial:
        with trace_context.tracing(context):
            variables, _ = init(key)
        if variables.opt_state is not None:  # of a step with its own optimizer
            return variables
        stored = lambda path, x: (
            x if _is_stored(declared, path_name(path), x.dtype) else x.astype(config.precision.params)
        )
        return variables._replace(params=jax.tree.map_with_path(stored, variables.params))

    declared = parameter_groups.declared(config, task)
    (shapes, dtypes), context = _traced(init, config, mesh)
    if not jax.tree.leaves(shapes.params):
        raise ConfigError("init returned no arrays. The parameters are a pytree with at least one array.")
    _check_histories(config, shapes.params)
    for path, dtype in dtypes.of_leaves:
        which, _, name = path.partition("/")
        if which == "params":
            if shapes.opt_state is None and not _is_stored(declared, name, dtype):
                _check_parameter(name, dtype)
        elif dtype == jax.dtypes.float0:
            raise ConfigError(
                f"init returned model state '{name}' as float0, which is JAX's gradient of an integer: it holds no "
                "data, and cannot be saved. Remove it."
            )
    jaxpr, stored = jax.make_jaxpr(init_as_stored, return_shape=True)(abstract_key())
    paths = [path.removeprefix("params/") for path, _ in named_leaves(stored)]
    constrained = zip(paths, constrained_outputs(jaxpr), strict=True)
    annotations = Annotations(_rules_of(context, config), {path: spec for path, spec in constrained if spec})
    notes = _cast_notes(dict(dtypes.of_leaves), stored, config)
    return AbstractInit(init_as_stored, stored.params, stored.state, annotations, notes)


def _check_histories(config: Config, params: Any) -> None:
    """Raises ConfigError if products in float8 are configured and no parameter is a history."""
    if config.precision.matmul == "float8" and not any(
        re.fullmatch(float8.PATTERN, p) for p, _ in named_leaves(params)
    ):
        raise ConfigError(
            "precision.matmul is float8, and init returned no 'float8' leaf. A task computes those products in float8 "
            "that have a history among the parameters. Add sk.float8_histories(weights) to the parameters, as in "
            "examples/gpt.py, or remove precision.matmul."
        )


def _is_stored(declared: Declared, path: str, dtype: Any) -> bool:
    """Returns whether a parameter keeps the dtype of `init`: overwritten by its gradient, or frozen and quantized."""
    role = declared.role(path)
    quantized = is_narrow(dtype) or jnp.issubdtype(dtype, jnp.integer)
    return role == "overwritten" or (role == "frozen" and quantized)


def _narrowed(path: str, leaf: Any) -> Any:
    """Returns a numpy leaf of `init` in the dtype that JAX uses; raises ConfigError if an integer overflows."""
    if not isinstance(leaf, np.ndarray | np.generic) or leaf.dtype.kind not in "iu":
        return leaf
    return narrow(f"'{path}' that init returned", np.asarray(leaf), canonical_dtype(leaf.dtype))


def _check_parameter(path: str, dtype: Any) -> None:
    """Raises ConfigError for a parameter that no optimizer can update."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        name = path.rpartition("/")[2]
        raise ConfigError(
            f"init returned parameter '{path}' as {dtype}. Parameters are real: Adam and others square the gradient, "
            f"and precision casts by real dtypes. Use two real leaves, {{'re': {name}.real, 'im': {name}.imag}}, and "
            f"write jax.lax.complex({name}['re'], {name}['im']) in the loss."
        )
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ConfigError(
            f"init returned parameter '{path}' as {dtype}. Parameters are floating point, since they have a gradient. "
            "Return other arrays as model state, sk.Variables(params, state), or name constants: "
            f"Task(frozen=['{re.escape(path)}'])."
        )


def _cast_notes(dtypes: dict[str, Any], stored: Initial, config: Config) -> list[str]:
    texts = {
        "params": f"these parameters are converted to {config.precision.params} (precision.params); init returned "
        "them in another dtype",
        "state": "this model state is stored in 32 bits, half of what init returned, since JAX uses 32 bits unless "
        "JAX_ENABLE_X64=1 is set",
    }
    changed: dict[str, dict[str, list[str]]] = {which: {} for which in texts}
    for path, leaf in named_leaves(stored):
        which, _, name = path.partition("/")
        if leaf.dtype != dtypes[path]:
            changed[which].setdefault(str(dtypes[path]), []).append(name)
    return [f"{text}: {_some(changed[which])}." for which, text in texts.items() if changed[which]]


def _some(by_dtype: dict[str, list[str]]) -> str:
    more: Callable[[list[str]], str] = lambda paths: f" and {len(paths) - 4} more" if len(paths) > 4 else ""
    return "; ".join(f"{', '.join(paths[:4])}{more(paths)} ({dtype})" for dtype, paths in by_dtype.items())


def check_jit() -> None:
    """Raises ConfigError if compilation is disabled."""
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        raise ConfigError(
            "jax_disable_jit is set. A step is one compiled program over the mesh, and cannot run without compilation. "
            "Remove it (JAX_DISABLE_JIT, jax.config), and print with jax.debug.print, or call your function directly."
        )


def check_precision(config: Config) -> None:
    """Raises ConfigError if the config requests 64-bit types that JAX has disabled."""
    wide = [name for name, dtype in config.precision if dtype == "float64"]
    if wide and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise ConfigError(
            f"precision.{wide[0]} is float64, and JAX was started without 64-bit types: it would compute in float32. "
            "Set the environment variable JAX_ENABLE_X64=1, or use float32."
        )


def input_notes(config: Config, batches: Sequence[Any]) -> list[str]:
    """Returns a note about batch arrays that are rounded before the loss, unless `precision.inputs` is set.

    Raises:
        ConfigError: a pattern of `precision.inputs` matches no floating point array of the abstract `batches`.
    """
    requested, compute = config.precision.inputs, config.precision.compute
    floats = {p: x for b in batches for p, x in named_leaves(b) if jnp.issubdtype(x.dtype, jnp.floating)}
    for pattern in requested if isinstance(requested, list) else ():
        if not any(is_cast([pattern], path) for path in floats):
            raise ConfigError(
                f"precision.inputs: pattern '{pattern}' matches none of the {len(floats)} floating point arrays of a "
                f"batch: {', '.join(sorted(floats)) or 'none'}. A pattern has to match a whole "
                f"path.{nearest(pattern, floats)} Fix it, or remove it."
            )
    rounded = sorted(path or "(the whole)" for path, x in floats.items() if common_dtype(x.dtype, compute) != compute)
    if requested is not None or compute == config.precision.params == "float32" or not rounded:
        return []
    note = (
        f"these arrays of a batch are rounded to {compute} before the loss (precision.compute): {', '.join(rounded)}. "
        "Targets may need more. Set precision.inputs: given to cast none, [patterns of paths] to cast only those, or "
        "compute if this is intended."
    )
    return [note]


def make_optimizer(config: Config, task: Task) -> optax.GradientTransformationExtraArgs:
    """Returns the config's optimizer, or else the task's, preceded by clipping by the true global norm."""
    optimizer = call_user(lambda: parameter_groups.choose(config, task), "Task.optimizer")
    for hook in task.hooks:
        if hook.optimizer is not None:
            optimizer = call_user(functools.partial(hook.optimizer, optimizer), f"hook '{hook.name}': optimizer")
    inner = _reporting(_with_any_extra(optimizer))
    if config.clip_norm is None:
        return inner
    clip = clip_by_global_norm(config.clip_norm)

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        clipped, _ = clip.update(grads, clip.init(params), params)  # clipping is stateless
        return inner.update(clipped, state, params, **extra)

    return recorded(optax.GradientTransformationExtraArgs(inner.init, update))


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Returns `optax.clip_by_global_norm`, which also records the norm for the log."""

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        norm = optax.tree.norm(grads)
        trace_context.current().slots.record_norm(norm)
        clip: Callable[[Any], Any] = lambda g: lax.select(norm < max_norm, g, (g / norm.astype(g.dtype)) * max_norm)
        return jax.tree.map(clip, grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


@functools.lru_cache(maxsize=64)  # programs of one optimizer have equal states: it is static in the train state
def _reporting(inner: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that raises UserCodeError if a function of it, or a schedule, raises or returns another tree
    than optax requires."""

    def init(params: Any) -> Any:
        with _optax_promotion():
            state = call_user(lambda: inner.init(params), "the optimizer's init", is_model=False)
        for path, leaf in named_leaves(state):
            if not hasattr(leaf, "dtype") and not isinstance(leaf, bool | int | float | complex):
                raise UserCodeError(
                    f"the optimizer's init returned {type(leaf).__name__} at '{path}'. Its state consists of arrays, "
                    "which a checkpoint stores. Remove that leaf."
                )
        return state

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        what = "the optimizer's update (or its schedule)"
        with _optax_promotion():
            result = call_user(lambda: inner.update(grads, state, params, **extra), what, is_model=False)
        if not isinstance(result, tuple) or len(result) != 2:
            raise UserCodeError(
                f"the optimizer's update returned {type(result).__name__}. It must return (updates, state), as in "
                "optax.GradientTransformation."
            )
        like = grads if params is None else params
        if bool(jax.tree.structure(result[0]) != jax.tree.structure(like)):  # type: ignore[operator]
            found, expected = ([path for path, _ in named_leaves(tree)] for tree in (result[0], like))
            missing = ", ".join(sorted({*expected} - {*found})[:4])
            raise UserCodeError(
                f"the optimizer's update returned updates of another structure than the parameters"
                f"{f': {missing} missing' * bool(missing)}. Each parameter needs an update. Return zeros for a "
                "parameter that does not change."
            )
        return result

    return optax.GradientTransformationExtraArgs(init, update)


def _optax_promotion() -> contextlib.AbstractContextManager[Any]:
    """Context of an optimizer: optax (0.2.8) counts steps in int32 and multiplies them with floats, which
    `jax_numpy_dtype_promotion=strict` refuses."""
    standard: contextlib.AbstractContextManager[Any] = jax.numpy_dtype_promotion("standard")
    return standard


def recorded(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that records its call in the usage of the step."""
    inner = optax.with_extra_args_support(optimizer)

    def update(*args: Any, **extra: Any) -> Any:
        trace_context.current().usage.record_call("optimizer")
        return inner.update(*args, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _with_any_extra(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that ignores unknown extra arguments, unlike `optax.contrib.sam` (0.2.8)."""
    inner = optax.with_extra_args_support(optimizer)
    parameters = inspect.signature(inner.update).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return inner
    known = {p.name for p in parameters}

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return inner.update(grads, state, params, **{name: x for name, x in extra.items() if name in known})

    return optax.GradientTransformationExtraArgs(inner.init, update)
