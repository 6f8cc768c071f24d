"""A state as `{path: array}`, as the nested dict that lies on disk, and what differs between two of them.

The tree itself is not saved: its node types (namedtuples of optax, equinox modules, nnx states) would tie a checkpoint
to the code that wrote it. Saved are the leaves under their paths, one dict level per `/`; restoring requests the same
paths and puts the arrays into the current treedef. `None`, empty tuples and empty dicts hold no leaf and come back
from that treedef.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax

from spmdkit.errors import ConfigError
from spmdkit.foundation.trees import named_leaves

LeafTable = dict[str, tuple[tuple[int, ...], str]]
"""Path of a leaf -> (global shape, name of its dtype)."""

SHOWN_DIFFERENCES = 5


@dataclasses.dataclass(frozen=True)
class StateStructure:
    """What all states of one run share: structure, paths, shapes and dtypes. `num_bytes` is that of all leaves."""

    treedef: jax.tree_util.PyTreeDef
    kinds: list[tuple[Any, Any]]
    table: LeafTable
    num_bytes: int


def structure_of(state: Any, known: StateStructure | None = None) -> tuple[StateStructure, list[Any]]:
    """Returns (form, leaves) of a state; `known` itself if the state has that form.

    Naming and checking costs some 20 us a leaf, and `save` blocks the training loop: only the first state pays it.

    Raises:
        ConfigError: as `leaf_table`.
    """
    leaves, treedef = jax.tree.flatten(state)
    kinds = [(getattr(leaf, "shape", None), getattr(leaf, "dtype", None)) for leaf in leaves]
    if known is not None and known.kinds == kinds and known.treedef == treedef:
        return known, leaves
    return StateStructure(treedef, kinds, leaf_table(state), table_bytes(state)), leaves


def leaf_table(state: Any) -> LeafTable:
    """Returns `{path: (shape, dtype name)}` of a state of arrays or of abstract arrays, in flattening order.

    Raises:
        ConfigError: a leaf is no jax array, or two leaves have the same path (a dict key with a `/` or `.` in it).
    """
    table: LeafTable = {}
    for path, leaf in named_leaves(state):
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            raise ConfigError(
                f"the state's leaf `{path}` is a {type(leaf).__name__}. Every leaf of a state that is saved is a "
                "jax.Array. Make it one with jnp.asarray, or keep it out of the state."
            )
        if path in table:
            raise ConfigError(
                f"the state has two leaves with the path `{path}`. A checkpoint knows leaves by their path, keys "
                "joined by `/`. Rename one of the keys."
            )
        table[path] = (tuple(leaf.shape), str(leaf.dtype))
    _check_names(table)
    return table


def _check_names(table: LeafTable) -> None:
    """Raises ConfigError where paths meet on disk: `a.b` and `a/b` are one name, and `a` cannot also be a folder."""
    dotted: dict[str, str] = {}
    for path in table:
        name = path.replace("/", ".")
        if name in dotted:
            raise ConfigError(
                f"the state's leaves `{dotted[name]}` and `{path}` have the same name in a checkpoint, `{name}`. "
                "Names must differ after `/` and `.` are taken as one. Rename one of the keys."
            )
        dotted[name] = path
    folders = {path.rsplit("/", depth)[0] for path in table for depth in range(1, path.count("/") + 1)}
    for path in table:
        if path in folders:
            inner = next(other for other in table if other.startswith(path + "/"))
            raise ConfigError(
                f"the state's leaf `{path}` is also the folder of the leaf `{inner}`. A path is one or the other in a "
                "checkpoint. Rename one of the keys."
            )


def table_bytes(state: Any) -> int:
    """Returns the bytes of all leaves together, global, typed keys included."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `{"a/b": x}` as `{"a": {"b": x}}`."""
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *folders, name = path.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = leaf
    return tree


def pick(tree: Mapping[str, Any], path: str) -> Any:
    """Returns the leaf at `path` of a nested dict."""
    node: Any = tree
    for name in path.split("/"):
        node = node[name]
    return node


def differences(saved: LeafTable, requested: LeafTable) -> list[str]:
    """Returns one line per leaf that differs between a checkpoint and the requested state; empty when they match."""
    lines = []
    for path, leaf in requested.items():
        if path not in saved:
            lines.append(f"{path}: not in the checkpoint, requested {_describe(leaf)}")
        elif saved[path] != leaf:
            lines.append(f"{path}: saved {_describe(saved[path])}, requested {_describe(leaf)}")
    lines.extend(
        f"{path}: saved {_describe(leaf)}, not requested" for path, leaf in saved.items() if path not in requested
    )
    return lines


def _describe(leaf: tuple[tuple[int, ...], str]) -> str:
    shape, dtype = leaf
    return f"{dtype}[{','.join(map(str, shape))}]"


SEAMS = {"pick": pick}
"""What `verify` replaces (verify/mutations.py)."""
