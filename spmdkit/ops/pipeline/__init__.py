"""`sk.pipeline`: a stack of equal layers split into stages; each device computes one stage, on a different microbatch.

    loss, metrics = sk.pipeline(embed, layer, head)(params["embed"], params["blocks"], params["head"], batch)

    W[L_pipeline, ...]   x[P_pipeline, b, ...]      in each tick every stage runs its L / P layers, then x moves by
                                                    one stage

On a mesh without a pipeline axis the op is a scan over the layers. When: links are too slow to send weights (fsdp,
tensor); a pipeline sends only activations, once per microbatch. When not: few microbatches.

    schedule     forward and backward      stage inputs in memory    bubble                     sent in addition
    gpipe        all, then all             M + P - 1                 (P - 1) / (M + P - 1)
    1f1b         alternate                 2 P - 1                   (P - 1) / (M + P - 1)
    interleaved  alternate, v chunks       2 v P - 1, of 1/v layers  (P - 1) / (v M + P - 1)  stage parameters, each way

The pipeline is one SPMD program in the global view: a `vmap` over the stage dim with the pipeline axis as its
`spmd_axis_name`, a roll of that dim (a collective-permute), and loops over ticks from the tables of schedule.py. So
fsdp, tensor, context and expert work inside a stage. Each batch shard retains its rows: no example is sent.

Wire: gpipe.py and one_f_one_b.py. With ZeRO 3 over fsdp a stage's weights are gathered for each microbatch, as with
gradient accumulation; ZeRO 1 and 2 gather nothing in the loop.
Source: Huang et al. (2019); Narayanan et al. (2019, 2021); Xu et al., "GSPMD" (2021), section 3.3 (pipeline as a
vectorised loop).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from spmdkit.foundation.trees import abstract
from spmdkit.ops.pipeline.checks import check_layers, check_not_in_manual, checked, loss_and_metrics, without_gradient
from spmdkit.ops.pipeline.gpipe import forward
from spmdkit.ops.pipeline.one_f_one_b import one_f_one_b
from spmdkit.ops.pipeline.parts import AXIS, Model, Pipe, Rows, layers_in_order
from spmdkit.ops.pipeline.schedule import StageSchedule
from spmdkit.step import trace_context

__all__ = ["pipeline"]

MICROBATCHES_PER_STAGE = 4
"""The default maximum: a bubble of 1/5."""


def pipeline(
    embed: Callable[..., Any],
    layer: Callable[..., Any],
    head: Callable[..., Any],
    *,
    head_per_token: bool = False,
    stacked_dims: int = 1,
) -> Callable[..., Any]:
    """Returns `pipelined(embed_params, layers, head_params, rows) -> loss`, or `(loss, metrics)` if the head returns
    both.

    Args:
        embed: `embed(embed_params, rows) -> x`, the first activation: an array or a pytree of floating point arrays
            [rows, ...]. Values that accumulate over the layers, such as a balance loss per example, are part of it.
        layer: `layer(x, weights, rows) -> x` of the same shapes; `weights` is one entry of `layers`, a pytree of arrays
            [L, ...]. It is wrapped in `sk.remat`, unless it calls `sk.remat`.
        head: `head(x, head_params, rows) -> sk.mean(...)` or `(sk.mean(...), {name: sk.mean(...)})`. Only the loss has
            a gradient. It may be a sum of means, except with the schedules 1f1b and interleaved.
        head_per_token: the head treats each token, the second dim of `x`, separately (norm, logits, cross-entropy). If
            a microbatch has too few rows, its tokens are then sharded over the stages; otherwise the head runs on one
            stage while the others are idle. Arrays of `rows` with that second dim are sharded with the tokens.
        stacked_dims: 2 if the layers are stacked as [v, L / v, ...], in the same order, with the second dim named
            `layers`. The interleaved schedule with v chunks then sends no parameters.

    The functions must not close over traced arrays: their inputs are the parameters and `rows`, a pytree of arrays
    [examples, ...] without gradient. They may call `sk.example_keys` and `sk.example_mask`, which apply to the current
    rows. Inside `layer` the keys differ between layers.

    Layout: layers [L, ...] with dim `layers` first (`layout.axes`: the pipeline axis); embedding and head replicated
        along the pipeline axis.

    Raises:
        ConfigError: the number of layers is not divisible by the stages, a function closes over a traced array or
            returns a wrong result, or `rows` depend on parameters.
    """

    return functools.partial(_pipelined, Model(embed, layer, head), head_per_token, stacked_dims)


@jax.named_scope(trace_context.PIPELINE)
def _pipelined(
    user: Model, head_per_token: bool, stacked_dims: int, embed_params: Any, layers: Any, head_params: Any, rows: Any
) -> Any:
    context = trace_context.current()
    context.usage.record_call("pipeline")
    context.usage.axes.add(AXIS)
    check_not_in_manual(context)
    num_stages, settings = context.sharding.size(AXIS), context.options.pipeline
    check_layers(layers, stacked_dims, num_stages, settings.chunks)
    rows = without_gradient(rows)
    one_sum = num_stages > 1 and settings.schedule != "gpipe"
    model = user._replace(head=lambda *args: loss_and_metrics(user.head(*args), one_sum))
    examples = trace_context.current_examples()
    example_rows = Rows(rows) if examples is None else Rows(rows, examples.mask, examples.positions, examples.key)
    if num_stages == 1:
        stack = jax.tree.map(lambda w: w.reshape(-1, *w.shape[stacked_dims:]), layers)
        loss, metrics = _one_stage(model, context, embed_params, stack, head_params, example_rows)
    else:
        one_layer = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape[stacked_dims:], w.dtype), layers)
        pipe = _set_up(model, context, head_per_token, embed_params, one_layer, head_params, example_rows)
        pipe = dataclasses.replace(pipe, stacked_dims=stacked_dims)
        schedule = forward if settings.schedule == "gpipe" else one_f_one_b
        loss, metrics = schedule(pipe, embed_params, layers, head_params, example_rows)
    return (loss, metrics) if metrics is not None else loss


def _one_stage(
    model: Model, context: trace_context.Context, embed_params: Any, stack: Any, head_params: Any, example_rows: Rows
) -> Any:
    """Returns (loss, metrics) of the unpipelined model: a scan over the layers. `stack` is [L, ...]."""
    rows, embed = example_rows.data, model.embed
    if context.sharding.mesh is not None:  # not in the analysis of a step: the trace of the step itself checks
        weights = jax.tree.map(lambda w: w[0], stack)
        model, _ = checked(model, context, embed_params, weights, head_params, example_rows)
    x = layers_in_order(lambda x, w: model.layer(x, w, rows), 0, embed(embed_params, rows), stack)
    return model.head(x, head_params, rows)


def _set_up(
    model: Model,
    context: trace_context.Context,
    head_per_token: bool,
    embed_params: Any,
    weights: Any,
    head_params: Any,
    rows: Rows,
) -> Pipe:
    """Returns the pipeline of one call; `weights` are the weights of one layer."""
    num_stages, settings = context.sharding.size(AXIS), context.options.pipeline
    shards = context.sharding.num_shards
    num = _num_microbatches(rows.num // shards, num_stages, settings.microbatches)
    size = rows.num // num
    inner = dataclasses.replace(context, mapped_axes=(*context.mapped_axes, AXIS))
    micro = jax.eval_shape(lambda: rows.map(lambda x: x[:size]))
    model, x_shapes = checked(model, inner, abstract(embed_params), weights, abstract(head_params), micro)
    parts = num_stages * context.sharding.size("context", "tensor")
    tokens = {s.shape[1] for s in jax.tree.leaves(x_shapes) if s.ndim > 1}
    head_dim = None
    if size // shards % num_stages == 0:
        head_dim = 0
    elif head_per_token and len(tokens) == 1 and min(tokens) % parts == 0:
        head_dim = 1
    return Pipe(model, inner, StageSchedule(num_stages, num, settings.chunks), x_shapes, head_dim)


def _num_microbatches(num_rows: int, num_stages: int, requested: int | None) -> int:
    """Returns the largest divisor of one shard's rows that is at most the requested number or the default: an
    evaluation batch may have fewer rows than a training batch."""
    most = min(requested or MICROBATCHES_PER_STAGE * num_stages, num_rows)
    return next(num for num in range(most, 0, -1) if num_rows % num == 0)
