"""The `Sync` interface: when groups of replicas synchronize. Each module in this folder defines one sync,
`make(**options) -> Sync`, and is loaded by name. An option out of range raises `ConfigError`.

A group is one position along the sync's axes (`replica` if it is larger than one, otherwise `data`). A step within a
group is the step of the mesh without these axes. The train state stores `params`, `opt_state`, `model_state` and `ema`
per group, as [groups, ...] sharded over these axes. It stores one `step` and one `rng`, and one `sync`, the result of
`init`, sharded like the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import optax

Mean = Callable[[Any], Any]
"""tree [groups, ...] -> tree [...], the mean over groups: the only communication between groups."""


@dataclass(frozen=True)
class Agreement:
    """A program in which groups synchronize all parameters or a part of them.

    Attributes:
        name: name in the plan.
        every: steps between two runs.
        first: step after which the program runs first.
        overlapped: its communication overlaps the compute of the next step, in one program. It does not change the
            parameters.
    """

    name: str
    every: int
    first: int
    overlapped: bool = False


@dataclass(frozen=True)
class Sync:
    """When and how groups synchronize. The fields are pure functions of global arrays, which the partitioner shards.

    Attributes:
        every: steps between two synchronizations. None: every step, without groups; only `optimizer` and `description`
            are used.
        init: `(params) -> state`, with one copy of the parameters, [...], before groups first train separately. The
            state is None, or a tree in which copies of parameters have paths that end in the parameter's path.
        agree: `(params, state, mean) -> (params, state)`. The input params are [groups, ...]. The output is one copy,
            [...], which every group receives, so groups are bitwise equal. It is a separate program that runs after
            each step that `every` divides.
        view: `(params, state, mean) -> params`, from [groups, ...] to the single copy [...] that is evaluated and
            exported, also between synchronizations.
        schedule: the programs in which groups synchronize, each for a part of the parameters. `agree` then also takes
            the index of the program, and may return leaves [groups, ...]. Empty: one program, after each step that
            `every` divides.
        start: number of initial steps with synchronous training, without groups.
        optimizer: wraps the optimizer, including clipping; None: no wrapper.
        outer_optimizer: an optimizer in the form of `config.optimizer`. The program builds it, and `init` and `agree`
            then take the keyword argument `outer`, an optax transformation.
        reducer: the reducer of `mean` in `agree`, in the form of `config.reducer`; None: the exact mean. `mean` then
            accepts only trees like the parameters, float32, with None for leaves that are not sent.
        description: additional behavior, for `program.explain()`.
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
