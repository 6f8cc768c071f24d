"""1F1B and its interleaved form: in each tick of one loop every stage runs a forward and a backward pass, on different
microbatches.

    tick t:  x[P_pipeline, b, ...]  = stage(x), the input stored in a ring buffer;  shift x by one stage
             loss and its gradient for the output of the last stage
             dx[P_pipeline, b, ...] = vjp of the stage at a stored input;           shift dx back by one stage

The backward pass of a microbatch starts as soon as its forward pass leaves the last stage, so a stage stores at most 2
v P - 1 inputs of a chunk, for any number of microbatches. This requires the loss inside the pipeline: the forward rule
of a `custom_vjp` computes the gradient, by `jax.vjp` inside the tick, and the backward rule only scales it.

Cost: a stage's forward pass is recomputed from its stored input (as with `remat: full` around a stage; a rematerialised
layer is recomputed once more). Gradients are added per stage in float32 or wider. The results of an idle stage are
masked with a select, never multiplied by zero.

Wire, per device and call of the loss, A bytes of one microbatch's activation on a device, P stages, H bytes of
embedding and head:
    transfers         2 (v M + P - 1) A       collective-permute
    last stage, head  2 M (P - 1)/P A         all-to-all; none if the head is unsharded
    embedding, head   2 (P - 1)/P H           all-reduce
    order of layers   interleaved: parameters and gradients of a stage are sent (`Pipe.chunks`), unless stacked on
                      two dims
Weight gradients over fsdp (ZeRO 3) and context are summed in every tick.
Memory: (2 v P + 3) A, the gradients of the stage's layers, embedding and head, and the residuals of one chunk.
Source: Narayanan et al., "PipeDream" (2019); Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM" (2021), section 2.2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmdkit.ops.pipeline.checks import constant_count
from spmdkit.ops.pipeline.gpipe import forward
from spmdkit.ops.pipeline.parts import AXIS, Pipe, Rows, masked, pick, select
from spmdkit.ops.pipeline.schedule import Work


class _Grads(NamedTuple):
    """Gradients of the floating point leaves, each a list of [P, ...], one entry per stage."""

    embedding: Any
    layers: Any
    head: Any


class _Carry(NamedTuple):
    """The carry between ticks: received activations and cotangents, stored inputs, and sums."""

    inbox: Any
    cotangents: Any
    ring: Any
    grads: _Grads
    sums: Any


class _Ticks(NamedTuple):
    """The work of each tick; arrays with a tick dim, None for work that a phase does not have."""

    slot: Any
    forward: Any
    leaves: Any
    leaving: Any
    backward: Any


def one_f_one_b(pipe: Pipe, embedding: Any, layers: Any, head: Any, rows: Rows) -> Any:
    """Returns the result of `gpipe.forward`; if differentiated, the same loop computes the gradient. Only the sum of
    the loss, the first result of the head, has a gradient."""
    floats, others, rebuild = _floats((embedding, layers, head))

    @jax.custom_vjp
    def value_and_gradient(floats: Any, rows: Rows, others: Any) -> Any:
        embedding, layers, head = rebuild(floats, others)
        return forward(pipe, embedding, layers, head, rows)

    def run_with_gradient(floats: Any, rows: Rows, others: Any) -> Any:
        embedding, layers, head = rebuild(floats, others)
        sums, grads = _loss_and_gradient(pipe, embedding, layers, head, rows)
        return sums, (grads, floats)

    def scale(saved: Any, cotangents: Any) -> Any:
        grads, floats = saved
        by = cotangents[0].sum
        return [(g * by.astype(g.dtype)).astype(x.dtype) for g, x in zip(grads, floats, strict=True)], None, None

    value_and_gradient.defvjp(run_with_gradient, scale)
    loss, metrics = value_and_gradient(floats, rows, others)
    return dataclasses.replace(lax.stop_gradient(loss), sum=loss.sum), metrics


def _loss_and_gradient(pipe: Pipe, embedding: Any, layers: Any, head: Any, rows: Rows) -> tuple[Any, list[jax.Array]]:
    """Returns (sums over microbatches, gradient of the loss's sum for each floating point leaf)."""
    loop = _TickLoop(pipe, embedding, pipe.groups(pipe.chunks(layers)), head, pipe.microbatches(rows))
    end, leaves = _run(loop), _floats(layers)[0]
    added: Callable[[list[jax.Array]], list[jax.Array]] = lambda parts: [x.sum(0) for x in parts]
    chunks = [jnp.concatenate(end.grads.layers[n :: len(leaves)], axis=2) for n in range(len(leaves))]
    of_layers = pipe.joined(chunks, leaves)
    grads = [*added(end.grads.embedding), *of_layers, *added(end.grads.head)]
    return jax.tree.map(lambda x: x.sum(0), end.sums), grads


@dataclasses.dataclass(frozen=True)
class _TickLoop:
    """The body of the loop over ticks. Chunks are groups of layers [P, v, G, ...], rows [M, b, ...]; every result has a
    leading stage dim."""

    pipe: Pipe
    embedding: Any
    chunks: Any
    head: Any
    rows: Rows

    def start(self) -> _Carry:
        """Returns the carry before the first tick: zeros with their final sharding."""
        pipe, dtype = self.pipe, self.pipe.context.options.gradient_dtype
        sums = jax.eval_shape(self.losses, pipe.zeros(pipe.x_shapes), jnp.bool_(True), jnp.int32(0))[0]
        of_stage = lambda s: jax.ShapeDtypeStruct(s.shape[1:], s.dtype)
        like: Callable[[Any], Any] = lambda tree: pipe.zeros(
            [jax.ShapeDtypeStruct(x.shape, dtype or x.dtype) for x in _floats(tree)[0]]
        )
        arriving = pipe.place(pipe.zeros(pipe.x_shapes), AXIS, "rows")
        return _Carry(
            arriving,
            arriving,
            pipe.place(pipe.zeros(pipe.x_shapes, pipe.schedule.num_slots), None, AXIS, "rows"),
            _Grads(like(self.embedding), like(jax.tree.map(of_stage, self.chunks)), like(self.head)),
            pipe.zeros(jax.tree.map(of_stage, sums)),
        )

    def tick(self, carry: _Carry, ticks: _Ticks) -> tuple[_Carry, None]:
        """Returns the carry after one tick."""
        pipe = self.pipe
        does_forward, does_backward = ticks.forward is not None, ticks.backward is not None
        inbox, cotangents, ring, grads, sums = carry
        from_head = cotangents
        if does_forward:
            keep = lambda kept, x: lax.dynamic_update_index_in_dim(kept, x, ticks.slot, 0)
            ring = jax.tree.map(keep, ring, inbox)
            out = self.stages(inbox, ticks.forward)
            inbox = pipe.shift(out, 1)
        if does_forward and does_backward:

            def with_head(head_grads: Any, sums: Any) -> Any:
                new_sums, new_grads, from_head = self.losses(out, ticks.leaves, ticks.leaving)
                return _add(head_grads, new_grads), jax.tree.map(jnp.add, sums, new_sums), from_head

            if pipe.schedule.num_chunks == 1:  # a microbatch leaves the last stage in each of these ticks
                head_grads, sums, from_head = with_head(grads.head, sums)
            else:
                without = lambda head_grads, sums: (head_grads, sums, cotangents)
                head_grads, sums, from_head = lax.cond(ticks.leaves, with_head, without, grads.head, sums)
            grads = grads._replace(head=head_grads)
        if does_backward:
            embed_grads, chunk_grads, ct = self.gradients(cotangents, from_head, ring, ticks.backward)
            grads = grads._replace(
                embedding=_add(grads.embedding, embed_grads),
                layers=self._add_to_chunk(grads.layers, chunk_grads, ticks.backward.chunk),
            )
            cotangents = pipe.shift(pipe.place(ct, AXIS, "rows"), -1)
        return _Carry(inbox, cotangents, ring, grads, sums), None

    def stages(self, inbox: Any, work: Work) -> Any:
        """Returns the output of each stage."""

        def run_stage(stage: Any, micro: Any, chunk: Any, chunks: Any, x: Any) -> Any:
            return self.pipe.stage(stage, chunk, self.embedding, pick(chunks, chunk), x, self._microbatch(micro))

        out = self.pipe.over_stages(run_stage, 0)(self.pipe.stages, work.microbatch, work.chunk, self.chunks, inbox)
        return self.pipe.place(out, AXIS, "rows")

    def losses(self, out: Any, valid: Any, micro: Any) -> tuple[Any, list[jax.Array], Any]:
        """Returns (sums of the head's parts, gradients of its parameters, cotangents of `out`)."""
        pipe, (floats, others, rebuild) = self.pipe, _floats(self.head)
        head_rows, axes = pipe.rows_of_head(self._microbatch(micro))

        def head_loss(stage: Any, x: Any, rows: Rows) -> Any:
            def loss(floats: Any, x: Any) -> Any:
                mean, metrics = pipe.head(rebuild(floats, others), x, rows)
                return mean.sum, (dataclasses.replace(mean, count=constant_count(mean.count)), metrics)

            (_, sums), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(floats, x)
            return masked(valid & pipe.has_head(stage), (sums, *grads))

        sums, grads, parts = pipe.over_stages(head_loss, (0, 0, axes))(pipe.stages, pipe.spread(out), head_rows)
        return sums, grads, pipe.gather(parts)

    def gradients(self, cotangents: Any, from_head: Any, ring: Any, work: Work) -> Any:
        """Returns (gradients of the embedding's parameters, of one chunk, cotangents of the stages' inputs)."""
        pipe, (e_floats, e_others, e_rebuild) = self.pipe, _floats(self.embedding)

        def stage_gradient(stage: Any, work: Work, chunks: Any, ring: Any, ct: Any, from_head: Any) -> Any:
            is_last = (stage == pipe.num_stages - 1) & (work.chunk == pipe.schedule.num_chunks - 1)
            chunk, rows = pick(chunks, work.chunk), self._microbatch(work.microbatch)
            w_floats, w_others, w_rebuild = _floats(chunk)

            def stage_of(e_floats: Any, w_floats: Any, x: Any) -> Any:
                return pipe.stage(
                    stage, work.chunk, e_rebuild(e_floats, e_others), w_rebuild(w_floats, w_others), x, rows
                )

            _, vjp = jax.vjp(stage_of, e_floats, w_floats, pick(ring, work.slot))
            embed_grads, chunk_grads, ct = vjp(select(is_last, from_head, ct))
            return *masked(work.valid, (embed_grads, chunk_grads)), ct

        mapped = pipe.over_stages(stage_gradient, (0, 0, 0, 1, 0, 0))
        return mapped(pipe.stages, work, self.chunks, ring, cotangents, from_head)

    def _microbatch(self, micro: Any) -> Rows:
        return self.rows.map(lambda a: pick(a, micro))

    def _add_to_chunk(self, total: list[jax.Array], gradient: list[jax.Array], chunk: jax.Array) -> list[jax.Array]:
        """Adds each stage's gradient [P, G, ...] to its chunk of [P, v, G, ...]."""
        if self.pipe.schedule.num_chunks == 1:
            return [t + p[:, None].astype(t.dtype) for t, p in zip(total, gradient, strict=True)]

        def add_at_chunk(chunk: jax.Array, total: jax.Array, gradient: jax.Array) -> jax.Array:
            new = lax.dynamic_index_in_dim(total, chunk, 0, keepdims=False) + gradient.astype(total.dtype)
            total = lax.dynamic_update_index_in_dim(total, new, chunk, 0)
            return total

        added = self.pipe.over_stages(add_at_chunk, 0)
        total = self.pipe.place([added(chunk, t, p) for t, p in zip(total, gradient, strict=True)], AXIS)
        return total


def _run(loop: _TickLoop) -> _Carry:
    """Returns the carry after all ticks: forward only, both, backward only."""
    schedule = loop.pipe.schedule
    ahead, back, (leaves, leaving) = schedule.forward, schedule.backward, schedule.head
    first, middle, last = schedule.first_backward, len(ahead.valid), len(back.valid)

    def phase(carry: _Carry, start: int, stop: int, does_forward: bool, does_backward: bool) -> _Carry:
        slots = np.arange(start, stop, dtype=np.int32) % schedule.num_slots
        ticks = _Ticks(
            slots,
            ahead.between(start, stop) if does_forward else None,
            leaves[start:stop] if does_forward else None,
            leaving[start:stop] if does_forward else None,
            back.between(start, stop) if does_backward else None,
        )
        return lax.scan(loop.tick, carry, ticks)[0]

    carry = phase(loop.start(), 0, first, True, False)
    carry = phase(carry, first, middle, True, True)
    return phase(carry, middle, last, False, True)


def _add(total: list[jax.Array], gradient: list[jax.Array]) -> list[jax.Array]:
    return [t + p.astype(t.dtype) for t, p in zip(total, gradient, strict=True)]


def _floats(tree: Any) -> tuple[list[jax.Array], list[jax.Array], Callable[[Any, Any], Any]]:
    """Returns (the floating point leaves, the other leaves, a function that rebuilds the tree from both)."""
    leaves, treedef = jax.tree.flatten(tree)
    is_float = [jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves]

    def rebuild(floats: Any, others: Any) -> Any:
        by_kind = {True: iter(floats), False: iter(others)}
        return jax.tree.unflatten(treedef, [next(by_kind[f]) for f in is_float])

    of_kind: Callable[[bool], list[jax.Array]] = lambda kind: [
        x for x, f in zip(leaves, is_float, strict=True) if f == kind
    ]
    return of_kind(True), of_kind(False), rebuild
