"""Synchronous training for the first `start` steps, then local SGD: groups train separately and average their
parameters every `every` steps.

    steps 1 to start     the step of the whole mesh: all replicas are synchronous, with one optimizer state
    later                w_g <- w_g - update(g_g) per group, and w_g <- mean_h w_h after each step that `every` divides

The loss falls fastest at the start, where the gradients of groups differ most from their mean. Later, with a smaller
learning rate, groups that train separately lose little and often generalize better. Set `start` to the first decay of
the learning rate, as its authors do.

Class: equal to synchronous training if `start` is not below the number of steps, for every optimizer; equal to
`local_sgd` with `start: 0`.
Otherwise converging.
Use it where local SGD from the first step costs too much loss. The first phase sends as much as `every_step`.
Forward: none between groups after `start`. Wire: `2 (G-1)/G * 4 bytes` per parameter and device, in each step to
`start`, then every `every` steps.
Source: Lin et al., "Don't use large mini-batches, use local SGD" (2018, arXiv 1808.07217), section 3, post-local SGD.
"""

from __future__ import annotations

import dataclasses

from spmdkit.communication.sync import local_sgd
from spmdkit.communication.sync.base import Sync
from spmdkit.errors import ConfigError


def make(start: int, every: int = 16) -> Sync:
    """Returns the sync.

    Raises:
        ConfigError: `start` is not an integer of at least 0, or `every` not of at least 1.
    """
    if isinstance(start, bool) or not isinstance(start, int) or start < 0:
        raise ConfigError(
            f"post_local.start is {start!r}. It is the number of synchronous steps at the start. Write start: 500."
        )
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ConfigError(
            f"post_local.every is {every!r}. It is the number of steps between two means. Write every: 16."
        )
    description = f"to step {start} all replicas are synchronous in every step"
    return dataclasses.replace(local_sgd.make(every), start=start, description=description)
