"""`sk.manual`: a part of a model that runs per device on shards, with explicit collectives.

    rows = ("batch", "sequence", None)
    y = sk.manual(fn, in_dims=[rows, ("embed", "mlp")], out_dims=rows)(x, w)

Outside, arrays are global and the partitioner selects the collectives. Inside `fn` an array is one device's shard:
`axes("mlp")` returns the mesh axes of a logical name, and `all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all`
and `ring_shift` take logical names. Without mesh axes they are the identity, so the same code runs on every mesh.

How: one `jax.shard_map` over all mesh axes, as an operation with custom rules for vmap and derivatives (`ops/part.py`).
The residuals are the inputs and the values that `remat` selects; all others are recomputed, with their gathers. By its
type (`check_vma`), an operand that is the same along an axis gets the sum of its cotangents over it, and `all_gather`
becomes `reduce_scatter`. Only the reducer sums over replica axes.

Wire: forward, the collectives of `fn`; backward, every all_gather and other recomputed collective, the transpose of
each collective, and one all-reduce over every axis along which an operand is the same and its cotangent is not.
Source: jax documentation, "shard_map" (typing of manual axes, 2025).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from spmdkit import compat
from spmdkit.errors import ConfigError
from spmdkit.foundation.formatting import shown_axes
from spmdkit.foundation.trees import describe, named_leaves
from spmdkit.mesh.mesh import MODEL_AXES, dim_axes, spec_axes
from spmdkit.ops.collectives import axes
from spmdkit.ops.part import Part, differentiable
from spmdkit.step import trace_context
from spmdkit.step.checks.implicit_psum import refuse_summed, takes_derivative, traced

Dims = tuple[str | None, ...]


def manual(
    fn: Callable[..., Any], in_dims: Sequence[Any], out_dims: Any, name: str | None = None, *, kernel: bool = False
) -> Callable[..., Any]:
    """Returns `fn` as a function of global arrays that runs on the shards defined by the names of the dims.

    Args:
        fn: `fn(*shards) -> shards`, pytrees of arrays. It closes over no traced array: pass it as an argument.
        in_dims: for each argument a pytree prefix of dims. Dims are a tuple with one entry per dim: a logical name
            (`layout.axes`), a mesh axis, several of these joined by `+` (sharded over the first, then over the next),
            or None. Missing trailing entries are None.
        out_dims: the same for the result, which must be equal along all axes that are not named.
        name: name in messages; default: the function's name.
        kernel: whether `fn` calls a kernel (Pallas, cuDNN), which neither the partitioner nor a vmap over devices can
            shard.

    On a mesh without model axes, in a per-replica step and inside another `manual`, `fn` is called directly. With
    `kernel` this holds only if its arrays are on one device (ZeRO 1 and 2 and pipeline stages are a vmap over devices).

    Raises:
        ConfigError: a dim is not divisible by its axes, a name is unknown, or a result differs along an axis that its
            dims do not name.
    """
    name = name or getattr(fn, "__name__", "fn")

    @functools.wraps(fn)
    def manual_fn(*args: Any) -> Any:
        context = trace_context.current()
        if not is_sharded(context, kernel):
            with trace_context.in_part():
                return fn(*args)
        assert context.sharding.mesh is not None
        args = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else jnp.asarray(x), args)
        leaves, treedef = jax.tree.flatten(args)
        in_specs = _flat_specs(context, tuple(in_dims), args)
        for spec, (path, leaf) in zip(in_specs, named_leaves(args), strict=True):
            _check_divisible(context, f"{name}: argument {path}", leaf.shape, spec)
        inner = dataclasses.replace(context, in_manual=True)
        out_structure: list[Any] = []

        def body(*shards: jax.Array) -> tuple[jax.Array, ...]:
            with trace_context.tracing(inner):
                out = fn(*jax.tree.unflatten(treedef, shards))
            specs = _flat_specs(context, out_dims, out)
            out_structure[:] = [jax.tree.structure(out), specs]
            return tuple(
                _as_declared(context, f"{name}: result {path}", x, spec)
                for (path, x), spec in zip(named_leaves(out), specs, strict=True)
            )

        shapes, is_watched = _trace_once(context, str(name), body, leaves, in_specs)
        watched = (str(name), body) if is_watched else None
        treedef_out, out_specs = out_structure
        part = Part(body, inner, context.sharding.mesh, in_specs, tuple(out_specs), tuple(shapes), watched=watched)
        return jax.tree.unflatten(treedef_out, differentiable(part)(*leaves))

    return manual_fn


def is_sharded(context: trace_context.Context, kernel: bool = False) -> bool:
    """Returns whether `manual` shards its arrays: the mesh has model axes (with `kernel`: any axes), and there is no
    enclosing manual part."""
    if context.in_manual or context.sharding.form == "manual" or context.sharding.mesh is None:
        return False
    if kernel:
        return math.prod(context.sharding.sizes.values()) > 1  # all are one in a group of one device
    outer = (*context.sharding.data_axes, *context.mapped_axes)
    return any(context.sharding.size(a) > 1 for a in MODEL_AXES if a not in outer)


# ---- specs


def _is_dims(x: Any) -> bool:
    return isinstance(x, tuple) and all(d is None or isinstance(d, str) for d in x)


def _flat_specs(context: trace_context.Context, dims: Any, values: Any) -> tuple[PartitionSpec, ...]:
    """Returns the spec of each leaf of `values`; `dims` is a tree prefix of `values`."""

    def specs(dims: Dims, value: Any) -> list[PartitionSpec]:
        dim_axes_of = [axes(*d.split("+")) if d is not None else () for d in dims]
        spec = PartitionSpec(*(None if not a else a[0] if len(a) == 1 else a for a in dim_axes_of))
        for leaf in jax.tree.leaves(value):
            if len(dims) > jnp.ndim(leaf):
                raise ConfigError(
                    f"sk.manual: {len(dims)} names {dims} for {describe(leaf)}. At most one name for each dim."
                )
        return [spec] * len(jax.tree.leaves(value))

    with trace_context.tracing(context):
        nested = jax.tree.map(specs, dims, values, is_leaf=_is_dims)
    return tuple(s for s in jax.tree.leaves(nested, is_leaf=lambda x: isinstance(x, PartitionSpec)))


def _check_divisible(context: trace_context.Context, what: str, shape: tuple[int, ...], spec: PartitionSpec) -> None:
    for i, (length, names) in enumerate(zip(shape, spec, strict=False)):
        cut = dim_axes(names)
        if length % context.sharding.size(*cut):
            raise ConfigError(
                f"sk.manual: {what} has shape {shape}; dim {i} is sharded over {shown_axes(cut)} = "
                f"{context.sharding.size(*cut)}, and {length} is not divisible by it. Make the dim a multiple of "
                f"{context.sharding.size(*cut)}, or use another mesh."
            )


def _as_declared(context: trace_context.Context, what: str, x: Any, spec: PartitionSpec) -> jax.Array:
    """Returns `x` typed as varying over the axes of its spec. Raises ConfigError if it varies over other axes."""
    x = jnp.asarray(x)
    # The axes of pipeline stages and of ZeRO 1 and 2 belong to an enclosing vmap: a result may vary over them.
    may_differ = (*spec_axes(spec), *context.mapped_axes, *context.sharding.data_axes)
    differs = [a for a in compat.varying_axes(x) if a in MODEL_AXES and context.sharding.size(a) > 1]
    if extra := sorted(a for a in differs if a not in may_differ):
        raise ConfigError(
            f"sk.manual: {what} is {describe(x)} and differs along {extra}, which its dims do not name. Devices along "
            "them would disagree. Reduce it (all_reduce, reduce_scatter), or name the dim that they shard."
        )
    varying: jax.Array = compat.as_varying(x, spec_axes(spec))
    return varying


def _trace_once(
    context: trace_context.Context, name: str, body: Any, leaves: Sequence[Any], in_specs: Any
) -> tuple[list[jax.ShapeDtypeStruct], bool]:
    """Returns (the shapes of the results' shards, whether `fn` takes a derivative). Raises ConfigError for closures
    over traced arrays, and for a derivative that JAX's types have summed over devices."""
    assert context.sharding.mesh is not None
    locals_: list[Any] = []

    def probe(*shards: jax.Array) -> None:
        locals_[:] = body(*shards)

    trace = functools.partial(traced, probe, context.sharding.mesh, tuple(in_specs), leaves)
    closed = trace(typed=True)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in locals_]
    if any(isinstance(c, jax.core.Tracer) for c in closed.consts):
        raise ConfigError(
            "sk.manual: fn closes over a traced array. Inside, arrays are shards, and an outer array has no spec. "
            "Pass it as an argument, with its dims in in_dims."
        )
    axes = [a for a in MODEL_AXES if context.sharding.size(a) > 1]
    refuse_summed(f"sk.manual: {name}", closed, lambda: trace(typed=False), axes)
    return shapes, takes_derivative(closed)
