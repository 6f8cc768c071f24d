"""`Hook`: functions that a run calls around its steps. Each built-in hook is a file in this folder. A user-defined hook
is in `Task(hooks=[...])` or named in the config's `hooks`.

    @sk.hook
    def patience(evaluations=3):
        seen = {"best": math.inf, "since": 0}

        def after_eval(run, step, values):
            better = values["loss"] < seen["best"]
            seen.update(best=min(values["loss"], seen["best"]), since=0 if better else seen["since"] + 1)
            if seen["since"] >= evaluations:
                return sk.Stop(why=f"the loss is not below {seen['best']:.4f} since {evaluations} evaluations")

        return sk.Hook("patience", after_eval=after_eval, state=lambda: dict(seen), restore=seen.update)

A hook returns the action that it requests and does not perform it. All processes perform it at the same step. If
several actions change the course of training, the strongest wins: `Stop`, then `Rollback`, then `ReplaceState`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Never, Protocol, TypeAlias

import jax
import numpy as np

from spmdkit.errors import ConfigError

if TYPE_CHECKING:
    from spmdkit.cluster import Cluster
    from spmdkit.config import Config
    from spmdkit.metrics import EventLog
    from spmdkit.program.program import Program
    from spmdkit.step.state import TrainState

DeviceMetrics: TypeAlias = Mapping[str, jax.Array]
"""Metric name -> array on the devices."""
Metrics: TypeAlias = Mapping[str, float | np.ndarray[tuple[int, ...], np.dtype[np.generic]]]
"""Metric name -> float, or the array of `sk.bincount`."""


class RunView(Protocol):
    """The part of a run that a hook may use."""

    @property
    def step(self) -> int:
        """The last dispatched step."""

    @property
    def config(self) -> Config:
        """The config, with the values that the program selected for `auto`."""

    @property
    def program(self) -> Program:
        """The compiled program, its mesh, schedule and shardings."""

    @property
    def cluster(self) -> Cluster:
        """The processes of the run. `cluster.is_main` is true on process 0."""

    @property
    def directory(self) -> Path:
        """The run directory."""

    @property
    def events(self) -> EventLog:
        """`events.jsonl` of the run."""

    def message(self, text: str) -> None:
        """Shows a line on the terminal of process 0."""

    def write(self, record: Mapping[str, object], kind: str = "scalars") -> None:
        """Writes a record `{"step", ...}` to the trackers, on process 0. Kinds: scalars, text, image, histogram, array
        and audio (metrics/trackers/base.py)."""

    def numbers(self, step: int, values: DeviceMetrics) -> Metrics:
        """Returns the metrics of `step` on the host. Waits for the devices."""

    def gather(self, tree: Any) -> Any:
        """Returns the tree with whole numpy arrays, on every mesh and process. All processes call it."""

    def is_log_step(self, step: int) -> bool:
        """Returns whether the metrics of `step` are written."""

    def newest(self) -> str:
        """Returns a sentence about the newest checkpoint."""

    @property
    def last_logged(self) -> Metrics:
        """The metrics of the last log step, and `step`."""


@dataclass(frozen=True)
class Save:
    """Save the state.

    Attributes:
        known: every process requests this at this step independently, so it is performed immediately. Otherwise the
            processes first agree on a step, which may be some steps later.
    """

    known: bool = False


@dataclass(frozen=True)
class Evaluate:
    """Evaluate the state. `known`: as in `Save`."""

    known: bool = False


@dataclass(frozen=True)
class ReplaceState:
    """Continue with a different state of the same shapes. All processes request it at the same step."""

    state: TrainState


@dataclass(frozen=True)
class Rollback:
    """Restore an earlier step and continue training from there.

    Attributes:
        to_step: restores the newest checkpoint up to this step. None: the newest checkpoint, or the initial state if
            there is none. 0: the initial state.
        skip_batches: number of batches after that step to skip permanently.
        batches: numbers of further batches to skip permanently. `run.program.schedule.number(step)` is the number of
            the batch of a step.
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
        code: exit code of `spmdkit train`. 0: the run is finished. 42: the run should be restarted. Both save the
            state. Any other code of `spmdkit.errors` is a failure, and nothing is saved.
        why: the message.
        known: as in `Save`.
        save_first: a failure that is no fault of the state: the state is saved if it is finite.
    """

    code: int = 0
    why: str = ""
    known: bool = False
    save_first: bool = False

    @property
    def saves(self) -> bool:
        """Whether the state is saved."""
        return self.code in (0, 42)


Action = Stop | Save | Evaluate | ReplaceState | Rollback


@dataclass(frozen=True)
class Hook:
    """Functions that a run calls around its steps. `run` has the attributes and methods of `RunView`.

    The next step reuses the memory of a state: read it during the call, and copy values for later use.

    Attributes:
        name: unique in a run; the key of the hook's state in a checkpoint.
        order: hooks are called in ascending order. Built-in: finite 10, evaluation 20, saving 30, profile 35, logging
            40, signals 45, watchdog 1000.
        every: `after_step` is called at steps divisible by this number and at the last step; None: at each step.
        on: "all" processes, which may start computations with collectives, or "main" (process 0), which may not.
        in_step: `(old state, new state, metrics) -> (new state, metrics)`; a pure function, traced into the end of the
            step, in `order`.
        optimizer: `optimizer -> optimizer`, wraps the optax optimizer, inside of `clip_norm`; a pure function.
        begin: `(run, step, state)`, before the first step of this process.
        before_step: `(run, step, state)`, with the input state of the step.
        after_step: `(run, step, state, metrics)`, as soon as the step is dispatched. The metrics are on the devices;
            reading them waits for the step.
        after_eval: `(run, step, values)`, metric name -> float or array; the same on every process.
        after_save: `(run, step)`, once the arrays are copied. The checkpoint may still be in flight.
        end: `(run, step, state)`, after the last step, and after a `Stop` that saves.
        state: returns the state of the hook for the checkpoint, as JSON values.
        restore: receives that state, before `begin` and after a rollback; any type, hence `Never`.

    Raises:
        ConfigError: only one of `state` and `restore`, an unknown `on`, or an `every` below 1.
    """

    name: str
    order: int = 50
    every: int | None = None
    on: Literal["all", "main"] = "all"
    in_step: Callable[[TrainState, TrainState, DeviceMetrics], tuple[TrainState, DeviceMetrics]] | None = None
    optimizer: Callable[[Any], Any] | None = None
    begin: Callable[[RunView, int, TrainState], Action | None] | None = None
    before_step: Callable[[RunView, int, TrainState], Action | None] | None = None
    after_step: Callable[[RunView, int, TrainState, DeviceMetrics], Action | None] | None = None
    after_eval: Callable[[RunView, int, Metrics], Action | None] | None = None
    after_save: Callable[[RunView, int], Action | None] | None = None
    end: Callable[[RunView, int, TrainState], Action | None] | None = None
    state: Callable[[], object] | None = None
    restore: Callable[[Never], object] | None = None

    def __post_init__(self) -> None:
        if (self.state is None) != (self.restore is None):
            raise ConfigError(
                f"hook '{self.name}' has {'restore' if self.state is None else 'state'} only. A checkpoint stores the "
                "state of a hook and restores it. Pass both, or neither."
            )
        if self.on not in ("all", "main") or (self.every is not None and self.every < 1):
            raise ConfigError(
                f"hook '{self.name}' has on={self.on!r} and every={self.every!r}. on is 'all' or 'main', and every is "
                "None or a number of at least 1. Omit both for all processes and every step."
            )


@dataclass(frozen=True)
class Decision:
    """The actions after a step, in this order: `evaluate`, `save`, `turn` (a change of the course of training)."""

    evaluate: bool = False
    save: bool = False
    turn: Stop | Rollback | ReplaceState | None = None


def decide(actions: Iterable[Action]) -> Decision:
    """Returns the decision for all actions requested at one step: the strongest turn, without actions that it makes
    redundant.

    A `Stop` with a failure wins over one without. Of several `Rollback`s the one to the earliest step wins.
    """
    requested = list(actions)
    stops = sorted((a for a in requested if isinstance(a, Stop)), key=lambda a: (a.saves, -a.code, a.why))
    back = [a for a in requested if isinstance(a, Rollback)]
    furthest = sorted(back, key=lambda a: (a.to_step is None, a.to_step or 0, -a.skip_batches, a.batches))
    replaced = [a for a in requested if isinstance(a, ReplaceState)]
    turns: list[Stop | Rollback | ReplaceState] = [*stops, *furthest, *replaced]
    turn = turns[0] if turns else None
    if isinstance(turn, Rollback) or (isinstance(turn, Stop) and not turn.saves):
        return Decision(turn=turn)
    save = any(isinstance(a, Save) for a in requested) or isinstance(turn, Stop)
    return Decision(any(isinstance(a, Evaluate) for a in requested), save, turn)


_TYPES: Mapping[str, type] = {"stop": Stop, "save": Save, "evaluate": Evaluate, "rollback": Rollback}


def to_json(action: Action) -> list[Any]:
    """Converts an action to JSON values, to send it to other processes. A `ReplaceState` cannot be sent."""
    name = next(name for name, kind in _TYPES.items() if isinstance(action, kind))
    return [name, {key: value for key, value in vars(action).items() if key != "known"}]


def from_json(value: list[Any]) -> Action:
    """Converts the result of `to_json` to an action."""
    action: Action = _TYPES[value[0]](**value[1])
    return action
