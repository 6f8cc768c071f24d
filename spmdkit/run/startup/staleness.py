"""The staleness of gradients at which an optimizer no longer converges as without it, by a published experiment
(docs/benchmarks.md#staleness-and-optimizers): momentum and second moments of old gradients overshoot.

Source: Mitliagkas et al., "Asynchrony begets momentum" (2016), for momentum.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from spmdkit.config import Config, parameter_server
from spmdkit.foundation import plugins
from spmdkit.foundation.trees import named_leaves

MOMENTS: Mapping[str, re.Pattern[str]] = {
    "adam": re.compile(r"(^|/)(mu|nu)(/|$)"),
    "adafactor": re.compile(r"(^|/)v_row(/|$)"),
    "momentum": re.compile(r"(^|/)trace(/|$)"),
}
"""Optimizer of the experiment -> path of a leaf that optax's optimizers of its kind have in their state."""

LIMITS: Mapping[str, int] = {"adam": 0, "adafactor": 4, "momentum": 0}
"""Optimizer -> largest staleness with at most `MOST` times the loss without staleness, at the lowest measured rate."""
MOST = 1.5


def staleness_notes(config: Config, opt_state: Any) -> list[str]:
    """Returns a note if the staleness of the config exceeds the limit of its optimizer, as a list of at most one."""
    staleness, paths = expected_staleness(config), [path for path, _ in named_leaves(opt_state)]
    kind = next((kind for kind, pattern in MOMENTS.items() if any(map(pattern.search, paths))), None)
    if kind is None or staleness <= LIMITS[kind]:
        return []
    note = (
        f"gradients are up to {staleness} updates late, and the optimizer has the state of {kind}. From a staleness of "
        f"{LIMITS[kind] + 1} on {kind} ended above {MOST:g} times its loss in the published experiment "
        "(docs/benchmarks.md, Staleness and optimizers). Lower the learning rate, use sgd without momentum, or reduce "
        "the staleness (fewer workers, overlap: false, max_staleness)"
    )
    return [note]


def expected_staleness(config: Config) -> int:
    """Returns the number of updates by which a gradient is usually late: the delay of `sync: stale`, or the number of
    other workers of a parameter server, and one more with `overlap`."""
    if plugins.is_reference(config.sync):
        return 0
    name, options = plugins.split(config.sync)
    if name == "stale":
        return int(options.get("k", 0) if isinstance(options, Mapping) else options)
    if not parameter_server.is_chosen(config):
        return 0
    server = parameter_server.options(config)
    usual = 0 if server.aggregate > 1 else server.workers - 1 + server.overlaps
    return usual if server.max_staleness is None else min(usual, server.max_staleness)
