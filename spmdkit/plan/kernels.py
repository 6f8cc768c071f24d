"""FLOPs of kernels that XLA calls but does not emit, from their arrays.

| kernel | FLOPs |
| --- | --- |
| `__cudnn$fmha*` | attention, q [B, T, N, H] and k [B, S, K, H]: two products of 2 B N T S H, the backward five |
| `__cublas*` | one product; its `backend_config` names the contracted dims |
| Mosaic, `cost_estimate` | the declared FLOPs (spmdkit's kernels declare them) |
| Mosaic, `splash*`, `flash*` without one | attention, q [B, N, T, H]: two products, dq three, dkv four, fused five |

A causal mask halves attention. Triton kernels are fusions with their products in the text (`costs.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from spmdkit.plan.hlo.text import Instruction

_DECLARED = re.compile(r'"cost_estimate":\{"flops":"?(\d+)')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_FLOATS = ("bf16", "f16", "f32")
_ATTENTION = re.compile(r"splash|flash")


def target_of(i: Instruction) -> str:
    """Returns the target of a custom call."""
    match = _TARGET.search(i.attributes)
    return match[1] if match else ""


def kernel_flops(i: Instruction, operands: Sequence[Instruction]) -> dict[tuple[str, int], float]:
    """Returns (dtype, passes) -> FLOPs of a custom call; empty for one without products."""
    arrays = [o.shapes[0] for o in operands if o.shapes and o.shapes[0].dtype.startswith(("f", "bf"))]
    target, dtype = target_of(i), next((a.dtype for a in arrays if a.dtype in _FLOATS), "f32")
    flops = 0.0
    if declared := _DECLARED.search(i.attributes):
        flops = float(declared[1])
    elif target.startswith("__cudnn$fmha") and len(arrays) > 1 and len(arrays[0].dims) == len(arrays[1].dims) == 4:
        (b, t, n, h), s = arrays[0].dims, arrays[1].dims[1]
        flops = (5 if "Backward" in target else 2) * 2.0 * b * n * t * s * h * (0.5 if "CAUSAL" in i.attributes else 1)
    elif target.startswith("__cublas") and arrays:
        match = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', i.attributes)
        contracted = [int(n.strip(' "')) for n in match[1].split(",")] if match and match[1] else []
        flops, dtype = 2.0 * i.shapes[0].size * math.prod(arrays[0].dims[n] for n in contracted), arrays[0].dtype
    elif target == "tpu_custom_call" and _ATTENTION.search(i.name):
        flops = _mosaic_attention(i.name, [a.dims for a in arrays if a.dtype in _FLOATS and len(a.dims) in (3, 4)])
    return {(dtype, 1): flops} if flops else {}


def _mosaic_attention(name: str, arrays: Sequence[tuple[int, ...]]) -> float:
    """Returns the FLOPs of causal attention, [B, N, T, H] or [B, N, H, T]: the longer of the last dims is positions."""
    large = [dims for dims in arrays if min(dims[-2:]) >= 64 and max(dims[-2:]) >= 128]
    if len(large) < 3:
        return 0.0
    (q, k), num = large[:2], math.prod(large[0][:-2])
    products = 5 if "fused" in name else 4 if "dkv" in name else 3 if "dq" in name else 5 if "bwd" in name else 2
    return products * 2.0 * num * max(q[-2:]) * max(k[-2:]) * min(q[-2:]) * 0.5
