"""What a sync is: when groups of replicas agree. A file each in this folder, `make(**options) -> Sync`, found by its
name.

A group is one position along the sync's axes (`replica` where it is larger than one, otherwise `data`); inside of it a
step is the step of the mesh without these axes. The train state holds `params`, `opt_state`, `model_state` and `ema`
once for each group, [groups, ...] cut over these axes; `step` and `rng` once; `sync`, what `init` gives, once, cut as
the parameters are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import optax

Mean = Callable[[Any], Any]
"""tree [groups, ...] -> tree [...], the mean over the groups: the only thing that crosses them."""


@dataclass(frozen=True)
class Agreement:
    """A program in which groups agree, on all or on a part of what they have.

    Attributes:
        name: what a plan calls it.
        every: steps from one run of it to the next.
        first: the step after which it runs first.
        overlapped: what it sends crosses beside the compute of the next step, in one program with it; it leaves the
            parameters as they are.
    """

    name: str
    every: int
    first: int
    overlapped: bool = False


@dataclass(frozen=True)
class Sync:
    """When and how groups agree. Pure functions of whole (global) arrays; the partitioner sees to the rest.

    Attributes:
        every: steps between two agreements; None: every step, there are no groups, nothing else is looked at.
        init: `(params) -> kept`: params [...], one copy, before the first step in which groups train alone. None, or a
            tree whose copies of the parameters end in their paths.
        agree: `(params, kept, mean) -> (params, kept)`: params [groups, ...] in, one copy [...] out, which every group
            gets. A program of its own, run after each step whose number `every` divides. Bitwise the same for all
            groups by construction.
        view: `(params, kept, mean) -> params`: [groups, ...] -> the one copy [...] that is evaluated and exported,
            between agreements too.
        schedule: the programs in which groups agree, each on a part or in part; `agree` then also takes the number of
            its turn, and may return leaves [groups, ...], what each group has of its own. Empty: one, after each step
            that `every` divides.
        start: steps at the start in which all replicas agree in every step, as if there were no groups.
        optimizer: what the sync makes of the optimizer (clipping included); None: nothing.
        outer_optimizer: as `config.optimizer` names it. The program builds it, and `init` and `agree` then take the keyword
            argument `outer`, an optax transformation.
        reducer: by which `mean` adds what crosses in `agree`, as `config.reducer` names it; None: exactly. It is then
            given trees like the parameters alone, float32, with None for leaves that do not cross.
        description: what else the sync does, for `program.explain()`.
    """

    every: int | None
    init: Callable[..., Any] = lambda params: None
    agree: Callable[..., tuple[Any, Any]] | None = None
    view: Callable[[Any, Any, Mean], Any] | None = None
    optimizer: Callable[[optax.GradientTransformation], optax.GradientTransformation] | None = None
    outer_optimizer: Mapping[str, Any] | None = None
    schedule: tuple[Agreement, ...] = ()
    start: int = 0
    reducer: str | Mapping[str, Any] | None = None
    description: str = ""

    def __post_init__(self) -> None:
        is_number = isinstance(self.every, int) and not isinstance(self.every, bool) and self.every >= 1
        if self.every is not None and not is_number:
            raise ValueError(f"every is {self.every!r}: it is the number of steps between two agreements, from 1 on")
        if self.every is not None and (self.agree is None or self.view is None):
            raise ValueError(f"a sync of groups (every: {self.every}) needs agree and view")

    @property
    def agreements(self) -> tuple[Agreement, ...]:
        """The programs in which groups agree."""
        if self.every is None or self.schedule:
            return self.schedule
        return (Agreement("agreement", self.every, self.start // self.every * self.every + self.every),)
