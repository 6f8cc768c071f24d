"""Experts without a capacity: no choice is dropped, so experts get unequal numbers of rows.

    x[N, D] -> rows sorted by expert, [R, D] -> grouped products -> ... -> y[N, D]    R <= e N min(top_k, E_e), static

Two forms of communication over the `expert` axis, selected by platform:

    ragged_all_to_all   TPU, GPU, e > top_k: each row is sent only to the device of its expert; sizes are sent first
    all_gather          elsewhere, or e <= top_k: every device gathers all tokens along `expert`, computes the
                        choices of its experts, and reduce_scatter returns the sums

Memory: R rows of width D, the worst case in which all tokens choose the same experts.
Wire: see `spmdkit.ops.moe`.
Source: Gale et al., "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts" (2022).

Shape suffixes: N tokens of this device (of all along `expert` once gathered), D width, E experts, K choices of a token,
R rows sorted by expert, e devices along `expert`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from spmdkit import compat
from spmdkit.ops.collectives import Names, all_gather, axes, axis_index, axis_size, reduce_scatter
from spmdkit.ops.moe.experts import Expert, run_sorted
from spmdkit.ops.moe.router import Routing
from spmdkit.ops.moe.rows import sum_rows
from spmdkit.step import trace_context


def through_rows(x_BTD: jax.Array, routing: Routing, weights: Any, expert: Expert, *, over: Names) -> jax.Array:
    """Returns [B, T, D], this device's partial sum of the experts' results for the tokens gathered over `over`, the
    mesh axes that shard both the tokens and the experts' weights."""
    x_BTD, experts_BTK, weights_BTK = (
        all_gather(a, over, 1) for a in (x_BTD, routing.experts_BTK, routing.weights_BTK)
    )
    num_experts, top_k = routing.probs_BTE.shape[-1], experts_BTK.shape[-1]
    x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
    tokens = (x_ND, experts_BTK.reshape(-1, top_k), weights_BTK.reshape(-1, top_k))
    across = _by_ragged_all_to_all if _sends_rows(top_k) else _by_all_gather
    return across(*tokens, weights, expert, num_experts).reshape(x_BTD.shape)


def _sends_rows(top_k: int) -> bool:
    return axis_size("expert") > top_k and trace_context.current().platform in ("tpu", "gpu", "cuda", "rocm")


def _by_all_gather(
    x_ND: jax.Array, experts_NK: jax.Array, weights_NK: jax.Array, weights: Any, expert: Expert, num_experts: int
) -> jax.Array:
    x_ND, experts_NK, weights_NK = (all_gather(a, "expert", 0) for a in (x_ND, experts_NK, weights_NK))
    num_local = num_experts // axis_size("expert")
    local_NK = experts_NK - axis_index("expert") * num_local
    local_NK = jnp.where((local_NK >= 0) & (local_NK < num_local), local_NK, num_local)
    y_ND = _run_local_experts(x_ND, local_NK, weights_NK, weights, expert, num_local)
    return reduce_scatter(y_ND, "expert", 0)


def _by_ragged_all_to_all(
    x_ND: jax.Array, experts_NK: jax.Array, weights_NK: jax.Array, weights: Any, expert: Expert, num_experts: int
) -> jax.Array:
    N, K = experts_NK.shape
    num_devices, device = axis_size("expert"), axis_index("expert")
    num_local = num_experts // num_devices
    by_expert = _sort(experts_NK, num_experts, N * K)
    count_E = by_expert.sizes_E
    count_sde = all_gather(count_E[None], "expert", 0).reshape(num_devices, num_devices, num_local)
    count_sd = count_sde.sum(2, dtype=jnp.int32)  # rows sent from device s to device d
    begin_sd = _exclusive_sum(count_sd, 1)  # their offsets on s
    arrive_sd = _exclusive_sum(count_sd, 0)  # their offsets on d

    def send_rows(rows: jax.Array) -> jax.Array:
        max_rows = num_devices * N * min(K, num_local)
        return _ragged(rows, max_rows, begin_sd[device], count_sd[device], arrive_sd[device], count_sd[:, device])

    def return_rows(rows: jax.Array) -> jax.Array:
        return _ragged(rows, N * K, arrive_sd[:, device], count_sd[:, device], begin_sd[:, device], count_sd[device])

    x_RD = send_rows(_pick(x_ND, by_expert.token_R, by_expert.row_NK))
    weight_R1 = send_rows(_pick(weights_NK.reshape(-1, 1), by_expert.choice_R, by_expert.row_NK.reshape(-1, 1)))
    # Received rows are in order of (device, expert): the counts determine their experts.
    ends = jnp.cumsum(count_sde[:, device].reshape(-1), dtype=jnp.int32)
    segment_R = jnp.searchsorted(ends, jnp.arange(len(x_RD), dtype=jnp.int32), side="right").astype(jnp.int32)
    local_R1 = jnp.where(segment_R < len(ends), segment_R % num_local, num_local)[:, None]
    y_RD = return_rows(_run_local_experts(x_RD, local_R1, weight_R1, weights, expert, num_local))
    return sum_rows(y_RD[None], by_expert.row_NK[None], by_expert.token_R[None, :, None])[0]


def _run_local_experts(
    x_ND: jax.Array, local_NK: jax.Array, weights_NK: jax.Array, weights: Any, expert: Expert, num_local: int
) -> jax.Array:
    """Returns [N, D]: for each token the weighted sum over its chosen experts on this device. `local_NK`: local expert
    index; `num_local`: none."""
    N, K = local_NK.shape
    places = _sort(local_NK, num_local, N * min(K, num_local))
    x_RD = _pick(x_ND, places.token_R, places.row_NK)
    weight_R1 = _pick(weights_NK.reshape(-1, 1), places.choice_R, places.row_NK.reshape(-1, 1))
    with jax.named_scope("moe_experts"):
        y_RD = run_sorted(expert, weights, x_RD, places.sizes_E, trace_context.current().platform)
        is_row_R1 = (places.token_R >= 0)[:, None]
        y_RD = jnp.where(is_row_R1, y_RD.astype(jnp.float32) * weight_R1, 0.0).astype(x_ND.dtype)
    return sum_rows(y_RD[None], places.row_NK[None], places.token_R[None, :, None])[0]


class _Rows(NamedTuple):
    """Choices sorted by expert: the map between choices and rows; -1 for none."""

    sizes_E: jax.Array
    token_R: jax.Array
    choice_R: jax.Array
    row_NK: jax.Array


def _sort(experts_NK: jax.Array, num_experts: int, num_rows: int) -> _Rows:
    """Returns the choices of experts 0 .. num_experts - 1 sorted by expert, in `num_rows` rows; others are omitted."""
    N, K = experts_NK.shape
    flat_C = experts_NK.reshape(-1)
    sizes_E = (flat_C[:, None] == jnp.arange(num_experts, dtype=jnp.int32)).sum(0, dtype=jnp.int32)
    sorted_C = jnp.argsort(flat_C, stable=True).astype(jnp.int32)
    row_C = jnp.argsort(sorted_C).astype(jnp.int32)
    is_row_R = jnp.arange(num_rows, dtype=jnp.int32) < sizes_E.sum(dtype=jnp.int32)
    choice_R = jnp.where(is_row_R, sorted_C[:num_rows], -1)
    row_NK = jnp.where(flat_C < num_experts, row_C, -1).reshape(N, K)
    return _Rows(sizes_E, jnp.where(is_row_R, choice_R // K, -1), choice_R, row_NK)


def _pick(x_ND: jax.Array, index_R: jax.Array, back_NK: jax.Array) -> jax.Array:
    return sum_rows(x_ND[None], index_R[None, :, None], back_NK[None])[0]


def _exclusive_sum(x: jax.Array, dim: int) -> jax.Array:
    return jnp.cumsum(x, axis=dim, dtype=x.dtype) - x


def _ragged(rows: jax.Array, num_rows: int, *offsets_and_sizes: jax.Array) -> jax.Array:
    """Returns the rows received from all devices along `expert`, in an array of `num_rows` rows."""
    received, *indices = compat.typed_like((jnp.zeros((num_rows, rows.shape[1]), rows.dtype), *offsets_and_sizes), rows)
    exchanged: jax.Array = lax.ragged_all_to_all(rows, received, *indices, axis_name=axes("expert"))
    return exchanged
