"""The text of a compiled program, `compiled.as_text()`, as data: computations, instructions, shapes, calls.

XLA prints the optimized module after scheduling, so the order of the lines of a computation is the execution order on
one device. The parser reads the text of the CPU and the TPU compiler (jax 0.10.2), with the older metadata syntax
(`source_file=`, `source_line=`) and the newer one (`stack_frame_id=` and four tables before the first computation).

Source: the grammar of HLO text, openxla.org/xla/operation_semantics and xla/hlo/parser/hlo_parser.cc.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

SAME = ("copy", "copy-start", "copy-done", "bitcast", "convert", "reshape", "transpose")
"""Operations that pass an array on in another form."""

_BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16, "tf32": 32, "c64": 64, "c128": 128}
_SHAPE = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{([^{}]*)\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_END = re.compile(r'\}(?:, execution_thread="[^"]*")?\s*$')
"""The end of a computation. Lines of a kernel's metadata can also start with a brace, followed by more text."""
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')


@dataclass(frozen=True)
class Shape:
    """One array: `dtype` in XLA's notation, `dims` on one device, and the text of the layout."""

    dtype: str
    dims: tuple[int, ...]
    layout: str = ""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @functools.cached_property
    def bytes(self) -> int:
        """Bytes of the elements, without padding."""
        return (self.size * bits(self.dtype) + 7) // 8

    @property
    def padded_bytes(self) -> int:
        """Bytes that the array takes in memory: a TPU pads the two minor dims to full tiles, `T(8,128)`."""
        tile = re.search(r"T\(([\d,]+)\)", self.layout)
        if tile is None:
            return self.bytes
        if not self.dims:
            return max(self.bytes, 512)
        order = self.layout.split(":")[0]
        lengths = [self.dims[int(i)] for i in order.split(",")] if order else self.dims[::-1]
        sizes = [int(n) for n in tile[1].split(",")][::-1]
        padded = (-(-length // n) * n for length, n in itertools.zip_longest(lengths, sizes, fillvalue=1))
        return (math.prod(padded) * bits(self.dtype) + 7) // 8

    @property
    def space(self) -> int:
        """Memory space: 0 is the device's main memory, on TPU 1 is on the chip, 5 is the host's."""
        match = re.search(r"S\((\d+)\)", self.layout)
        return int(match[1]) if match else 0

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


def bits(dtype: str) -> int:
    """Returns the bits of one element: `f32` -> 32, `bf16` -> 16, `f8e4m3fn` -> 8, `s4` -> 4, `pred` -> 8."""
    if dtype in _BITS:
        return _BITS[dtype]
    number = re.match(r"[a-z]+(\d+)", dtype)
    assert number, f"unknown dtype {dtype} in HLO"
    return int(number[1])


@dataclass(frozen=True, eq=False)
class Instruction:
    """One line of a computation.

    Attributes:
        shapes: the arrays of the result, a tuple's in flattening order.
        operands: names of instructions of the same computation.
        text: the text between the parentheses (the value of a constant, the number of a parameter).
        attributes: the text after the parentheses.
        index: position in the schedule of its computation.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    text: str
    attributes: str
    computation: str
    index: int
    is_root: bool

    @property
    def bytes(self) -> int:
        """Bytes of the result, without padding."""
        return sum(shape.bytes for shape in self.shapes)

    @functools.cached_property
    def op_name(self) -> str:
        """JAX's op name, a path: `jit(run)/while/body/dot_general`; empty if XLA created the instruction."""
        match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return match[1] if match else ""

    @functools.cached_property
    def backend_config(self) -> dict[str, Any]:
        """The JSON that the backend stores with the instruction."""
        start = self.attributes.find("backend_config={")
        if start < 0:
            return {}
        config: dict[str, Any] = json.JSONDecoder().raw_decode(self.attributes, start + len("backend_config="))[0]
        return config

    def attribute(self, name: str) -> str | None:
        """Returns the text of a simple attribute: `channel_id=1` -> "1", `dimensions={0}` -> "0"."""
        match = re.search(rf"(?:^|[ ,]){name}=(?:\{{([^{{}}]*)\}}|%?([\w.\-]+))", self.attributes)
        return None if match is None else match[1] if match[1] is not None else match[2]

    @functools.cached_property
    def called(self) -> dict[str, tuple[str, ...]]:
        """Role -> computations: `body`, `condition`, `calls`, `to_apply`, `branch_computations`,
        `called_computations`."""
        plain = _QUOTED.sub('""', self.attributes)
        roles: dict[str, tuple[str, ...]] = {}
        for role, many, single in re.findall(
            r"(?:^|[ ,])(body|condition|calls|to_apply|select|scatter|branch_computations|true_computation|false_computation|"  # noqa: E501
            r"called_computations)=(?:\{([^{}]*)\}|%?([\w.\-]+))",
            plain,
        ):
            roles[role] = tuple(_NAME.findall(many)) or ((single,) if single else ())
        if "true_computation" in roles:
            roles["branch_computations"] = roles.pop("true_computation") + roles.pop("false_computation")
        return roles

    @property
    def calls(self) -> tuple[str, ...]:
        """The computations of a fusion or an async start; empty for all other instructions."""
        return self.called.get("calls", ())


@dataclass(frozen=True, eq=False)
class Computation:
    """A function of the module: its instructions in the order of the schedule."""

    name: str
    is_entry: bool
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Name -> instruction."""
        return {i.name: i for i in self.instructions}

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Name -> the instructions that read it, in the order of the schedule."""
        readers: dict[str, list[Instruction]] = {i.name: [] for i in self.instructions}
        for i in self.instructions:
            for operand in dict.fromkeys(i.operands):
                if operand in readers:
                    readers[operand].append(i)
        return readers

    @functools.cached_property
    def root(self) -> Instruction:
        """The instruction that computes the result of the computation."""
        return next((i for i in self.instructions if i.is_root), self.instructions[-1])

    def operand(self, instruction: Instruction, index: int = 0) -> Instruction | None:
        """Returns the instruction that produces an operand, or None."""
        return self.by_name.get(instruction.operands[index]) if index < len(instruction.operands) else None

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """Returns the instructions that produce the operands."""
        return [self.by_name[name] for name in instruction.operands if name in self.by_name]

    def producer(self, instruction: Instruction, forms: Collection[str]) -> Instruction:
        """Returns the instruction that produces the data, skipping operations of `forms`."""
        while instruction.opcode in forms and (source := self.operand(instruction)) is not None:
            instruction = source
        return instruction


@dataclass(frozen=True)
class Frame:
    """One frame of the stack that created an instruction."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, eq=False)
class Module:
    """A compiled program of one device.

    Attributes:
        header: the first line: `input_output_alias`, `num_partitions`, the entry's layout.
        computations: by name.
        stacks: stack frame id -> frames, innermost first.
    """

    header: str
    computations: dict[str, Computation]
    stacks: dict[int, tuple[Frame, ...]] = field(repr=False)

    @functools.cached_property
    def entry(self) -> Computation:
        """The computation that the program starts with."""
        return next(c for c in self.computations.values() if c.is_entry)

    @functools.cached_property
    def has_frames(self) -> bool:
        """Whether any instruction has a stack."""
        return any(self.frames(i) for c in self.computations.values() for i in c.instructions)

    @property
    def num_partitions(self) -> int:
        """The devices of the program (partitions times replicas)."""
        count: Callable[[str], int] = lambda name: (
            int(match[1]) if (match := re.search(rf"{name}=(\d+)", self.header)) else 1
        )
        return count("num_partitions") * count("replica_count")

    def instructions(self) -> Iterator[Instruction]:
        """Yields every instruction once."""
        for computation in self.computations.values():
            yield from computation.instructions

    def unfused(self) -> Iterator[Instruction]:
        """Yields the instructions outside fusions: those with a result in memory."""
        inside = {name for i in self.instructions() if i.opcode in ("fusion", "async-start") for name in i.calls}
        return (i for i in self.instructions() if i.computation not in inside)

    def around(self, instruction: Instruction) -> Computation:
        """Returns the computation of an instruction."""
        return self.computations[instruction.computation]

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """Returns the instructions that produce the operands."""
        return self.around(instruction).operands(instruction)

    def fused(self, fusion: Instruction) -> Computation:
        """Returns the computation of a fusion."""
        return self.computations[fusion.calls[0]]

    def frames(self, instruction: Instruction) -> tuple[Frame, ...]:
        """Returns the stack that created an instruction, innermost first; empty if XLA created it."""
        if match := re.search(r"stack_frame_id=(\d+)", instruction.attributes):
            return self.stacks.get(int(match[1]), ())
        match = re.search(r'source_file="([^"]*)"(?: source_line=(\d+))?', instruction.attributes)
        return (Frame(match[1], int(match[2] or 0), ""),) if match else ()


def parse(text: str) -> Module:
    """Returns the module of an HLO text.

    Raises:
        ValueError: the text contains no entry computation.
    """
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith("HloModule")), 0)
    computations: dict[str, Computation] = {}
    tables: dict[str, list[str]] = {}
    name, is_entry, table = "", False, ""
    body: list[Instruction] = []
    for line in lines[first + 1 :]:
        if not line or line[0] == "#":
            continue
        if line[0] != " ":
            if line.endswith("{") and (header := re.match(r"(ENTRY )?%?([\w.\-]+)", line)):
                name, is_entry, body, table = header[2], bool(header[1]), [], ""
            elif name and _END.match(line):
                computations[name] = Computation(name, is_entry, tuple(body))
                name = ""
            elif name and body:  # the metadata of a kernel, and the lines after it
                body[-1] = dataclasses.replace(body[-1], attributes=f"{body[-1].attributes}\n{line}")
            elif line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
                table = line
                tables[table] = []
            elif table:
                tables[table].append(line)
        elif name and (head := _INSTRUCTION.match(line)):
            body.append(_instruction(line, head, name, len(body)))
    if not any(c.is_entry for c in computations.values()):
        raise ValueError("HLO text without an ENTRY computation. It is what compiled.as_text() returns.")
    return Module(lines[first] if lines else "", computations, _stacks(tables))


def _instruction(line: str, head: re.Match[str], computation: str, index: int) -> Instruction:
    start = head.end()
    end = _closing(line, start) if line[start] == "(" else line.index(" ", start)
    shapes = _shapes(line[start:end])
    opcode = _OPCODE.match(line, end)
    assert opcode, f"no opcode in HLO line {line[:200]}"
    close = _closing(line, opcode.end() - 1)
    inner = line[opcode.end() : close - 1]
    operands = () if opcode[1] in ("constant", "parameter") else tuple(_NAME.findall(inner))
    attributes = line[close:].lstrip(", ")
    return Instruction(head[2], opcode[1], shapes, operands, inner, attributes, computation, index, bool(head[1]))


def _closing(line: str, start: int) -> int:
    """Returns the position after the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.compile(r'[()]|"(?:[^"\\]|\\.)*"').finditer(line, start):
        if match[0] == "(":
            depth += 1
        elif match[0] == ")":
            depth -= 1
            if depth == 0:
                return match.end()
    raise AssertionError(f"unbalanced parentheses in HLO line {line[:200]}")


@functools.lru_cache(maxsize=10_000)
def _shapes(text: str) -> tuple[Shape, ...]:
    return tuple(
        Shape(dtype, tuple(int(n.replace("<=", "")) for n in dims.split(",") if n.strip()), layout)
        for dtype, dims, layout in _SHAPE.findall(text)
    )


def _stacks(tables: dict[str, list[str]]) -> dict[int, tuple[Frame, ...]]:
    """Returns frame id -> stack from the four tables. XLA prints parent ids plus one: 1 means no parent."""
    if "StackFrames" not in tables:
        return {}
    strings: Callable[[str], dict[int, str]] = lambda name: {
        int(n): text[1:-1] for n, text in (line.split(" ", 1) for line in tables[name])
    }
    files, functions = strings("FileNames"), strings("FunctionNames")
    numbers: Callable[[str], dict[str, int]] = lambda line: {key: int(n) for key, n in re.findall(r"(\w+)=(\d+)", line)}
    rows: Callable[[str], dict[int, dict[str, int]]] = lambda name: {
        int(line.split(" ", 1)[0]): numbers(line) for line in tables[name]
    }
    locations, frames = rows("FileLocations"), rows("StackFrames")
    offset = 1 if any(row.get("parent_frame_id") == number for number, row in frames.items()) else 0
    stacks: dict[int, tuple[Frame, ...]] = {}
    for number in frames:
        at, stack = number, dict[int, Frame]()
        while at in frames and at not in stack:
            place = locations[frames[at]["file_location_id"]]
            stack[at] = Frame(files[place["file_name_id"]], place["line"], functions[place["function_name_id"]])
            at = frames[at].get("parent_frame_id", 0) - offset
        stacks[number] = tuple(stack.values())
    return stacks
