"""The dtype of a data leaf on the device, with an error for conversions that lose digits.

Without x64, JAX converts float64 to float32 and int64 to int32 silently. Here:
  float64, complex128     an error: the user decides whether to lose half the digits
  int64, uint64           int32, uint32 after a range check: numpy's default integer is int64, so label arrays have it
  Python float, int       float32, int32: they have no dtype
  str, object, datetime   an error: devices do not support them
With `jax_enable_x64` the 64-bit types are unchanged.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from spmdkit.errors import ConfigError


def device_dtype(where: str, dtype: Any) -> np.dtype:
    """Returns the native dtype in which a leaf of `dtype` is gathered. `where` names the leaf in errors.

    Raises:
      ConfigError: devices do not support the dtype, or it would lose floating-point digits.
    """
    if not _is_numeric(dtype):
        raise ConfigError(
            f"{where} has dtype {dtype}, which no device can hold. Data must be numbers or booleans. "
            f"{_encoding(dtype)}, or remove it."
        )
    native = dtype.newbyteorder("=")
    canonical = np.dtype(jax.dtypes.canonicalize_dtype(native))
    if canonical != native and native.kind in "fc":
        raise ConfigError(
            f"{where} has dtype {native}, but JAX without x64 computes in {canonical}. spmdkit does not "
            f"reduce precision silently. Convert it: .astype(np.{canonical})."
        )
    return canonical


def _encoding(dtype: Any) -> str:
    kind = getattr(dtype, "kind", "")
    if kind == "O":
        return "It holds Python objects, often rows of unequal length: pad them to one shape and use np.stack"
    if kind in "Mm":
        return "Convert it to a number, such as days: (values - values.min()).astype(np.int32)"
    return "Encode it as integers (np.unique(values, return_inverse=True)[1].astype(np.int32))"


def _is_numeric(dtype: Any) -> bool:
    if not isinstance(dtype, np.dtype):
        return False  # extended dtypes of JAX, such as PRNG keys
    if dtype.kind in "biufc":
        return dtype.itemsize <= (16 if dtype.kind == "c" else 8)  # not longdouble
    return dtype.kind == "V" and jax.numpy.issubdtype(dtype, np.number)  # bfloat16, float8, int4 of ml_dtypes


def narrow(where: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns `array` as `dtype` (from `device_dtype`), the same object if the dtype is equal.

    Raises:
      ConfigError: an integer is out of range.
    """
    if array.dtype == dtype:
        return array
    if array.dtype.kind in "iu" and array.dtype.itemsize > dtype.itemsize and array.size:
        low, high = (int(array.min()), int(array.max())) if array.ndim else (int(array), int(array))
        limits = np.iinfo(dtype)
        if low < limits.min or high > limits.max:
            raise ConfigError(
                f"{where} is {array.dtype} with values from {low} to {high}, and JAX without x64 holds {dtype}, "
                f"{limits.min} to {limits.max}. Map the values into that range, or set JAX_ENABLE_X64=1."
            )
    return array.astype(dtype)
