"""Parameter leaves that the optimizer does not train: frozen ones, and those that their gradient overwrites.

    frozen       p                  no gradient, no reduction, no check, no optimizer state
    overwritten  max_r max_m dL/dp  the backward rule returns the new value, as in flax's FP8 layers (replicas r,
                                    microbatches m): no division, no optimizer state

Wire: nothing for a frozen leaf; one all-reduce of a maximum for all overwritten leaves.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from spmdkit import compat
from spmdkit.errors import ConfigError
from spmdkit.foundation.formatting import nearest
from spmdkit.foundation.trees import named_leaves, path_name
from spmdkit.step.trace_context import Context

Role = Literal["frozen", "overwritten"]

Roles = Mapping[str, Role]
"""Path of a parameter -> its role, for parameters that the optimizer does not train."""

OVERWRITTEN = "_overwrite_with_gradient"
"""The name of flax's collection of leaves that their gradient overwrites."""


def differentiated(params: Any) -> Any:
    """Returns the parameters with respect to which a loss is differentiated: `fast` of the pair of `optax.lookahead`,
    otherwise all."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


@dataclass(frozen=True)
class Declared:
    """The patterns that give parameters a role; a pattern matches a full path.

    Attributes:
        choices: (source, pattern, whether the parameters are frozen; None if the source does not decide).
        overwritten: patterns of overwritten parameters.
        train_only: patterns of the parameters that are not frozen; empty: all.
    """

    choices: tuple[tuple[str, str, bool | None], ...] = ()
    overwritten: tuple[str, ...] = ()
    train_only: tuple[str, ...] = ()

    def role(self, path: str) -> Role | None:
        """Returns the role of a parameter."""
        if any(re.fullmatch(pattern, path) for pattern in self.overwritten):
            return "overwritten"
        return "frozen" if any(self.decisions(path).values()) else None

    def decisions(self, path: str) -> dict[str, bool]:
        """Returns source -> whether it freezes a parameter, for the sources that decide."""
        found = {
            source: freezes
            for source, pattern, freezes in self.choices
            if freezes is not None and re.fullmatch(pattern, path)
        }
        if self.train_only:
            found["train_only"] = not any(re.fullmatch(pattern, path) for pattern in self.train_only)
        return found

    @property
    def patterns(self) -> list[tuple[str, str]]:
        """All pairs (source, pattern)."""
        pairs = [(source, pattern) for source, pattern, _ in self.choices]
        overwritten = [("Task.overwritten", pattern) for pattern in self.overwritten]
        return [*pairs, *overwritten, *(("train_only", pattern) for pattern in self.train_only)]


def declared_roles(declared: Declared, params: Any, where: Callable[[str], str] = str) -> dict[str, Role]:
    """Returns the roles of the parameters. `where`: the position of a source in messages.

    Raises:
        ConfigError: a pattern matches no parameter, two sources contradict each other, or no parameter is trained.
    """
    paths = [path for path, _ in named_leaves(params)]
    sources = list(dict.fromkeys(source for source, _ in declared.patterns))
    if sources and isinstance(params, optax.LookaheadParams):
        raise ConfigError(
            f"{' and '.join(map(where, sources))}: not for the pair of parameters of optax.lookahead. Keep "
            "constants in the model state: sk.Variables(params, state)."
        )
    roles = {path: role for path in paths if (role := declared.role(path)) is not None}
    for source, pattern in declared.patterns:
        matched = [path for path in paths if re.fullmatch(pattern, path)]
        if not matched:
            raise ConfigError(
                f"{where(source)}: '{pattern}' matches no parameter. The parameters are {', '.join(paths[:8])}. A "
                f"pattern matches a full path.{nearest(pattern, paths)} Fix it, or remove it."
            )
        if (source, pattern, None) in declared.choices and roles.keys() >= {*matched}:
            raise ConfigError(
                f"{where(source)}: '{pattern}' matches only parameters that the optimizer does not train, so it has no "
                "effect. Remove it."
            )
    for path in paths:
        decisions = declared.decisions(path)
        freezing = [where(source) for source, freezes in decisions.items() if freezes]
        training = [where(source) for source, freezes in decisions.items() if not freezes]
        overwriting = ["Task.overwritten"] * (roles.get(path) == "overwritten")
        if freezing and (other := training + overwriting):
            what = "overwritten" if overwriting else "trained"
            raise ConfigError(
                f"parameter '{path}' is frozen by {freezing[0]} and {what} by {other[-1]}. It has one role. Change one "
                "pattern."
            )
    if len(roles) == len(paths):
        raise ConfigError(
            f"{' and '.join(map(where, sources))} match all {len(paths)} parameters. At least one is trained. Remove a "
            "pattern."
        )
    return roles


def roles_in(context: Context, part: Any) -> Roles:
    """Returns the roles of the leaves of a part of the parameters, by its paths. A leaf of a part has the role of the
    parameters with the same shape and path suffix, if they agree."""
    roles, placements = context.options.roles, context.sharding.placements
    if not roles:
        return {}
    shapes = {} if placements is None else placements.shapes
    found: dict[str, Role] = {}
    leaves = named_leaves(part)
    is_whole = [path for path, _ in leaves] == list(shapes)
    for path, leaf in leaves:
        ends = [key for key, shape in shapes.items() if f"/{key}".endswith(f"/{path}") and shape == jnp.shape(leaf)]
        keys = [path] if is_whole else ends
        kinds = {roles.get(key) for key in keys}
        role = kinds.pop() if len(kinds) == 1 else None
        if role is not None:
            found[path] = role
    return found


def check_overwritten(roles: Roles, params: Any) -> None:
    """Raises ConfigError if a leaf of flax's `_overwrite_with_gradient` has no role."""
    for path, _ in named_leaves(params):
        if OVERWRITTEN in path.split("/") and path not in roles:
            raise ConfigError(
                f"parameter '{path}' is overwritten by its gradient (flax's {OVERWRITTEN}), and the optimizer would "
                "update it. Such leaves are declared, with patterns of full paths. Pass "
                f"Task(overwritten=['(.*/)?{OVERWRITTEN}/.*'])."
            )


def select(tree: Any, keep: Callable[[str], bool], empty: Any = None) -> Any:
    """Returns a tree with `empty`, which has no leaves, in place of the leaves with paths that are not kept."""
    return jax.tree.map_with_path(lambda path, x: x if keep(path_name(path)) else empty, tree)


def fill(tree: Any, whole: Any) -> Any:
    """Returns `tree`, a result of `select` from a tree like `whole`, with the missing leaves of `whole`."""
    is_empty: Callable[[Any], bool] = lambda x: x is None or isinstance(x, optax.MaskedNode)
    present = {path_name(path): x for path, x in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_empty)[0]}
    leaf = lambda path, x: x if is_empty(found := present[path_name(path)]) else found
    return jax.tree.map_with_path(leaf, whole)


@functools.lru_cache(maxsize=64)  # programs of one optimizer have equal states: it is static in the train state
def for_trained(
    optimizer: optax.GradientTransformationExtraArgs, declared: Declared
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that updates only the parameters without a role, and stores a state only for them."""
    role_of = declared.role
    kept: Callable[[Any], Any] = lambda tree: select(tree, lambda path: role_of(path) is None, optax.MaskedNode())

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        if "grad" in extra:
            extra["grad"] = kept(extra["grad"])
        if (value_fn := extra.get("value_fn")) is not None:
            extra["value_fn"] = lambda trained: value_fn(fill(trained, params))
        updates, state = optimizer.update(kept(grads), state, None if params is None else kept(params), **extra)
        return fill(updates, jax.tree.map_with_path(_update_of, grads, params)), state

    def _update_of(path: Any, grad: Any, param: Any) -> Any:
        return grad - param if role_of(path_name(path)) == "overwritten" else jnp.zeros_like(grad)

    return optax.GradientTransformationExtraArgs(lambda params: optimizer.init(kept(params)), update)


def unread_gradients(optimizer: optax.GradientTransformationExtraArgs, params: Any, opt_state: Any) -> set[str]:
    """Returns the paths of the parameters with a gradient that changes no result of the optimizer, as under
    `optax.set_to_zero` in `optax.partition`. All arguments but the first are abstract.

    The optimizer is traced only if some of its states are masked.
    """
    is_state: Callable[[Any], bool] = lambda x: isinstance(x, optax.MaskedState | optax.transforms.PartitionState)
    if isinstance(params, optax.LookaheadParams) or not any(
        is_state(x) for x in jax.tree.leaves(opt_state, is_leaf=is_state)
    ):
        return set()

    def update(grads: Any, opt_state: Any, params: Any, value: Any) -> Any:
        value_fn = lambda params: sum((x.sum() for x in jax.tree.leaves(params)), jnp.zeros(()))
        return optimizer.update(grads, opt_state, params, value=value, grad=grads, value_fn=value_fn)

    try:
        jaxpr = jax.make_jaxpr(update)(params, opt_state, params, jax.ShapeDtypeStruct((), jnp.float32))
    except Exception:  # noqa: BLE001 - an optimizer with other arguments: the trace of the step reports errors
        return set()
    return {
        path for (path, _), is_read in zip(named_leaves(params), compat.used_inputs(jaxpr), strict=False) if not is_read
    }
