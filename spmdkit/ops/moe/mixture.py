"""What one device does of a mixture: route its tokens, bring them to the experts and back, and say how even the load
was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmdkit import compat
from spmdkit.ops import context
from spmdkit.ops.collectives import all_gather, all_reduce, axes, axis_index, axis_size, reduce_scatter
from spmdkit.ops.manual import Dims
from spmdkit.ops.moe.capacity import num_slots, through_slots
from spmdkit.ops.moe.dropless import through_rows
from spmdkit.ops.moe.experts import Expert, is_dims
from spmdkit.ops.moe.load import Load, load_of
from spmdkit.ops.moe.router import Routing, route, token_noise
from spmdkit.step import trace_context

GATHERED = "embed"
"""The name of dims that are made whole before they are used."""


class Mixing(NamedTuple):
    """How tokens are mixed; see `sk.moe` for each field."""

    top_k: int
    capacity: float | None
    expert: Expert
    dims: Any
    router_dims: Dims
    sequence: str | None
    score: str
    normalise: bool
    priority: str
    noise: float
    key_impl: Any


class Operands(NamedTuple):
    """The arrays of `sk.moe`; keys as numbers."""

    x_BTD: jax.Array
    router_DE: jax.Array
    experts: Any
    positions: jax.Array | None
    where_BT: jax.Array | None
    bias_E: jax.Array | None
    key_data: jax.Array | None


def dims_in(choices: Mixing, given: Operands) -> list[Any]:
    """Returns the names of the dims of each operand."""
    tokens = ("batch", choices.sequence)
    return [
        (*tokens, None),
        choices.router_dims,
        choices.dims,
        None if given.positions is None else tokens[2 - given.positions.ndim :],
        None if given.where_BT is None else tokens,
        None if given.bias_E is None else (None,),
        None if given.key_data is None else ("batch",),
    ]


def dims_out(choices: Mixing) -> tuple[Any, Load]:
    """Returns the names of the dims of y and of the load."""
    per_example: Any = ("batch",)
    return ("batch", choices.sequence, None), Load(*[per_example] * len(Load._fields))


def mixture(choices: Mixing, given: Operands) -> tuple[jax.Array, Load]:
    """Returns this device's shards of y and of the load, from its shards of the operands."""
    cut = () if choices.sequence is None else axes(choices.sequence)
    num_tokens, num_experts = given.x_BTD.shape[1] * axis_size(cut), given.router_DE.shape[-1]
    order_T = _order(num_tokens, cut)
    noise_BTE = _noise(choices, given, order_T, cut)
    differs = sorted(compat.varying_axes(given.x_BTD))
    routing = route(
        given.x_BTD,
        _whole(given.router_DE, choices.router_dims, differs),
        top_k=choices.top_k,
        score=choices.score,
        normalise=choices.normalise,
        bias_E=given.bias_E,
        noise_BTE=noise_BTE,
        where_BT=given.where_BT,
    )
    slots = None if choices.capacity is None else num_slots(choices.capacity, choices.top_k, num_tokens, num_experts)
    weights = jax.tree.map(lambda d, w: _whole(w, d, differs), choices.dims, given.experts, is_leaf=is_dims)
    y_BTD = _through_experts(choices, given, routing, weights, order_T, slots, cut)
    y_BTD = all_reduce(y_BTD, tuple(a for a in _own_axes(choices.dims) if a not in cut))
    return y_BTD, load_of(routing, given.where_BT, slots, cut)


def _noise(choices: Mixing, given: Operands, order_T: jax.Array, cut: Sequence[str]) -> jax.Array | None:
    """Returns noise on the logits of this device's tokens, drawn from their places in their examples."""
    if given.key_data is None:
        return None
    num_here, at = given.x_BTD.shape[1], given.positions
    if at is None:
        at = lax.dynamic_slice_in_dim(order_T, axis_index(cut) * num_here, num_here)
    at_BT = jnp.broadcast_to(at, given.x_BTD.shape[:2])
    return choices.noise * token_noise(given.key_data, choices.key_impl, at_BT, given.router_DE.shape[-1])


def _through_experts(
    choices: Mixing,
    given: Operands,
    routing: Routing,
    weights: Any,
    order_T: jax.Array,
    slots: int | None,
    cut: tuple[str, ...],
) -> jax.Array:
    """Returns the tokens after their experts; a part of a sum along axes that cut experts' weights and not the
    sequence."""
    own, at = _own_axes(choices.dims), given.positions
    if slots is None:
        both = tuple(a for a in cut if a in own)
        return reduce_scatter(through_rows(given.x_BTD, routing, weights, choices.expert, over=both), both, 1)
    y_BTD = through_slots(
        given.x_BTD,
        routing,
        order_T if at is None else all_gather(at, cut, at.ndim - 1),
        weights,
        choices.expert,
        slots=slots,
        by_weight=choices.priority == "weight",
        sequence=cut,
        slot_axes=tuple(a for a in cut if a not in own),
    )
    return reduce_scatter(y_BTD, cut, 1)


def _whole(weight: jax.Array, dims: Dims, differs: Sequence[str]) -> jax.Array:
    """Returns a weight with its `embed` dims gathered, typed as varying along `differs`, over which tokens differ.

    Typed before it is gathered, so that its gradient is scattered first and added along `differs` as a shard. The other
    way round, which is what JAX does by itself, the gathered gradient is added: fsdp times the bytes.
    """
    weight = compat.as_varying(weight, differs)
    for i, name in enumerate(dims):
        if name == GATHERED:
            weight = all_gather(weight, name, i)
    return weight


def _order(num_tokens: int, cut: Sequence[str]) -> jax.Array:
    """Returns int32[T]: the position of each place of a whole sequence, as `sk.context_order` has put it, if the model
    called that."""
    positions_T = np.arange(num_tokens, dtype=np.int32)
    num = axis_size("sequence")
    is_reordered = trace_context.current().usage.has_called("context_order") and set(axes("sequence")) <= set(cut)
    if num > 1 and is_reordered and context.order() == "zigzag":
        parts = np.split(positions_T, 2 * num)
        positions_T = np.concatenate([part for i in range(num) for part in (parts[i], parts[-1 - i])])
    return jnp.asarray(positions_T)


def _own_axes(dims: Any) -> tuple[str, ...]:
    """Returns the mesh axes that cut one expert's weights while they are used: results are parts of a sum along
    them."""
    names = {n for d in jax.tree.leaves(dims, is_leaf=is_dims) for n in d if n not in (None, GATHERED, "expert")}
    return axes(*sorted(names))
