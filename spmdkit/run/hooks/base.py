"""What a hook is: what is due around a step. A file each in this folder; a user's own is `Task(hooks=[...])` or named
in the config's `hooks`.

    @sk.hook
    def patience(evaluations=3):
        seen = {"best": math.inf, "since": 0}

        def after_eval(run, step, values):
            better = values["loss"] < seen["best"]
            seen.update(best=min(values["loss"], seen["best"]), since=0 if better else seen["since"] + 1)
            if seen["since"] >= evaluations:
                return sk.Stop(why=f"the loss is not below {seen['best']:.4f} since {evaluations} evaluations")

        return sk.Hook("patience", after_eval=after_eval, state=lambda: dict(seen), restore=seen.update)

A hook asks for actions and takes none itself. All processes agree on them at one step, and of those that change where
training goes the strongest wins: `Stop`, then `Rollback`, then `ReplaceState`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from spmdkit.errors import ConfigError


@dataclass(frozen=True)
class Save:
    """Save the state.

    Attributes:
        known: every process asks for this at this step by itself, as for all that a step's number decides. Nothing has
            to be agreed, and it is done now. Otherwise it is done at a step that all processes agree on, which may be
            some steps later.
    """

    known: bool = False


@dataclass(frozen=True)
class Evaluate:
    """Evaluate the state. `known`: as in `Save`."""

    known: bool = False


@dataclass(frozen=True)
class ReplaceState:
    """Go on with another state, shaped as the old one; all processes ask for it at the same step."""

    state: Any


@dataclass(frozen=True)
class Rollback:
    """Go back to a saved step and train from there again.

    Attributes:
        to_step: the newest checkpoint that is not after it is taken; None: the newest of all, or the beginning; 0: the
            beginning.
        skip_batches: so many batches after it are left out, for good.
        batches: numbers of batches that are left out besides, for good; of a step it is
            `run.program.schedule.number(step)`.
        known: as in `Save`.
    """

    to_step: int | None = None
    skip_batches: int = 0
    batches: tuple[int, ...] = ()
    known: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "batches", tuple(self.batches))


@dataclass(frozen=True)
class Stop:
    """End training after this step.

    Attributes:
        code: exit code of `spmdkit train`: 0 a run that is finished, 42 one that is to be started again (both save the
            state), any other of `spmdkit.errors` a failure (nothing is saved).
        why: the message.
        known: as in `Save`.
    """

    code: int = 0
    why: str = ""
    known: bool = False

    @property
    def saves(self) -> bool:
        """Whether the state is good, and is saved."""
        return self.code in (0, 42)


Action = Stop | Save | Evaluate | ReplaceState | Rollback


@dataclass(frozen=True)
class Hook:
    """What is due around a step. `run` is the `Run`: `step`, `config`, `program`, `message(text)`, `write(record,
    kind)`.

    A state that is handed over is gone after the next step: look at it, copy what must stay.

    Attributes:
        name: its own in a run: the key of its state in a checkpoint.
        order: hooks are called from low to high. Ours: finite 10, evaluation 20, saving 30, profile 35, logging 40,
            signals 45, watchdog 1000.
        every: `after_step` is called at the steps that this divides and at the last one; None: at each.
        on: "all" processes, on which a computation with collectives may be started, or "main", process 0, where it may
            not.
        in_step: `(old state, new state, metrics) -> (new state, metrics)`; pure, traced into the step after the user's
            own, in `order`.
        begin: `(run, step, state)`, before the first step of this process.
        before_step: `(run, step, state)`, with the state before it.
        after_step: `(run, step, state, metrics)`, as soon as the step is dispatched: metrics are on the device, to look
            at them waits.
        after_eval: `(run, step, values)`, name -> float, or array of a metric that is one; the same on every process.
        after_save: `(run, step)`, as soon as the arrays are copied: the checkpoint may still be written.
        end: `(run, step, state)`, after the last step, and after a `Stop` that saves.
        state: returns what is to travel in a checkpoint, as JSON values.
        restore: takes it, before `begin` and after a rollback.

    An action may depend on what this process alone knows (a clock, a signal, a metric that it has waited for): it is
    agreed on, and done by all at one step. `known` says that it follows from what all have: the number of the step,
    values of an evaluation.

    Raises:
        ConfigError: one of `state` and `restore` without the other, another `on`, an `every` below 1.
    """

    name: str
    order: int = 50
    every: int | None = None
    on: Literal["all", "main"] = "all"
    in_step: Callable[[Any, Any, Any], tuple[Any, Any]] | None = None
    begin: Callable[..., Action | None] | None = None
    before_step: Callable[..., Action | None] | None = None
    after_step: Callable[..., Action | None] | None = None
    after_eval: Callable[..., Action | None] | None = None
    after_save: Callable[..., Action | None] | None = None
    end: Callable[..., Any] | None = None
    state: Callable[[], Any] | None = None
    restore: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        if (self.state is None) != (self.restore is None):
            raise ConfigError(
                f"hook '{self.name}' has {'restore' if self.state is None else 'state'} alone. What a checkpoint takes, it gives back. "
                "Give both, or none."
            )
        if self.on not in ("all", "main") or (self.every is not None and self.every < 1):
            raise ConfigError(
                f"hook '{self.name}' has on={self.on!r} and every={self.every!r}. on is 'all' or 'main', and every a number of at least 1 "
                "or None. Leave them out for all processes and every step."
            )


@dataclass(frozen=True)
class Decision:
    """What is done after a step: `evaluate`, then `save`, then `turn`, which says where training goes."""

    evaluate: bool = False
    save: bool = False
    turn: Stop | Rollback | ReplaceState | None = None


def decide(actions: Iterable[Action]) -> Decision:
    """Returns what is done of all that is asked for at one step: the strongest turn, and nothing that it makes useless.

    A `Stop` with a failure wins over one without, and the `Rollback` that goes back furthest over others.
    """
    asked = list(actions)
    stops = sorted((a for a in asked if isinstance(a, Stop)), key=lambda a: (a.saves, -a.code, a.why))
    back = [a for a in asked if isinstance(a, Rollback)]
    furthest = sorted(back, key=lambda a: (a.to_step is None, a.to_step or 0, -a.skip_batches, a.batches))
    strongest: list[Stop | Rollback | ReplaceState] = [
        *stops,
        *furthest,
        *(a for a in asked if isinstance(a, ReplaceState)),
    ]
    turn = strongest[0] if strongest else None
    if isinstance(turn, Rollback) or (isinstance(turn, Stop) and not turn.saves):
        return Decision(turn=turn)
    save = any(isinstance(a, Save) for a in asked) or isinstance(turn, Stop)
    return Decision(any(isinstance(a, Evaluate) for a in asked), save, turn)


_TYPES: Mapping[str, type] = {"stop": Stop, "save": Save, "evaluate": Evaluate, "rollback": Rollback}


def to_json(action: Action) -> list[Any]:
    """Returns an action as JSON values, to tell it to other processes. A `ReplaceState` cannot be told."""
    name = next(name for name, kind in _TYPES.items() if isinstance(action, kind))
    return [name, {key: value for key, value in vars(action).items() if key != "known"}]


def from_json(value: list[Any]) -> Action:
    """Returns the action of `to_json`."""
    return _TYPES[value[0]](**value[1])
