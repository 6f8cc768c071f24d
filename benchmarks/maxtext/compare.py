"""The train step of spmdkit against MaxText's own step, at the same shapes, by the same compiler, read by one reader.

    python benchmarks/maxtext/compare.py [--only CHIP/STRATEGY ...] [--again] [--read] [--python PYTHON]

Compiles the cells of `cells.yaml` that are not measured, in the environment of `requirements.txt`, and writes each into
`results.json` when it is done; writes docs/measured/maxtext.md. Ends with 1 if a ratio is above LIMIT and has no cause
under `known` in `cells.yaml`. The programs of the cells with GOALS are kept in `programs/`.
"""

import argparse
import datetime
import gzip
import json
import math
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.maxtext import programs

FOLDER = ROOT / "benchmarks" / "maxtext"
RESULTS, CELLS, PAGE = FOLDER / "results.json", FOLDER / "cells.yaml", ROOT / "docs" / "measured" / "maxtext.md"
BUILD, KEPT = ROOT / "build" / "bench-maxtext", FOLDER / "programs"
LIMIT = 1.05
GOALS = {"flops": 1.01, "sent_bytes": 1.0, "peak_bytes": 1.0, "step_s": 1.0}
GOAL_CHIPS = ("v5p", "v6e", "h100")
GOAL_STRATEGIES = ("fsdp/7b", "data-tensor/7b", "context/7b", "experts/8x1b", "pipeline/7b")
LIMIT_S = 1200
"""Processor time of a compilation."""
SMALL = 0.01
"""Exposed communication below this share of a step is not compared."""
SIDES = ("spmdkit", "maxtext")
FIGURES = {
    "flops": ("FLOPs", 1e12, "TFLOP"),
    "memory_bytes": ("main memory", 1e9, "GB"),
    "sent_bytes": ("communication", 1e9, "GB"),
    "exposed_s": ("exposed", 1e-3, "ms"),
    "peak_bytes": ("peak memory", 2**30, "GiB"),
    "step_s": ("time", 1e-3, "ms"),
}
"""Figure of a program -> its column, its unit, the name of the unit."""


def cells():
    """Returns name -> settings of both programs, in the order of the table."""
    document, found = yaml.safe_load(CELLS.read_text()), {}
    for chip, rows in document["cells"].items():
        for name, (target, mesh, batch, sequence) in rows.items():
            strategy, model = name.split("/")
            of_model, of_strategy = document["models"][model], document["strategies"][strategy]
            found[f"{chip}/{name}"] = {
                "target": target,
                "mesh": mesh,
                "batch": batch,
                "sequence": sequence,
                "spmdkit": _our_config(of_model["ours"], mesh, batch, sequence) | of_strategy.get("ours", {}),
                "maxtext": _maxtext_settings(target, mesh, batch, sequence)
                | of_model["maxtext"]
                | of_strategy.get("maxtext", {}),
            }
    return found


def _our_config(model, mesh, batch, sequence):
    return {
        "task_args": {**model, "context": sequence, "random_tokens": True},
        "mesh": mesh,
        "batch_size": batch,
        "precision": "bfloat16",
        "remat": "full",
        "learning_rate": 3.0e-4,
        "clip_norm": 1.0,
    }


def _maxtext_settings(target, mesh, batch, sequence):
    hosts = 1
    if target.startswith("gpu:") and "x" in target:
        hosts = int(target.rpartition(":")[2].split("x")[0])
    sizes = {"fsdp": 1, **mesh}
    axes = {f"ici_{axis}_parallelism": size for axis, size in sizes.items()}
    axes["ici_fsdp_parallelism"] = sizes["fsdp"] // hosts
    axes |= {"dcn_data_parallelism": 1, "dcn_fsdp_parallelism": hosts}
    return {
        **axes,
        "per_device_batch_size": batch / math.prod(mesh.values()),
        "max_target_length": sequence,
        "remat_policy": "full",
        "attention": "cudnn_flash_jax" if target.startswith("gpu:") else "flash",
    }


def known():
    """Returns cell -> figure -> cause of a ratio above its limit."""
    return yaml.safe_load(CELLS.read_text())["known"] or {}


def has_goals(name):
    """Returns whether a cell has goals."""
    chip, _, strategy = name.partition("/")
    return chip in GOAL_CHIPS and strategy in GOAL_STRATEGIES


def limit_of(name, figure):
    """Returns the limit of a ratio: the goal, or LIMIT."""
    return GOALS.get(figure, LIMIT) if has_goals(name) else LIMIT


# ---- measuring -------------------------------------------------------------------------------------------------------


def measure(name, cell, python, again, previous):
    """Compiles both programs of a cell, unless they are saved, and returns their figures. Those of MaxText in the
    `previous` measurement remain if their settings do."""
    row = {"settings": settings_of(cell), "date": datetime.datetime.now(datetime.UTC).date().isoformat()}
    remains = previous and all(previous["settings"][key] == cell[key] for key in ("target", "maxtext"))
    for side in SIDES:
        if side == "maxtext" and remains and side in previous and not _is_compiled(name, side, cell):
            row[side] = previous[side]
            continue
        if not _is_compiled(name, side, cell) or (again and side == "spmdkit"):
            problem = _compile(name, side, cell, python)
            if problem:
                return row | {"problem": f"{side}: {problem}"}
        row[side] = saved_figures(name, side, cell)
    return row


def program_of(name, side):
    """Returns the folder of a compiled program."""
    return (KEPT if has_goals(name) else BUILD) / name / side


def saved_figures(name, side, cell):
    """Returns the figures of a saved program."""
    folder = program_of(name, side)
    text = gzip.decompress((folder / "step.txt.gz").read_bytes()).decode()
    return figures(json.loads((folder / "step.json").read_text()), text, cell["target"])


def settings_of(cell):
    """Returns what a measurement depends on."""
    return {key: cell[key] for key in ("target", *SIDES)}


def is_current(row, cell):
    """Returns whether a measurement is one of this cell."""
    return row is not None and row["settings"] == settings_of(cell)


def _is_compiled(name, side, cell):
    file = program_of(name, side) / "settings.json"
    return file.exists() and json.loads(file.read_text()) == cell[side]


def _compile(name, side, cell, python):
    """Compiles one program; returns the problem, or None."""
    out, saved = BUILD / name / side, program_of(name, side)
    for folder in (out, saved):
        folder.mkdir(parents=True, exist_ok=True)
    (saved / "settings.json").unlink(missing_ok=True)
    if side == "spmdkit":
        task = {"task": f"{ROOT / 'examples' / 'gpt.py'}:task", "run_dir": str(out / "run")}
        (out / "config.yaml").write_text(yaml.safe_dump(task | cell[side]))
        arguments = [FOLDER / "compile_ours.py", out, cell["target"], out / "config.yaml"]
    else:
        settings = [f"{key}={value}" for key, value in cell[side].items()]
        arguments = [FOLDER / "compile_step.py", out, cell["target"], *settings]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    try:
        result = subprocess.run(
            [python, *map(str, arguments)],
            env=environment,
            timeout=4 * LIMIT_S,  # for a busy machine
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S + 30)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    except subprocess.TimeoutExpired:
        return f"not compiled within {4 * LIMIT_S // 60} minutes"
    (out / "log").write_text(result.stdout)
    if result.returncode == -signal.SIGXCPU:
        return f"not compiled within {LIMIT_S // 60} minutes of processor time"
    if result.returncode:
        return programs.last_error(result.stdout)
    text = (out / "step.txt").read_text()
    for folder in (f"{Path(python).parents[1]}/", f"{ROOT}/"):
        text = text.replace(folder, "")
    (saved / "step.txt.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    (out / "step.txt").unlink()
    if saved != out:
        (out / "step.json").replace(saved / "step.json")
    (saved / "settings.json").write_text(json.dumps(cell[side]))
    return None


def figures(summary, text, target):
    """Returns the figures of a compiled step."""
    from spmdkit.plan.machine.target import parse_target
    from spmdkit.plan.step_time import predict_time

    module, bill, devices = programs.parsed(summary, text)
    time = predict_time(parse_target(target), module, bill, devices)
    return {
        "flops": time.hlo_flops,
        "memory_bytes": time.memory_bytes,
        "sent_bytes": bill.bytes_at_least,
        "exposed_s": sum(link.exposed_s for link in time.links.values()),
        "peak_bytes": summary["memory"]["peak_memory_in_bytes"],
        "step_s": time.step_s,
        "attention": programs.attention_of(module),
        "loops_of_unknown_length": time.guessed,
        "compile_cpu_s": summary["cpu_s"],
        "versions": summary["versions"],
    }


# ---- the table -------------------------------------------------------------------------------------------------------


def ratios(row):
    """Returns figure -> spmdkit / MaxText; None for exposed communication that is small in both steps."""
    ours, theirs = (row[side] for side in SIDES)
    found = {name: ours[name] / theirs[name] if theirs[name] else math.inf for name in FIGURES}
    if all(side["exposed_s"] < SMALL * side["step_s"] for side in (ours, theirs)):
        found["exposed_s"] = None
    return found


def measured(results):
    """Returns the measurements of both programs of the present cells, in the order of the table."""
    rows = {name: results[name] for name, cell in cells().items() if is_current(results.get(name), cell)}
    return {name: row for name, row in rows.items() if "problem" not in row}


def above(results):
    """Returns (cell, figure, ratio) of the ratios above their limit."""
    found = [(name, figure, r) for name, row in measured(results).items() for figure, r in ratios(row).items()]
    return [(name, figure, r) for name, figure, r in found if r is not None and r > limit_of(name, figure)]


def unexplained(results, causes):
    """Returns the ratios above the limit without a known cause, as lines."""
    return [
        f"{name}: {FIGURES[figure][0]} {r:.3f} of MaxText's, the limit is {limit_of(name, figure)}"
        for name, figure, r in above(results)
        if figure not in causes.get(name, {})
    ]


def page(results, causes):
    """Returns docs/measured/maxtext.md."""
    wanted, complete = cells(), measured(results)
    notes, rows, absolute = [], [], []
    for name, row in complete.items():
        shown = [_ratio(name, figure, r, causes, notes) for figure, r in ratios(row).items()]
        rows.append([name, _mesh(wanted[name]), *shown, row["date"]])
        absolute.append([name, *(_both(row, figure) for figure in FIGURES), _attention(row)])
    problems = yaml.safe_load(CELLS.read_text())["problems"]
    missing = [
        [n, problems.get(n) or results.get(n, {}).get("problem", "not run")] for n in wanted if n not in complete
    ]
    dates = sorted({row["date"] for row in complete.values()})
    versions = {key.replace("-", "_"): v for key, v in next(iter(complete.values()))["maxtext"]["versions"].items()}
    span = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    parts = [
        _INTRODUCTION.format(
            limit=LIMIT,
            chips=", ".join(GOAL_CHIPS),
            goals=", ".join(f"{FIGURES[figure][0]} {goal}" for figure, goal in GOALS.items()),
            small=f"{SMALL:.0%}",
            dates=span,
            **versions,
        ),
        "## Ratios: spmdkit / MaxText\n",
        _table(["cell", "mesh", *(column for column, _, _ in FIGURES.values()), "measured"], rows),
        "".join(f"{n}. {note}\n" for n, note in enumerate(notes, 1)),
        "## Figures: spmdkit / MaxText\n",
        "Per device and step.\n",
        _table(["cell", *(f"{column}, {unit}" for column, _, unit in FIGURES.values()), "attention"], absolute),
    ]
    if missing:
        parts += ["## Not measured\n", _table(["cell", "reason"], missing)]
    return "\n".join(part for part in parts if part)


def _attention(row):
    return " / ".join(dict.fromkeys(row[side]["attention"] for side in SIDES))


def _ratio(name, figure, r, causes, notes):
    if r is None:
        return "small"
    if r <= limit_of(name, figure):
        return f"{r:.3f}"
    cause = causes.get(name, {}).get(figure, "No known cause.")
    if cause not in notes:
        notes.append(cause)
    return f"**{r:.3f}** [{notes.index(cause) + 1}]"


def _both(row, figure):
    unit = FIGURES[figure][1]
    return " / ".join(f"{row[side][figure] / unit:.4g}" for side in SIDES)


def _mesh(cell):
    return f"`{cell['target']}` " + " x ".join(f"{axis} {size}" for axis, size in cell["mesh"].items())


def _table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


_INTRODUCTION = """# Comparison with MaxText on the same compiler

Generated by `make bench-maxtext`. The train steps of spmdkit (`examples/gpt.py`) and of MaxText {maxtext} are compiled
by the same compilers (jax {jax}, libtpu {libtpu}, jax-cuda13-pjrt {jax_cuda13_pjrt}) for the same machines, and read by
one reader, that of `plan`. No step runs: times are predicted by a walk through the compiled schedule.

- Both programs have the same shapes, mesh, batch, remat (`full`: only the inputs of layers are saved), optimizer (AdamW
  with float32 state), gradient clipping, float32 weights and bfloat16 arithmetic. MaxText has its own defaults
  otherwise, and no compiler options. spmdkit has its default compiler options.
- Attention is the same kind of kernel in both: splash on TPU, cuDNN on GPU. The column `attention` lists both where
  they differ. MaxText's tiles have 512 queries and keys. spmdkit selects tiles by chip and shape: 1,024 queries and 512
  keys on v6e.
- 7B, 1B, 70B: Llama 2 7B, MaxText's default model (1.1 billion parameters), Llama 2 70B. 8x1b: 24 layers of width 2,048
  with eight experts of width 5,632, two per token, with capacity 1.25. MaxText moves tokens to experts with one-hot
  products, which are part of its FLOPs.
- spmdkit's step also checks that the gradient is finite.
- `pipeline` is GPipe, the only schedule of MaxText; `pipeline-1f1b` is the default schedule of spmdkit. Eight
  microbatches.
- *main memory*: bytes that instructions read and write. *communication*: bytes that a device sends. *exposed*: time in
  which the device waits for communication; `small`: below {small} of the step in both. *time*: of the step.
- The limit of each ratio is {limit}. The cells of `7b` and `8x1b` on {chips}, except for `pipeline-1f1b`, have lower
  limits: {goals}.
- Ratios above their limit are bold, with their cause. `make bench-maxtext` fails if such a ratio has no known cause.

Measured {dates}. The command continues where it was interrupted. `make bench-maxtext ONLY=v5p/fsdp`
measures the cells with that prefix, `AGAIN=--again` compiles spmdkit's step again.
"""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", default=str(ROOT / ".venv-maxtext" / "bin" / "python"))
    parser.add_argument("--only", nargs="*", default=[""], help="prefixes of cells, v5p/fsdp")
    parser.add_argument("--again", action="store_true", help="measure the cells again; MaxText's programs are reused")
    parser.add_argument("--read", action="store_true", help="read saved programs of measured cells again")
    arguments = parser.parse_args()
    wanted = {name: cell for name, cell in cells().items() if name.startswith(tuple(arguments.only or [""]))}
    if not wanted:
        parser.error(f"--only {' '.join(arguments.only)} is no prefix of a cell: {', '.join(cells())}")
    for name, cell in wanted.items():
        reads = arguments.read and all(_is_compiled(name, side, cell) for side in SIDES)
        if is_current(read_results().get(name), cell) and not (arguments.again or reads):
            continue
        if not Path(arguments.python).exists():
            parser.error(f"--python {arguments.python} does not exist. `make bench-maxtext` creates the environment.")
        row = measure(name, cell, arguments.python, arguments.again, read_results().get(name))
        results = read_results() | {name: row}
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        shown = row.get("problem") or ", ".join(
            f"{FIGURES[figure][0]} {'small' if r is None else f'{r:.3f}'}" for figure, r in ratios(row).items()
        )
        print(f"{name}: {shown}", flush=True)
    results = read_results()
    PAGE.write_text(page(results, known()))
    if lines := unexplained(results, known()):
        sys.exit("\n".join(lines))


def read_results():
    """Returns cell -> measurement."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


if __name__ == "__main__":
    main()
