"""`HookRunner`: calls the hooks of a run in order and returns the decision of a step: the requested actions, on which
all processes agree at one step."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, get_args

from spmdkit.cluster import Cluster
from spmdkit.errors import ConfigError
from spmdkit.foundation import phase, plugins, user_code
from spmdkit.run.hooks.base import Action, Decision, Hook, ReplaceState, RunView, Stop, decide, from_json, to_json

SLOW_SECONDS, SLOW_SHARE = 1.0, 0.2
"""A hook is reported if it takes at least this time, and this share of the time since the start."""


class HookRunner:
    """The hooks of a run. `decision` returns the actions that they requested by the end of a step, `more` the ones that
    need no agreement between processes.

    Args:
        lag: maximum number of steps in flight.
        clock: monotonic seconds, for the time of hooks.

    Attributes:
        generation: the number of rollbacks; part of the name of an agreement, because steps repeat.
        on_main_only: the user-defined hook in which only process 0 is, of several processes; otherwise None.
    """

    def __init__(
        self,
        hooks: Sequence[Hook],
        cluster: Cluster,
        last_step: int,
        lag: int,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._hooks, self._cluster, self._last, self._lag = list(hooks), cluster, last_step, lag
        self._clock, self._since, self._seconds = clock, clock(), dict[str, float]()
        self._is_slow: set[str] = set()
        self._ours = frozenset(plugins.names("default_hooks"))
        self._now: list[Action] = []  # performed after this step
        self._pending: list[Action] = []  # require an agreement
        self.generation = 0
        self.on_main_only: str | None = None

    def after_step(self, run: RunView, step: int, state: Any, metrics: Any) -> None:
        """Calls `after_step` of the hooks that are due."""
        for hook in self._hooks:
            if hook.after_step and (hook.every is None or step % hook.every == 0 or step == self._last):
                self._request(hook, "after_step", run, step, state, metrics)

    def call(self, what: str, *args: Any) -> None:
        """Calls `begin`, `before_step`, `after_eval`, `after_save` or `end` of every hook that defines it."""
        for hook in self._hooks:
            if getattr(hook, what) is not None:
                self._request(hook, what, *args)

    @property
    def has_own(self) -> bool:
        """Whether there are user-defined hooks."""
        return any(hook.name not in self._ours for hook in self._hooks)

    def _request(self, hook: Hook, what: str, *args: Any) -> None:
        runs_here = hook.on == "all" or self._cluster.is_main
        action = self._called(hook, what, getattr(hook, what), *args) if runs_here else None
        if hook.name not in self._ours:
            self._pass(hook, getattr(hook, what), action)
        if action is None:
            return
        if not isinstance(action, get_args(Action)):
            raise ConfigError(
                f"hook '{hook.name}': {what} returned {type(action).__name__}. A hook returns None or an action. "
                "Return sk.Stop(...), sk.Save(), sk.Evaluate(), sk.ReplaceState(state) or sk.Rollback(...)."
            )
        if self._cluster.num_processes == 1:
            self._now.append(action)
        elif isinstance(action, ReplaceState):
            self._now.append(self._requested_by_all(hook, action))
        elif action.known and hook.on == "all":
            self._now.append(action)
        elif action not in self._pending:
            self._pending.append(action)

    def _pass(self, hook: Hook, call: Callable[..., Any], action: Any) -> None:
        """Records that this process leaves a user-defined hook; with an action of all processes, after that."""
        if hook.on == "all" and (isinstance(action, ReplaceState) or getattr(action, "known", False)):
            phase.hold_hook(f"'{hook.name}'{user_code.line_of(call)}", f"sk.{type(action).__name__}")
        else:
            phase.pass_hook()

    def _called(self, hook: Hook, what: str, call: Callable[..., Any], *args: Any) -> Any:
        try:
            if hook.name in self._ours:
                return call(*args)
            self.on_main_only = hook.name if hook.on == "main" and self._cluster.num_processes > 1 else None
            begun = self._clock()
            with phase.in_hook(hook.name):
                action = call(*args)
            self._seconds[hook.name] = self._seconds.get(hook.name, 0.0) + self._clock() - begun
            return action
        except (Exception, SystemExit, GeneratorExit) as error:
            if "non-addressable" in str(error):
                error.add_note("run.gather(tree) returns host arrays on every process. Call it on all processes.")
            if hook.name not in self._ours:  # an error of a built-in hook is an error of the step
                user_code.call_user(partial(_raise, error), f"hook '{hook.name}': {what}", is_model=False)
            raise
        finally:
            self.on_main_only = None

    def slow_hooks(self) -> list[str]:
        """Returns a line for each user-defined hook that takes a large share of the time, once per hook."""
        elapsed_s = self._clock() - self._since
        slow = {
            name: seconds
            for name, seconds in self._seconds.items()
            if seconds >= max(SLOW_SECONDS, SLOW_SHARE * elapsed_s) and name not in self._is_slow
        }
        self._is_slow |= slow.keys()
        return [
            f"hook '{name}' takes {seconds / elapsed_s:.0%} of the time, {seconds:.1f} s up to here, including its "
            "waits for the devices"
            for name, seconds in slow.items()
        ]

    def _requested_by_all(self, hook: Hook, action: ReplaceState) -> ReplaceState:
        """Returns the action once every process has requested it: a state is never sent to other processes."""
        if hook.on == "main":
            raise ConfigError(
                f"hook '{hook.name}': only process 0 requests sk.ReplaceState. Each process holds a part of the state, "
                'and all replace it together. Write sk.Hook(..., on="all").'
            )
        self._cluster.same_everywhere("replaced state", hook.name)
        phase.settle_hook()
        return action

    def decision(self, step: int) -> Decision:
        """Returns the decision after `step`, the same on every process. All processes call it at every step."""
        cluster = self._cluster
        if cluster.num_processes > 1 and cluster.agree(
            f"actions/{self.generation}", step, bool(self._pending), self._lag
        ):
            self._now += self._actions_of_all()
            self._pending.clear()
        return self.more()

    def decision_at_start(self) -> Decision:
        """Returns the decision before the first step, for the actions requested in `begin`, the same on every
        process."""
        if self._cluster.num_processes > 1 and any(h.begin and h.name not in self._ours for h in self._hooks):
            self._now += self._actions_of_all()
            self._pending.clear()
        return self.more()

    def more(self) -> Decision:
        """Returns the decision for the actions requested since the last one, in `before_step`, `after_eval` and
        `after_save`."""
        if not self._now:
            return NOTHING
        requested, self._now = self._now, []
        return decide(requested)

    def stop_reason(self) -> str:
        """Returns the reason of the first process that requests a stop, the same on all processes; "" if there is none.
        All processes call it at the same point."""
        whys = [action.why for action in (*self._now, *self._pending) if isinstance(action, Stop)]
        return self._cluster.first_problem("reason to stop", lambda: next(iter(whys), ""))

    def _actions_of_all(self) -> list[Action]:
        mine = [to_json(action) for action in self._pending]
        gathered = self._cluster.gather("actions", mine)
        return [from_json(value) for values in gathered for value in values]

    def clear_requests(self) -> None:
        """Drops the requested actions after a rollback."""
        self._now.clear()
        self._pending.clear()
        self.generation += 1

    def state(self) -> dict[str, Any]:
        """Returns the state of each hook, JSON values by name."""
        return {hook.name: self._checked(hook, hook.state()) for hook in self._hooks if hook.state is not None}

    def restore(self, saved: Mapping[str, Any]) -> Iterable[str]:
        """Restores the state of each hook. Returns the names in the checkpoint without a hook."""
        for hook in self._hooks:
            if hook.restore is not None and hook.name in saved:
                user_code.call_user(lambda h=hook: h.restore(saved[h.name]), f"hook '{hook.name}': restore")  # type: ignore[misc]
        return sorted(set(saved) - {hook.name for hook in self._hooks if hook.restore is not None})

    @staticmethod
    def _checked(hook: Hook, value: object) -> object:
        try:
            copy = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"hook '{hook.name}': state returned a value that JSON cannot represent ({error}). The record of the "
                "checkpoint stores finite numbers, text, true, false, None, lists and dicts. Return such values."
            ) from None
        if copy != value:
            raise ConfigError(
                f"hook '{hook.name}': state returned {value!r}, which JSON restores as {copy!r}. JSON has lists, and "
                "dicts with text keys only. Return those."
            )
        return copy


NOTHING = Decision()


def _raise(error: BaseException) -> None:
    raise error
