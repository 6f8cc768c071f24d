"""Groups train separately; every `every` steps an outer optimizer uses the mean of their moves as a gradient.

    w_g <- w_g - inner(g_g)              in every step, nothing sent between groups
    D = a - mean_h w_h                   after `every` steps: the outer gradient; a is the last synchronized copy
    a <- a - outer(D),  w_g <- a         Nesterov momentum by default

Each group has its own inner optimizer state. The outer gradients may be compressed: `reducer: int8` rounds them. There
is no error feedback, so the rounding error is lost. It is small relative to the mean of many steps only for a reducer
with several bits per value.

Streaming: `fragments: P` splits the tree of parameters, leaf by leaf, into P parts of about the same bytes. Each
synchronizes every `every` steps, at different steps, so that one step sends at most the largest fragment. With
`overlap: t` the outer gradient is sent during the compute of the next step, in one program with it, and is applied t
steps after it was computed. Groups then keep the fraction `alpha` of their own parameters: w_g <- alpha w_g + (1 -
alpha) a.

With `start: s` the first s steps are synchronous training, and the outer parameters start from their result: DiLoCo's
authors start from a trained model. From a random start with few steps in a round the loss is much higher.

Class: up to `start` equal to synchronous training, for every optimizer. With `optimizer: {name: sgd, learning_rate:
1.0}` equal to `local_sgd`, and so with `every: 1` to synchronous training for sgd, momentum, Nesterov and decoupled
weight decay without clipping. Otherwise another method, which converges. Tune the outer learning rate and momentum: 0.7
and 0.9 are the paper's, for hundreds of steps between synchronizations; with 16 steps 1.0 and 0.5 were best
(docs/benchmarks.md).
Use it where links between groups are slow and training is long: between data centers. Not where they are fast.
Memory: `a` in float32 and the outer optimizer's state, once, sharded as the parameters are; with `overlap` the outer
gradient too.
Forward: none between groups after `start`. At a synchronization: one all-reduce of the outer gradient over the groups,
or the collectives of the reducer.
Wire: `2 (G-1)/G * 4 bytes` per parameter and device every `every` steps, or `wire` of the reducer; at most that of a
fragment in one step.
Source: Douillard et al., "DiLoCo: Distributed low-communication training of language models" (2023, arXiv 2311.08105),
algorithm 1; Douillard et al., "Streaming DiLoCo with overlapping communication" (2025, arXiv 2501.18512), algorithm 2,
with layers as fragments; Reddi et al., "Adaptive federated optimization" (2020), algorithm 1, for outer optimizers
other than sgd.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spmdkit.communication.sync.base import Agreement, Mean, Sync
from spmdkit.errors import ConfigError
from spmdkit.foundation import plugins
from spmdkit.foundation.trees import common_dtype

NESTEROV = {"name": "sgd", "learning_rate": 0.7, "momentum": 0.9, "nesterov": True}


def make(
    every: int,
    optimizer: Mapping[str, Any] | None = None,
    reducer: str | Mapping[str, Any] | None = None,
    fragments: int = 1,
    overlap: int = 0,
    alpha: float | None = None,
    start: int = 0,
) -> Sync:
    """Returns the sync.

    Args:
        optimizer: the outer one, as `config.optimizer`; None: Nesterov momentum, `NESTEROV`.
        reducer: for the outer gradients, as `config.reducer`; None: the exact mean.
        fragments: parts of the parameters that synchronize at different steps.
        overlap: steps from computing an outer gradient to applying it; 0: immediately.
        alpha: the fraction of its own parameters that a group keeps at a synchronization; None: 0.5 with an overlap,
            otherwise 0.
        start: steps at the start with synchronous training, as in `post_local`.

    Raises:
        ConfigError: a number is out of its range, or there is no such reducer.
    """
    _check(every, fragments, overlap, alpha, start)
    if reducer is not None and not plugins.is_reference(reducer) and (wrong := plugins.problem("reducers", reducer)):
        raise ConfigError(f"diloco.reducer: {wrong}")
    own = (0.5 if overlap else 0.0) if alpha is None else float(alpha)

    def init(params: Any, outer: optax.GradientTransformation) -> Any:
        agreed = jax.tree.map(lambda x: jnp.asarray(x, common_dtype(x.dtype, jnp.float32)), params)
        sync_state = {
            "agreed": agreed,
            "outer": tuple(outer.init(fragment(agreed, fragments, i)) for i in range(fragments)),
        }
        return sync_state | {"taken": jax.tree.map(jnp.zeros_like, agreed)} if overlap else sync_state

    def agree(
        params: Any, sync_state: Any, mean: Mean, turn: int = 0, *, outer: optax.GradientTransformation
    ) -> tuple[Any, Any]:
        number = turn % fragments
        agreed, mine = (fragment(tree, fragments, number) for tree in (sync_state["agreed"], params))
        if turn < fragments:
            gradient = mean(jax.tree.map(lambda a, p: a - p.astype(a.dtype), agreed, mine))
            if overlap:
                return params, sync_state | {"taken": with_fragment(sync_state["taken"], gradient)}
        else:
            gradient = fragment(sync_state["taken"], fragments, number)
        updates, state = outer.update(gradient, sync_state["outer"][number], agreed)
        new = optax.apply_updates(agreed, updates)
        mixed = jax.tree.map(lambda p, a: own * p.astype(a.dtype) + (1 - own) * a, mine, new) if own else new
        states = tuple(state if i == number else other for i, other in enumerate(sync_state["outer"]))
        return with_fragment(params, mixed), sync_state | {
            "agreed": with_fragment(sync_state["agreed"], new),
            "outer": states,
        }

    return Sync(
        every,
        init,
        agree,
        view=lambda params, sync_state, mean: mean(params),
        outer_optimizer=NESTEROV if optimizer is None else optimizer,
        reducer=reducer,
        schedule=_schedule(every, fragments, overlap, start // every * every),
        start=start,
        description=_description(start, fragments),
    )


def _check(every: Any, fragments: Any, overlap: Any, alpha: Any, start: Any) -> None:
    whole = lambda x: isinstance(x, int) and not isinstance(x, bool)
    if not whole(every) or every < 1:
        raise ConfigError(
            f"diloco.every is {every!r}. It is the number of steps between two synchronizations. Write every: 100."
        )
    if not whole(fragments) or not 1 <= fragments <= every:
        raise ConfigError(
            f"diloco.fragments is {fragments!r}, with every: {every}. Fragments synchronize after different steps, so "
            f"there are 1 to {every}. Write fragments: {min(4, every)}."
        )
    if not whole(overlap) or not 0 <= overlap < every:
        raise ConfigError(
            f"diloco.overlap is {overlap!r}, with every: {every}. An outer gradient is applied before the next one of "
            f"its fragment is sent, 0 to {every - 1} steps later. Write overlap: {min(1, every - 1)}."
        )
    if not whole(start) or start < 0:
        raise ConfigError(
            f"diloco.start is {start!r}. It is the number of synchronous steps at the start. Write start: 500."
        )
    is_number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    if alpha is not None and not (is_number and 0 <= alpha < 1):
        raise ConfigError(
            f"diloco.alpha is {alpha!r}. It is the fraction of its own parameters that a group keeps, from 0 to below "
            "1. Write alpha: 0.5."
        )


def _description(start: int, fragments: int) -> str:
    found = [f"to step {start} all replicas are synchronous in every step"] * bool(start)
    return ", ".join([*found, *[f"{fragments} fragments at different steps"] * (fragments > 1)])


# ---- fragments


def _schedule(every: int, fragments: int, overlap: int, before: int) -> tuple[Agreement, ...]:
    """Returns when each fragment sends, spread evenly over a round; with an overlap also when each is applied.
    `before`: steps
    before the first round."""
    if fragments == 1 and not overlap:
        return ()
    first = [before + every + i * every // fragments for i in range(fragments)]
    of = [f" {i + 1} of {fragments}" if fragments > 1 else "" for i in range(fragments)]
    if not overlap:
        return tuple(Agreement(f"agreement{name}", every, step) for name, step in zip(of, first, strict=True))
    sends = [Agreement(f"send{name}", every, step, overlapped=True) for name, step in zip(of, first, strict=True)]
    return (*sends, *(Agreement(f"apply{name}", every, step + overlap) for name, step in zip(of, first, strict=True)))


def fragments_of(sizes: Sequence[int], num: int) -> list[int]:
    """Returns the fragment of each leaf: the largest leaf first, each to the lightest fragment.

    Raises:
        ConfigError: there are fewer leaves than fragments.
    """
    if len(sizes) < num:
        raise ConfigError(
            f"diloco.fragments is {num}, and there are {len(sizes)} arrays of parameters. A fragment consists of "
            f"whole arrays. Write fragments: {len(sizes)}, or store layers in separate arrays."
        )
    owner, filled = [0] * len(sizes), [0] * num
    for leaf in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        lightest = min(range(num), key=lambda i: filled[i])
        owner[leaf], filled[lightest] = lightest, filled[lightest] + max(1, sizes[leaf])
    return owner


def fragment(tree: Any, num: int, number: int) -> Any:
    """Returns a tree like the parameters, one copy or [groups, ...], with None for the leaves of other fragments."""
    leaves, structure = jax.tree.flatten(tree)
    owner = fragments_of([x.size for x in leaves], num)
    return jax.tree.unflatten(structure, [x if i == number else None for x, i in zip(leaves, owner, strict=True)])


def with_fragment(tree: Any, fragment: Any) -> Any:
    """Returns the tree with the leaves of a fragment replaced."""
    return jax.tree.map(lambda x, old: old if x is None else x, fragment, tree, is_leaf=lambda x: x is None)
