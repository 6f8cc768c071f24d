"""Several evaluation sets: a mapping of data that each have the structure of the training data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from spmdkit.data.per_process import PerProcess
from spmdkit.data.stream_reader import open_data
from spmdkit.errors import ConfigError


class EvaluationSets(dict[str, Any]):
    """Several evaluation sets, by name."""


def evaluation_sets(eval_data: Any, train_data: Any) -> Any:
    """Returns `eval_data`, as `EvaluationSets` if it is several sets.

    A mapping with the structure of `train_data` is one set. A mapping of values that each have this structure, or
    without `train_data` a mapping of mappings or sources, is several. Streams among the data are open.

    Raises:
        ConfigError: it is a list of sets; only some values have the structure of `train_data`; the name of a set is
            empty or has a slash.
    """
    if isinstance(eval_data, list) and eval_data and train_data is not None:
        _refuse_list_of_sets(eval_data[0], train_data)
    if not isinstance(eval_data, Mapping) or not eval_data:
        return eval_data
    if train_data is None:
        if any(_is_array(x) for x in eval_data.values()):
            return eval_data
    else:
        wanted = _structure(train_data, "train_data")
        if all(map(_is_array, jax.tree.leaves(dict(eval_data)))) and str(jax.tree.structure(dict(eval_data))) == wanted:
            return eval_data
        found = {name: _structure(x, f"eval_data['{name}']") for name, x in eval_data.items()}
        if wanted not in found.values():
            return eval_data
        if others := [name for name, structure in found.items() if structure != wanted]:
            raise ConfigError(
                f"eval_data['{others[0]}'] has the structure {found[others[0]]}, and train_data and other values of "
                f"eval_data have {wanted}. Each of several evaluation sets has the structure of train_data. Return the "
                "same keys, or pass one set."
            )
    if bad := [name for name in eval_data if not isinstance(name, str) or not name or "/" in name]:
        raise ConfigError(
            f"eval_data has a set named {bad[0]!r}. Its metrics are named NAME/loss. Use text without a slash."
        )
    return EvaluationSets(eval_data)


def _refuse_list_of_sets(first: Any, train_data: Any) -> None:
    """Raises ConfigError if the first item of a list is a set of examples: arrays with one dim more than those of an
    example, or data of a library."""
    is_iterable: Callable[[Any], bool] = lambda x: (
        hasattr(x, "__iter__") and not isinstance(x, str | Mapping | tuple | list)
    )
    leaves = jax.tree.leaves(first, is_leaf=is_iterable)
    example = jax.tree.leaves(open_data(train_data, "train_data").element())
    is_library = any(is_iterable(leaf) and not hasattr(leaf, "shape") for leaf in leaves)
    if is_library or [np.ndim(leaf) for leaf in leaves] == [len(leaf.shape) + 1 for leaf in example]:
        raise ConfigError(
            "eval_data is a list of data sets, and a list is one set of examples. Several sets have names: "
            'eval_data={"clean": a, "hard": b}.'
        )


def _is_array(data: Any) -> bool:
    return isinstance(data, np.ndarray | jax.Array)


def _structure(data: Any, what: str) -> str:
    """Returns the tree structure of an example as text; of data that are no set of examples, "none"."""
    if isinstance(data, PerProcess):
        return _structure(data.source, what)
    if not isinstance(data, list) and jax.tree.leaves(data) and all(map(_is_array, jax.tree.leaves(data))):
        return str(jax.tree.structure(data))
    try:
        return str(jax.tree.structure(open_data(data, what).element()))
    except ConfigError:
        return "none"
