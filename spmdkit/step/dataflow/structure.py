"""Rules of operations that move, combine or index elements: `(eqn, flows, shape of rows) -> Flow`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from spmdkit.step.dataflow.arithmetic import layout, linear, nonlinear, plus, product
from spmdkit.step.dataflow.flow import NONE, Flow, marks, mixing

Rule = Callable[[Any, Sequence[Flow]], Flow]


def shape_of(eqn: Any, index: int = 0) -> tuple[int, ...]:
    return tuple(eqn.invars[index].aval.shape)


def result_shape(eqn: Any) -> tuple[int, ...]:
    return tuple(eqn.outvars[0].aval.shape)


def _meets(flow: Flow, shape: tuple[int, ...], dims: Iterable[int]) -> bool:
    """Returns whether the rows of a value extend over one of the dims, or may do so."""
    if not flow.is_row or flow.rows == 1:
        return False
    span = flow.span(shape)
    return span is None or any(span[0] <= dim <= span[1] for dim in dims)


def _other(eqn: Any, flows: Sequence[Flow], mixes: bool = True) -> Flow:
    found = mixing(eqn, flows) if mixes else marks(flows)
    return Flow("other", 0, **{**found, "source": found["source"] or eqn})


def _mixed_row(eqn: Any, flows: Sequence[Flow]) -> Flow:
    """Returns a value on the rows of the first `row` value, if there is one, that depends on other rows too."""
    row = next((f for f in flows if f.is_row), None)
    return _other(eqn, flows) if row is None else replace(row, tag="", **mixing(eqn, flows))


# ---- reductions


def reduce_sum(eqn: Any, flows: Sequence[Flow]) -> Flow:
    (flow,), shape = flows, shape_of(eqn)
    # Dims are integers, also of numpy. The name of a mesh axis holds parts of the same rows.
    axes = [axis for axis in eqn.params["axes"] if not isinstance(axis, str)]
    if not _meets(flow, shape, axes):
        return _without(weighted_sum(eqn, flows), shape, axes)
    return Flow("total", plus(flow.degree, 1), **{**marks(flows), "added": None, "source": flow.source or eqn})


def weighted_sum(eqn: Any, flows: Sequence[Flow]) -> Flow:
    """A sum with constant weights of elements that belong to one row, or to none."""
    return product(eqn, (flows[0], NONE))


def _without(flow: Flow, shape: tuple[int, ...], axes: Iterable[int]) -> Flow:
    """Returns a `row` value after a reduction over axes along which one row extends."""
    left = [d for d in range(len(shape)) if d not in set(axes)]
    return flow.moved(shape, tuple(shape[d] for d in left), {d: i for i, d in enumerate(left)})


def reduce_extreme(eqn: Any, flows: Sequence[Flow]) -> Flow:
    """reduce_max, reduce_min."""
    (flow,), shape, axes = flows, shape_of(eqn), eqn.params["axes"]
    how = eqn.primitive.name.removeprefix("reduce_")
    if not flow.is_row:
        return flow if flow.how in ("none", how, "unknown") else _other(eqn, flows)
    changed = nonlinear(eqn, flows)
    if not _meets(flow, shape, axes):
        return _without(changed, shape, axes)
    return Flow(how, 0, **{**marks([changed]), "source": flow.source or eqn})


def reduce_other(eqn: Any, flows: Sequence[Flow]) -> Flow:
    """Any other reduction."""
    shape, axes = shape_of(eqn), eqn.params.get("axes", eqn.params.get("dimensions"))
    if not any(_meets(f, shape, axes) for f in flows):
        return _without(nonlinear(eqn, flows), shape, axes)
    return _other(eqn, flows, mixes=any(f.is_statistic for f in flows))


def along(eqn: Any, flows: Sequence[Flow]) -> Flow:
    """Operations along one dim that keep the shape: sort, cumsum, top_k ..."""
    params, shape = eqn.params, shape_of(eqn)
    dims = params.get("axis", params.get("dimension", params.get("dimensions", len(shape) - 1)))
    dims = dims if isinstance(dims, tuple | list) else (dims,)
    if any(_meets(f, shape, dims) for f in flows):
        return _mixed_row(eqn, flows)
    rule = {"rev": linear, "cumsum": weighted_sum}.get(eqn.primitive.name, nonlinear)
    return rule(eqn, flows).moved(shape, result_shape(eqn), {d: d for d in range(len(shape))})


# ---- shapes


def keep(eqn: Any, flows: Sequence[Flow]) -> Flow:
    """Reshapes: the flat order of the elements stays."""
    return flows[0]


def transpose(eqn: Any, flows: Sequence[Flow]) -> Flow:
    dims = {d: i for i, d in enumerate(eqn.params["permutation"])}
    return flows[0].moved(shape_of(eqn), result_shape(eqn), dims)


def broadcast(eqn: Any, flows: Sequence[Flow], num: int) -> Flow:
    """broadcast_in_dim. `num`: the number of rows if no other dim has its length, or -1."""
    flow, out = flows[0], result_shape(eqn)
    if flow.is_row:
        dims = dict(enumerate(eqn.params["broadcast_dimensions"]))
        return flow.moved(shape_of(eqn), out, dims)
    if flow.tag == "zero":
        return flow
    before = shape_of(eqn)
    mapped = {d: before[i] for i, d in enumerate(eqn.params["broadcast_dimensions"])}
    new = [d for d, size in enumerate(out) if size == num and mapped.get(d, 1) == 1]
    if len(new) != 1:
        return flow
    row = Flow("row", 0 if flow.degree is None else flow.degree, num, math.prod(out[new[0] + 1 :]), **marks(flows))
    if flow.how == "total" and flow.degree is not None:
        return replace(row, added=eqn)
    return replace(row, **mixing(eqn, flows)) if flow.is_statistic or flow.degree is None else row


def iota(eqn: Any, num: int) -> Flow:
    shape, dim = eqn.params["shape"], eqn.params["dimension"]
    if shape[dim] != num:
        return NONE
    return Flow("row", 0, num, math.prod(shape[dim + 1 :]), mixed=eqn, tag="index")


def slice_(eqn: Any, flows: Sequence[Flow]) -> Flow:
    return part(eqn, flows[0], shape_of(eqn), result_shape(eqn), eqn.params["start_indices"], eqn.params["strides"])


def part(eqn: Any, flow: Flow, shape: Any, out: Any, starts: Any, strides: Any = None) -> Flow:
    """Returns a part of a value."""
    smaller = [d for d, (a, b) in enumerate(zip(shape, out, strict=True)) if a != b]
    if not _meets(flow, shape, smaller):
        return flow.moved(shape, out, {d: d for d in range(len(shape))})
    span = flow.span(shape)
    if span is None or span[0] != span[1]:
        return _mixed_row(eqn, [flow])
    dim = span[0]
    block = flow.rows * (flow.stride // math.prod(shape[dim + 1 :]))  # all rows once
    whole_blocks = out[dim] % block == 0 and starts[dim] % block == 0
    if not whole_blocks or (strides is not None and strides[dim] != 1):
        return _mixed_row(eqn, [flow])
    return replace(flow, stride=flow.stride // math.prod(shape[dim + 1 :]) * math.prod(out[dim + 1 :]))


def concatenate(eqn: Any, flows: Sequence[Flow]) -> Flow:
    dim, out = eqn.params["dimension"], result_shape(eqn)
    filled = [(f, shape_of(eqn, i)) for i, f in enumerate(flows) if math.prod(shape_of(eqn, i))]
    parts = []
    for flow, shape in filled:
        if _meets(flow, shape, [dim]):
            span = flow.span(shape)
            if span is None or span[0] != span[1] or not all(f.is_row for f, _ in filled):
                return _other(eqn, flows, mixes=False)
        parts.append(flow.moved(shape, out, {d: d for d in range(len(shape))}))
    if parts[0].tag == "index":  # indices (row, column): `x[jnp.arange(n), labels]`
        mixed = marks(parts[1:])["mixed"]
        return replace(parts[0], mixed=mixed, tag="" if mixed else "index")
    return replace(linear(eqn, parts), tag="")


def stack(eqn: Any, flows: Sequence[Flow]) -> Flow:
    axis, shape = eqn.params["axis"], shape_of(eqn)
    dims = {d: d + (d >= axis) for d in range(len(shape))}
    return linear(eqn, [replace(f.moved(shape, result_shape(eqn), dims), tag="") for f in flows])


def tile(eqn: Any, flows: Sequence[Flow]) -> Flow:
    (flow,), shape, out = flows, shape_of(eqn), result_shape(eqn)
    repeated = [d for d, num in enumerate(eqn.params["reps"]) if num > 1]
    span = flow.span(shape)
    if span is not None and span[0] != span[1] and _meets(flow, shape, repeated):
        return replace(flow, stride=0)
    return flow.moved(shape, out, {d: d for d in range(len(shape))})


def pad(eqn: Any, flows: Sequence[Flow]) -> Flow:
    flow, shape, out = linear(eqn, flows), shape_of(eqn), result_shape(eqn)
    padded = [d for d, config in enumerate(eqn.params["padding_config"]) if any(config)]
    if _meets(flow, shape, padded):
        return replace(flow, stride=0)
    return flow.moved(shape, out, {d: d for d in range(len(shape))})


def window(eqn: Any, flows: Sequence[Flow]) -> Flow:
    """reduce_window and its variants."""
    shape, out = shape_of(eqn), result_shape(eqn)
    wide = [d for d, size in enumerate(eqn.params["window_dimensions"]) if size > 1]
    if _meets(flows[0], shape, wide):
        return _mixed_row(eqn, flows)
    rule = weighted_sum if eqn.primitive.name == "reduce_window_sum" else nonlinear
    return rule(eqn, flows).moved(shape, out, {d: d for d in range(len(shape))})


# ---- products


def dot_general(eqn: Any, flows: Sequence[Flow]) -> Flow:
    (left, right), out = flows, result_shape(eqn)
    (contracted, batch) = eqn.params["dimension_numbers"]
    degree = plus(left.degree, right.degree)
    if any(f.tag == "zero" for f in flows) or not any(f.is_row for f in flows):
        return product(eqn, flows)
    free: Callable[[int, Any], list[int]] = lambda side, shape: [
        d for d in range(len(shape)) if d not in contracted[side] and d not in batch[side]
    ]
    shapes = shape_of(eqn, 0), shape_of(eqn, 1)
    num_batch, first_right = len(batch[0]), len(free(0, shapes[0]))
    moved, summed = [], []
    for side, flow in enumerate(flows):
        dims = {d: i for i, d in enumerate(batch[side])}
        start = num_batch + (first_right if side else 0)
        dims |= {d: start + i for i, d in enumerate(free(side, shapes[side]))}
        if _meets(flow, shapes[side], contracted[side]):
            summed.append(side)
        elif flow.is_row:
            moved.append(flow.moved(shapes[side], out, dims))
    statistic = any(f.is_statistic for f in flows)
    added = any(f.added for f in flows) and all(f.is_row for f in flows)
    if len(summed) == 2 and not added:
        found = marks(flows)
        return Flow("total", plus(degree, 1), **{**found, "source": found["source"] or eqn})
    if summed:
        return _mixed_row(eqn, flows) if moved else _other(eqn, flows)
    same = len({(f.rows, f.stride) for f in moved}) == 1
    if not same or statistic or added or degree is None:
        return replace(moved[0], **mixing(eqn, flows))
    return replace(moved[0], degree=degree, tag="", **marks(flows))


def conv(eqn: Any, flows: Sequence[Flow]) -> Flow:
    left, right = flows
    if not (left.is_row or right.is_row):
        return product(eqn, flows)
    numbers, shape, out = eqn.params["dimension_numbers"], shape_of(eqn), result_shape(eqn)
    if right.enters or _meets(left, shape, [d for d in range(len(shape)) if d != numbers.lhs_spec[0]]):
        return _mixed_row(eqn, flows)
    return replace(left.moved(shape, out, {numbers.lhs_spec[0]: numbers.out_spec[0]}), tag="")


# ---- indexing


def gather(eqn: Any, flows: Sequence[Flow]) -> Flow:
    (operand, indices), numbers = flows, eqn.params["dimension_numbers"]
    shape, of_indices, out = shape_of(eqn, 0), shape_of(eqn, 1), result_shape(eqn)
    if not operand.enters and not indices.enters:
        return replace(NONE, **marks(flows))
    sizes, offset = eqn.params["slice_sizes"], numbers.offset_dims
    window = [d for d in range(len(shape)) if d not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)]
    batch_out = [d for d in range(len(out)) if d not in offset]
    index_dims = dict(enumerate(batch_out))
    of_operand = dict(zip(window, offset, strict=True))
    for d, e in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        of_operand[d] = index_dims[e]
    if operand.is_statistic or indices.is_statistic:
        return replace(_mixed_row(eqn, flows), stride=0) if indices.enters else operand
    placed = indices.moved(of_indices, out, index_dims)
    if not operand.is_row:
        return replace(placed, tag="")
    if indices.tag == "index" and _indexes_rows(operand, shape, numbers.start_index_map):  # x[jnp.arange(n), ...]
        return replace(placed, tag="", degree=operand.degree, **marks([operand]))
    cut = [d for d in range(len(shape)) if d not in numbers.operand_batching_dims and sizes[d] != shape[d]]
    if _meets(operand, shape, cut):
        return replace(_mixed_row(eqn, flows), stride=0)
    moved = operand.moved(shape, out, of_operand)
    return replace(moved, tag="", **(marks(flows) if layout([placed, moved])[2] else mixing(eqn, flows)))


def _indexes_rows(operand: Flow, shape: tuple[int, ...], indexed: Sequence[int]) -> bool:
    """Returns whether the first number of each index selects along the dim of the rows."""
    return operand.span(shape) == (0, 0) and indexed[0] == 0


def scatter(eqn: Any, flows: Sequence[Flow]) -> Flow:
    (operand, indices, updates), numbers = flows, eqn.params["dimension_numbers"]
    shape, of_indices, of_updates = (shape_of(eqn, i) for i in range(3))
    adds = eqn.primitive.name.endswith(("add", "sub"))
    if not any(f.enters for f in flows):
        return replace(NONE, **marks(flows))
    if any(f.is_statistic for f in flows):
        if indices.enters or any(f.is_row for f in flows):
            return _mixed_row(eqn, flows)
        return linear(eqn, (operand, updates))
    window = list(numbers.update_window_dims)
    batch = [d for d in range(len(of_updates)) if d not in window]
    index_dims = dict(enumerate(batch))
    placed = indices.moved(of_indices, of_updates, index_dims)
    fixed = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    target = [d for d in range(len(shape)) if d not in fixed]
    to_operand = dict(zip(window, target, strict=True))
    for d, e in zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True):
        to_operand[index_dims[e]] = d
    scattered = [d for d in batch if d not in to_operand]
    if not operand.is_row and shape[:1] == (indices.rows,):  # zeros for each row
        operand = Flow("row", 0, indices.rows, math.prod(shape[1:]))
    if indices.tag == "index" and _indexes_rows(operand, shape, numbers.scatter_dims_to_operand_dims):
        return replace(operand, tag="", **marks([operand, updates]))  # x.at[jnp.arange(n), i].set(...)
    if _meets(updates, of_updates, scattered) or _meets(placed, of_updates, scattered):
        if operand.is_row:
            return _mixed_row(eqn, flows)
        found = {**marks(flows), "source": marks(flows)["source"] or eqn}
        if any(f.added for f in (indices, updates)):  # a mean times a number of rows
            return _other(eqn, flows)
        if adds and indices.tag != "index":
            return Flow("total", plus(updates.degree, 1), **{**found, "added": None})
        return Flow("other", 0, **found)
    moved = [f.moved(of_updates, shape, to_operand) for f in (placed, updates) if f.is_row]
    return linear(eqn, [operand, *moved]) if adds else replace(nonlinear(eqn, [operand, *moved]), tag="")


def dynamic_slice(eqn: Any, flows: Sequence[Flow]) -> Flow:
    (operand, *starts), shape, out = flows, shape_of(eqn), result_shape(eqn)
    if any(f.tag == "offset" for f in starts) and operand.whole is not None:
        if operand.is_row:  # rows of this replica against rows of this replica
            return _mixed_row(eqn, flows)
        dim = next(i for i, f in enumerate(starts) if f.tag == "offset")
        return Flow("row", 0, out[dim], math.prod(out[dim + 1 :]))
    if any(f.enters for f in starts):
        return nonlinear(eqn, flows)
    of_part = part(eqn, operand, shape, out, (1,) * len(shape))
    return replace(of_part, **marks([of_part, *starts]))


def dynamic_update_slice(eqn: Any, flows: Sequence[Flow]) -> Flow:
    (operand, update, *starts), shape, of_update = flows, shape_of(eqn), shape_of(eqn, 1)
    if any(f.enters for f in starts):
        return _other(eqn, flows, mixes=False)
    smaller = [d for d, (a, b) in enumerate(zip(shape, of_update, strict=True)) if a != b]
    if _meets(update, of_update, smaller):
        return _other(eqn, flows, mixes=False)
    moved = update.moved(of_update, shape, {d: d for d in range(len(shape))})
    written = linear(eqn, [operand, moved])
    return replace(written, tag="", **marks([written, *starts]))


# ---- batched functions


def leading(trailing: int, eqn: Any, flows: Sequence[Flow]) -> Flow:
    """A function of the last `trailing` dims, for each position of the other dims."""
    out, shapes = result_shape(eqn), [shape_of(eqn, i) for i in range(len(flows))]
    batch = max(map(len, shapes)) - trailing  # a vector has less dims than a matrix
    pairs = list(zip(flows, shapes, strict=True))
    if any(_meets(flow, shape, range(batch, len(shape))) for flow, shape in pairs):
        return _mixed_row(eqn, flows)
    return nonlinear(eqn, [flow.moved(shape, out, {d: d for d in range(batch)}) for flow, shape in pairs])


def triangular_solve(eqn: Any, flows: Sequence[Flow]) -> Flow:
    matrix, right = flows
    shape = shape_of(eqn, 1)
    solved = len(shape) - (2 if eqn.params["left_side"] else 1)
    if not matrix.enters and not _meets(right, shape, [solved]):
        return weighted_sum(eqn, [right])
    return leading(2, eqn, flows)


def random(eqn: Any, flows: Sequence[Flow]) -> Flow:
    """Random bits and keys: one for each key. Bits of the index of a row are no more than random."""
    rows = [(i, f) for i, f in enumerate(flows) if f.is_row]
    if not rows:
        return NONE
    i, flow = rows[0]
    before, after = math.prod(shape_of(eqn, i)), math.prod(result_shape(eqn))
    return Flow("row", 0, flow.rows, flow.stride * after // before)


def _of_last_dims(eqn: Any, flows: Sequence[Flow]) -> Flow:
    return leading(len(eqn.params["fft_lengths"]), eqn, flows)


def _names(text: str) -> list[str]:
    return text.split()


RULES: dict[str, Rule] = {
    "reduce_sum": reduce_sum,
    **dict.fromkeys(("reduce_max", "reduce_min"), reduce_extreme),
    **dict.fromkeys(
        ("reduce", "reduce_and", "reduce_or", "reduce_xor", "reduce_prod", "argmax", "argmin"), reduce_other
    ),
    **dict.fromkeys(
        ("sort", "top_k", "approx_top_k", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "rev"), along
    ),
    **dict.fromkeys(("reshape", "squeeze", "expand_dims"), keep),
    "transpose": transpose,
    "slice": slice_,
    "concatenate": concatenate,
    "stack": stack,
    "tile": tile,
    "pad": pad,
    **dict.fromkeys(("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"), window),
    "dot_general": dot_general,
    "conv_general_dilated": conv,
    "gather": gather,
    **dict.fromkeys(
        _names("scatter scatter_add scatter_sub scatter_mul scatter_min scatter_max"),
        scatter,
    ),
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    **dict.fromkeys(
        _names("cholesky lu geqrf householder_product eigh eig svd qr schur hessenberg tridiagonal tridiagonal_solve"),
        functools.partial(leading, 2),
    ),
    "lu_pivots_to_permutation": functools.partial(leading, 1),
    "triangular_solve": triangular_solve,
    "fft": _of_last_dims,
    **dict.fromkeys(
        _names(
            "random_bits random_fold_in random_split random_wrap random_unwrap random_seed random_gamma threefry2x32 "
            "rng_bit_generator rng_uniform"
        ),
        random,
    ),
}
"""Primitives with one rule for all results. `_` stands for `-`."""
