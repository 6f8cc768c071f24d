"""Embedding lookup and cross-entropy loss with the vocabulary sharded over devices.

    embed          tokens[B_b, T_s] , E[V_t, D_f]               ->  x[B_b, T_st, D]
    cross_entropy  h[B_b, T_st, D] . W[D_f, V_t] , targets      ->  loss[B_b, T_s]      no full logits[B, T, V]

Axes: `b` batch, `s` sequence (context), `t` vocabulary (tensor), `f` weight storage (fsdp).

Each device looks up the ids in its vocabulary shard, with zeros for all other ids, and one reduction sums the results.
The loss needs three values per token: the largest logit, the sum of exponentials and the target's logit. Each is
reduced over the device's columns, then over t. A device computes the logits of at most `chunk` tokens at a time.

Wire, bytes sent per device and step; N_t, N_f, N_c devices along t, f, and the other batch and sequence axes; n tokens
per device after the gather over t, X their bytes [n, D], W bytes of the table or head gathered over f, [D, V/N_t]:

    embed, by table    forward  (N_t-1)/N_t X   + (N_f-1)/N_f W                 backward  the same + 2 (N_c-1)/N_c W/N_f
    embed, by tokens   forward  (N_t-1)/N_t X   + (N_f-1)/N_f X/N_t             backward  the same + 2 (N_c-1)/N_c W/N_f
                                                + 4 (N_f-1) n of ids            if X/N_t < W and f shards the batch
    cross_entropy      forward  (N_t-1)/N_t (X + 24 n)   + (N_f-1)/N_f W
                       backward (N_t-1)/N_t 2 X          + 2 (N_f-1)/N_f W      + 2 (N_c-1)/N_c W/N_f

When not: the logits fit in memory. A plain matrix product and softmax is then as good.
Source: Shoeybi et al., "Megatron-LM" (2019), section 3 (the parallel cross-entropy); Wijmans et al., "Cut Your Losses
in Large-Vocabulary Language Models" (2024) (logits in blocks); Chowdhery et al., "PaLM" (2022), section 5 (z-loss).

Shape suffixes: B examples, T positions, D width, V vocabulary, N tokens per device (B T), C tokens per chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from spmdkit import compat
from spmdkit.errors import ConfigError
from spmdkit.foundation.formatting import shown_axes
from spmdkit.foundation.trees import describe
from spmdkit.ops import tensor
from spmdkit.ops.both_modes import both_modes
from spmdkit.ops.collectives import all_gather, all_reduce, all_to_all, axes, axis_index, axis_size
from spmdkit.ops.manual import Dims, manual
from spmdkit.step import trace_context

LOGITS_BYTES = 2**29
"""Maximum bytes of float32 logits per device at a time, if `chunk` is not set."""

LANES = 128
"""A TPU pads the last dim in memory to a multiple of this number of values."""

SMALLEST = -1e30
"""The logit of a padding id: finite, so that a shard with padding ids only gives no NaN."""


@jax.named_scope(trace_context.VOCAB)
def embed(
    tokens_BT: jax.Array,
    table_VD: jax.Array,
    *,
    dims: Dims = tensor.ROWS,
    by: Literal["auto", "table", "tokens"] = "auto",
) -> jax.Array:
    """Returns the table rows of the tokens, [B, T, D]; zeros for ids outside the vocabulary.

    Args:
        dims: dims of the result; with `norm_sequence` the reduction over the vocabulary is a reduce-scatter over the
            sequence.
        by: data sent over the axes that shard the table's width. `table` gathers the table, `tokens` sends ids and
            returns vectors, `auto` selects the one with fewer bytes sent, or `table` if the padded vectors would take
            more memory.

    Layout: tokens sharded as `dims` without the vocabulary axes; table `("vocab", "embed")`.
    """
    _check_ids("sk.embed: tokens_BT", tokens_BT)
    table_dims: Dims = ("vocab", "embed")
    vocab_axes = tensor.kept_axes(table_dims[:1], dims)
    token_dims = tensor.between_dims(dims, vocab_axes)

    def local(tokens: jax.Array, table: jax.Array) -> jax.Array:
        stores = axes("embed")
        batch = axes(dims[0]) if dims[0] is not None else ()
        movable = bool(stores) and set(stores) <= set(batch) and not set(axes("vocab")) - set(vocab_axes)
        if by == "tokens" and stores and not movable:
            raise ConfigError(
                f"sk.embed(by='tokens'): the table's width is sharded over {list(stores)}, the examples over "
                f"{list(batch)}. Ids can be sent to the devices that store the width only along axes that cut the "
                "examples. Use by='table'."
            )
        smaller = tokens.size // axis_size(vocab_axes) < table.shape[0]
        smaller &= tokens.size * max(table.shape[1], LANES) <= table.size
        if movable and (by == "tokens" or (by == "auto" and smaller)):
            gathered_tokens = all_gather(tokens, stores, 0)
            x = tensor.reduce_rows(_look_up(gathered_tokens, table, vocab_axes), dims, vocab_axes)
            return all_to_all(x, stores, split_dim=0, join_dim=x.ndim - 1)
        full_table = tensor.gather_weight(table, table_dims, dims, 1, tokens)
        return tensor.reduce_rows(_look_up(tokens, full_table, vocab_axes), dims, vocab_axes)

    x_BTD: jax.Array = manual(local, (token_dims, table_dims), dims, "sk.embed")(tokens_BT, table_VD)
    return x_BTD


@jax.named_scope(trace_context.VOCAB)
def cross_entropy(
    hidden_BTD: jax.Array,
    head_DV: jax.Array,
    targets_BT: jax.Array,
    *,
    where: jax.Array | None = None,
    z_loss: float = 0.0,
    chunk: int | None = None,
    vocab_size: int | None = None,
    dims: Dims = tensor.ROWS,
) -> jax.Array:
    """Returns `-log softmax(hidden . head)[target]`, float32[B, T]. The logits of at most `chunk` tokens exist on a
    device at a time.

    Args:
        targets_BT: integer ids; an id outside the vocabulary gives NaN, unless `where` masks it.
        where: bool[B, T]; where False, the loss is zero and has no gradient.
        z_loss: adds `z_loss * log(sum(exp(logits)))**2`, which prevents drift of the logits.
        chunk: number of tokens per device with logits in memory at a time; default: half a GiB of logits.
        vocab_size: number of ids, if the head is padded to a multiple of the tensor axis; padding columns get no
            probability and no gradient.
        dims: dims of `hidden_BTD`.

    Layout: hidden as `dims`, head `("embed", "vocab")`, other arguments and the result sharded as the rows of `dims`
        without the vocabulary axes. Products and sums are in float32; gradients have the dtypes of hidden and head.

    Raises:
        ConfigError: V is not divisible by the axes of `vocab` (pad the head and set `vocab_size`), or targets are not
            integers.
    """
    _check_ids("sk.cross_entropy: targets_BT", targets_BT)
    head_dims: Dims = ("embed", "vocab")
    vocab_axes = tensor.kept_axes(head_dims[1:], dims)
    row_dims = tensor.between_dims(dims, vocab_axes)
    _check(head_DV.shape[1], vocab_size, chunk, vocab_axes)
    core = _Core(dims, head_dims, vocab_axes, vocab_size, z_loss, chunk)
    losses_BT = core.differentiable(row_dims)(targets_BT, hidden_BTD, head_DV)
    return losses_BT if where is None else jnp.where(where, losses_BT, 0)


def padded_vocab(vocab_size: int, multiple: int = 128) -> int:
    """Returns `vocab_size` rounded up to a multiple of `multiple`. A head or table of this length can be sharded over
    any axis size that divides `multiple`."""
    return -(-vocab_size // multiple) * multiple


def _check_ids(what: str, ids: Any) -> None:
    ids = ids if hasattr(ids, "dtype") else jnp.asarray(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ConfigError(
            f"{what} is {describe(ids)}. Ids count the rows of the vocabulary: they are integers of any width, and a "
            "fraction would be cut off silently. Cast them where they are whole numbers, ids.astype(jnp.int32)."
        )


def _check(num: int, vocab_size: int | None, chunk: int | None, vocab_axes: tuple[str, ...]) -> None:
    parts = axis_size(vocab_axes)
    if trace_context.current().in_manual:
        num *= parts
    if num % parts:
        raise ConfigError(
            f"sk.cross_entropy: the head has {num} columns, sharded over {shown_axes(vocab_axes)} = {parts}. Each "
            f"device holds as many as the others. Make it padded_vocab({num}, {parts}) = {padded_vocab(num, parts)} "
            f"columns long and give vocab_size={vocab_size or num}."
        )
    if vocab_size is not None and not 0 < vocab_size <= num:
        raise ConfigError(
            f"sk.cross_entropy: vocab_size is {vocab_size}, and the head has {num} columns. It counts the columns "
            f"that are ids, the first ones. Give a number from 1 to {num}."
        )
    if chunk is not None and chunk < 1:
        raise ConfigError(
            f"sk.cross_entropy: chunk is {chunk}. It is a number of tokens of at least 1. Try chunk=1024."
        )


# ---- on shards


def _look_up(tokens: jax.Array, table_VD: jax.Array, vocab_axes: tuple[str, ...]) -> jax.Array:
    """Returns rows of this device's table shard; zeros for ids in other shards."""
    ids = tokens.astype(jnp.int32) - axis_index(vocab_axes) * table_VD.shape[0]
    is_local = (ids >= 0) & (ids < table_VD.shape[0])
    rows = jnp.take(table_VD, jnp.where(is_local, ids, 0), axis=0, mode="clip")
    return jnp.where(is_local[..., None], rows, jnp.zeros((), table_VD.dtype))


class _Core(NamedTuple):
    """The loss and its gradient on shards; N: tokens of this device, V: its shard of the vocabulary."""

    dims: Dims
    head_dims: Dims
    vocab_axes: tuple[str, ...]
    vocab_size: int | None
    z_loss: float
    chunk: int | None

    def differentiable(self, row_dims: Dims) -> Callable[..., jax.Array]:
        """Returns `(targets, hidden, head) -> loss` on global arrays, with derivatives in both modes."""
        step, ends = trace_context.current(), (self.dims, self.head_dims)

        def part(fn: Any, more_in: Any, out_dims: Any) -> Any:
            def run(*args: Any) -> Any:
                with trace_context.tracing(step):  # the backward pass is traced outside the caller's context
                    return manual(fn, (*ends, row_dims, *more_in), out_dims, "sk.cross_entropy")(*args)

            return run

        value_of = part(self.forward, (), (row_dims, row_dims))
        tangent, backward = part(self.tangent, (row_dims, *ends), row_dims), part(self.backward, (row_dims,) * 2, ends)

        def forward(targets: jax.Array, hidden: jax.Array, head: jax.Array) -> Any:
            value, logsumexp = value_of(hidden, head, targets)
            return value, (hidden, head, targets, logsumexp)

        return both_modes(forward, lambda kept, ts: tangent(*kept, *ts), lambda kept, ct: backward(*kept, ct))

    def forward(self, hidden: jax.Array, head: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns (loss, logsumexp), each float32 shaped like the targets."""
        hidden_ND, head_DV = self._gather(hidden, head)
        first = axis_index(self.vocab_axes) * head_DV.shape[1]

        def chunk_loss(rows: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
            logits_CV, is_target_CV = self._logits(*rows, head_DV, first)
            largest_C = logits_CV.max(-1)
            total_C = jnp.exp(logits_CV - largest_C[:, None]).sum(-1)
            return largest_C, total_C, jnp.sum(logits_CV, -1, where=is_target_CV)

        tokens = hidden_ND.reshape(*targets.shape, -1), targets.astype(jnp.int32)
        targets_N = tokens[1].reshape(-1)
        largest_N, total_N, target_N = self._over_chunks(chunk_loss, tokens, head_DV.shape[1])
        top_N = lax.pmax(lax.stop_gradient(largest_N), self.vocab_axes) if self.vocab_axes else largest_N
        sums_2N = all_reduce(jnp.stack([total_N * jnp.exp(largest_N - top_N), target_N]), self.vocab_axes)
        logsumexp_N = top_N + jnp.log(sums_2N[0])
        num_ids = self.vocab_size or head_DV.shape[1] * axis_size(self.vocab_axes)
        exists_N = (targets_N >= 0) & (targets_N < num_ids)
        loss_N = jnp.where(exists_N, logsumexp_N - sums_2N[1], jnp.nan) + self.z_loss * logsumexp_N**2
        return loss_N.reshape(targets.shape), logsumexp_N.reshape(targets.shape)

    def tangent(self, hidden: jax.Array, head: jax.Array, targets: jax.Array, _: jax.Array, *tangents: Any) -> Any:
        """Returns the tangent of the loss for tangents of hidden and head (forward mode)."""
        return jax.jvp(lambda hidden, head: self.forward(hidden, head, targets)[0], (hidden, head), tangents)[1]

    def backward(
        self, hidden: jax.Array, head: jax.Array, targets: jax.Array, logsumexp: jax.Array, cotangent: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the gradients of hidden and head."""
        hidden_ND, head_DV = self._gather(hidden, head)
        first = axis_index(self.vocab_axes) * head_DV.shape[1]
        rows = (hidden_ND, *(x.reshape(-1) for x in (targets.astype(jnp.int32), logsumexp, cotangent)))
        differs = sorted({a for x in (*rows, head_DV) for a in compat.varying_axes(x)})
        d_head_DV, d_hidden_ND = self._by_columns(rows, head_DV, first, differs)
        d_hidden = d_hidden_ND.astype(hidden.dtype).reshape(*targets.shape, -1)
        d_hidden = tensor.summed_like(tensor.reduce_rows(d_hidden, self.dims, self.vocab_axes), hidden)
        return d_hidden, tensor.scatter_gradient(d_head_DV.astype(head.dtype), head, self.head_dims, self.dims, 0)

    def _by_columns(self, rows: Any, head_DV: jax.Array, first: Any, differs: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the gradients, computed for a group of columns and all rows at a time: each column is written once.
        With chunks of rows, the head's gradient would be a float32 sum over chunks, twice in memory (8B on v5p: 3.9 GiB
        of 7.9 GiB of temporaries, 2026-11-21). Padding columns of the last group are zeros."""
        hidden_ND, num = rows[0], head_DV.shape[1]
        least = min(num, -(-hidden_ND.shape[0] // self._chunk(num)))
        parts = next((n for n in range(least, 4 * least + 1) if num % n == 0), least)
        width = -(-num // parts)
        head_DV = jnp.pad(head_DV, [(0, 0), (0, parts * width - num)]) if num % parts else head_DV
        zeros = (jnp.zeros(head_DV.shape, head_DV.dtype), jnp.zeros(hidden_ND.shape, jnp.float32))

        def chunk_sums(sums: tuple[jax.Array, jax.Array], i: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
            d_head_DV, d_hidden_ND = sums
            columns_DV = lax.dynamic_slice_in_dim(head_DV, i * width, width, 1)
            d_NV = self._slope(rows, columns_DV, first + i * width)
            if parts * width > num:  # the logit of a zero column may be far above all others
                d_NV = jnp.where(i * width + jnp.arange(width, dtype=jnp.int32) < num, d_NV, jnp.zeros((), d_NV.dtype))
            d_columns_DV = jnp.matmul(hidden_ND.T, d_NV, preferred_element_type=jnp.float32).astype(head_DV.dtype)
            d_head_DV = lax.dynamic_update_slice_in_dim(d_head_DV, d_columns_DV, i * width, 1)
            return (d_head_DV, d_hidden_ND + jnp.matmul(d_NV, columns_DV.T, preferred_element_type=jnp.float32)), None

        zeros = compat.as_varying(zeros, differs)
        d_head_DV, d_hidden_ND = lax.scan(chunk_sums, zeros, jnp.arange(parts, dtype=jnp.int32))[0]
        return d_head_DV[:, :num], d_hidden_ND

    def _slope(self, rows: tuple[jax.Array, ...], head_DV: jax.Array, first: Any) -> jax.Array:
        """Returns the derivative of the loss with respect to each logit, [C, V]."""
        hidden_CD, targets_C, logsumexp_C, cotangent_C = rows
        logits_CV, is_target_CV = self._logits(hidden_CD, targets_C, head_DV, first)
        scale_C = cotangent_C * (1 + 2 * self.z_loss * logsumexp_C)
        d_CV = scale_C[:, None] * jnp.exp(logits_CV - logsumexp_C[:, None])
        return (d_CV - jnp.where(is_target_CV, cotangent_C[:, None], 0)).astype(hidden_CD.dtype)

    def _gather(self, hidden: jax.Array, head: jax.Array) -> tuple[jax.Array, jax.Array]:
        hidden = tensor.gather_rows(hidden, self.dims, self.vocab_axes)
        return hidden.reshape(-1, hidden.shape[-1]), tensor.gather_weight(head, self.head_dims, self.dims, 0, hidden)

    def _logits(
        self, hidden_CD: jax.Array, targets_C: jax.Array, head_DV: jax.Array, first: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Returns (logits, whether a column is the target), [C, V]."""
        logits_CV = jnp.matmul(hidden_CD, head_DV, preferred_element_type=jnp.float32)
        ids_V = first + jnp.arange(head_DV.shape[1], dtype=jnp.int32)
        if self.vocab_size is not None:
            logits_CV = jnp.where(ids_V < self.vocab_size, logits_CV, SMALLEST)
        return logits_CV, targets_C[:, None] == ids_V

    def _chunk(self, num_columns: int) -> int:
        """Returns the number of tokens with logits in memory at a time."""
        return self.chunk or max(1, LOGITS_BYTES // (4 * num_columns))

    def _over_chunks(self, one: Callable[..., Any], tokens: Any, num_columns: int) -> Any:
        """Returns `one` applied to chunks of tokens [B, T, ...], joined to [B T]. A chunk is a part of one example, or
        several examples, of which each chunk has the same number. The last part of an example is padded with zeros."""
        num, length = jax.tree.leaves(tokens)[0].shape[:2]
        most = self._chunk(num_columns)
        parts = -(-length // most)  # of an example
        size = -(-length // parts)
        each = next(n for n in range(max(1, min(num, most // length)), 0, -1) if num % n == 0)  # examples of a chunk

        def cut(x: jax.Array) -> jax.Array:
            x = jnp.pad(x, [(0, 0), (0, parts * size - length)] + [(0, 0)] * (x.ndim - 2))
            return x.reshape(num // each * parts, each * size, *x.shape[2:])

        chunks = jax.tree.map(cut, tokens)
        out = one(jax.tree.map(lambda x: x[0], chunks)) if num == each and parts == 1 else lax.map(one, chunks)
        return jax.tree.map(lambda x: x.reshape(num, parts * size)[:, :length].reshape(-1), out)


SEAMS = {"axis_index": axis_index}
"""Functions that `verify` replaces (verify/mutations.py)."""
