"""A second reader of compiled programs, written without looking at the first one (`spmdkit/plan/hlo`, `costs.py`).

`totals(text)` returns the bytes that one device sends in a step, by the formulas of `docs/collectives.md`, and the
FLOPs of its products, convolutions and cuDNN attention. A loop runs as often as its integers show, or
once if that is unknown.
"""

import math
import operator
import re
from fractions import Fraction

SENDS = "(all-gather|all-reduce|(?:ragged-)?all-to-all|reduce-scatter|collective-permute|collective-broadcast)(-start)?"
COMPARES = {"LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge, "EQ": operator.eq}
INTEGERS = {"add": operator.add, "subtract": operator.sub, "copy": int, "bitcast": int, "convert": int, **COMPARES}
CALLS = {"fusion": "calls", "async-start": "calls", "call": "to_apply", "call-start": "to_apply"}


def totals(text):
    """Returns (bytes sent, FLOPs) of one device and step."""
    program = Program(text)
    return program.walk(program.entry, [None] * 10_000, set())


def shapes(kind):
    """Returns (bytes of an element, dims) of the arrays of a type."""
    arrays = re.findall(r"([a-z]+)(\d*)\w*\[([\d,]*)\]", kind)
    return [(int(bits or 8) / 8, [int(dim) for dim in dims.split(",") if dim]) for _, bits, dims in arrays]


def called(rest, key):
    return re.findall(r"%([\w.-]+)", re.search(rf"[ {{]{key}=(\{{.*?\}}|[^,]*)", rest)[1])


class Program:
    def __init__(self, text):
        self.rows, self.root = {}, {}  # computation -> name -> (type, opcode, operands, rest of the line)
        for line in text.splitlines():
            if m := re.match(r"(ENTRY )?%(\S+) \(.*\{$", line):
                here = m[2]
                self.rows[here] = {}
            elif m := re.match(r"  (ROOT )?%(\S+) = (.*?) ([a-z][a-z0-9-]*)\((.*)", line):
                self.rows[here][m[2]] = (m[3], m[4], re.findall(r"%([^\s,]+)", m[5].split(")")[0]), m[5])
                self.root[here] = m[2]
        self.entry = re.search(r"^ENTRY %(\S+)", text, re.M)[1]
        head = re.findall(r"(?:num_partitions|replica_count)=(\d+)", text.split("\n")[0])
        self.devices = math.prod(map(int, head))

    def types(self, here, operands):
        return [shape for name in operands for shape in shapes(self.rows[here][name][0])]

    def value(self, here, name, frame):
        """Returns the integer of a scalar, the list of a tuple, None for other values; `frame` has the arguments."""
        if name in frame:
            return frame[name]
        (kind, op, operands, rest), result = self.rows[here][name], None
        if op == "parameter":
            result = frame[int(rest.split(")")[0])]
        elif re.match(r"\(|(pred|[su]\d+)\[\]", kind):
            values = [self.value(here, operand, frame) for operand in operands]
            op = re.search(r"direction=(\w+)", rest)[1] if op == "compare" else op
            if op == "constant" and re.match(r"-?\d", rest):
                result = int(rest.split(")")[0])
            elif op == "tuple":
                result = values
            elif op == "get-tuple-element":
                result = values[0] and values[0][int(re.search(r"index=(\d+)", rest)[1])]
            elif op in ("fusion", "call"):
                result = self.run(called(rest, CALLS[op])[0], values)
            elif op in INTEGERS and None not in values:
                result = int(INTEGERS[op](*values))
        frame[name] = result
        return result

    def run(self, here, arguments):
        return self.value(here, self.root[here], dict(enumerate(arguments)))

    def iterations(self, rest, state, most=10_000):
        for done in range(most):
            if not (again := self.run(called(rest, "condition")[0], [state])):
                return 1 if again is None else done
            state = self.run(called(rest, "body")[0], [state])
        return 1

    def sent(self, here, op, operands, rest):
        size = sum(width * math.prod(dims) for width, dims in self.types(here, operands))
        if op == "collective-permute":
            return size * any(a != b for a, b in re.findall(r"(\d+),(\d+)", re.search(r"pairs=\{(.*?)\}\}", rest)[1]))
        groups = re.search(r"groups=(?:\[\d+,(\d+)\]|@?mesh\[(.*?)\].*?\{(.*?)\}|\{(.*?)\}[,}])", rest)
        axes = dict(re.findall(r"'(\w+)'=(\d+)", groups[2] or ""))
        joined = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", groups[3] or "")
        listed = max(len(g.split(",")) for g in groups[4].split("},{")) if groups[4] else self.devices
        n = math.prod(int(part or axes[axis]) for axis, part in joined) if joined else int(groups[1] or listed)
        scattered = self.rows[here][self.root[here]][1] == "dynamic-slice"  # a TPU's sum and slice in one operation
        factor = {"all-gather": n, "all-reduce": 1 if scattered else 2, "collective-broadcast": Fraction(n, n - 1 or 1)}
        return size * Fraction(n - 1, n) * factor.get(op, 1)

    def product(self, here, kind, op, operands, rest):
        out, (left, right) = shapes(kind)[0][1], (dims for _, dims in self.types(here, operands))
        if op == "dot":
            over = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", rest)[1]
            return 2 * math.prod(out) * math.prod(left[int(dim)] for dim in over.split(",") if dim)
        window = re.search(r"window=\{(.*?)\}", rest)
        window = dict(re.findall(r"(\w+)=([\d_x]+)", window[1])) if window else {}
        a, b, c = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", rest).groups()
        taps = 2 * out[c.index("b")] * out[c.index("f")] * right[b.index("i")]
        for i in range(len(a) - 2):
            of = lambda key, default, i=i: window[key].split("x")[i] if key in window else default
            stride, grow, step = (int(of(key, 1)) for key in ("stride", "lhs_dilate", "rhs_dilate"))
            low = int(of("pad", "0_0").split("_")[0])
            at = [o * stride + k * step - low for o in range(out[c.index(str(i))]) for k in range(int(of("size", 1)))]
            taps *= sum(0 <= p <= (left[a.index(str(i))] - 1) * grow and p % grow == 0 for p in at)
        return taps

    def walk(self, here, arguments, chains):
        frame, total = dict(enumerate(arguments)), (0, 0)
        for kind, op, operands, rest in self.rows[here].values():
            more, times = (0, 0), 1
            if m := re.fullmatch(SENDS, op):
                chain = re.search(r'chain_id="(\d+)"', rest)  # a TPU writes one collective into several fusions
                more = (0 if chain and chain[1] in chains else self.sent(here, m[1], operands, rest), 0)
                chains |= {chain[1]} if chain else set()
            elif op in ("dot", "convolution"):
                more = (0, self.product(here, kind, op, operands, rest))
            elif op == "custom-call" and "__cudnn$fmha" in rest:  # two products forward, five backward; causal: half
                (b, t, n, h), (_, s, *_) = (dims for _, dims in self.types(here, operands[:2]))
                more = (0, (5 if "Backward" in rest else 2) * 2 * b * n * t * s * h // (2 if "CAUSAL" in rest else 1))
            elif op == "while":
                state = self.value(here, operands[0], frame)
                more, times = self.walk(called(rest, "body")[0], [state], set()), self.iterations(rest, state)
            elif op in CALLS:
                more = self.walk(called(rest, CALLS[op])[0], [None] * len(operands), chains)
            elif op == "conditional":
                names = called(rest, "(?:branch|true|false)_computations?")
                more = tuple(map(max, zip(*(self.walk(name, [None], set()) for name in names), strict=True)))
            total = tuple(all_before + times * one for all_before, one in zip(total, more, strict=True))
        return total
