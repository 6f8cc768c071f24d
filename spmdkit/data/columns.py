"""Columns of Arrow tables as numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmdkit.errors import ConfigError


def to_numpy(name: str, column: Any) -> np.ndarray:
    """Returns a column of a `pyarrow.Table`; lists of one length are further dims.

    Raises:
        ConfigError: it has a null, or lists of different lengths.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if column.null_count:
        raise ConfigError(
            f"column {name!r} has {column.null_count} nulls in {len(column)} rows. Arrays of devices have no nulls. "
            "Remove these rows, or fill them."
        )
    if not pa.types.is_list(column.type) and not hasattr(column.type, "value_type"):
        return np.asarray(column.to_numpy(zero_copy_only=False))
    lengths = pc.list_value_length(column).unique().to_pylist()
    if len(lengths) > 1:
        raise ConfigError(
            f"column {name!r} has lists of {min(lengths)} to {max(lengths)} values. All examples must have one shape. "
            "Pad or crop the lists, or pack them."
        )
    values = to_numpy(name, column.flatten())
    return values.reshape(len(column), *(lengths or [0]), *values.shape[1:])
