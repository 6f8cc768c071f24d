"""The assignment of parameter leaves, and their optimizer state, to servers.

`greedy` assigns the largest remaining leaf to the server with the fewest bytes (TensorFlow 1's
`GreedyLoadBalancingStrategy`), `round_robin` assigns the leaves cyclically (`replica_device_setter`'s default), and
`rules` map path patterns to servers. Leaves without a rule are assigned greedily.

A server updates only its leaves. An optimizer in which the update of one leaf depends on other leaves (a global norm)
is rejected with several servers. Its jaxpr is checked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.interpreters import partial_eval

from spmdkit.errors import ConfigError
from spmdkit.foundation.trees import leaf_bytes, named_leaves

Arrays = dict[str, Any]
"""Path of a leaf -> its array. Messages contain trees in this form."""


def owners(params: Any, servers: int, partition: str | Sequence[tuple[str, int]]) -> dict[str, int]:
    """Returns path -> server for each leaf of the (abstract) parameters. Raises ConfigError if a rule matches no leaf,
    or a server has no leaf."""
    leaves = named_leaves(params)
    if len(leaves) < servers:
        raise ConfigError(
            f"sync: parameter_server has servers: {servers}, and the parameters have {len(leaves)} leaves. A leaf is "
            f"on one server. Try servers: {len(leaves)}."
        )
    if partition == "round_robin":
        return {path: i % servers for i, (path, _) in enumerate(leaves)}
    assigned = _by_rules([path for path, _ in leaves], () if isinstance(partition, str) else partition)
    load = [0] * servers
    for path, leaf in leaves:
        if path in assigned:
            load[assigned[path]] += leaf_bytes(leaf)
    for path, leaf in sorted(leaves, key=lambda pair: -leaf_bytes(pair[1])):
        if path not in assigned:
            assigned[path] = min(range(servers), key=lambda server: load[server])
            load[assigned[path]] += leaf_bytes(leaf)
    if idle := sorted(set(range(servers)) - set(assigned.values())):
        raise ConfigError(
            f"sync: parameter_server.partition gives server {idle[0]} of {servers} no leaf. Every server holds a "
            "leaf. Change the rules, or lower servers."
        )
    return {path: assigned[path] for path, _ in leaves}


def _by_rules(paths: Sequence[str], rules: Sequence[tuple[str, int]]) -> dict[str, int]:
    assigned: dict[str, int] = {}
    for pattern, server in rules:
        claimed = [path for path in paths if re.fullmatch(pattern, path)]
        if not claimed:
            raise ConfigError(
                f"sync: parameter_server.partition: pattern '{pattern}' matches none of the {len(paths)} leaves "
                f"({', '.join(paths[:6])}). A pattern has to match a whole path. Fix it, or remove it."
            )
        for path in claimed:
            assigned.setdefault(path, server)
    return assigned


def shard(tree: Any, owned: Mapping[str, int], server: int) -> Any:
    """Returns a tree like the parameters, with None for the leaves of other servers. JAX does not count None as a
    leaf."""
    leaves, structure = jax.tree.flatten(tree)
    shards = [x if owned[path] == server else None for (path, _), x in zip(named_leaves(tree), leaves, strict=True)]
    return jax.tree.unflatten(structure, shards)


def to_arrays(tree: Any) -> Arrays:
    """Returns path -> leaf."""
    return dict(named_leaves(tree))


def to_tree(like: Any, arrays: Mapping[str, Any]) -> Any:
    """Returns a tree like `like` with the leaves of `arrays`, which may contain more paths."""
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[path] for path, _ in named_leaves(like)])


def joined(like: Any, shards: Sequence[Mapping[str, Any]]) -> Any:
    """Returns the full tree from the parts of the servers. A leaf on several servers (a count of updates) is from the
    first."""
    every: dict[str, Any] = {}
    for arrays in shards:
        every = {**arrays, **every}
    return to_tree(like, every)


def check_separable(optimizer: Any, params: Any, owned: Mapping[str, int]) -> None:
    """Traces the optimizer to check that each server can update its leaves alone. Raises ConfigError if the optimizer
    cannot be initialized for a part of the tree, needs more than a gradient and the loss, or uses leaves of other
    servers."""
    shapes = params
    params = jax.eval_shape(lambda: jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), shapes))
    try:
        state = jax.eval_shape(optimizer.init, params)
        loss = jax.ShapeDtypeStruct((), "float32")
        update = lambda g, s, p, loss: optimizer.update(g, s, p, value=loss)
        jaxpr, out = jax.make_jaxpr(update, return_shape=True)(params, state, params, loss)
    except TypeError as error:
        raise ConfigError(
            "sync: parameter_server: a server cannot use this optimizer. It has a gradient, the parameters and the "
            f"loss ({error}), and cannot evaluate the loss again. Use another optimizer, or sync: every_step."
        ) from error
    servers = sorted(set(owned.values()))
    if len(servers) == 1:
        return
    inputs = [path for tree in (params, state, params) for path, _ in named_leaves(tree)]
    holders = [holder_of(path, owned) for path in inputs] + [None]
    results = [holder_of(path, owned) for tree in out for path, _ in named_leaves(tree)]
    for server in servers:
        try:
            part = jax.eval_shape(optimizer.init, shard(params, owned, server))
        except Exception as error:
            raise _inseparable(
                f"it cannot be initialized for a part of the parameters ({type(error).__name__}: {error})"[:300]
            ) from error
        if missing := [path for path, _ in named_leaves(part) if path not in dict(named_leaves(state))]:
            raise _inseparable(
                f"its state for a part of the parameters has {missing[0]}, which that for all parameters does not have"
            )
        used = partial_eval.dce_jaxpr(jaxpr.jaxpr, [holder == server for holder in results])[1]
        for path, holder, reads in zip([*inputs, "loss"], holders, used, strict=True):
            if reads and holder not in (None, server):
                raise _inseparable(
                    f"the update of a leaf of server {server} uses '{path}', which server {holder} holds"
                )


def holder_of(path: str, owned: Mapping[str, int]) -> int | None:
    """Returns the server of a parameter, or of a leaf of the optimizer state that follows one; otherwise None."""
    parts = path.split("/")
    return next((owned[end] for i in range(len(parts)) if (end := "/".join(parts[i:])) in owned), None)


def _inseparable(why: str) -> ConfigError:
    return ConfigError(
        f"sync: parameter_server with several servers: the optimizer needs all parameters: {why}. A server has its "
        "own leaves only. Use servers: 1, or an optimizer that updates each leaf independently; clip_norm clips a "
        "global norm, on the workers."
    )
