"""Groups train separately. Every `every` steps an outer optimizer uses the mean change of their parameters as gradient.

    w_g <- w_g - inner(g_g)              in every step, nothing sent between groups
    D = a - mean_h w_h                   after `every` steps: the outer gradient; a is the last synchronized copy
    a <- a - outer(D),  w_g <- a         Nesterov momentum by default

Each group has a separate inner optimizer state. The outer gradients may be compressed: `reducer: int8` rounds them.
There is no error feedback, so use a reducer with several bits per value.

Streaming: `fragments: P` splits the parameter tree by leaf into P fragments of about equal bytes, which synchronize at
different steps, so one step sends at most the largest fragment. With `overlap: t` the outer gradient is sent during the
compute of the next step, in the same program, and is applied t steps after it was computed. Groups then retain the
fraction `alpha` of their parameters: w_g <- alpha w_g + (1 - alpha) a.

Class: equal to synchronous training up to `start`, for every optimizer. With `optimizer: {name: sgd, learning_rate:
1.0}` equal to `local_sgd`. Otherwise a different method, which converges. Tune the outer learning rate and momentum:
the paper uses 0.7 and 0.9 for hundreds of steps between synchronizations; with 16 steps 1.0 and 0.5 were best
(docs/benchmarks.md). The authors start from a trained model; for a random initialization set `start`.
Use it if links between groups are slow and training is long, as between data centers. Do not use it on fast links.
Memory: one copy of `a` in float32 and of the outer optimizer's state, sharded like the parameters; with `overlap` also
the outer gradient.
Wire: at a synchronization `2 (G-1)/G * 4 bytes` per parameter and device (one all-reduce), or `wire` of the reducer;
otherwise nothing between groups after `start`.
Source: Douillard et al., "DiLoCo: Distributed low-communication training of language models" (2023, arXiv 2311.08105),
algorithm 1; Douillard et al., "Streaming DiLoCo with overlapping communication" (2025, arXiv 2501.18512), algorithm 2;
Reddi et al., "Adaptive federated optimization" (2020), algorithm 1, for other outer optimizers.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spmdkit.communication.options import check_option, is_number, is_whole
from spmdkit.communication.sync.base import Agreement, Mean, Sync
from spmdkit.communication.sync.post_local import check_start, describe_start
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
        optimizer: the outer optimizer, in the form of `config.optimizer`; None: Nesterov momentum, `NESTEROV`.
        reducer: the reducer of the outer gradients, in the form of `config.reducer`; None: the exact mean.
        fragments: number of parts of the parameters that synchronize at different steps.
        overlap: steps between computing an outer gradient and applying it; 0: it is applied immediately.
        alpha: fraction of its parameters that a group retains at a synchronization; None: 0.5 with an overlap,
            otherwise 0.
        start: number of initial steps with synchronous training, as in `post_local`.
    """
    _check(every, fragments, overlap, alpha)
    check_start("diloco", start)
    if reducer is not None and not plugins.is_reference(reducer) and (wrong := plugins.problem("reducers", reducer)):
        raise ConfigError(f"diloco.reducer: {wrong}")
    retained = (0.5 if overlap else 0.0) if alpha is None else float(alpha)
    details = [f"{fragments} fragments at different steps"] if fragments > 1 else []
    return Sync(
        every,
        functools.partial(_init, fragments, overlap),
        functools.partial(_agree, fragments, overlap, retained),
        view=lambda params, sync_state, mean: mean(params),
        outer_optimizer=NESTEROV if optimizer is None else optimizer,
        reducer=reducer,
        schedule=_schedule(every, fragments, overlap, start // every * every),
        start=start,
        description=", ".join([describe_start(start), *details] if start else details),
    )


def _check(every: int, fragments: int, overlap: int, alpha: float | None) -> None:
    rule = "It is the number of steps between two synchronizations. Write every: 100."
    check_option(is_whole(every, 1), "diloco.every", every, rule)
    rule = (
        f"Fragments synchronize after different steps, so with every: {every} there are 1 to {every}. "
        f"Write fragments: {min(4, every)}."
    )
    check_option(is_whole(fragments, 1) and fragments <= every, "diloco.fragments", fragments, rule)
    rule = (
        f"With every: {every} an outer gradient is applied 0 to {every - 1} steps later, before the next one of its "
        f"fragment is sent. Write overlap: {min(1, every - 1)}."
    )
    check_option(is_whole(overlap, 0) and overlap < every, "diloco.overlap", overlap, rule)
    rule = "It is the fraction of its own parameters that a group keeps, from 0 to below 1. Write alpha: 0.5."
    check_option(alpha is None or (is_number(alpha) and 0 <= alpha < 1), "diloco.alpha", alpha, rule)


def _init(fragments: int, overlap: int, params: Any, outer: optax.GradientTransformation) -> Any:
    agreed = jax.tree.map(lambda x: jnp.asarray(x, common_dtype(x.dtype, jnp.float32)), params)
    states = tuple(outer.init(fragment(agreed, fragments, i)) for i in range(fragments))
    pending = {"taken": jax.tree.map(jnp.zeros_like, agreed)} if overlap else {}
    return {"agreed": agreed, "outer": states} | pending


def _agree(
    fragments: int,
    overlap: int,
    alpha: float,
    params: Any,
    sync_state: Any,
    mean: Mean,
    turn: int = 0,
    *,
    outer: optax.GradientTransformation,
) -> tuple[Any, Any]:
    number = turn % fragments
    agreed, local = (fragment(tree, fragments, number) for tree in (sync_state["agreed"], params))
    if turn < fragments:
        gradient = mean(jax.tree.map(lambda a, p: a - p.astype(a.dtype), agreed, local))
        if overlap:
            return params, sync_state | {"taken": replace_fragment(sync_state["taken"], gradient)}
    else:
        gradient = fragment(sync_state["taken"], fragments, number)
    updates, state = outer.update(gradient, sync_state["outer"][number], agreed)
    new = optax.apply_updates(agreed, updates)
    mixed = jax.tree.map(lambda p, a: alpha * p.astype(a.dtype) + (1 - alpha) * a, local, new) if alpha else new
    states = tuple(state if i == number else other for i, other in enumerate(sync_state["outer"]))
    return replace_fragment(params, mixed), {
        **sync_state,
        "agreed": replace_fragment(sync_state["agreed"], new),
        "outer": states,
    }


# ---- fragments


def _schedule(every: int, fragments: int, overlap: int, before: int) -> tuple[Agreement, ...]:
    """Returns the programs that send each fragment, spread evenly over a round, and with an overlap those that apply
    it. `before` is the number of steps before the first round."""
    if fragments == 1 and not overlap:
        return ()
    first = [before + every + i * every // fragments for i in range(fragments)]
    at = [(f" {i + 1} of {fragments}" if fragments > 1 else "", step) for i, step in enumerate(first)]
    if not overlap:
        return tuple(Agreement(f"agreement{name}", every, step) for name, step in at)
    sends = [Agreement(f"send{name}", every, step, overlapped=True) for name, step in at]
    return (*sends, *(Agreement(f"apply{name}", every, step + overlap) for name, step in at))


def fragments_of(sizes: Sequence[int], num: int) -> list[int]:
    """Returns the fragment of each leaf. Leaves are assigned by decreasing size, each to the smallest fragment."""
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


def replace_fragment(tree: Any, fragment: Any) -> Any:
    """Returns the tree with the leaves of a fragment replaced."""
    return jax.tree.map(lambda x, old: old if x is None else x, fragment, tree, is_leaf=lambda x: x is None)
