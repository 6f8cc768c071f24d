"""A state as `{path: array}` and as the nested dict on disk, and the differences between two states.

The tree structure is not saved, because its node types would bind a checkpoint to the code that wrote it. Leaves are
saved by path, one dict level per `/`, and a restore inserts them into the current treedef. `None`, empty tuples and
empty dicts are restored from that treedef.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from spmdkit.errors import ConfigError
from spmdkit.foundation.trees import check_names, named_leaves, tree_bytes

LeafTable = dict[str, tuple[tuple[int, ...], str]]
"""Path of a leaf -> (global shape, name of its dtype)."""


@dataclasses.dataclass(frozen=True)
class StateStructure:
    """The structure shared by all states of one run. `num_bytes`: the size of all leaves."""

    treedef: jax.tree_util.PyTreeDef
    kinds: list[tuple[Any, Any]]
    table: LeafTable
    num_bytes: int


def structure_of(state: Any, known: StateStructure | None = None) -> tuple[StateStructure, list[Any]]:
    """Returns (structure, leaves) of a state; `known` itself if the state has that structure.

    Names and checks cost about 20 us per leaf, and `save` blocks the training loop: only the first state is checked.

    Raises:
        ConfigError: as `leaf_table`.
    """
    leaves, treedef = jax.tree.flatten(state)
    kinds = [(getattr(leaf, "shape", None), getattr(leaf, "dtype", None)) for leaf in leaves]
    if known is not None and known.kinds == kinds and known.treedef == treedef:
        return known, leaves
    return StateStructure(treedef, kinds, leaf_table(state), tree_bytes(state)), leaves


def leaf_table(state: Any) -> LeafTable:
    """Returns `{path: (shape, dtype name)}` of a state of arrays or of abstract arrays, in flattening order.

    Raises:
        ConfigError: a leaf is not a jax array, or names of leaves are empty or collide.
    """
    check_names(state, "the state")
    table: LeafTable = {}
    for path, leaf in named_leaves(state):
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            raise ConfigError(
                f"the state's leaf `{path}` is a {type(leaf).__name__}. Every leaf of a state that is saved is a "
                "jax.Array. Make it one with jnp.asarray, or keep it out of the state."
            )
        table[path] = (tuple(leaf.shape), str(leaf.dtype))
    return table


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
    """Returns one line per leaf that differs between a checkpoint and the requested state; [] if there is none."""
    text: Callable[[Any], str] = lambda leaf: f"{leaf[1]}[{','.join(map(str, leaf[0]))}]"
    return [
        *(f"{path}: not in the checkpoint, requested {text(x)}" for path, x in requested.items() if path not in saved),
        *(
            f"{path}: saved {text(saved[path])}, requested {text(x)}"
            for path, x in requested.items()
            if path in saved and saved[path] != x
        ),
        *(f"{path}: saved {text(x)}, not requested" for path, x in saved.items() if path not in requested),
    ]


SEAMS = {"pick": pick}
"""`verify` replaces these functions (verify/mutations.py)."""
