"""What the config asks for and the user's step does not use: refused, since it would change nothing, or repeat work."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from spmdkit.config import Config
from spmdkit.errors import ConfigError
from spmdkit.layout import LeafPlacement
from spmdkit.step import scope


def check_used(
    config: Config, context: scope.Context, layout: Sequence[LeafPlacement], always_full: bool, what: str
) -> None:
    """Refuses a part of the config that the traced step has no use for.

    Args:
        context: of the step after it was traced: `noticed` says what the user's functions called.
        always_full: every batch has all its rows.
        what: the name of the user's function.

    Raises:
        ConfigError: microbatches that nothing accumulates, short batches whose padding would count, an axis that cuts
            nothing, or settings of an attention that is not there.
    """
    sizes = context.cuts.sizes
    if context.cuts.microbatches > 1 and not context.noticed.has_called("value_and_grad"):
        raise ConfigError(
            f"microbatches: {config.microbatches} has no effect: train_step never calls sk.value_and_grad, which is what "
            "accumulates. Use it, or set microbatches: 1."
        )
    if not always_full and not context.noticed.has_called("value_and_grad", "mean", "example_mask"):
        raise ConfigError(
            "data.remainder is mask, but train_step uses neither sk.value_and_grad, sk.mean nor sk.example_mask: padding rows of "
            "the short batch would count as examples. Use one of them, or set data.remainder: drop."
        )
    if sizes["context"] > 1 and not any("context" in p.axes for p in layout) and "context" not in context.noticed.axes:
        raise ConfigError(
            f"mesh.context is {sizes['context']}, but {what} cuts nothing over context: {sizes['context']} devices would "
            "repeat each other's work. Name the sequence dim of its activations (sk.shard(x, 'batch', 'sequence', None), sk.attention), "
            f"or use data: {sizes['context']}."
        )
    if sizes["pipeline"] > 1 and not context.noticed.has_called("pipeline"):
        raise ConfigError(
            f"mesh.pipeline is {sizes['pipeline']}, but {what} never calls sk.pipeline: {sizes['pipeline']} devices would "
            "repeat each other's work. Run its layers through sk.pipeline(embed, layer, head), or use another axis of the mesh "
            f"(data: {sizes['pipeline']})."
        )
    if context.chosen.attention != scope.AttentionSettings() and not context.noticed.has_called("attention"):
        changed = [
            k
            for k, v in dataclasses.asdict(context.chosen.attention).items()
            if v != getattr(scope.AttentionSettings(), k)
        ]
        raise ConfigError(
            f"attention.{changed[0]} is {getattr(context.chosen.attention, changed[0])}, but {what} never calls sk.attention, so it has "
            "no effect. Use sk.attention in the model, or remove the section attention."
        )
