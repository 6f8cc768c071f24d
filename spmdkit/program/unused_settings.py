"""Rejects settings that the user's step does not use: they would have no effect, or repeat work."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from spmdkit.config import Config
from spmdkit.errors import ConfigError
from spmdkit.foundation import plugins
from spmdkit.mesh.layout import LeafPlacement
from spmdkit.program.groups import sync_of
from spmdkit.step import trace_context
from spmdkit.step.trace_context import Context


def check_used(config: Config, context: Context, layout: Sequence[LeafPlacement], always_full: bool, what: str) -> None:
    """Raises ConfigError for a setting that the traced step does not use.

    Args:
        context: context of the step after tracing; its usage records the functions that user code called.
        always_full: whether every batch has all its rows.
        what: the name of the user's function.
    """
    sizes = context.sharding.sizes
    _check_own_step(config, context)
    if context.sharding.microbatches > 1 and not context.usage.has_called("value_and_grad"):
        raise ConfigError(
            f"microbatches: {config.microbatches} has no effect: train_step never calls sk.value_and_grad, which "
            "accumulates. Use it, or set microbatches: 1."
        )
    if not always_full and not context.usage.has_called("value_and_grad", "mean", "example_mask"):
        key = "drop_remainder" if config.data.repeat else "repeat"
        raise ConfigError(
            f"data.{key} is false, but train_step uses neither sk.value_and_grad, sk.mean nor "
            "sk.example_mask: padding rows of the short batch would count as examples. Use one of them, or set "
            f"data.{key}: true."
        )
    if sizes["context"] > 1 and not any("context" in p.axes for p in layout) and "context" not in context.usage.axes:
        raise ConfigError(
            f"mesh.context is {sizes['context']}, but {what} shards nothing over context: {sizes['context']} devices "
            "would repeat each other's work. Name the sequence dim of its activations (sk.shard(x, 'batch', "
            f"'sequence', None), sk.attention), or use data: {sizes['context']}."
        )
    if sizes["pipeline"] > 1 and not context.usage.has_called("pipeline"):
        raise ConfigError(
            f"mesh.pipeline is {sizes['pipeline']}, but {what} never calls sk.pipeline: {sizes['pipeline']} devices "
            "would repeat each other's work. Run its layers through sk.pipeline(embed, layer, head), or use another "
            f"axis of the mesh (data: {sizes['pipeline']})."
        )
    if context.options.attention != trace_context.AttentionSettings() and not context.usage.has_called("attention"):
        changed = [
            k
            for k, v in dataclasses.asdict(context.options.attention).items()
            if v != getattr(trace_context.AttentionSettings(), k)
        ]
        raise ConfigError(
            f"attention.{changed[0]} is {getattr(context.options.attention, changed[0])}, but {what} never calls "
            "sk.attention, so it has no effect. Use sk.attention in the model, or remove the section attention."
        )


def _check_own_step(config: Config, context: Context) -> None:
    called, precision = context.usage.has_called, config.precision
    if config.ema is not None and not called("ema"):
        raise ConfigError(
            f"ema: {config.ema} has no effect: train_step neither calls state.apply_gradients, which averages, nor "
            "returns another state.ema. It would keep the value of init, and so would eval.params: ema and an export "
            "of it. Update with state.apply_gradients(grads), or remove ema."
        )
    if config.clip_norm is not None and not called("optimizer"):
        raise ConfigError(
            f"clip_norm: {config.clip_norm} has no effect: train_step calls neither state.apply_gradients nor "
            "state.optimizer.update, before which the gradient is clipped. Use one, clip in the step "
            "(optax.clip_by_global_norm), or remove clip_norm."
        )
    if sync_of(config).optimizer is not None and not called("optimizer"):
        raise ConfigError(
            f"sync: {plugins.split(config.sync)[0]} has no effect: train_step calls neither state.apply_gradients nor "
            "state.optimizer.update, where gradients are delayed. Use one, or sync: every_step."
        )
    if precision.compute != precision.params and not called("value_and_grad"):
        raise ConfigError(
            f"precision.compute: {precision.compute} has no effect: train_step never calls sk.value_and_grad, which "
            f"computes in it. Use it, cast in the step, or set precision: {precision.params}."
        )
    if precision.rounding == "stochastic" and not called("rounding"):
        raise ConfigError(
            "precision.rounding: stochastic has no effect: train_step never calls state.apply_gradients, which rounds "
            "the parameters. Use it, or remove precision.rounding."
        )
    if context.options.remat is not None and not called("value_and_grad", "remat"):
        raise ConfigError(
            f"remat: {config.remat} has no effect: train_step never calls sk.value_and_grad, which applies it to the "
            "loss, nor sk.remat. Wrap the blocks of the model in sk.remat, use jax.checkpoint, or set remat: none."
        )
