"""Convolutions that XLA's partitioner splits wrongly, as matrix products that it splits right."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmdkit.compat import without_axes

Params = dict[str, Any]


def split_grouped_convolutions() -> None:
    """Computes two kinds of convolutions as matrix products. Idempotent.

    A `vmap` over replicas (`spmd_axis_name`) makes each kernel gradient a convolution with one feature group per
    replica. For such a one XLA (jaxlib 0.10.2, dot_as_convolution_util.cc) gathers the rows of all replicas on every
    device, does not compile ("feature_group_count must be a positive number"), or returns the product of other groups.
    The same holds for other grouped convolutions in a partitioned module: see `_is_split_wrongly`.
    """
    from jax._src.lax import convolution
    from jax.interpreters import batching, mlir

    primitive = lax.conv_general_dilated_p
    rule = batching.fancy_primitive_batchers[primitive]
    if getattr(rule, "func", None) is not _mapped:
        batching.fancy_primitive_batchers[primitive] = functools.partial(_mapped, rule)
        for platform in ("cpu", "gpu", "tpu"):
            expand = {"expand_complex_convolutions": True} if platform != "tpu" else {}
            lower = functools.partial(convolution._conv_general_dilated_lower, **expand)
            mlir.register_lowering(primitive, functools.partial(_lowered, lower), platform=platform)


def _mapped(rule: Any, axis_data: Any, operands: Any, dims: Any, **params: Any) -> Any:
    if axis_data.spmd_name is None or None in dims:
        return rule(axis_data, operands, dims, **params)
    lhs, rhs = (jnp.moveaxis(x, dim, 0) for x, dim in zip(operands, dims, strict=True))
    return as_products(lhs, rhs, **params), 0


def _lowered(lower: Any, ctx: Any, lhs: Any, rhs: Any, **params: Any) -> Any:
    from jax.interpreters import mlir

    if not (
        _is_partitioned(ctx.module_context.axis_context) and _is_split_wrongly((*ctx.avals_in, *ctx.avals_out), params)
    ):
        return lower(ctx, lhs, rhs, **params)
    one = functools.partial(_of_one, **params)
    return mlir.lower_fun(one, multiple_results=False)(without_axes(ctx), lhs, rhs)


def _is_partitioned(axis_context: Any) -> bool:
    """Returns whether a module has several devices and axes that are not manual."""
    mesh = getattr(axis_context, "mesh", None)
    if mesh is not None:
        return bool(frozenset(mesh.axis_names) != axis_context.manual_axes)
    return getattr(axis_context, "num_devices", None) != 1


def _of_one(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    return as_products(lhs[None], rhs[None], **params)[0]


def _is_split_wrongly(avals: Any, params: Params) -> bool:
    """Returns whether XLA may ignore the groups of a convolution: if its kernel moves along no dim, or if it is the
    kernel gradient of a convolution that is mapped over its input and its kernel."""
    if params["feature_group_count"] * params["batch_group_count"] == 1:
        return False
    (lhs, rhs, out), numbers = avals, params["dimension_numbers"]
    names = ("window_strides", "padding", "lhs_dilation", "rhs_dilation")
    size_of: Callable[[Any, Any], list[int]] = lambda aval, spec: [aval.shape[i] for i in spec[2:]]
    image, kernel = size_of(lhs, numbers.lhs_spec), size_of(rhs, numbers.rhs_spec)
    outputs = size_of(out, numbers.out_spec)
    moves_along_no_dim = all(
        tuple(padding) == (0, 0) and lhs_dilation == rhs_dilation == 1 and (k == size or (k == 1 and stride == 1))
        for size, k, stride, padding, lhs_dilation, rhs_dilation in zip(
            image, kernel, *(params[name] for name in names), strict=True
        )
    )
    return moves_along_no_dim or (params["feature_group_count"] > 1 and math.prod(outputs) <= math.prod(kernel))


def as_products(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """Returns `conv_general_dilated` of each pair lhs[i], rhs[i], stacked along dim 0.

    There is one product for each position of the output, or of the kernel if these are fewer. The output of a kernel
    gradient has as many positions as the kernel of the layer; its products contract the rows and the image.

    Names of dims: r replica, g group, n rows, c features in, o features out, A, B, ... spatial.
    """
    numbers, strides, dilations = params["dimension_numbers"], params["window_strides"], params["rhs_dilation"]
    space = [chr(ord("A") + i) for i in range(len(strides))]
    lhs_dims, rhs_dims = _named("nc", space, numbers.lhs_spec), _named("oc", space, numbers.rhs_spec)
    kernel = [rhs.shape[rhs_dims.index(x)] for x in space]
    pads = dict(zip(space, zip(params["padding"], params["lhs_dilation"], strict=True), strict=True))
    edges = [(*pads[x][0], pads[x][1] - 1) if x in pads else (0, 0, 0) for x in lhs_dims]
    lhs = lax.pad(lhs, jnp.zeros((), lhs.dtype), edges)
    spans = zip([lhs.shape[lhs_dims.index(x)] for x in space], kernel, strides, dilations, strict=True)
    outputs = [(size - (k - 1) * step - 1) // stride + 1 for size, k, stride, step in spans]
    is_narrow = jnp.issubdtype(lhs.dtype, jnp.floating) and lhs.dtype.itemsize < 4
    sums = params["preferred_element_type"] or (jnp.float32 if is_narrow else lhs.dtype)
    product = functools.partial(jnp.einsum, precision=params["precision"], preferred_element_type=sums)

    groups = params["feature_group_count"] * params["batch_group_count"]
    lhs, lhs_dims = _grouped(lhs, lhs_dims, "c" if params["feature_group_count"] > 1 else "n", groups)
    rhs, rhs_dims = _grouped(rhs, rhs_dims, "o", groups)
    part_of = functools.partial(_part, lhs, [lhs_dims.index(x) for x in space])
    if math.prod(outputs) <= math.prod(kernel):
        text = f"{lhs_dims},{rhs_dims}->rngo"
        parts = (part_of(at, strides, kernel, dilations) for at in itertools.product(*map(range, outputs)))
        result = jnp.stack([product(text, part, rhs) for part in parts], -1)
    else:
        positions, axes = list(itertools.product(*map(range, kernel))), [rhs_dims.index(x) for x in space]
        text = f"{lhs_dims},{''.join(x for x in rhs_dims if x not in space)}->rngo{''.join(space)}"
        weights = (lax.squeeze(_part(rhs, axes, at, [1] * len(at), [1] * len(at), strides), axes) for at in positions)
        parts = (part_of(at, dilations, outputs, strides) for at in positions)
        result = functools.reduce(jnp.add, map(functools.partial(product, text), parts, weights))
    result = result.reshape(*result.shape[:2], -1, *outputs)
    places = [1 + numbers.out_spec.index(i) for i in range(result.ndim - 1)]
    return result.transpose(0, *places).astype(params["preferred_element_type"] or lhs.dtype)


def _named(features: str, space: Sequence[str], spec: Sequence[int]) -> str:
    """Returns one letter for each dim of an operand; the first dim is the replica."""
    names = dict(zip(spec, (*features, *space), strict=True))
    return "r" + "".join(names[i] for i in range(len(spec)))


def _grouped(x: jax.Array, dims: str, split: str, groups: int) -> tuple[jax.Array, str]:
    """Returns `x` and the names of its dims with the groups as a dim in front of the dim that holds them."""
    i = dims.index(split)
    return x.reshape(*x.shape[:i], groups, -1, *x.shape[i + 1 :]), dims.replace(split, "g" + split)


def _part(
    x: jax.Array,
    axes: Sequence[int],
    at: Sequence[int],
    distances: Sequence[int],
    sizes: Sequence[int],
    steps: Sequence[int],
) -> jax.Array:
    """Returns along each of `axes` the entries at `at * distance + i * step` for i < size."""
    for axis, i, distance, size, step in zip(axes, at, distances, sizes, steps, strict=True):
        x = lax.slice_in_dim(x, i * distance, i * distance + (size - 1) * step + 1, step, axis)
    return x
