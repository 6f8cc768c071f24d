"""Splash attention, JAX's Pallas kernel for TPUs: skips causally masked blocks, supports segment ids and grouped heads.

Tiles: `RECIPES` by chip and shape, else `BLOCKS`; `attention.block_q` etc. in the config override both.

Saves `out` and `lse`, and recomputes the scores in the backward pass. Lengths must be multiples of 128. Heads are
padded with zeros to a multiple of 128, which changes no score (the matrix unit is 128 wide).
Source: jax 0.10.2, `jax.experimental.pallas.ops.tpu.splash_attention`; tiles: AI-Hypercomputer/tpu-recipes and
AI-Hypercomputer/maxtext, recipes of 2026 (benchmarks/published.yaml).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spmdkit import compat
from spmdkit.errors import ConfigError
from spmdkit.ops.attention_blocks import Implementation, Mask, product_flops
from spmdkit.ops.kernel import kernel

LANES = 128
BLOCKS = (512, 256, 128)
"""Tile lengths of queries and keys without a recipe; the largest that divides is used."""


class Tiles(NamedTuple):
    """Tiles of all kernels: queries, keys, keys that are multiplied at a time. None: by recipe or length.

    Attributes:
        fused_backward: one backward kernel with 5 products, instead of two with 7, which compute the scores and their
            gradient twice. Its gradient of the queries has a part for each tile of keys.
    """

    block_q: int | None = None
    block_kv: int | None = None
    block_kv_compute: int | None = None
    fused_backward: bool | None = None


BY_LENGTH = Tiles()


class ResolvedTiles(NamedTuple):
    """`Tiles` for given operands."""

    block_q: int
    block_kv: int
    block_kv_compute: int
    fused_backward: bool

    def __str__(self) -> str:
        backward = "one kernel" if self.fused_backward else "two kernels"
        return (
            f"tiles of {self.block_q} queries and {self.block_kv} keys, {self.block_kv_compute} at a time; backward "
            f"pass in {backward}"
        )


class Recipe(NamedTuple):
    """Tiles for a causal mask, at least `tokens` queries and keys, and heads of at most `width`."""

    tokens: int
    width: int
    tiles: Tiles


RECIPES = {
    "v6e": (Recipe(8192, 128, Tiles(2048, 2048, 512, True)), Recipe(2048, 128, Tiles(1024, 512, 512, False))),
    "7x": (Recipe(8192, 128, Tiles(2048, 2048, 512, True)), Recipe(8192, 256, Tiles(1024, 1024, 512, True))),
}
"""Chip -> recipes, the first that applies is used. The published ones with 2,048 keys multiply 512 to 2,048 of them at
a time, more than 512 with a larger scoped VMEM."""


def tiles_of(
    chip: str | None, lengths: tuple[int, int], width: int, causal: bool, requested: Tiles | ResolvedTiles
) -> ResolvedTiles:
    """Returns the tiles for `lengths` (queries, keys) and heads of `width` on a chip. Requested values stay; a tile of
    a recipe that does not divide its length is halved until it does."""
    T, S = lengths
    found = (r.tiles for r in RECIPES.get(chip or "", ()) if causal and min(lengths) >= r.tokens and width <= r.width)
    recipe = next(found, BY_LENGTH)
    q = requested.block_q or _dividing(recipe.block_q, T)
    kv = requested.block_kv or _dividing(recipe.block_kv, S)
    part = requested.block_kv_compute or (recipe.block_kv_compute and _dividing(recipe.block_kv_compute, kv)) or kv
    fused = recipe.fused_backward if requested.fused_backward is None else requested.fused_backward
    return ResolvedTiles(q, kv, part, bool(fused))


def _dividing(tile: int | None, length: int) -> int:
    """Returns the largest of `tile`, its halves and `LANES` that divides `length`; without a tile one of `BLOCKS`."""
    halves = BLOCKS if tile is None else [tile >> n for n in range(tile.bit_length()) if tile >> n >= LANES]
    return next((n for n in halves if length % n == 0), LANES)


@functools.cache
def splash(tiles: Tiles | ResolvedTiles = BY_LENGTH, interpret: bool = False) -> Implementation:
    """Returns splash attention; with `interpret` the kernel runs on any device, slowly, for tests."""

    def forward(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, scale: float) -> tuple[jax.Array, jax.Array]:
        def forward_of(q: jax.Array, k: jax.Array, v: jax.Array, segments: Any) -> tuple[jax.Array, jax.Array]:
            attend = _kernel(q, k, mask.causal, tiles, interpret)
            out, (lse,) = jax.vmap(attend)(_scaled(q, scale), _heads_first(k), _heads_first(v), segments)
            return out, lse

        out_BNTH, lse_BNT = kernel(forward_of, 2 * product_flops(q, k, mask))(q, k, v, _ids(mask))
        return out_BNTH.swapaxes(1, 2)[..., : q.shape[3]], lse_BNT.swapaxes(1, 2)

    def backward(q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, mask: Mask, scale: float) -> Any:
        def backward_of(q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, segments: Any) -> Any:
            attend = _kernel(q, k, mask.causal, tiles, interpret)
            k, v, out, dout = (_heads_first(x) for x in (k, v, out, dout))
            gradient: Callable[..., Any] = jax.vmap(lambda *xs: compat.splash_attention_gradient(attend, *xs))
            return gradient(_scaled(q, scale), k, v, out, lse.swapaxes(1, 2), dout, segments)

        flops = (5 if tiles.fused_backward else 7) * product_flops(q, k, mask)
        grads = kernel(backward_of, flops)(q, k, v, out.astype(q.dtype), lse, dout.astype(q.dtype), _ids(mask))
        dq, dk, dv = (g.swapaxes(1, 2)[..., : q.shape[3]] for g in grads)
        return dq.astype(jnp.float32) * scale, dk, dv

    return Implementation(forward, backward)


def missing(device: Any, q: jax.Array, lengths: tuple[int, ...], ids: tuple[str, ...]) -> str | None:
    """Returns why splash attention does not support blocks of `lengths` tokens on `device` (None: any TPU), or None."""
    if device is not None and device.platform != "tpu":
        return f"it runs on TPUs, and the mesh has {device.platform} devices ({device.device_kind})"
    if "positions" in ids:
        return "it does not support positions"
    if short := [length for length in lengths if length % LANES]:
        return f"it needs blocks of a multiple of {LANES} tokens, and a device attends to blocks of {short[0]}"
    return None


def _kernel(q_BTNH: jax.Array, k_BSKH: jax.Array, causal: bool, tiles: Tiles | ResolvedTiles, interpret: bool) -> Any:
    """Returns the kernel of one example: q [N, T, H], k, v [K, S, H], ids -> (out [N, T, H], (lse float32[N, T],)).

    Raises:
        ConfigError: a tile that does not divide the queries or keys, or is no multiple of 128.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash_kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    causal_mask, full_mask = _masks()
    T, N, S = q_BTNH.shape[1], q_BTNH.shape[2], k_BSKH.shape[1]
    t, s, part, fused = tiles_of(None, (T, S), q_BTNH.shape[3], causal, tiles)
    _check_tile("block_q", t, T, "queries")
    _check_tile("block_kv", s, S, "keys")
    _check_tile("block_kv_compute", part, s, "keys of a tile")
    return splash_kernel.make_splash_mha(
        masks.MultiHeadMask([(causal_mask if causal else full_mask)((T, S))] * N),
        block_sizes=splash_kernel.BlockSizes(
            block_q=t,
            block_kv=s,
            block_kv_compute=part,
            block_q_dkv=t,
            block_kv_dkv=s,
            block_kv_dkv_compute=part,
            block_q_dq=None if fused else t,
            block_kv_dq=None if fused else s,
            use_fused_bwd_kernel=fused,
        ),
        save_residuals=True,
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )


def _check_tile(key: str, requested: int, length: int, what: str) -> None:
    possible = [n for n in range(LANES, length + 1, LANES) if length % n == 0]
    if requested not in possible:
        nearest = min(possible, key=lambda n: abs(n - requested))
        raise ConfigError(
            f"attention.{key} is {requested}, and a device attends to {length} {what}. A tile is a multiple of {LANES} "
            f"that divides them. Try {nearest}."
        )


@functools.cache
def _masks() -> tuple[Any, Any]:
    """Returns the causal and the full mask, with constant tiles stored as one value: the kernel's set-up checks every
    tile (full tiles: 22 s for 32,768 tokens on 2 cores, 2026-11-21)."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    class Causal(masks.CausalMask):
        def __getitem__(self, tile: tuple[slice, slice]) -> np.ndarray:
            rows, columns = tile
            if columns.start >= rows.stop or columns.stop <= rows.start + 1:
                return np.array([[columns.start < rows.stop]])
            return super().__getitem__(tile)

    class Full(masks.FullMask):
        def __getitem__(self, tile: tuple[slice, slice]) -> np.ndarray:
            return np.array([[True]])

    return Causal, Full


def _ids(mask: Mask) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash_kernel

    if mask.q_segments is None or mask.k_segments is None:
        return None
    return splash_kernel.SegmentIds(mask.q_segments, mask.k_segments)


def _heads_first(x_BTNH: jax.Array) -> jax.Array:
    """Returns [B, N, T, H] with H padded to a multiple of 128."""
    return jnp.pad(x_BTNH.swapaxes(1, 2), [(0, 0)] * 3 + [(0, -x_BTNH.shape[3] % LANES)])


def _scaled(q_BTNH: jax.Array, scale: float) -> jax.Array:
    return _heads_first((q_BTNH.astype(jnp.float32) * scale).astype(q_BTNH.dtype))
