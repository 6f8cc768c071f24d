"""Numbers of any width as those that errors are computed with: complex and half precision too, which numpy alone takes
for something else.

complex          both parts; in float64 the imaginary one would be lost
bfloat16, ...    floating point, though numpy calls their kind `V`; of half precision a few of the type's own ulps are
                 rounding
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

HALF_ULPS = 4
"""Ulps of a type of less than 32 bits that two sums of the same numbers, in another order, may be apart: 4e-3 in
float16, 3e-2 in bfloat16."""


def is_inexact(x: Any) -> bool:
    """Returns whether an array holds floating point or complex numbers."""
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def is_half(x: Any) -> bool:
    """Returns whether an array holds floating point numbers of less than 32 bits."""
    return is_inexact(x) and x.dtype.itemsize < 4


def wide(x: Any) -> np.ndarray:
    """Returns an array in complex128 or float64."""
    x = np.asarray(x)
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


def eps(x: Any) -> float:
    """Returns the relative distance of neighbours in the type of an array; of a complex one, of its parts."""
    return float(jnp.finfo(x.dtype).eps)


def difference(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Returns `found - expected`, wide; zero where numbers of half precision are within `HALF_ULPS` of each other."""
    right = wide(expected)
    apart = wide(found) - right
    return (
        np.where(np.abs(apart) <= HALF_ULPS * eps(expected) * np.abs(right), 0, apart) if is_half(expected) else apart
    )
