"""cuDNN's flash attention, for NVIDIA GPUs since Ampere: bfloat16 or float16, head width up to 128 (Hopper: 256), no
segment ids or positions. The backward pass recomputes the scores from `out` and `lse`.

Source: NVIDIA cuDNN documentation, "Attention"; `jax.nn.dot_product_attention(implementation="cudnn")` (jax 0.10.2).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from spmdkit import compat
from spmdkit.ops.attention_blocks import Implementation, Mask, product_flops
from spmdkit.ops.kernel import kernel


def forward(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, scale: float) -> tuple[jax.Array, jax.Array]:
    """Returns (out [B, T, N, H], lse float32[B, T, N])."""
    flops = 2 * product_flops(q, k, mask)
    out, lse_BNT = kernel(lambda q, k, v: compat.cudnn_attention(q, k, v, causal=mask.causal, scale=scale), flops)(
        q, k, v
    )
    return out, lse_BNT.swapaxes(1, 2)


def backward(q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, mask: Mask, scale: float) -> Any:
    """Returns (dq, dk, dv) in the dtype of the operands."""
    flops = 5 * product_flops(q, k, mask)
    run = kernel(lambda *xs: compat.cudnn_attention_gradient(*xs, causal=mask.causal, scale=scale), flops)
    return run(q, k, v, out.astype(q.dtype), lse.swapaxes(1, 2), dout.astype(q.dtype))


CUDNN = Implementation(forward, backward)


def missing(device: Any, q: jax.Array, lengths: tuple[int, ...], ids: tuple[str, ...]) -> str | None:
    """Returns why cuDNN does not support these operands on `device` (None: any GPU), or None if it does."""
    if device is not None and (device.platform != "gpu" or "nvidia" not in device.device_kind.lower()):
        return f"it runs on NVIDIA GPUs, and the mesh has {device.platform} devices ({device.device_kind})"
    capability = float(getattr(device, "compute_capability", None) or 8)
    widest = 256 if capability >= 9 else 128
    if capability < 8:
        return f"it needs compute capability 8.0 (Ampere), and the mesh has {capability}"
    if ids:
        return f"it does not support {ids[0]}"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it needs bfloat16, and q is {q.dtype}"
    if q.shape[3] % 8 or q.shape[3] > widest:
        return f"it needs heads of a width that is a multiple of 8 up to {widest}, and q has {q.shape[3]}"
    return None
