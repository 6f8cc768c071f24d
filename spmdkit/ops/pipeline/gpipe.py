"""The GPipe schedule: one loop over ticks runs all forward passes, and JAX differentiates the loop.

    tick t:  x[P_pipeline, b, ...] = stage(x);  head on the output of the last stage;  shift x by one stage

The residuals of every tick are saved, so activation memory grows with the number of microbatches. All schedules use
this loop for evaluation. The results of an idle stage (P - 1 of v M + P - 1 ticks) are masked, and a `gate` sets its
cotangents to zero, so no NaN of an idle stage reaches a gradient. The parameters of embedding and head are first copied
along the stages, so that their gradients are summed over the stages once.

Wire, per device and call of the loss, A bytes of one microbatch's activation on a device, P stages, H bytes of
embedding and head:
    transfers         (v M + P - 1) A forward, the same backward      collective-permute
    last stage, head  2 M (P - 1)/P A                                 all-to-all; none if the head is unsharded
    embedding, head   2 (P - 1)/P H                                   all-reduce
Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism" (2019).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmdkit.ops.pipeline.parts import AXIS, Pipe, Rows, gate, masked, pick
from spmdkit.ops.pipeline.schedule import Work


def forward(pipe: Pipe, embedding: Any, layers: Any, head: Any, rows: Rows) -> Any:
    """Returns the results of the head, summed over all microbatches (and parts of them). Shapes: layers [L, ...], rows
    [M b, ...]; embedding and head as the user's functions expect them."""
    schedule = pipe.schedule
    chunks, rows = pipe.groups(pipe.chunks(layers)), pipe.microbatches(rows)
    copies = lambda x: jnp.broadcast_to(x, (pipe.num_stages, *jnp.shape(x)))
    embedding, head = pipe.place(jax.tree.map(copies, (embedding, head)), AXIS)
    inbox = pipe.place(pipe.zeros(pipe.x_shapes), AXIS, "rows")

    def stages(inbox: Any, work: Work) -> Any:
        def run_stage(
            stage: Any, valid: Any, micro: Any, chunk: Any, embedding: Any, chunks: Any, x: Any, rows: Rows
        ) -> Any:
            embedding, weights, x = gate(valid, (embedding, pick(chunks, chunk), x))
            return pipe.stage(stage, chunk, embedding, weights, x, rows.map(lambda a: pick(a, micro)))

        mapped = pipe.over_stages(run_stage, (0, 0, 0, 0, 0, 0, 0, None))
        out = mapped(pipe.stages, work.valid, work.microbatch, work.chunk, embedding, chunks, inbox, rows)
        return pipe.place(out, AXIS, "rows")

    def losses(out: Any, valid: Any, micro: Any) -> Any:
        head_rows, axes = pipe.rows_of_head(rows.map(lambda a: pick(a, micro)))

        def head_loss(stage: Any, params: Any, x: Any, rows: Rows) -> Any:
            counts = valid & pipe.has_head(stage)
            params, x = gate(counts, (params, x))
            return masked(counts, pipe.head(params, x, rows))

        return pipe.over_stages(head_loss, (0, 0, 0, axes))(pipe.stages, head, pipe.spread(out), head_rows)

    def tick(carry: Any, work: tuple[Work, Any, Any]) -> Any:
        inbox, sums = carry
        items, leaves, micro = work
        out = stages(inbox, items)
        if schedule.num_chunks == 1:
            sums = jax.tree.map(jnp.add, sums, losses(out, leaves, micro))
        else:
            add = lambda: jax.tree.map(jnp.add, sums, losses(out, leaves, micro))
            sums = lax.cond(leaves, add, lambda: sums)
        return (pipe.shift(out, 1), sums), None

    def fill(inbox: Any, work: Work) -> Any:
        return pipe.shift(stages(inbox, work), 1), None

    first, last = schedule.first_backward, len(schedule.forward.valid)
    leaves, micro = schedule.head
    sums = pipe.zeros(jax.eval_shape(lambda: pick(losses(inbox, jnp.bool_(True), jnp.int32(0)), 0)))
    inbox, _ = lax.scan(fill, inbox, schedule.forward.between(0, first))
    xs = (schedule.forward.between(first, last), leaves[first:last], micro[first:last])
    _, sums = lax.scan(tick, (inbox, sums), xs)[0]
    return jax.tree.map(lambda x: x.sum(0), sums)
