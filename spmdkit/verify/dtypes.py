"""Conversion of arrays of any dtype, including complex and half precision, to the wide dtype in which errors are
computed.

complex          both parts; a cast to float64 would drop the imaginary part
bfloat16, ...    floating point, although numpy reports kind `V`; differences of a few ulps of the dtype are rounding
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

HALF_ULPS = 4
"""Ulps by which two sums of the same numbers in different order may differ in a dtype of less than 32 bits: 4e-3 in
float16, 3e-2 in bfloat16."""


def is_inexact(x: Any) -> bool:
    """Returns whether an array holds floating point or complex numbers."""
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def is_half(x: Any) -> bool:
    """Returns whether an array holds floating point numbers of less than 32 bits."""
    return is_inexact(x) and x.dtype.itemsize < 4


def wide(x: Any) -> np.ndarray:
    """Returns an array in complex128 or float64."""
    array: np.ndarray = np.asarray(x)
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def eps(x: Any) -> float:
    """Returns the machine epsilon of an array's dtype; for a complex dtype, that of its parts."""
    return float(jnp.finfo(x.dtype).eps)


def difference(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Returns `found - expected` in the wide dtype. Half precision numbers within `HALF_ULPS` of each other give
    zero."""
    right = wide(expected)
    apart = wide(found) - right
    return (
        np.where(np.abs(apart) <= HALF_ULPS * eps(expected) * np.abs(right), 0, apart) if is_half(expected) else apart
    )
