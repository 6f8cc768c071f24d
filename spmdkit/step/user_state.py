"""A train state of the user's own type: flax's `TrainState`, a NamedTuple, a dataclass with two optimizers.

`init` returns it; `train_step(state, batch) -> (state, metrics)` and `eval_fn(state, batch)` receive it. The program
stores its leaves as a `TrainState`: parameters and optimizer state by the rules of the layout, all other leaves as
model state under their paths.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from spmdkit.errors import ConfigError
from spmdkit.foundation.formatting import nearest
from spmdkit.foundation.trees import describe, first_difference, named_leaves, path_name
from spmdkit.step.state import Initial, TrainState


@dataclass(frozen=True)
class StateView:
    """The parts of a user-defined train state, by their paths in it (`params`, `generator/params`).

    Attributes:
        params: the parameters, which are evaluated, exported and sharded by the rules of the layout. A sequence of
            paths names several parts (two networks).
        opt_state: the optimizer's state, sharded like the parameters; None: there is none.
        step: the number of completed steps, an integer scalar that the program sets; None: the state counts for itself.
    """

    params: str | Sequence[str] = "params"
    opt_state: str | Sequence[str] | None = None
    step: str | None = None


FLAX_VIEW = StateView("params", "opt_state", "step")
"""The view of `flax.training.train_state.TrainState` and its subclasses."""


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Fixed:
    """A leaf of a user's state that is no array, such as the activation function of an equinox module."""

    value: Any


def with_fixed(state: Any) -> Any:
    """Returns a state in which leaves that are no arrays are part of the structure. Numbers are arrays, but not in an
    equinox module, where `eqx.filter_jit` does not trace them either."""
    equinox = sys.modules.get("equinox")

    def in_module(x: Any) -> Any:
        return x if hasattr(x, "dtype") else _Fixed(x)

    def as_array(x: Any) -> Any:
        if equinox is not None and isinstance(x, equinox.Module):
            return jax.tree.map(in_module, x)
        return jnp.asarray(x) if isinstance(x, bool | int | float | complex) else in_module(x)

    return jax.tree.map(as_array, state, is_leaf=lambda x: equinox is not None and isinstance(x, equinox.Module))


def _as_written(state: Any) -> Any:
    def is_fixed(x: Any) -> bool:
        return isinstance(x, _Fixed)

    return jax.tree.map(lambda x: x.value if isinstance(x, _Fixed) else x, state, is_leaf=is_fixed)


def view_of(state: Any, declared: StateView | None) -> StateView | None:
    """Returns the view of what `init` returned: that of the task or of flax; None: it is not a train state."""
    flax = sys.modules.get("flax.training.train_state")
    return FLAX_VIEW if declared is None and flax is not None and isinstance(state, flax.TrainState) else declared


class UserState:
    """Converts a user's train state to the fields of a `TrainState` and back.

    Args:
        abstract: what `init` returns, `with_fixed`.

    Raises:
        ConfigError: the view names no leaf of the state, or its step is no integer scalar.
    """

    def __init__(self, abstract: Any, view: StateView):
        self._view, self._abstract, self._structure = view, abstract, jax.tree.structure(abstract)
        leaves = dict(named_leaves(abstract))
        self._fields: dict[str, Sequence[str]] = {"params": _paths(view.params), "opt_state": _paths(view.opt_state)}
        for field, parts in {**self._fields, "step": _paths(view.step)}.items():
            for part in parts:
                if not _has_part(abstract, part):
                    raise ConfigError(
                        f"Task.state: {field} is '{part}', and the state of init has no such part. Its leaves: "
                        f"{', '.join(list(leaves)[:6])}.{nearest(part, leaves)} Name a path of the state."
                    )
        if view.step is not None and not _is_count(leaves.get(view.step)):
            raise ConfigError(
                f"Task.state: step is '{view.step}', which is not an integer scalar. It is the number of completed "
                "steps. Name that leaf, or remove step."
            )
        named = [part for parts in self._fields.values() for part in (*parts, *_paths(view.step))]
        self._other = [path for path in leaves if not any(_is_in(path, part) for part in named)]

    def split(self, state: Any) -> Initial:
        """Returns the parameters, the optimizer's state and the other leaves by path."""
        state = with_fixed(state)
        leaves = dict(named_leaves(state))
        params, opt_state = (self._parts(state, field) for field in ("params", "opt_state"))
        return Initial(params, {path: leaves[path] for path in self._other}, opt_state)

    def join(self, params: Any, opt_state: Any, other: Any, step: Any) -> Any:
        """Returns the user's state from the fields of a `TrainState`."""
        by_path = dict(other)
        for field, tree in (("params", params), ("opt_state", opt_state)):
            by_path.update(self._by_path(field, tree))
        leaves = [by_path.get(path, step) for path, _ in named_leaves(self._abstract)]
        return _as_written(jax.tree.unflatten(self._structure, leaves))

    def _parts(self, state: Any, field: str) -> Any:
        parts = self._fields[field]
        if isinstance(getattr(self._view, field), str):
            return _part(state, parts[0])
        return {part: _part(state, part) for part in parts}

    def _by_path(self, field: str, tree: Any) -> Iterator[tuple[str, Any]]:
        for part in self._fields[field]:
            own = tree if isinstance(getattr(self._view, field), str) else tree[part]
            for path, leaf in named_leaves(own):
                yield f"{part}/{path}" if path else part, leaf

    def step_of(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the step on a `TrainState` from one on the user's state."""

        @functools.wraps(train_step)
        def on_fields(state: TrainState, batch: Any) -> Any:
            own = self.join(state.params, state.opt_state, state.model_state, state.step)
            out = train_step(own, batch)
            if not (isinstance(out, tuple) and len(out) == 2 and isinstance(out[0], type(own))):
                raise ConfigError(
                    f"train_step returned {describe(out)}. It must return (state, metrics): the {type(own).__name__} "
                    "that it received, updated, and a dict of scalars."
                )
            if difference := first_difference(with_fixed(own), with_fixed(out[0])):
                raise ConfigError(
                    f"train_step changed the state: {difference}. Shapes and dtypes of the state stay the same over "
                    "all steps."
                )
            new = self.split(out[0])
            new_state = state.replace(params=new.params, opt_state=new.opt_state, model_state=new.state)
            return new_state.with_average(), out[1]

        return on_fields

    def evaluation_of(self, eval_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `(params, model_state, batch) -> metrics` from `(state, batch) -> metrics`. The optimizer's state and
        the step are None."""

        def on_fields(params: Any, model_state: Any, batch: Any) -> Any:
            nothing = jax.tree.map(lambda _: None, self._parts(self._abstract, "opt_state"))
            return eval_fn(self.join(params, nothing, model_state, None), batch)

        return on_fields


def _paths(entry: str | Sequence[str] | None) -> Sequence[str]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _is_in(path: str, part: str) -> bool:
    return path == part or path.startswith(f"{part}/")


def _part(tree: Any, path: str) -> Any:
    """Returns the subtree at a path."""
    for name in path.split("/"):
        tree = _children(tree)[name]
    return tree


def _has_part(tree: Any, path: str) -> bool:
    try:
        _part(tree, path)
    except KeyError:
        return False
    return True


def _children(tree: Any) -> dict[str, Any]:
    pairs = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)[0]
    return {path_name(key): child for key, child in pairs}


def _is_count(leaf: Any) -> bool:
    return leaf is not None and not jnp.shape(leaf) and jnp.issubdtype(jnp.result_type(leaf), jnp.integer)
