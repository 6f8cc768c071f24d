"""`count`: the arithmetic of a traced step, from its jaxpr: the body of every scan times its length.

A compiler's count (`cost_analysis`) includes a scanned body once, so a stack of 32 layers would count as one. Matrix
products and convolutions count as 2 x multiply-adds, the convention for model FLOPs. All other arithmetic, one FLOP per
output element, is counted separately. The numbers cover the full mesh: shapes inside `shard_map` are per device, and
are multiplied by the number of devices on the mapped axes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from spmdkit.foundation import jaxprs

_FREE = {
    "broadcast_in_dim", "reshape", "squeeze", "transpose", "convert_element_type", "slice", "dynamic_slice", "concatenate", "pad",  # noqa: E501
    "copy", "copy_p", "iota", "sharding_constraint", "pvary", "pcast", "stop_gradient", "gather", "device_put", "rev", "split",  # noqa: E501
    "random_wrap", "random_unwrap", "dynamic_update_slice", "bitcast_convert_type", "optimization_barrier", "axis_index",  # noqa: E501
}  # fmt: skip
"""Operations that move data and do not compute."""
_COLLECTIVES = ("psum", "all_gather", "all_to_all", "ppermute", "reduce_scatter")


@dataclass(frozen=True)
class Arithmetic:
    """The arithmetic of one step on the full mesh. A loop with a dynamic trip count counts as one iteration.

    Attributes:
        by_dtype: dtype of the operands -> FLOPs of matrix products and convolutions.
        elementwise: FLOPs of all other operations.
    """

    by_dtype: dict[str, float] = field(default_factory=dict)
    elementwise: float = 0.0

    @property
    def products(self) -> float:
        """FLOPs of matrix products and convolutions."""
        return sum(self.by_dtype.values())

    @property
    def flops(self) -> float:
        """FLOPs that a plan reports: of products; of all operations in a program without products."""
        return self.products or self.elementwise


def count(jaxpr: Any) -> Arithmetic:
    """Returns the arithmetic of a (closed) jaxpr."""
    by_dtype, elementwise = defaultdict[str, float](float), 0.0
    for eqn, flops, is_product in _operations(jaxprs.open_jaxpr(jaxpr), 1.0):
        if is_product:
            by_dtype[str(eqn.invars[0].aval.dtype)] += flops
        else:
            elementwise += flops
    return Arithmetic(dict(by_dtype), elementwise)


def products_by_line(jaxpr: Any, line: Callable[[Any], str | None]) -> dict[str, float]:
    """Returns the FLOPs of products by the user's line, `line(equation)`."""
    total = defaultdict[str, float](float)
    for eqn, flops, _ in _operations(jaxprs.open_jaxpr(jaxpr), 1.0):
        if eqn.primitive.name in _PRODUCTS and (at := line(eqn)):
            total[at] += flops
    return total


def collective_bytes(jaxpr: Any, axes: Collection[str]) -> dict[tuple[str, ...], float]:
    """Returns mesh axes -> bytes that all devices send in the collectives of `shard_map` over some of `axes` alone, by
    the formulas of rings of many devices."""
    total = defaultdict[tuple[str, ...], float](float)
    for eqn, elements, _ in _operations(jaxprs.open_jaxpr(jaxpr), 1.0):
        names, name = jaxprs.axis_names(eqn), eqn.primitive.name
        if names and names <= set(axes) and name.startswith(_COLLECTIVES):
            total[tuple(sorted(names))] += (
                (2 if name.startswith("psum") else 1) * elements * eqn.outvars[0].aval.dtype.itemsize
            )
    return dict(total)


def _operations(jaxpr: Any, times: float) -> Iterator[tuple[Any, float, bool]]:
    """Yields (equation, FLOPs of all its runs, whether it is a product or a kernel)."""
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        if name in _PRODUCTS:
            yield eqn, times * _PRODUCTS[name](eqn), True
        elif name == "scan":
            yield from _operations(params["jaxpr"].jaxpr, times * params["length"])
        elif name == "while":
            yield from _operations(params["body_jaxpr"].jaxpr, times)
        elif name == "cond":
            weight = lambda branch: sum(flops for _, flops, _ in _operations(branch.jaxpr, 1.0))
            yield from _operations(max(params["branches"], key=weight).jaxpr, times)
        elif name == "shard_map":
            yield from _operations(jaxprs.open_jaxpr(params["jaxpr"]), times * _mapped_devices(params))
        elif name == "spmdkit_manual":  # the body of sk.manual: one shard_map
            shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
            yield from _operations(jax.make_jaxpr(params["part"].run)(*shapes).jaxpr, times)
        elif name == "spmdkit_kernel":
            yield eqn, times * params["flops"], True
        elif name == "pallas_call" and params.get("cost_estimate") is not None:
            yield eqn, times * params["cost_estimate"].flops, True
        elif inner := list(jaxprs.inner_jaxprs(eqn)):
            for sub in inner:
                yield from _operations(sub, times)
        elif name not in _FREE:  # the arithmetic of a reduction is that of its input
            reduced = eqn.invars if name.startswith(("reduce", "cum", "arg")) else ()
            avals = [v.aval for v in [*eqn.outvars, *reduced] if hasattr(v, "aval")]
            yield eqn, times * max(map(_size, avals), default=0), False


def _mapped_devices(params: Any) -> int:
    mesh = params["mesh"]
    names = params.get("manual_axes") or mesh.axis_names
    return math.prod(mesh.shape[name] for name in names)


def _size(aval: Any) -> int:
    return math.prod(getattr(aval, "shape", ()))


def _dot(eqn: Any) -> float:
    (lhs_contracted, _), _ = eqn.params["dimension_numbers"]
    lhs = eqn.invars[0].aval.shape
    return float(2.0 * _size(eqn.outvars[0].aval) * math.prod(lhs[i] for i in lhs_contracted))


def _convolution(eqn: Any) -> float:
    numbers, params = eqn.params["dimension_numbers"], eqn.params
    specs = zip(("bf", "oi", "bf"), (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec), strict=True)
    operands = (*eqn.invars[:2], eqn.outvars[0])
    lhs, rhs, out = (
        {c: v.aval.shape[n] for c, n in zip(f"{labels}0123", spec, strict=False)}
        for (labels, spec), v in zip(specs, operands, strict=True)
    )
    low = [low for low, _ in params["padding"]]
    window = zip(params["window_strides"], low, params["lhs_dilation"], params["rhs_dilation"], strict=True)
    return convolution_flops(lhs, rhs, out, list(window))


_PRODUCTS: Mapping[str, Callable[[Any], float]] = {"dot_general": _dot, "conv_general_dilated": _convolution}


def convolution_flops(
    lhs: Mapping[str, int], rhs: Mapping[str, int], out: Mapping[str, int], window: Sequence[Sequence[int]]
) -> float:
    """Returns 2 x multiply-adds, without padding and the holes of a dilated input, as hardware counters do.

    Args:
        lhs, rhs, out: label of a dim (`b`, `f`, of rhs `i`, `o`; the number of a spatial dim) -> its length.
        window: for each spatial dim the stride, the low padding, the dilations of lhs and rhs.
    """
    pairs = 1  # (output position, window tap) pairs that read an element of the input
    for n, (stride, low, lhs_dilation, rhs_dilation) in enumerate(window):
        at = np.arange(out[str(n)])[:, None] * stride + np.arange(rhs[str(n)]) * rhs_dilation - low
        inside = (at >= 0) & (at <= (lhs[str(n)] - 1) * lhs_dilation)
        pairs *= int(np.count_nonzero(inside & (at % lhs_dilation == 0)))
    return 2.0 * out["b"] * out["f"] * rhs["i"] * pairs
