"""Synchronous training for the first `start` steps, then local SGD: groups train separately and average their
parameters every `every` steps.

    steps 1 to start     the step of the complete mesh: all replicas are synchronous, with one optimizer state
    later                w_g <- w_g - update(g_g) per group, and w_g <- mean_h w_h after each step that `every` divides

Class: equal to synchronous training if `start` is at least the number of steps, for every optimizer; equal to
`local_sgd` with `start: 0`. Otherwise converging.
Use it if local SGD from the first step increases the loss too much, since the gradients of groups differ most in early
steps. Set `start` to the first decay of the learning rate, as the authors do.
Wire: that of `every_step` up to `start`, then that of `local_sgd`.
Source: Lin et al., "Don't use large mini-batches, use local SGD" (2018, arXiv 1808.07217), section 3, post-local SGD.
"""

from __future__ import annotations

import dataclasses

from spmdkit.communication.options import check_option, is_whole
from spmdkit.communication.sync import local_sgd
from spmdkit.communication.sync.base import Sync


def make(start: int, every: int = 16) -> Sync:
    """Returns the sync."""
    check_start("post_local", start)
    local_sgd.check_every("post_local", every)
    return dataclasses.replace(local_sgd.make(every), start=start, description=describe_start(start))


def check_start(sync: str, start: int) -> None:
    """Rejects a number of synchronous steps that is not an integer of at least 0."""
    rule = "It is the number of synchronous steps at the start. Write start: 500."
    check_option(is_whole(start, 0), f"{sync}.start", start, rule)


def describe_start(start: int) -> str:
    """Returns the description of the synchronous phase for `program.explain()`."""
    return f"to step {start} all replicas are synchronous in every step"
