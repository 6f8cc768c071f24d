"""A second reader of compiled programs, written without looking at the package's reader (`spmdkit/plan/hlo`)."""

import math
import re

ROW = re.compile(r"^  (?:ROOT )?%(\S+) = (.*?) ([a-z][a-z0-9-]*)\((.*)", re.M)
SENDS = "(all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)(?:-start)?"
CALLED = r"(?:calls|to_apply|body|branch_computations)=\{?((?:%[^\s,}]+,? ?)+)"
GROUPS = r"groups=(?:\{\{(.*?)\}|\[\d+,(\d+)\]|mesh\[(.*?)\].*?\{(.*?)\})"


class Program:
    def __init__(self, text):
        bodies = re.findall(r"^(?:ENTRY )?%(\S+) [^\n]*\{\n(.*?)^\}", text, re.S | re.M)
        self.computations = {name: ROW.findall(body) for name, body in bodies}
        self.rows = {name: row for rows in self.computations.values() for name, *row in rows}
        self.entry = bodies[-1][0]
        self.chains = set()  # a TPU writes one collective, a chain, into several fusions

    def operands(self, rest):
        return [self.rows[name] for name in re.findall(r"%([^\s,]+)", rest.split(")")[0])]

    def totals(self, computation=None):
        """Returns (bytes sent by a device, FLOPs of products), by the formulas of docs/development/collectives.md."""
        sent, flops, rows = 0, 0, self.computations[computation or self.entry]
        for _, kind, op, rest in rows:
            if collective := re.fullmatch(SENDS, op):
                chain = re.search(r'chain_id="(\d+)"|$', rest)[1]
                scattered = rows[-1][2] == "dynamic-slice"  # a TPU's fusion of a sum and the slice that a device keeps
                sent += (chain not in self.chains) * self.sent("reduce-scatter" if scattered else collective[1], rest)
                self.chains |= {chain} - {None}
            elif op in ("dot", "convolution"):
                flops += product(op, rest, *(sizes(row[0]) for row in [(kind,), *self.operands(rest)]))
            elif op != "reduce" and (called := re.search(CALLED, rest)):
                branches = [self.totals(name) for name in re.findall(r"%([^\s,]+)", called[1])]
                times = self.trips(rest) if op == "while" else 1
                sent, flops = (n + times * max(more) for n, *more in zip((sent, flops), *branches, strict=True))
        return sent, flops

    def trips(self, rest):
        if known := re.search(r'known_trip_count":\{"n":"(\d+)', rest):
            return int(known[1])
        *_, (_, _, op, compare) = self.computations[re.search(r"condition=%([^\s,]+)", rest)[1]]
        counter, *limit = self.operands(compare)
        if op != "compare" or counter[1] != "get-tuple-element":
            return 1
        start = self.operands(self.operands(rest)[0][2])[int(re.search(r"index=(\d+)", counter[2])[1])]
        while start[1] != "constant":
            start = self.operands(start[2])[0]
        return int(limit[0][2].split(")")[0]) - int(start[2].split(")")[0])

    def sent(self, op, rest):
        widths = [int(re.match(r"[a-z]+(\d*)", row[0])[1] or 8) // 8 for row in self.operands(rest)]
        size = sum(width * math.prod(sizes(row[0])) for width, row in zip(widths, self.operands(rest), strict=True))
        if op == "collective-permute":
            return size * any(a != b for a, b in re.findall(r"(\d+),(\d+)", re.search(r"pairs=\{(.*?)\}\}", rest)[1]))
        listed, n, mesh, axes = re.search(GROUPS, rest).groups(default="")
        extents = dict(re.findall(r"'(\w+)'=(\d+)", mesh))
        n = int(n or len(listed.split(","))) * math.prod(int(extents[axis]) for axis in re.findall(r"'(\w+)'", axes))
        return size * (n - 1) * {"all-gather": n, "all-reduce": 2}.get(op, 1) // n


def sizes(kind):
    return [int(dim) for dim in re.search(r"\[([\d,]*)\]", kind)[1].split(",") if dim]


def product(op, rest, out, left, right):
    if op == "dot":
        over = re.search(r"lhs_contracting_dims=\{([\d,]+)\}", rest)[1]
        return 2 * math.prod(out) * math.prod(left[int(dim)] for dim in over.split(","))
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", rest).groups()  # how a TPU writes a product of matrices
    left, right, out = (dict(zip(*pair, strict=True)) for pair in zip(labels, (left, right, out), strict=True))
    windows = [max(left[dim], right[dim], out[dim]) for dim in left if dim.isdigit()]
    return 2 * out["b"] * out["f"] * right["i"] * math.prod(windows)
