"""JAX names that change between versions, for `jax>=0.10.2,<0.13`. Only this package tests JAX's version."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

T = TypeVar("T")


def varying_axes(x: jax.typing.ArrayLike) -> frozenset[str]:
    """Returns the manual mesh axes over which `x` varies (empty outside `shard_map`)."""
    kind = getattr(jax.typeof(x), "manual_axis_type", None)
    return frozenset() if kind is None else frozenset(kind.varying)


def varying_axes_of(aval: Any) -> frozenset[str]:
    """Returns the manual mesh axes of an abstract value."""
    return frozenset(aval.manual_axis_type.varying)


def varying_aval(shape: Sequence[int], dtype: Any, axes: frozenset[str]) -> Any:
    """Returns the abstract value of an array that varies over `axes` (empty outside `shard_map`)."""
    from jax._src import core

    if not axes:
        return core.ShapedArray(shape, dtype)
    replicated = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec())
    return core.ShapedArray(shape, dtype, sharding=replicated, manual_axis_type=core.ManualAxisType(varying=axes))


@contextlib.contextmanager
def untyped_axes() -> Iterator[None]:
    """Context in which the types of arrays hold no mesh axes: `check_vma=False` for one kernel."""
    from jax._src import config

    with config._check_vma(False):
        yield


@contextlib.contextmanager
def hide_spmd_vmap_axes() -> Iterator[None]:
    """Context that hides the axes of an enclosing `vmap(spmd_axis_name=)`: they would apply to a `shard_map` traced
    inside it, and JAX then rejects its own cotangents (0.10.2)."""
    from jax._src import core

    env = core.get_axis_env()
    core.trace_ctx.set_axis_env(core.AxisEnv(env.axis_sizes, frozenset(), env.explicit_mesh_axis_names))
    try:
        yield
    finally:
        core.trace_ctx.set_axis_env(env)


@contextlib.contextmanager
def where_values_are_known(args: Any) -> Iterator[None]:
    """Context in which a `custom_jvp` rule traces operations that depend only on `args` in the enclosing trace: the
    trace of reverse mode moves loop-invariant values out of loops (jax 0.10.2), which changes the program."""
    from jax._src import core
    from jax._src.interpreters import partial_eval

    trace = core.trace_ctx.trace
    is_apart = isinstance(trace, partial_eval.JaxprTrace)
    if is_apart and not any(isinstance(x, partial_eval.JaxprTracer) for x in jax.tree.leaves(args)):
        with core.set_current_trace(trace.parent_trace):
            yield
    else:
        yield


def axes_are_typed() -> bool:
    """Returns whether the types of arrays hold the mesh axes over which they vary, as in a `shard_map` with
    `check_vma`."""
    from jax._src import config

    return bool(config._check_vma.value)


def without_axes(ctx: Any) -> Any:
    """Returns the context of a lowering rule with operands and results typed without mesh axes."""
    from jax._src import core

    plain: Callable[[Any], list[Any]] = lambda avals: [core.ShapedArray(a.shape, a.dtype) for a in avals]
    return ctx.replace(avals_in=plain(ctx.avals_in), avals_out=plain(ctx.avals_out))


def as_varying(tree: T, axes: Sequence[str]) -> T:
    """Returns `tree` with each leaf typed as varying over `axes`; leaves that already vary are unchanged."""

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(a for a in axes if a not in varying_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    varying: T = jax.tree.map(cast, tree)
    return varying


def typed_like(x: T, like: Any) -> T:
    """Returns `x` typed as varying over the axes over which `like` varies."""
    return as_varying(x, sorted(varying_axes(like)))


TYPED_AS_SAME = "typed_as_same"


@functools.cache
def _typed_as_same() -> Any:
    from jax._src import core
    from jax.extend.core import Primitive
    from jax.interpreters import batching, mlir

    primitive = Primitive(TYPED_AS_SAME)
    primitive.def_abstract_eval(lambda aval, what, rule: aval.update(manual_axis_type=core.ManualAxisType()))
    mlir.register_lowering(primitive, lambda ctx, x, what, rule: [x])
    batching.defvectorized(primitive)
    return primitive


def typed_as_same(x: jax.Array, what: str, rule: str) -> jax.Array:
    """Returns `x` typed as varying over no axis, without communication. The texts are parameters of the equation.
    The caller shows that `x` is the same on each device."""
    same: jax.Array = _typed_as_same().bind(x, what=what, rule=rule)
    return same


def all_gather_invarying(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Returns the shards of all devices along `axes` concatenated along dim 0, typed as the same on each device."""
    gathered: jax.Array = lax.all_gather(x, tuple(axes), axis=0, tiled=True, to="invarying")
    return gathered


def add_multi_axis_vmap_rules() -> None:
    """Adds a `vmap` rule to `lax.all_gather` and `lax.psum_scatter` over a tuple of axes, which JAX (0.10.2) does not
    have: one axis at a time. Idempotent."""
    from jax._src.lax import parallel
    from jax.interpreters import batching

    rules = batching.fancy_primitive_batchers
    for primitive, one_by_one in ((parallel.all_gather_p, _gathered), (parallel.reduce_scatter_p, _scattered)):
        if getattr(rules.get(primitive), "func", None) not in (_gathered, _scattered):
            rules[primitive] = functools.partial(one_by_one, rules[primitive])


def _names(axis_data: Any, axis_name: Any) -> tuple[tuple[Any, int], ...] | None:
    """Returns (name, size) of each axis of a multi-axis collective if the `vmap` binds one of them, else None."""
    if not isinstance(axis_name, tuple) or len(axis_name) < 2 or axis_data.name not in axis_name:
        return None
    return tuple((name, axis_data.size if name == axis_data.name else lax.axis_size(name)) for name in axis_name)


def _gathered(
    rule: Any, axis_data: Any, operands: Any, dims: Any, *, all_gather_dimension: int, tiled: bool, **params: Any
) -> Any:
    names = _names(axis_data, params["axis_name"])
    if names is None or params.get("axis_index_groups") is not None:
        return rule(axis_data, operands, dims, all_gather_dimension=all_gather_dimension, tiled=tiled, **params)
    for name, size in reversed(names):
        axis_params = params | {"axis_name": (name,), "axis_size": size}
        out, d = rule(axis_data, operands, dims, all_gather_dimension=all_gather_dimension, tiled=False, **axis_params)
        operands, dims = (out,), (d,)
    (x,), first = operands, all_gather_dimension
    last = first + len(names) + tiled
    return x.reshape(*x.shape[:first], -1, *x.shape[last:]), None


def _scattered(
    rule: Any, axis_data: Any, operands: Any, dims: Any, *, scatter_dimension: int, tiled: bool, **params: Any
) -> Any:
    names = _names(axis_data, params["axis_name"])
    if names is None or params.get("axis_index_groups") is not None:
        return rule(axis_data, operands, dims, scatter_dimension=scatter_dimension, tiled=tiled, **params)
    for name, size in names:
        axis_params = params | {"axis_name": (name,), "axis_size": size}
        out, d = rule(axis_data, operands, dims, scatter_dimension=scatter_dimension, tiled=True, **axis_params)
        operands, dims = (out,), (d,)
    (x,), (d,) = operands, dims
    if tiled:
        return x, d
    position = scatter_dimension + (d <= scatter_dimension)
    return jnp.squeeze(x, position), d - (position < d)


def lower_reduce_scatter_as_all_to_all() -> None:
    """Lowers a reduce-scatter on CPU devices to an all-to-all and a local sum; no effect since jax 0.12.

    Between processes one reduce-scatter of a few bytes makes every later all-reduce a hundred times slower, and ignores
    the timeout (jax 0.10.2 to 0.11.2 over Gloo, https://github.com/jax-ml/jax/issues/40831). Both send the same bytes.
    """
    from jax._src.lax import parallel
    from jax.interpreters import mlir

    if jax.__version_info__ >= (0, 12):
        return

    def parts_added(
        x: jax.Array, *, axis_name: Any, scatter_dimension: int, axis_index_groups: Any, axis_size: int, tiled: bool
    ) -> jax.Array:
        if tiled:
            x = jnp.reshape(x, (*x.shape[:scatter_dimension], axis_size, -1, *x.shape[scatter_dimension + 1 :]))
        parts = lax.all_to_all(x, axis_name, scatter_dimension, 0, axis_index_groups=axis_index_groups)
        return jnp.sum(parts, 0, dtype=x.dtype)

    def rule(ctx: Any, x: Any, **params: Any) -> Any:
        return mlir.lower_fun(functools.partial(parts_added, **params), multiple_results=False)(without_axes(ctx), x)

    mlir.register_lowering(parallel.reduce_scatter_p, rule, platform="cpu")


def lay_out_ffts() -> None:
    """Lowers an FFT on CPU devices with its operand and result in row-major order. Idempotent.

    XLA's layout assignment chooses other orders for some sharded operands, and its FFT then fails to compile
    ("fft_thunk.cc: LayoutUtil::IsMonotonicWithDim0Major", jaxlib 0.10.2)."""
    from jax._src.lax import fft
    from jax.experimental.layout import Layout, with_layout_constraint
    from jax.interpreters import mlir

    def row_major(x: jax.Array) -> jax.Array:
        return with_layout_constraint(x, Layout(tuple(range(x.ndim))))  # type: ignore[no-any-return]

    constrain = mlir.lower_fun(row_major, multiple_results=False)

    def rule(ctx: Any, x: Any, **params: Any) -> Any:
        ctx = without_axes(ctx)
        (operand,) = constrain(ctx.replace(avals_out=ctx.avals_in), x)
        (result,) = fft._fft_lowering(ctx, operand, **params)
        return constrain(ctx.replace(avals_in=ctx.avals_out), result)

    mlir.register_lowering(lax.fft_p, rule, platform="cpu")


def accept_narrow_arguments(compiled: jax.stages.Compiled) -> jax.stages.Compiled:
    """Returns the compiled program, which accepts arrays of int4, int2 and float4.

    Such an array reports a layout of whole bytes and a program one of packed bits, so JAX refuses the call, though XLA
    converts (jax 0.10.2; `jax.jit` does not compare them).
    """
    executable = compiled._executable
    layouts: Sequence[Any] = getattr(executable, "_xla_in_layouts", ())
    if any(getattr(layout, "sub_byte_element_size_in_bits", 0) for layout in layouts):
        is_packed: Callable[[Any], bool] = lambda layout: bool(getattr(layout, "sub_byte_element_size_in_bits", 0))
        executable._xla_in_layouts = [None if is_packed(layout) else layout for layout in layouts]  # type: ignore[attr-defined]
    return compiled


def current_trace() -> Any:
    """Returns a token of the current trace; each loop, branch, `vmap`, `grad` and `jit` has a different one."""
    from jax._src import core

    return core.trace_ctx.trace


_NOT_USER = (
    *(os.sep + folder + os.sep for folder in ("site-packages", "dist-packages", os.path.join("lib", "python"))),
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
    os.path.dirname(os.__file__) + os.sep,
    "<frozen",
)
"""Parts of the paths of files that are not the user's: libraries, this package, Python."""


def auto_mesh(devices: np.ndarray, axes: Sequence[str]) -> Mesh:
    """Returns a mesh with axes of type Auto (`jax.make_mesh` creates Explicit axes)."""
    return Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def source_line(eqn: Any) -> str:
    """Returns `file.py:12 (function)` of the user's line that created an equation of a jaxpr."""
    from jax._src import source_info_util

    return source_info_util.summarize(eqn.source_info)


def user_lines(eqn: Any) -> list[str]:
    """Returns `file.py:12` of the lines that created an equation of a jaxpr, innermost first, without those of
    libraries and of this package. Paths are relative to the working directory if they are below it."""
    traceback, here = eqn.source_info.traceback, os.getcwd() + os.sep
    frames = () if traceback is None else traceback.frames
    lines = [f"{f.file_name}:{f.line_num}" for f in frames if not any(part in f.file_name for part in _NOT_USER)]
    return [line.removeprefix(here) for line in lines]


def user_line(eqn: Any) -> str | None:
    """Returns `file.py:12` of the innermost line of the user that created an equation, or None."""
    return next(iter(user_lines(eqn)), None)


def functions_of(eqn: Any, file: str) -> set[str]:
    """Returns the names of the functions of a file that created an equation of a jaxpr."""
    traceback = eqn.source_info.traceback
    return {f.function_name for f in (() if traceback is None else traceback.frames) if f.file_name == file}


def is_pmapped(fn: Any) -> bool:
    """Returns whether a function is a result of `jax.pmap`, which is a plain function with `lower`."""
    return inspect.isfunction(fn) and hasattr(fn, "lower") and hasattr(fn, "__wrapped__")


def bound_axes(sizes: Mapping[str, int]) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which mesh axes of these names and sizes are bound, as in `shard_map`."""
    from jax._src import core

    bound: contextlib.AbstractContextManager[None] = core.extend_axis_env_nd(list(sizes.items()))
    return bound


def jaxpr_of_result(closed: Any, index: int) -> str:
    """Returns the text of the operations that one result of a jaxpr depends on."""
    from jax.interpreters import partial_eval

    wanted = [i == index for i in range(len(closed.jaxpr.outvars))]
    return str(partial_eval.dce_jaxpr(closed.jaxpr, wanted)[0])


def used_inputs(closed: Any, wanted: Sequence[bool] | None = None) -> list[bool]:
    """Returns for each input of a jaxpr whether a result depends on it; `wanted` selects the results."""
    from jax.interpreters import partial_eval

    results = [True] * len(closed.jaxpr.outvars) if wanted is None else list(wanted)
    used: list[bool] = partial_eval.dce_jaxpr(closed.jaxpr, results)[1]
    return used


def carried_inputs(scan: Any) -> tuple[int, int]:
    """Returns (first index, number) of the carry inputs of a `scan` equation: after its constants, before its sliced
    inputs."""
    if "num_consts" in scan.params:
        return scan.params["num_consts"], scan.params["num_carry"]
    constants, carry, _ = scan.params["ft_in"].unpack()
    return len(constants), len(carry)


@contextlib.contextmanager
def whole_tracebacks() -> Iterator[None]:
    """Context in which tracebacks include JAX's frames: without them, the caller seems to raise JAX's errors."""
    before: str = jax.config.jax_traceback_filtering  # type: ignore[attr-defined]
    jax.config.update("jax_traceback_filtering", "off")
    try:
        yield
    finally:
        jax.config.update("jax_traceback_filtering", before)


def coordination_client() -> Any | None:
    """Returns the client of JAX's coordination service (key-value store, barriers), or None in a single process."""
    from jax._src import distributed

    return distributed.global_state.client


def num_joined_processes() -> int:
    """Returns the number of processes of `jax.distributed.initialize`. `jax.process_count` would create the devices."""
    from jax._src import distributed

    return int(distributed.global_state.num_processes or 1)


def replace_coordination_client(client: Any) -> None:
    """Replaces JAX's coordination client with `client` for all Python code of this process. Call it after JAX creates
    its devices, which need the original client."""
    from jax._src import distributed

    distributed.global_state.client = client


class _RemoteService:
    """Replaces JAX's coordination service, which runs in another process."""

    def __init__(self, end: Callable[[], Any] | None):
        self._end = end

    def shutdown(self) -> None:
        if self._end is not None:
            self._end()


@contextlib.contextmanager
def without_local_service(end: Callable[[], Any] | None = None) -> Iterator[None]:
    """Context in which `jax.distributed.initialize` starts no coordination service on process 0 (if that process exits,
    all other processes abort with SIGABRT); `jax.distributed.shutdown` calls `end` there. JAX has no option for this
    (0.10.2 to 0.12)."""
    from jaxlib import _jax

    name = "get_distributed_runtime_service"
    original = getattr(_jax, name)
    setattr(_jax, name, lambda *args, **options: _RemoteService(end))
    try:
        yield
    finally:
        setattr(_jax, name, original)


def holds_coordination_service() -> bool:
    """Returns whether JAX's coordination service runs in this process, so that all other processes exit with it."""
    from jax._src import distributed

    return distributed.global_state.service is not None and not isinstance(
        distributed.global_state.service, _RemoteService
    )


def backends_initialized() -> bool:
    """Returns whether JAX has already created its devices. Device settings have no effect after that."""
    from jax._src import xla_bridge

    return bool(xla_bridge.backends_are_initialized())


def set_cpu_collective_timeout(seconds: int) -> None:
    """Sets the timeout of XLA's CPU collectives between processes to `seconds`, unless the environment sets it. Call
    before JAX creates devices. psum_scatter ignores it before jaxlib 0.12."""
    flag, flags = "--xla_cpu_collective_timeout_seconds", os.environ.get("XLA_FLAGS", "")
    if flag not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}={seconds}".strip()


def cudnn_attention(q: Any, k: Any, v: Any, *, causal: bool, scale: float) -> Any:
    """Returns (out [B, T, N, H], logsumexp float32[B, N, T]) of cuDNN's flash attention.

    `jax.nn.dot_product_attention` has no gradient for a logsumexp over more keys (jax 0.10.2), so this binds its
    primitive, which is not partitioned: call it on shards.
    """
    cudnn, none, options = _cudnn(q, causal, scale)
    return cudnn._dot_product_attention_fwd_p.bind(q, k, v, *none, is_training=True, **options)


def cudnn_attention_gradient(
    q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, *, causal: bool, scale: float
) -> Any:
    """Returns (dq, dk, dv) of cuDNN's flash attention; `out` and `lse` (the logsumexp) may cover more keys than `k`."""
    cudnn, none, options = _cudnn(q, causal, scale)
    return cudnn._dot_product_attention_bwd_p.bind(q, k, v, *none, lse, out, dout, **options)


def _cudnn(q: jax.Array, causal: bool, scale: float) -> tuple[Any, list[jax.Array], dict[str, Any]]:
    """Returns (the module, empty operands for bias, lengths, offsets and page tables, the options)."""
    cudnn: Any = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    options = {
        "scale": scale,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK,
        "layout": cudnn.AttentionLayout.BTNH.value,
        "sliding_window_length": None,
    }
    if "score_mod_name" in inspect.signature(cudnn._dot_product_attention_fwd_cuda_lowering).parameters:  # jax 0.12
        options |= {"score_mod_name": None, "score_mod_jaxpr": None}
    return cudnn, [jnp.zeros(0, q.dtype)] * 7, options


def splash_attention_gradient(kernel: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, segments: Any) -> Any:
    """Returns (dq, dk, dv) of a splash attention kernel; `out` and `lse` may cover more keys than `k`."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    residuals = (q, k, v, segments, None, out, lse, kernel.dq_mask_info, kernel.dkv_mask_info)
    _, _, _, dq, dk, dv, _, _ = splash._splash_attention_bwd(**kernel.kwargs, res=residuals, do=dout)
    return dq, dk, dv


CALLBACK_LOGGERS = ("jax._src.debugging", "jax._src.callback")
"""Loggers through which JAX prints the traceback of a callback that raised, in addition to the error for the caller
(jax 0.10.2)."""
