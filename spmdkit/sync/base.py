"""What a sync is: when groups of replicas agree. A file each in this folder, `make(**options) -> Sync`, found by its name.

A group is one position along the sync's axes (`replica` where it is larger than one, otherwise `data`); inside of it a step is the step of the
mesh without these axes. The train state holds `params`, `opt_state`, `model_state` and `ema` once for each group, [groups, ...] cut over these
axes; `step` and `rng` once; `sync`, what `init` gives, once, cut as the parameters are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Mean = Callable[[Any], Any]
"""tree [groups, ...] -> tree [...], the mean over the groups: the only thing that crosses them."""


@dataclass(frozen=True)
class Sync:
    """When and how groups agree. Pure functions of whole (global) arrays; the partitioner sees to the rest.

    Attributes:
        every: steps between two agreements; None: every step, there are no groups, nothing else is looked at.
        init: `(params) -> kept`: params [...], one copy, before the first step. None, or a tree whose copies of the parameters end in
            their paths.
        agree: `(params, kept, mean) -> (params, kept)`: params [groups, ...] in, one copy [...] out, which every group gets. A program of its
            own, run after each step whose number `every` divides. Bitwise the same for all groups by construction.
        view: `(params, kept, mean) -> params`: [groups, ...] -> the one copy [...] that is evaluated and exported, between agreements too.
    """

    every: int | None
    init: Callable[[Any], Any] = lambda params: None
    agree: Callable[[Any, Any, Mean], tuple[Any, Any]] | None = None
    view: Callable[[Any, Any, Mean], Any] | None = None

    def __post_init__(self) -> None:
        is_number = isinstance(self.every, int) and not isinstance(self.every, bool) and self.every >= 1
        if self.every is not None and not is_number:
            raise ValueError(f"every is {self.every!r}: it is the number of steps between two agreements, from 1 on")
        if self.every is not None and (self.agree is None or self.view is None):
            raise ValueError(f"a sync of groups (every: {self.every}) needs agree and view")

    def due(self, step: int) -> bool:
        """Returns whether groups agree after `step`: a number of the host, so that nothing waits for the device."""
        return self.every is not None and step % self.every == 0
