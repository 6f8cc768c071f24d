"""The state before the first step: leaves of the config's `init_from`, all others of the task's `init`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from spmdkit import compat
from spmdkit.compat.user_mesh import ignores_user_settings
from spmdkit.foundation.trees import named_leaves
from spmdkit.foundation.user_code import call_user
from spmdkit.program.init_from import InitFrom
from spmdkit.step.groups import groups
from spmdkit.step.groups.groups import Groups
from spmdkit.step.rng import abstract_key
from spmdkit.step.state import TrainState


@dataclass(frozen=True, eq=False)
class StateCreation:
    """The program that creates the state before the first step.

    Attributes:
        seed: the config's seed, which gives the key of `init`.
        init_from: the leaves that are loaded, or None.
        create_one: `(key, path -> loaded parameter) -> one copy of the state` without the reducer's state.
        groups: groups that train separately, or None.
        one_copy: path -> leaf of one copy that `init_from` can load.
        abstract: the abstract state with its shardings.
        compile: compiles a lowered program.
    """

    seed: int
    init_from: InitFrom | None
    create_one: Callable[[jax.Array, Mapping[str, jax.Array]], TrainState]
    groups: Groups | None
    one_copy: Mapping[str, jax.ShapeDtypeStruct]
    abstract: TrainState
    compile: Callable[[jax.stages.Lowered], jax.stages.Compiled]

    @functools.cached_property
    def loadable(self) -> dict[str, Any]:
        """Path -> abstract leaf of the leaves that `init_from` loads."""
        paths = frozenset[str]() if self.init_from is None else self.init_from.paths
        return {path: x for path, x in named_leaves(self.abstract) if path in paths}

    def _load(self, paths: Collection[str]) -> dict[str, jax.Array]:
        targets = {path: x for path, x in self.loadable.items() if path in paths}
        return self.init_from.read(targets) if self.init_from is not None and targets else {}

    def _create(self, key: jax.Array, loaded: Mapping[str, jax.Array]) -> TrainState:
        """Returns the state before the first step. `loaded`: path -> leaf; only parameters have leaves that depend on
        them."""
        one_copy = {path: x[(0,) * (x.ndim - len(self.one_copy[path].shape))] for path, x in loaded.items()}
        state = self.create_one(key, one_copy)
        state = state if self.groups is None else groups.stack_state(self.groups, state)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.abstract.reducer)
        return state.replace(reducer=zeros)

    def _program(self, paths: Collection[str]) -> Any:
        """Returns the function (key, loaded leaves) -> leaves `paths` of the state before the first step, in order."""
        paths = frozenset(paths)
        placed = [x.sharding for path, x in named_leaves(self.abstract) if path in paths]
        create = lambda key, loaded: [x for path, x in named_leaves(self._create(key, loaded)) if path in paths]
        return jax.jit(create, out_shardings=placed)

    @functools.cached_property
    @ignores_user_settings
    def lowered(self) -> jax.stages.Lowered:
        """The program (key, loaded leaves) -> the other leaves, as passed to the compiler."""
        paths = [path for path, _ in named_leaves(self.abstract) if path not in self.loadable]
        return self._program(paths).lower(abstract_key(), self.loadable)  # type: ignore[no-any-return]

    @functools.cached_property
    def _compiled(self) -> jax.stages.Compiled:
        return self.compile(self.__dict__.pop("lowered", None) or self.lowered)

    @ignores_user_settings
    def create(self) -> TrainState:
        """Returns the whole state."""
        loaded, key = self._load(self.loadable), jax.random.key(self.seed)
        created: Iterator[jax.Array] = iter(call_user(lambda: self._compiled(key, loaded), "init"))
        leaves = [loaded[path] if path in loaded else next(created) for path, _ in named_leaves(self.abstract)]
        return jax.tree.unflatten(jax.tree.structure(self.abstract), leaves)  # type: ignore[no-any-return]

    @ignores_user_settings
    def leaves(self, paths: Collection[str]) -> dict[str, jax.Array]:
        """Returns some leaves by path. Only these are created or loaded, and the leaves of `init_from` that they depend
        on."""
        loaded, others = self._load(paths), [path for path in paths if path not in self.loadable]
        if not others:
            return loaded
        create, key, inputs = self._program(others), jax.random.key(self.seed), dict[str, jax.Array]()
        if self.loadable:
            _, *used = compat.used_inputs(jax.make_jaxpr(create)(abstract_key(), self.loadable))
            inputs = self._load([path for path, is_used in zip(sorted(self.loadable), used, strict=True) if is_used])
        created: list[jax.Array] = call_user(lambda: create(key, inputs), "init")
        names = [path for path, _ in named_leaves(self.abstract) if path in others]
        return loaded | dict(zip(names, created, strict=True))
