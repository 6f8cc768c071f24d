"""Groups of replicas train separately, and average their parameters every `every` steps.

    w_g <- w_g - update(g_g)        in every step, nothing sent between groups
    w_g <- mean_h w_h               after `every` steps

Class: equal to synchronous training at `every: 1` for sgd, momentum, Nesterov and decoupled weight decay without
clipping, if each group has the same number of examples. For Adam it is a different method, since each group has
separate second moments. Otherwise converging.
Use it if the links between groups are slow, as between data centers or over Ethernet. Do not use it on fast links: at
the same number of steps the loss is higher, and it increases with `every`.
Wire: every `every` steps one all-reduce of the parameters over the groups, `2 (G-1)/G * 4 bytes` per parameter and
device.
Source: Stich, "Local SGD converges fast and communicates little" (2019), algorithm 1.
"""

from __future__ import annotations

from typing import Any

from spmdkit.communication.options import check_option, is_whole
from spmdkit.communication.sync.base import Mean, Sync


def make(every: int) -> Sync:
    """Returns the sync."""
    check_every("local_sgd", every)

    def agree(params: Any, sync_state: Any, mean: Mean) -> tuple[Any, Any]:
        return mean(params), sync_state

    return Sync(every=every, agree=agree, view=lambda params, sync_state, mean: mean(params))


def check_every(sync: str, every: object) -> None:
    """Rejects a number of steps between two means that is not a positive integer."""
    rule = "It is the number of steps between two means. Write every: 16."
    check_option(is_whole(every, 1), f"{sync}.every", every, rule)
