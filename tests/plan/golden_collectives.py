"""The collectives of every strategy on every target, as a golden file, and the page
docs/development/collectives.md that is made from it.

    python tests/plan/golden_collectives.py                       # compile all of it and compare (make tpu)
    python tests/plan/golden_collectives.py --write               # and keep what was found
    python tests/plan/golden_collectives.py tpu:v5e:2x4/fsdp cpu:8    # some targets, or one strategy of a target

The programs are those of configs/ (GPT, width 64, eight devices), with little text to train on. Those named `+kernels`
have sequences so long that attention is a kernel. Those named `reducer=` are that reducer alone, on the gradient of the
GPT with width 128 and four layers, over data 8, `hierarchical` over replica 2 x data 4, `sparse_rows` with the bytes of
one round. TPU targets need the extra `tpu`, and no TPU. Exit code 0: all as in the file; 1: a difference.

Each target is compiled in a process, since a compiler that aborts ends its process; the file then has the reason.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).with_name("tpu_collectives.json")
PAGE = ROOT / "docs" / "development" / "collectives.md"

STRATEGIES = (
    "mirrored", "zero1", "zero2", "fsdp", "hsdp", "tensor", "data_fsdp_tensor", "context", "pipeline", "moe",
)  # fmt: skip
EVERY = 100
SYNCS = {
    "diloco": f"sync={{diloco: {{every: {EVERY}}}}}",
    "diloco_int8": f"sync={{diloco: {{every: {EVERY}, reducer: int8}}}}",
}
"""Strategy -> its change of configs/diloco.yaml. Its rows are those of the step, and with `phase` and `every` those of
the program in which groups agree."""
TWO_SLICES = "tpu:v5e:2x2*2"
TARGETS = ("cpu:8", "tpu:v4:2x2x2", "tpu:v5e:2x4", "tpu:v5p:2x2x2", "tpu:v6e:2x4", "tpu:7x:2x2x1", TWO_SLICES)
LITTLE_TEXT = ["task_args.train_bytes=65536", "task_args.eval_bytes=4096"]
# Only `replica` or `data` may cross slices: what all eight devices shard elsewhere is sharded within a slice here.
OVER_SLICES = {name: ["mesh.replica=2", "mesh.fsdp=4"] for name in ("zero1", "zero2", "fsdp")}
# By default `replica` is the number of slices (mesh.py); these are compiled as on one.
OVER_SLICES |= {name: ["mesh.replica=1"] for name in ("mirrored", *SYNCS)}
# Blocks of a multiple of 128 tokens, as splash attention takes them; a ring over four devices has eight blocks.
KERNELS = "+kernels"
KERNEL_TARGETS = ("tpu:v5e:2x4", "tpu:v5p:2x2x2")
KERNEL_TOKENS = {"context": 1024}

REDUCER = "reducer="
REDUCERS = ("sum", "bfloat16", "int8", "float8", "sign", "topk", "powersgd", "hierarchical", "adasum", "sparse_rows")
REDUCER_TARGETS = ("cpu:8", "tpu:v5e:2x4")

Row = dict[str, Any]
Entry = dict[str, Any]
Golden = dict[str, dict[str, Entry]]
"""target -> strategy -> {"mesh": axis -> size, "collectives": rows} or {"refused": reason}; `+kernels` also {"kernels":
calls}."""


def strategies_of(target: str) -> tuple[str, ...]:
    """Returns the strategies in the file of a target."""
    reducers = (REDUCER + name for name in REDUCERS if target in REDUCER_TARGETS)
    return (*STRATEGIES, *SYNCS, *(s + KERNELS for s in STRATEGIES if target in KERNEL_TARGETS), *reducers)


# ---- what a compiler makes of a strategy
# --------------------------------------------------------------------------------


def entries(target_name: str, strategies: Sequence[str]) -> Iterator[tuple[str, Entry]]:
    """Yields the entry of each strategy, compiled in this process."""
    os.environ.setdefault("NPROC", "16")
    from spmdkit.errors import SpmdkitError
    from spmdkit.plan.machine.target import open_target, parse_target

    machine = open_target(parse_target(target_name))
    for name in strategies:
        try:
            yield name, compiled_entry(name, machine)
        except (SpmdkitError, RuntimeError, ValueError, NotImplementedError) as error:
            yield name, {"refused": f"{type(error).__name__}: {str(error).splitlines()[0]}"}


def compiled_entry(strategy: str, machine: Any) -> Entry:
    """Returns the mesh and the rows of a strategy's compiled step on an opened target."""
    from spmdkit.config import load_config
    from spmdkit.plan.collectives_bill import read_bill
    from spmdkit.plan.hlo.text import parse
    from spmdkit.program.opening import open_program, task_of
    from spmdkit.testing import bill_of

    if strategy.startswith(REDUCER):
        from tests.support.reduction_alone import compiled_bill

        reducer, num = strategy.removeprefix(REDUCER), len(machine.devices)
        sizes = {"replica": 2, "data": num // 2} if reducer == "hierarchical" else {"replica": 1, "data": num}
        rows = rows_of(compiled_bill(reducer, machine.devices, sizes))
        return {"mesh": {axis: n for axis, n in sizes.items() if n > 1}, "collectives": rows}
    name = strategy.removesuffix(KERNELS)
    more = OVER_SLICES.get(name, []) if machine.name == TWO_SLICES else []
    if strategy != name:
        more = [*more, f"task_args.context={KERNEL_TOKENS.get(name, 256)}"]
    more = [*more, SYNCS[name]] if name in SYNCS else more
    file = "diloco.yaml" if name in SYNCS else f"{name}.yaml"
    config = load_config(ROOT / "configs" / file, [*LITTLE_TEXT, *more])
    program = open_program(config, task_of(config), machine.devices, machine.memory_limit_bytes)
    entry: Entry = {"mesh": {axis: n for axis, n in program.sizes.items() if n > 1}}
    if strategy != name:
        entry["kernels"] = program.compiled.as_text().count('custom_call_target="tpu_custom_call"')
    rows = rows_of(bill_of(program))
    for phase in program.phases:
        of_phase = {"phase": phase.name, "every": phase.every}
        rows += [row | of_phase for row in rows_of(read_bill(parse(phase.compiled.as_text()), program.sizes))]
    return entry | {"collectives": rows}


def rows_of(bill: Any) -> list[Row]:
    """Returns (op, the op it emulates, axes, in a loop) -> count and bytes, as rows; bytes None: a loop of unknown
    length, with those of one run."""
    together = collections.defaultdict(list)
    for c in bill.collectives:
        if c.counted:
            together[c.op, c.emulated_op or "", "x".join(c.axes), c.in_loop].append(c)
    rows = []
    for (op, emulated_op, axes, in_loop), same in sorted(together.items()):
        row = {"op": op, "for": emulated_op, "axes": axes, "in_loop": in_loop, "count": len(same)}
        at_least = sum(c.bytes_at_least for c in same)
        unknown = any(c.bytes is None for c in same)
        rows.append(row | ({"bytes": None, "bytes_at_least": at_least} if unknown else {"bytes": at_least}))
    return rows


# ---- processes -------------------------------------------------------------------------------------------------------


def measure(target: str, strategies: Sequence[str]) -> Iterator[tuple[str, Entry]]:
    """Yields the entry of each strategy, compiled in a process; one that dies leaves its last line as the reason."""
    left = list(strategies)
    while left:
        command = [sys.executable, str(Path(__file__)), "--child", target, *left]
        with tempfile.TemporaryFile("w+") as errors:
            environment = os.environ | {"PYTHONPATH": str(ROOT)}
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
            try:
                assert child.stdout is not None
                for line in child.stdout:
                    name, entry = json.loads(line)
                    left.remove(name)
                    yield name, entry
                code = child.wait(60)
            finally:
                child.kill()
            errors.seek(0)
            lines = [line for line in errors if line.strip()]
        if left:
            reasons = [line for line in lines if "Check failed" in line or "Error" in line] or lines or ["no output"]
            yield left.pop(0), {"refused": f"the process ended with code {code}: {reasons[-1].strip()}"}


# ---- the file --------------------------------------------------------------------------------------------------------


def read() -> dict[str, Any]:
    """Returns the golden file: `versions` and `targets`."""
    return json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {"versions": {}, "targets": {}}


def write(path: Path, document: dict[str, Any]) -> None:
    """Writes the golden file, a row on a line, in the order of the tables above."""
    lines = [f'{{\n"versions": {json.dumps(document["versions"])},\n"targets": {{']
    targets = [t for t in TARGETS if t in document["targets"]]
    for target in targets:
        lines.append(f'"{target}": {{')
        found = document["targets"][target]
        for name in (names := [s for s in strategies_of(target) if s in found]):
            end = "" if name == names[-1] else ","
            entry = found[name]
            if "refused" in entry:
                lines.append(f'"{name}": {json.dumps(entry)}{end}')
                continue
            rows = ",\n".join("  " + json.dumps(row) for row in entry["collectives"])
            kernels = f'"kernels": {entry["kernels"]}, ' if "kernels" in entry else ""
            lines.append(
                f'"{name}": {{"mesh": {json.dumps(entry["mesh"])}, {kernels}"collectives": [\n{rows}\n]}}{end}'
            )
        lines.append("}" if target == targets[-1] else "},")
    path.write_text("\n".join([*lines, "}", "}"]) + "\n")


def versions() -> dict[str, str]:
    """Returns the versions that decide what a compiler makes of a program."""
    has = lambda package: importlib.util.find_spec(package) is not None
    return {package: metadata.version(package) if has(package) else "none" for package in ("jax", "libtpu")}


def differences(expected: Entry | None, found: Entry) -> list[str]:
    """Returns what differs between the file's entry and the one just compiled, a line for each."""
    if expected is None:
        return ["not in the file"]
    if "refused" in expected or "refused" in found:
        before, now = expected.get("refused", "compiled"), found.get("refused", "compiled")
        return [] if before == now else [f"was: {before}", f"is:  {now}"]
    same = ("mesh", "kernels")
    lines = [f"{k} was {expected.get(k)}, is {found.get(k)}" for k in same if expected.get(k) != found.get(k)]
    before, now = ({_key(row): row for row in entry["collectives"]} for entry in (expected, found))
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            lines.append(f"{key}: was {_amount(before.get(key))}, is {_amount(now.get(key))}")
    return lines


def _key(row: Row) -> str:
    meant = f" (for {row['for']})" if row["for"] else ""
    often = f", {row['phase']} every {row['every']} steps" if "phase" in row else ""
    return f"{row['op']}{meant} over {row['axes']}{', in a loop' if row['in_loop'] else ''}{often}"


def _amount(row: Row | None) -> str:
    if row is None:
        return "none"
    sent = f"at least {row['bytes_at_least']}" if row["bytes"] is None else row["bytes"]
    return f"{row['count']} with {sent} bytes"


# ---- the page --------------------------------------------------------------------------------------------------------


def page(document: dict[str, Any]) -> str:
    """Returns docs/development/collectives.md: what is written by hand (`collectives_page.md`), with the tables."""
    text = Path(__file__).with_name("collectives_page.md").read_text()
    targets = document["targets"]
    kernels = [s + KERNELS for s in STRATEGIES]
    own = (*STRATEGIES, *SYNCS)
    found = {"TOTALS": _totals(targets, own), "DETAILS": "\n\n".join(_details(s, targets) for s in own)}
    found["KERNEL_TOTALS"] = _totals({t: targets[t] for t in KERNEL_TARGETS if t in targets}, kernels)
    found["KERNEL_DETAILS"] = "\n\n".join(_details(s, targets) for s in kernels)
    found["REDUCERS"] = _shares({t: targets[t] for t in REDUCER_TARGETS if t in targets})
    found["VERSIONS"] = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    for name, table in found.items():
        text = text.replace(f"{{{{{name}}}}}", table)
    return text


def _totals(targets: Golden, strategies: Sequence[str]) -> str:
    """Returns the table strategy x target of bytes that a device sends in a step; in brackets, over what the CPU
    sends."""
    names = [t for t in TARGETS if t in targets]
    rows = {}
    for strategy in strategies:
        rows[strategy] = cells = []
        least = _bytes(targets.get("cpu:8", {}).get(strategy))
        for target in names:
            sent = _bytes(targets[target].get(strategy))
            ratio = f" ({sent / least:.2f})" if sent is not None and least and target != "cpu:8" else ""
            cells.append("refused" if sent is None else f"{sent:,}{ratio}")
    return _table("strategy", names, rows)


def _table(what: str, names: Iterable[str], rows: dict[str, list[str]]) -> str:
    lines = [[what, *names], ["---", *("---:" for _ in names)], *([name, *cells] for name, cells in rows.items())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def share(targets: Golden, target: str, reducer: str) -> float:
    """Returns the bytes of a reducer over those of `sum`; of loops of unknown length one run."""
    found = [targets[target][REDUCER + name]["collectives"] for name in (reducer, "sum")]
    sent, plain = (sum(row.get("bytes_at_least", row["bytes"]) for row in rows) for rows in found)
    return float(sent / plain)


def _shares(targets: Golden) -> str:
    """Returns the table reducer x target of bytes over those of `sum`, and what is sent."""
    rows_of_reducer = {}
    for reducer in REDUCERS:
        rows_of_reducer[reducer] = cells = []
        for target, found in targets.items():
            rows = found[REDUCER + reducer]["collectives"]
            what = ", ".join(f"{row['count']} {_key(row)}: {row.get('bytes_at_least', row['bytes']):,}" for row in rows)
            cells.append(f"{share(targets, target, reducer):.4f} ({what})")
    return _table("reducer", targets, rows_of_reducer)


def _bytes(entry: Entry | None) -> int | None:
    """Returns what a device sends in a step on average; None where nobody knows."""
    if entry is None or "refused" in entry or any(row["bytes"] is None for row in entry["collectives"]):
        return None
    return round(sum(row["bytes"] / row.get("every", 1) for row in entry["collectives"]))


def _details(strategy: str, targets: Golden) -> str:
    names = [t for t in TARGETS if strategy in targets.get(t, {})]
    lines = [f"### {strategy}", ""]
    lines += [f"- {t}: {targets[t][strategy]['refused']}" for t in names if "refused" in targets[t][strategy]]
    names = [t for t in names if "refused" not in targets[t][strategy]]
    meshes = {t: " x ".join(f"{a} {n}" for a, n in targets[t][strategy]["mesh"].items()) for t in names}
    common = meshes[names[0]] if names else ""
    others = "".join(f"; on {t} {m}" for t, m in meshes.items() if m != common)
    cells = {t: {_key(row): row for row in targets[t][strategy]["collectives"]} for t in names}
    calls = [f"{targets[t][strategy]['kernels']} on {t}" for t in names if "kernels" in targets[t][strategy]]
    lines += [
        f"Mesh {common}{others}.{' Calls of kernels: ' if calls else ''}{', '.join(calls)}{'.' if calls else ''}",
        "",
    ]
    amount = lambda row: f"{row['count']}: {row['bytes']:,}" if row else ""
    keys = sorted({key for rows in cells.values() for key in rows})
    table = _table("collective", names, {key: [amount(cells[t].get(key)) for t in names] for key in keys})
    return "\n".join([*lines, table])


# ---- command ---------------------------------------------------------------------------------------------------------


def chosen(names: Sequence[str]) -> dict[str, list[str]]:
    """Returns target -> strategies of arguments like `tpu:v5e:2x4/fsdp`, `cpu:8`; without any: all."""
    found: dict[str, list[str]] = {}
    for name in names or TARGETS:
        target, _, strategy = name.partition("/")
        if target not in TARGETS or strategy not in ("", *strategies_of(target)):
            known = {target: strategies_of(target) for target in TARGETS}
            sys.exit(f"{name} is not in the table. Target -> strategies: {known}.")
        found.setdefault(target, []).extend([strategy] if strategy else strategies_of(target))
    return found


def main() -> int:
    """Compiles, compares and says; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="TARGET[/STRATEGY]")
    parser.add_argument("--write", action="store_true", help="keep what was found, and make the page")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        for pair in entries(options.names[0], options.names[1:]):
            print(json.dumps(pair), flush=True)
        return 0
    document, wrong, asked = read(), 0, chosen(options.names)
    if importlib.util.find_spec("libtpu") is None and any(target.startswith("tpu:") for target in asked):
        sys.exit("libtpu is not installed. It needs no TPU: pip install '.[tpu]', or name cpu:8 alone.")
    for target, strategies in asked.items():
        for name, entry in measure(target, strategies):
            lines = differences(document["targets"].get(target, {}).get(name), entry)
            wrong += bool(lines)
            verdict = "differs" if lines else "as in the file"
            print("\n    ".join([f"{target}/{name}: {verdict}", *lines]), flush=True)
            if options.write:
                document["targets"].setdefault(target, {})[name] = entry
                document["versions"] = versions()
                write(GOLDEN, document)
    if options.write:
        PAGE.write_text(page(document))
        return 0
    if wrong:
        made = ", ".join(f"{k} {v}" for k, v in document["versions"].items())
        here = ", ".join(f"{k} {v}" for k, v in versions().items())
        print(f"{wrong} differ from {GOLDEN.name} (made with {made}; here {here}). If this is intended: --write.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
