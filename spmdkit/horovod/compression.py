"""What a reduction sends: `Compression.none`, or `Compression.fp16`, which sends floating point as float16. Source:
horovod/torch/compression.py."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


class Compressor:
    """Sends arrays as they are. One of your own has these two functions."""

    @staticmethod
    def compress(x: jax.Array) -> tuple[jax.Array, Any]:
        """Returns (what is sent, what `decompress` needs to know)."""
        return x, None

    @staticmethod
    def decompress(x: jax.Array, context: Any) -> jax.Array:
        """Returns the array in the form that was given."""
        return x


class Float16Compressor(Compressor):
    """Floating point is cast to float16 before and back after: half of the bytes, sums up to 65,504. Other dtypes are
    left alone."""

    @staticmethod
    def compress(x: jax.Array) -> tuple[jax.Array, Any]:
        """Returns (float16, the dtype that was given)."""
        x = jnp.asarray(x)
        return (x.astype(jnp.float16), x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else (x, None)

    @staticmethod
    def decompress(x: jax.Array, context: Any) -> jax.Array:
        """Returns the array in the dtype that was given."""
        return x if context is None else x.astype(context)


class Compression:
    """The compressors that `allreduce`, `reducescatter` and `DistributedOptimizer` take."""

    none = Compressor
    fp16 = Float16Compressor
