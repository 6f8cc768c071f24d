"""The `Sync` interface: when groups of replicas synchronize. One file per sync in this folder,
`make(**options) -> Sync`, found by its name. An option out of its range is a `ConfigError`.

A group is one position along the sync's axes (`replica` where it is larger than one, otherwise `data`). A step within a
group is the step of the mesh without these axes. The train state stores `params`, `opt_state`, `model_state` and `ema`
once per group, [groups, ...] sharded over these axes. It stores `step` and `rng` once, and `sync`, the result of
`init`, once, sharded like the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import optax

Mean = Callable[[Any], Any]
"""tree [groups, ...] -> tree [...], the mean over the groups: the only communication between them."""


@dataclass(frozen=True)
class Agreement:
    """A program in which groups synchronize, on all or on a part of the parameters.

    Attributes:
        name: its name in a plan.
        every: steps from one run of it to the next.
        first: the step after which it runs first.
        overlapped: its communication overlaps the compute of the next step, in one program. It leaves the parameters
            unchanged.
    """

    name: str
    every: int
    first: int
    overlapped: bool = False


@dataclass(frozen=True)
class Sync:
    """When and how groups synchronize. Pure functions of global arrays; the partitioner shards them.

    Attributes:
        every: steps between two synchronizations. None: every step; there are no groups, and the other fields are
            ignored.
        init: `(params) -> state`, with params [...], one copy, before the first step in which groups train separately.
            The state is None, or a tree in which copies of parameters have paths that end in the parameter's path.
        agree: `(params, state, mean) -> (params, state)`, with params [groups, ...] in and one copy [...] out, which
            every group receives. A separate program, run after each step that `every` divides. Bitwise the same for all
            groups by construction.
        view: `(params, state, mean) -> params`, from [groups, ...] to the one copy [...] that is evaluated and
            exported, also between synchronizations.
        schedule: the programs in which groups synchronize, each on a part of the parameters. `agree` then also takes
            the index of the program, and may return leaves [groups, ...]. Empty: one program, after each step that
            `every` divides.
        start: steps at the start with synchronous training, as if there were no groups.
        optimizer: wraps the optimizer (clipping included); None: it is unchanged.
        outer_optimizer: as `config.optimizer` names it. The program builds it, and `init` and `agree` then take the
            keyword argument `outer`, an optax transformation.
        reducer: for `mean` in `agree`, as `config.reducer` names it; None: the exact mean. `mean` then accepts only
            trees like the parameters, float32, with None for leaves that are not sent.
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
            raise ValueError(
                f"every is {self.every!r}: it is the number of steps between two synchronizations, at least 1"
            )
        if self.every is not None and (self.agree is None or self.view is None):
            raise ValueError(f"a sync of groups (every: {self.every}) needs agree and view")

    @property
    def agreements(self) -> tuple[Agreement, ...]:
        """The programs in which groups synchronize."""
        if self.every is None or self.schedule:
            return self.schedule
        return (Agreement("agreement", self.every, self.start // self.every * self.every + self.every),)
