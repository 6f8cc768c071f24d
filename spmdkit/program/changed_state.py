"""Restores a saved state into a run with other leaves: after a change of the optimizer, `ema`, the precision or the
model.

| leaf | value |
| --- | --- |
| in the checkpoint, also at another position in the optimizer's chain or in another float dtype | the saved one |
| the count of a schedule, not in the checkpoint | the step |
| `ema`, not in the checkpoint, or named by `train --reset` | the parameters |
| another leaf named by `train --reset` | that of the initial state; for the count of a schedule the step |

Saved counts of schedules and a saved `ema` that the run does not need are not read. All other differences are errors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from spmdkit.checkpoint import nest
from spmdkit.errors import ConfigError
from spmdkit.foundation.trees import named_leaves
from spmdkit.program.program import Program

Table = Mapping[str, tuple[tuple[int, ...], str]]
FIELDS = ("params", "opt_state", "ema", "model_state")
_POSITION = re.compile(r"^opt_state/(?:\d+/)+")
_COUNT = re.compile(r"^opt_state/(?:.*/)?count$")


class Restorable(Protocol):
    """Saved states by step."""

    def read_tree(self, step: int) -> dict[str, tuple[tuple[int, ...], str]]: ...

    def restore(self, step: int, abstract_state: Any, optional: Any = ()) -> tuple[Any, dict[str, Any]]: ...


class ChangedState:
    """The saved states of `checkpoints`, with the leaves of the program's state. `lines`: notes for the user.

    Args:
        again: a restart of the command that has already reset: only leaves that do not fit are reset.
    """

    def __init__(self, checkpoints: Restorable, step: int, program: Program, reset: Sequence[str], again: bool = False):
        self._checkpoints, self._step, self._program = checkpoints, step, program
        self.lines: list[str] = []
        self._saved = dict(checkpoints.read_tree(step))
        requested = {path: leaf for path, leaf in named_leaves(program.abstract_state) if path.startswith(FIELDS)}
        self._schedules = _schedule_counts(program.abstract_state.opt_state)
        self._reset = _matches(reset, {**self._saved, **requested})
        self._from = self._sources(requested, set() if again else self._reset)
        used, made = set(self._from.values()), requested.keys() - self._from.keys()
        self._made = {
            path
            for path in made
            if path in self._reset or path in self._schedules or (path.startswith("ema") and "params" in _heads(used))
        }
        unread = {path for path in self._saved if path.startswith(FIELDS) and path not in used}
        has_ema = any(path.startswith("ema") for path in requested)
        self._dropped = {
            path
            for path in unread
            if path in self._reset or _COUNT.match(path) or (path.startswith("ema") and not has_ema)
        }
        moved = (
            path != source or self._saved[source][1] != str(requested[path].dtype)
            for path, source in self._from.items()
        )
        self.is_changed = bool(self._made or self._dropped or any(moved))
        self._note(requested)

    def _sources(self, requested: Mapping[str, Any], reset: set[str]) -> dict[str, str]:
        """Returns requested path -> saved path of each leaf that is read."""

        def fits(path: str, x: Any) -> bool:
            shape, dtype = self._saved[path]
            return shape == x.shape and _casts(dtype, x.dtype)

        kept = {path: x for path, x in requested.items() if path not in reset}
        found = {path: path for path, x in kept.items() if path in self._saved and fits(path, x)}
        if all(path in found or path in self._schedules for path in kept if path.startswith("opt_state")):
            return found
        found = {path: source for path, source in found.items() if not path.startswith("opt_state")}
        saved = [path for path in self._saved if path.startswith("opt_state") and path not in reset]
        for path, x in kept.items():  # a chain with one member more or less: the same names in the same order
            if path.startswith("opt_state"):
                name = _POSITION.sub("", path)
                same = (other for other in saved if _POSITION.sub("", other) == name and fits(other, x))
                if (source := next(same, None)) is not None:
                    saved.remove(source)
                    found[path] = source
        return found

    def _note(self, requested: Mapping[str, Any]) -> None:
        moved = sum(path != source for path, source in self._from.items())
        cast = [path for path, source in self._from.items() if self._saved[source][1] != str(requested[path].dtype)]
        counts = sorted(self._made & self._schedules)
        texts = {
            f"{moved} leaves of the optimizer are at another position in its chain": moved,
            f"{len(cast)} leaves are converted to the dtype of this run ({', '.join(cast[:2])} ...)": cast,
            f"{', '.join(counts)}, the count of a schedule, is set to {self._step}": counts,
            "ema begins at the parameters": any(path.startswith("ema") for path in self._made),
            f"{len(self._made & self._reset)} leaves are initialized (--reset)": self._made & self._reset,
            f"{', '.join(sorted(self._dropped)[:4])} of the checkpoint is not used": self._dropped,
        }
        self.lines = [f"note: step {self._step} is of another state: {text}" for text, holds in texts.items() if holds]

    def read_tree(self, step: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Returns `{path: (shape, dtype name)}` as if the run had saved it."""
        others = {path: leaf for path, leaf in self._saved.items() if not path.startswith(FIELDS)}
        return {path: self._saved[source] for path, source in self._from.items()} | others

    def restore(self, step: int, abstract_state: Any, optional: Any = ()) -> tuple[Any, dict[str, Any]]:
        """Returns (state, record)."""
        requested = dict(named_leaves(abstract_state))
        read = {}
        for path, x in requested.items():
            if path not in self._made:
                source = self._from.get(path, path)
                dtype = self._saved[source][1] if source in self._saved and path in self._from else x.dtype
                read[source] = jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)
        unread = (*([optional] if isinstance(optional, str) else optional), *sorted(self._dropped))
        loaded, record = self._checkpoints.restore(step, nest(read), optional=unread)
        arrays = dict(named_leaves(loaded))
        initial = self._program.initial.leaves({p for p in self._made - self._schedules if not p.startswith("ema")})
        leaves = []
        for path, x in requested.items():
            if path in self._made and path in self._schedules:
                value: Any = jnp.full(x.shape, self._step, x.dtype)
            elif path in self._made and path.startswith("ema"):
                under = f"params{path.removeprefix('ema')}"
                value = jnp.copy(initial[under] if under in initial else arrays[self._from.get(under, under)])
            elif path in initial:
                value = initial[path]
            else:
                value = arrays[self._from.get(path, path)]
            leaves.append(value if value.dtype == x.dtype and value.sharding == x.sharding else _placed(value, x))
        return jax.tree.unflatten(jax.tree.structure(abstract_state), leaves), record


def _placed(value: jax.Array, x: jax.ShapeDtypeStruct) -> jax.Array:
    cast: jax.Array = jax.jit(lambda leaf: leaf.astype(x.dtype), out_shardings=x.sharding)(value)
    return cast


def _heads(paths: set[str]) -> set[str]:
    return {path.partition("/")[0] for path in paths}


def _casts(saved: str, requested: Any) -> bool:
    both_float = saved.startswith(("float", "bfloat")) and jnp.issubdtype(requested, jnp.floating)
    return saved == str(requested) or bool(both_float)


def _schedule_counts(opt_state: Any) -> set[str]:
    """Returns the paths of the counts of schedules."""

    def is_schedule(x: Any) -> bool:
        return isinstance(x, optax.ScaleByScheduleState)

    nodes = jax.tree_util.tree_flatten_with_path(opt_state, is_leaf=is_schedule)[0]
    named = ((jax.tree_util.keystr(path, simple=True, separator="/"), x) for path, x in nodes)
    return {"/".join(filter(None, ("opt_state", path, "count"))) for path, x in named if is_schedule(x)}


def _matches(patterns: Sequence[str], leaves: Mapping[str, Any]) -> set[str]:
    """Returns the leaves that `--reset` names: a field, or a pattern of the path of a parameter, which includes its
    optimizer state and average. Raises ConfigError if a pattern matches none."""
    found = set[str]()
    for pattern in patterns:
        if pattern in ("opt_state", "ema"):
            found |= {path for path in leaves if path == pattern or path.startswith(f"{pattern}/")}
            continue
        try:
            whole = re.compile(rf"(?:.*/)?(?:{pattern.removeprefix('params/')})")
        except re.error as error:
            raise ConfigError(f"--reset {pattern}: no regular expression: {error}. Write 'head/.*'.") from None
        matched = {path for path in leaves if path.startswith(FIELDS) and whole.fullmatch(path)}
        if not matched:
            names = ", ".join([path.removeprefix("params/") for path in leaves if path.startswith("params/")][:6])
            raise ConfigError(
                f"--reset {pattern}: no leaf matches. It accepts opt_state, ema, or a pattern of the whole path of a "
                f"parameter: {names}. Write 'head/.*'."
            )
        found |= matched
    return found
