"""Recognizes errors of a device or of this process that has no memory left, by the texts of XLA and its libraries."""

from __future__ import annotations

import re

_TEXTS = re.compile(
    r"RESOURCE_EXHAUSTED|out of memory|OUT_?OF_?MEMORY|(?:failed|unable|not able) to allocate|(?:cannot|could not) "
    r"allocate|insufficient memory|STATUS_ALLOC_FAILED|bad_alloc",
    re.I,
)
"""XLA's status; its other errors by device (CPU `Out of memory allocating`, GPU `Failed to allocate N bytes for new
constant`, TPU `Ran out of memory in hbm`); the CUDA and ROCm drivers; cuBLAS, cuDNN; the operating system; C++."""


def is_exhausted(error: BaseException) -> bool:
    """Returns whether an exception of JAX or Python reports exhausted memory. gRPC uses the same status for a message
    that is too large."""
    if isinstance(error, MemoryError):
        return True
    text = str(error)
    from_jax = type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError")
    return from_jax and _TEXTS.search(text) is not None and "message larger than" not in text
