"""Pytrees as flat lists of (path, leaf). Layouts, checkpoints and messages use these names."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from spmdkit.errors import ConfigError


def path_name(path: tuple[Any, ...]) -> str:
    """Returns a key path as `blocks/0/kernel`: keys, indices and attribute names joined by `/`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Returns `[(path, leaf), ...]` in flattening order; `None` is not a leaf."""
    return [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]


def check_names(tree: Any, what: str) -> None:
    """Raises ConfigError if paths of leaves are not unique names in messages, layouts and files: an empty key, two
    leaves with the same path, `a.b` and `a/b`, or `a` and `a/b`."""
    paths, names = [path for path, _ in named_leaves(tree)], dict[str, str]()
    inner = {path.rsplit("/", depth)[0]: path for path in paths for depth in range(1, path.count("/") + 1)}
    for path in paths:
        name, problem = path.replace("/", "."), ""
        if "" in path.split("/") and not jax.tree_util.all_leaves([tree]):
            problem = f"the leaf `{path}` has an empty part. Every key is a part of the name. Rename the key."
        elif names.get(name) == path:
            problem = f"two leaves have the path `{path}`: keys are joined by `/`. Rename one of the keys."
        elif name in names:
            problem = (
                f"the leaves `{names[name]}` and `{path}` have the same name in a checkpoint, `{name}`. Names must "
                "differ after `/` and `.` are taken as one. Rename one of the keys."
            )
        elif path in inner:
            problem = (
                f"the leaf `{path}` is also the folder of the leaf `{inner[path]}`. A path is one or the other in a "
                "checkpoint. Rename one of the keys."
            )
        if problem:
            raise ConfigError(f"{what}: {problem}")
        names[name] = path


def is_key(x: Any) -> bool:
    """Returns whether a (possibly abstract) array has typed random keys, which numpy cannot represent."""
    return hasattr(x, "dtype") and bool(jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key))


def canonical_dtype(dtype: Any) -> Any:
    """Returns the dtype that JAX uses for `dtype` (64 bits may become 32); typed keys are unchanged."""
    return jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)


def common_dtype(*dtypes: Any) -> Any:
    """Returns the dtype to which JAX promotes the dtypes, even if the user has disabled implicit promotion."""
    with jax.numpy_dtype_promotion("standard"):
        return functools.reduce(jax.numpy.promote_types, dtypes)


def leaf_bytes(leaf: Any) -> int:
    """Returns the bytes of a (possibly abstract) array; for typed keys the bytes of their data."""
    return int(np.prod(leaf.shape, dtype=np.int64)) * int(canonical_dtype(leaf.dtype).itemsize)


def tree_bytes(tree: Any) -> int:
    """Returns the total bytes of all leaves (global, not per device)."""
    return sum(leaf_bytes(leaf) for leaf in jax.tree.leaves(tree))


def abstract(tree: Any) -> Any:
    """Returns the same tree with each array as a `jax.ShapeDtypeStruct`."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), canonical_dtype(x.dtype)), tree)


def describe(leaf: Any) -> str:
    """Returns `float32[64,128]` for an array, and the name of the Python type for any other object."""
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        return type(leaf).__name__
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def whole_on_host(x: Any) -> np.ndarray:
    """Returns an array of any sharding as a numpy array; typed keys as their data. All processes call it."""
    x = jax.random.key_data(x) if is_key(x) else x
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        if not x.is_fully_replicated:
            from jax.experimental import multihost_utils

            return np.asarray(multihost_utils.process_allgather(x, tiled=True))
        x = x.addressable_data(0)
    return np.asarray(x)


def first_difference(before: Any, after: Any) -> str | None:
    """Returns as text the first leaf that differs in path, shape or dtype between two trees, or None."""
    old, new = ({path: describe(_canonical(leaf)) for path, leaf in named_leaves(tree)} for tree in (before, after))
    for path in [*old, *(p for p in new if p not in old)]:
        if old.get(path) != new.get(path):
            return f"'{path}' was {old.get(path, 'absent')} and becomes {new.get(path, 'absent')}"
    return None


def _canonical(leaf: Any) -> Any:
    return abstract(leaf) if hasattr(leaf, "dtype") else leaf
