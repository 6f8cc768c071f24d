"""Compression of reductions: `Compression.none`, or `Compression.fp16`, which sends floating point as float16. Source:
horovod/torch/compression.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


class Compressor:
    """Sends arrays unchanged. A user-defined compressor has these two functions."""

    @staticmethod
    def compress(x: jax.Array) -> tuple[jax.Array, Any]:
        """Returns (the array to send, the context for `decompress`)."""
        return x, None

    @staticmethod
    def decompress(x: jax.Array, context: Any) -> jax.Array:
        """Returns the array in its original form."""
        return x


class Float16Compressor(Compressor):
    """Casts floating point to float16 before the reduction and back after it: half the bytes, sums up to 65,504. Other
    dtypes are unchanged."""

    @staticmethod
    def compress(x: jax.Array) -> tuple[jax.Array, Any]:
        """Returns (float16, the original dtype)."""
        x = jnp.asarray(x)
        return (x.astype(jnp.float16), x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else (x, None)

    @staticmethod
    def decompress(x: jax.Array, context: Any) -> jax.Array:
        """Returns the array in its original dtype."""
        return x if context is None else x.astype(context)


class Compression:
    """The compressors for `allreduce`, `reducescatter` and `DistributedOptimizer`."""

    none = Compressor
    fp16 = Float16Compressor


def compressed(compression: type[Compressor], send: Callable[[list[Any]], Any], arrays: Sequence[Any]) -> list[Any]:
    """Returns the decompressed results of `send` for the compressed arrays."""
    pairs = [compression.compress(x) for x in arrays]
    results = send([x for x, _ in pairs])
    return [compression.decompress(y, context) for y, (_, context) in zip(results, pairs, strict=True)]
