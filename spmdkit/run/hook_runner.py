"""`HookRunner`: calls the hooks of a run in their order and returns the decision of a step: what the hooks request,
agreed on by all processes at one step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

from spmdkit.cluster import Cluster
from spmdkit.errors import ConfigError
from spmdkit.foundation import phase, plugins, user_code
from spmdkit.run.hooks.base import Action, Decision, Hook, ReplaceState, RunView, Stop, decide, from_json, to_json


class HookRunner:
    """The hooks of a run. What they ask for is gathered, and taken by `decision` at the end of a step.

    Args:
        lag: steps that may be in flight.
    """

    def __init__(self, hooks: Sequence[Hook], cluster: Cluster, last_step: int, lag: int):
        here = [hook for hook in hooks if hook.on == "all" or cluster.is_main]
        self._hooks, self._cluster, self._last, self._lag = list(hooks), cluster, last_step, lag
        self._before = [(hook, hook.before_step) for hook in here if hook.before_step is not None]
        self._after = [(hook, hook.every, hook.after_step) for hook in here if hook.after_step is not None]
        self._here = here
        self._ours = frozenset(plugins.names("default_hooks"))
        self._now: list[Action] = []  # to be done after this step
        self._pending: list[Action] = []  # to be agreed on
        self._generation = 0

    # ---- asking ------------------------------------------------------------------------------------------------------

    def before_step(self, run: RunView, step: int, state: Any) -> None:
        """Calls the hooks that look at the state before a step."""
        for hook, call in self._before:
            self._ask(hook, "before_step", call, run, step, state)

    def after_step(self, run: RunView, step: int, state: Any, metrics: Any) -> None:
        """Calls the hooks that are due after a step."""
        for hook, every, call in self._after:
            if every is None or step % every == 0 or step == self._last:
                self._ask(hook, "after_step", call, run, step, state, metrics)

    def call(self, what: str, *args: Any) -> None:
        """Calls `begin`, `after_eval`, `after_save` or `end` of every hook that has it."""
        for hook in self._here:
            if (call := getattr(hook, what)) is not None:
                self._ask(hook, what, call, *args)

    @property
    def generation(self) -> int:
        """How often training went back: a step that comes again is asked about under another name."""
        return self._generation

    @property
    def has_own(self) -> bool:
        """Whether there are hooks of the user's."""
        return any(hook.name not in self._ours for hook in self._hooks)

    def _ask(self, hook: Hook, what: str, call: Callable[..., Any], *args: Any) -> None:
        action = self._called(hook, what, call, *args)
        if action is None:
            return
        if not isinstance(action, get_args(Action)):
            raise ConfigError(
                f"hook '{hook.name}': {what} returned {type(action).__name__}. It returns None or what it asks for. Return sk.Stop(...), "
                "sk.Save(), sk.Evaluate(), sk.ReplaceState(state) or sk.Rollback(...)."
            )
        if self._cluster.num_processes == 1:
            self._now.append(action)
        elif isinstance(action, ReplaceState):
            self._now.append(self._everywhere(hook, action))
        elif action.known and hook.on == "all":
            self._now.append(action)
        elif action not in self._pending:
            self._pending.append(action)

    def _called(self, hook: Hook, what: str, call: Callable[..., Any], *args: Any) -> Any:
        try:
            if hook.name in self._ours:
                return call(*args)
            with phase.during(f"hook '{hook.name}'"):
                return call(*args)
        except (Exception, SystemExit, GeneratorExit) as error:
            if hook.name in self._ours:
                raise  # what it has met in a step is no error of a hook
            raised = error
            user_code.call_user(lambda: _again(raised), f"hook '{hook.name}': {what}")
            raise

    def _everywhere(self, hook: Hook, action: ReplaceState) -> ReplaceState:
        """Returns the action, once every process asks for it: a state cannot be told to others."""
        if hook.on == "main":
            raise ConfigError(
                f"hook '{hook.name}': process 0 alone asks for sk.ReplaceState. All processes hold a part of the state, and replace it together. "
                'Write sk.Hook(..., on="all").'
            )
        self._cluster.same_everywhere("replaced state", hook.name)
        return action

    # ---- agreeing ----------------------------------------------------------------------------------------------------

    def decision(self, step: int) -> Decision:
        """Returns what is done after `step`, the same on every process. To be called by all of them at every step in
        turn."""
        cluster = self._cluster
        if cluster.num_processes > 1 and cluster.agree(
            f"actions/{self._generation}", step, bool(self._pending), self._lag
        ):
            self._now += self._actions_of_all()
            self._pending.clear()
        return self.more()

    def more(self) -> Decision:
        """Returns what was asked for since then, by `after_eval` and `after_save`."""
        if not self._now:
            return NOTHING
        asked, self._now = self._now, []
        return decide(asked)

    def why_stopping(self) -> str:
        """Returns why some process asks to stop, the same on all, or an empty text. To be called by all of them at one
        place."""
        whys = [action.why for action in (*self._now, *self._pending) if isinstance(action, Stop)]
        return self._cluster.first_problem("reason to stop", lambda: next(iter(whys), ""))

    def _actions_of_all(self) -> list[Action]:
        """Returns the actions that any process waits for, in the order of the processes."""
        mine = [to_json(action) for action in self._pending]
        gathered = self._cluster.gather("actions", mine)
        return [from_json(value) for values in gathered for value in values]

    def went_back(self) -> None:
        """Forgets what was requested, after a rollback: steps come again."""
        self._now.clear()
        self._pending.clear()
        self._generation += 1

    # ---- what travels in a checkpoint
    # ---------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Returns the hooks' own state, JSON values by name."""
        return {hook.name: self._checked(hook, hook.state()) for hook in self._hooks if hook.state is not None}

    def restore(self, saved: Mapping[str, Any]) -> Iterable[str]:
        """Gives the hooks their state back. Returns the names of those that a checkpoint knows and that are not there
        any more."""
        for hook in self._hooks:
            if hook.restore is not None and hook.name in saved:
                user_code.call_user(lambda h=hook: h.restore(saved[h.name]), f"hook '{hook.name}': restore")  # type: ignore[misc]
        return sorted(set(saved) - {hook.name for hook in self._hooks if hook.restore is not None})

    @staticmethod
    def _checked(hook: Hook, value: Any) -> Any:
        try:
            same = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"hook '{hook.name}': state returned what JSON cannot hold ({error}). It travels in the checkpoint's record: numbers that are "
                "finite, text, true, false, None, lists and dicts. Return those."
            ) from None
        if same != value:
            raise ConfigError(
                f"hook '{hook.name}': state returned {value!r}, which comes back as {same!r}. JSON has lists and dicts with keys of text "
                "alone. Return those."
            )
        return same


NOTHING = Decision()


def _again(error: BaseException) -> None:
    raise error
