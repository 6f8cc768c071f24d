"""Pytrees as flat lists of (path, leaf). Layouts, checkpoints and messages use these names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from spmdkit.errors import ConfigError
from spmdkit.foundation.formatting import format_bytes


def path_name(path: tuple[Any, ...]) -> str:
    """Returns a key path as `blocks/0/kernel`: keys, indices and attribute names joined by `/`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Returns `[(path, leaf), ...]` in flattening order; `None` is not a leaf."""
    return [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]


def summary(tree: Any, most: int = 3) -> str:
    """Returns one line about a tree, for a repr: `12 arrays, 1.2 MiB: w float32[4,8], b float32[8], ...`."""
    named = [(name, leaf) for name, leaf in named_leaves(tree) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]
    if not named:
        return type(tree).__name__ if jax.tree.leaves(tree) else "no arrays"
    first = ", ".join(f"{name} {describe(leaf)}".strip() for name, leaf in named[:most])
    size = format_bytes(sum(leaf_bytes(leaf) for _, leaf in named))
    return f"{len(named)} array{'s' * (len(named) > 1)}, {size}: {first}{', ...' * (len(named) > most)}"[:160]


def replace_leaves(tree: Any, name: str, leaves: Mapping[str, Any]) -> Any:
    """Returns the tree with the leaves that are in `leaves` by their path below `name`."""
    under = (jax.tree_util.GetAttrKey(name),)
    return jax.tree.map_with_path(lambda path, x: leaves.get(path_name((*under, *path)), x), tree)


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


def is_narrow(dtype: Any) -> bool:
    """Returns whether JAX never promotes a dtype implicitly: floats of 8 or fewer bits, integers of fewer than 8."""
    is_a = functools.partial(jax.numpy.issubdtype, dtype)
    return (is_a(np.floating) and dtype_bits(dtype) <= 8) or (is_a(np.integer) and dtype_bits(dtype) < 8)


def is_wide_float(dtype: Any) -> bool:
    """Returns whether values of a dtype can be averaged and trained: floats of more than 8 bits."""
    return bool(jax.numpy.issubdtype(dtype, np.inexact)) and not is_narrow(dtype)


def common_dtype(*dtypes: Any) -> Any:
    """Returns the dtype to which JAX promotes the dtypes, even if the user has disabled implicit promotion. With others
    a narrow dtype counts as int8, or as the widest of the other floats (float32 without any)."""
    if len({jax.numpy.dtype(dtype) for dtype in dtypes}) == 1:
        return jax.numpy.dtype(dtypes[0])
    wide = [dtype for dtype in dtypes if not is_narrow(dtype)]
    is_float: Callable[[Any], bool] = lambda dtype: bool(jax.numpy.issubdtype(dtype, np.inexact))
    for dtype in filter(is_narrow, dtypes):
        if not is_float(dtype):
            wide.append(np.dtype(np.int8))
        elif not any(map(is_float, wide)):
            wide.append(np.dtype(np.float32))
    with jax.numpy_dtype_promotion("standard"):
        return functools.reduce(jax.numpy.promote_types, wide)


def dtype_bits(dtype: Any) -> int:
    """Returns the bits of an element in a program: numpy uses 8 for 4; for typed keys the bits of their data."""
    dtype = canonical_dtype(dtype)
    is_extended = jax.numpy.issubdtype(dtype, jax.dtypes.extended)
    return int(8 * dtype.itemsize if is_extended else jax.dtypes.itemsize_bits(dtype))


def leaf_bytes(leaf: Any) -> int:
    """Returns the bytes of a (possibly abstract) array in a program; for typed keys the bytes of their data.

    XLA packs int4, int2 and float4 (memory analysis of CPU and TPU programs). A CPU device holds a byte per element.
    """
    return -(-int(np.prod(leaf.shape, dtype=np.int64)) * dtype_bits(leaf.dtype) // 8)


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
