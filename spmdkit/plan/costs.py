"""The cost of one instruction of a compiled program: FLOPs of its products, bytes that it moves through main memory."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence

from spmdkit.plan.flops import convolution_flops
from spmdkit.plan.hlo.text import Computation, Instruction, Module
from spmdkit.plan.kernels import kernel_flops

_SLICES = ("dynamic-slice", "gather", "slice")
_WINDOW = {"stride": 1, "pad": 0, "lhs_dilate": 1, "rhs_dilate": 1}
"""Attributes of a window for each spatial dim (for padding, the low side) -> default."""


class Costs:
    """FLOPs of products and bytes of main memory of one execution of each instruction."""

    def __init__(self, module: Module):
        self._module = module
        self._flops_of: dict[str, dict[tuple[str, int], float]] = {}
        self._reads_of: dict[str, dict[int, int]] = {}

    def flops(self, i: Instruction) -> dict[tuple[str, int], float]:
        """Returns (dtype, passes) -> FLOPs of the products of an instruction, including those inside a fusion."""
        if i.opcode == "fusion":
            return self._fused(i.calls[0])
        operands = self._module.operands(i)
        if i.opcode in ("dot", "convolution") and len(operands) == 2:
            num_flops = _dot(i, operands) if i.opcode == "dot" else _convolution(i, operands)
            dtype = operands[0].shapes[0].dtype
            return {(dtype, _passes(i) if dtype == "f32" else 1): num_flops}
        return kernel_flops(i, operands) if i.opcode == "custom-call" else {}

    def _fused(self, name: str) -> dict[tuple[str, int], float]:
        if name not in self._flops_of:
            total: dict[tuple[str, int], float] = defaultdict(float)
            for inner in self._module.computations[name].instructions:
                for key, flops in self.flops(inner).items():
                    total[key] += flops
            self._flops_of[name] = dict(total)
        return self._flops_of[name]

    def bytes(self, i: Instruction) -> int:
        """Returns the bytes that an instruction moves between main memory and the chip."""
        operands, written = self._module.operands(i), _in_memory(i)
        if i.opcode in _SLICES:
            return 2 * written
        if i.opcode == "dynamic-update-slice":
            return 2 * _in_memory(operands[1]) if len(operands) > 1 else written
        if i.opcode == "fusion":
            inner = self._module.fused(i)
            reads = self._reads(inner)
            total = min(written, _update_bytes(inner, inner.root, written))
            return total + sum(min(_in_memory(o), reads.get(n, 2**62)) for n, o in enumerate(operands))
        if i.opcode.endswith("-start"):  # (operand, result, context)
            return min((s.bytes for s in i.shapes[:2]), default=0) * sum(s.space == 0 for s in i.shapes[:2])
        return written + sum(map(_in_memory, operands))

    def _reads(self, fused: Computation) -> dict[int, int]:
        """Returns parameter number -> bytes read, for the parameters of which only slices are read."""
        if fused.name not in self._reads_of:
            read = {int(i.text): _slices_of(fused, i) for i in fused.instructions if i.opcode == "parameter"}
            self._reads_of[fused.name] = {n: num for n, num in read.items() if num is not None}
        return self._reads_of[fused.name]


def _slices_of(fused: Computation, i: Instruction, depth: int = 0) -> int | None:
    """Returns the bytes of the slices if a fusion reads an array only through slices; None if it reads all of it."""
    total = 0
    for user in fused.users[i.name]:
        if user.opcode in _SLICES and user.operands[0] == i.name:
            total += user.bytes
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == i.name:
            update = fused.operand(user, 1)
            total += update.bytes if update is not None else user.bytes
        elif _is_same(user, i) and depth < 8:
            inner = _slices_of(fused, user, depth + 1)
            if inner is None:
                return None
            total += inner
        else:
            return None
    return total


def _update_bytes(fused: Computation, root: Instruction, whole: int) -> int:
    """Returns the bytes that a fusion writes: for an in-place update, those of the update; for a tuple, the sum."""
    if root.opcode == "tuple":
        return sum(_update_bytes(fused, result, _in_memory(result)) for result in fused.operands(root))
    root = fused.producer(root, ("bitcast", "reshape"))
    if root.opcode == "dynamic-update-slice" and (update := fused.operand(root, 1)) is not None:
        return update.bytes
    return whole


def _is_same(user: Instruction, of: Instruction) -> bool:
    """Returns whether an operation in a fusion only changes the form of an array (an inner fusion of one array: a
    bitcast to the compiler's tiles)."""
    if user.opcode == "fusion":
        return len(user.operands) == 1 and len(user.shapes) == 1 and user.bytes == of.bytes
    return user.opcode in ("bitcast", "reshape")


def _in_memory(i: Instruction) -> int:
    """Returns the bytes of a result in the device's main memory (on TPU, space 1 is on the chip)."""
    return sum(s.padded_bytes for s in i.shapes if s.space == 0)


def _dot(i: Instruction, operands: Sequence[Instruction]) -> float:
    lhs = operands[0].shapes[0].dims
    contracted = [int(n) for n in (i.attribute("lhs_contracting_dims") or "").split(",") if n]
    return 2.0 * i.shapes[0].size * math.prod(lhs[n] for n in contracted)


def _passes(i: Instruction) -> int:
    """Returns the bfloat16 passes of a float32 product on a TPU: six at the highest precision, three at high."""
    match = re.search(r"operand_precision=\{(\w+),(\w+)\}", i.attributes)
    return {"highest": 6, "high": 3}.get(match[1], 1) if match else 1


def _convolution(i: Instruction, operands: Sequence[Instruction]) -> float:
    """Returns 2 x multiply-adds of a convolution; the TPU compiler writes every product as a convolution."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", i.attributes)
    if labels is None:
        return 0.0
    arrays = zip(labels.groups(), (*operands, i), strict=True)
    lhs, rhs, out = (dict(zip(label, x.shapes[0].dims, strict=True)) for label, x in arrays)
    text = re.search(r"window=\{([^}]*)\}", i.attributes)
    attributes = dict(re.findall(r"(\w+)=([\w\-]+)", text[1] if text else ""))
    number: Callable[[str, int], int] = lambda key, n: (
        int(attributes[key].split("x")[n].split("_")[0]) if key in attributes else _WINDOW[key]
    )
    return convolution_flops(lhs, rhs, out, [[number(key, n) for key in _WINDOW] for n in range(len(out) - 2)])
