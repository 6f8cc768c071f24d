"""Bugs in five natural tasks (tests/verify/located), and the lines that `verify` reports for them.

    python -m tests.support.located --write          every bug in every task -> docs/development/locate.md
    python -m tests.support.located gpt local_mean   one bug in one task

A bug in a task is one line, inserted into the task or replacing one of its lines, so the wrong line is known. A bug in
spmdkit is a mutant of `verify`; the expected line is in the function that contains the bug.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import importlib.util
import inspect
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax

import spmdkit as sk
from spmdkit.step import gradient
from spmdkit.step.row_order import RowOrder
from spmdkit.verify import mutations
from spmdkit.verify.locate import Locator
from spmdkit.verify.mutants import MUTANTS
from spmdkit.verify.runner import CaseRunner
from spmdkit.verify.task_runner import Setting, TaskRunner

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "verify" / "located"
TASKS = ("gpt", "cnn", "moe", "contrastive", "recurrent")
PAGE = ROOT / "docs" / "development" / "locate.md"
_TEXTS = tempfile.TemporaryDirectory(prefix="located-")
BATCH = 16
DATA, TWO = {"data": 4}, {"replica": 2, "data": 2}


@dataclasses.dataclass(frozen=True)
class Bug:
    """A wrong line of a task.

    Attributes:
        line: the line, without its indent.
        anchor: the start of the line that it replaces: a comment, `# hidden` or `# loss`, or a statement.
        short: batches may be short.
    """

    line: str
    anchor: str = "# hidden"
    mesh: dict[str, int] = dataclasses.field(default_factory=lambda: DATA)
    short: bool = False


NAMES = '("replica", "data")'
TASK_BUGS = {
    "local_mean": Bug("h = h - h.mean(0)"),
    "mean_of_local_variances": Bug(f"h = h / jnp.sqrt(jax.lax.pmean(h.var(0), {NAMES}) + 1)"),
    "mean_of_first_replica": Bug("h = h - sk.all_gather(h)[: len(h)].mean(0)"),
    "sum_of_local_means": Bug(f"h = h - jax.lax.psum(h.mean(0), {NAMES})"),
    "axis_omitted": Bug('h = h - jax.lax.pmean(h.mean(0), "data")', mesh=TWO),
    "local_max": Bug("h = h / (1 + jnp.abs(h).max())"),
    "local_median": Bug("h = h - jnp.median(h, 0)"),
    "local_cumsum": Bug("h = h - jnp.cumsum(h, 0) / 16"),
    "local_roll": Bug("h = 0.8 * h + 0.2 * jnp.roll(h, 1, 0)"),
    "local_row_index": Bug("h = (h.T * (1 + jnp.arange(len(h)) / 16)).T"),
    "local_batch_size": Bug("h = h * (len(h) / 16)"),
    "no_example_keys": Bug("h = h * jax.random.bernoulli(key, 0.8, h.shape)"),
    "key_per_replica": Bug(
        "h = h + 0.1 * jax.random.normal(jax.random.fold_in(jax.random.key(1), sk.replica_index()), h.shape[1:])"
    ),
    "gradient_times_local_rows": Bug("h = jax.lax.stop_gradient(h) + (h - jax.lax.stop_gradient(h)) * (len(h) / 16)"),
    "mean_of_local_means": Bug(
        'loss = (loss * batch["weight"]).sum() / batch["weight"].sum()\nreturn sk.mean(loss)',
        "return sk.mean(loss",
    ),
    "multiplied_by_replicas": Bug("loss = loss * sk.num_replicas()", "# loss"),
    "divided_by_replicas": Bug(f"loss = loss / jax.lax.psum(1, {NAMES})", "# loss"),
    "local_softmax": Bug("loss = loss * len(loss) * jax.nn.softmax(loss)", "# loss"),
    "local_hard_examples": Bug("loss = jnp.where(loss >= jnp.sort(loss)[len(loss) // 2], loss, 0)", "# loss"),
    "local_padding_ratio": Bug("loss = loss * (len(loss) / sk.example_mask().sum())", "# loss", short=True),
}
"""Bugs in a task, by name."""

CONTEXT, FSDP = {"data": 2, "context": 2}, {"data": 2, "fsdp": 2}
LONG_BUGS = {
    "local_denominator": Bug("total = weights.sum(-1, keepdims=True)", "total = "),
    "averaged_denominator": Bug(
        'total = all_reduce(weights.sum(-1, keepdims=True), "sequence") / axis_size("sequence")', "total = "
    ),
    "local_positions": Bug("positions = jnp.arange(x.shape[1])", "positions = "),
    "queries_of_other_shard": Bug('q = jnp.roll(all_gather(q, "sequence", dim=1), x.shape[1], 1)', "q = all_gather"),
    "local_mean_of_keys": Bug("k = k - k.mean(1, keepdims=True)", "# sequence"),
    "local_shift": Bug("v = jnp.roll(v, 1, 1)", "# sequence"),
    "key_per_shard": Bug(
        'v = v + jax.random.normal(jax.random.fold_in(jax.random.key(0), axis_index("sequence")), v.shape)',
        "# sequence",
    ),
}
"""Bugs in the task `long`, in a function of `sk.manual` with its sequence sharded over `context`, by name."""

FSDP_BUGS = {
    "recurrent": ("no_example_keys", "local_mean"),
    "cnn": ("local_max", "local_cumsum"),
    "gpt": ("local_batch_size", "local_row_index", "key_per_replica"),
    "moe": ("multiplied_by_replicas", "sum_of_local_means"),
    "contrastive": ("mean_of_local_means", "local_roll"),
}
"""Task -> bugs that are also tried on a mesh with sharded parameters, where a vmap maps replicas without a
`shard_map`."""

SHARDED = {f"long {name}": ("long", name, CONTEXT) for name in LONG_BUGS}
SHARDED |= {f"{task} {name}": (task, name, FSDP) for task, names in FSDP_BUGS.items() for name in names}
"""`task name` -> arguments of `locate_bug`, on meshes with an axis that shards parameters or sequences."""

MUTANT_FUNCTIONS = {
    "reduction_dropped": [mutations._first_only],
    "reduction_doubled": [mutations.doubled],
    "reduction_over_wrong_axis": [mutations._first_only],
    "microbatch_twice": [mutations.repeat_first_microbatch],
    "key_shared_by_replicas": [
        mutations.share_positions,
        RowOrder.of_microbatch,
        RowOrder.position,
        RowOrder.of_shards,
        gradient._positions,
    ],
    "key_folded_by_device": [mutations.fold_positions],
    "mean_over_shard": [mutations.shard_mean],
    "example_keys_forgotten": [mutations.fold_by_local_row],
}
"""Mutants of `verify` that apply to every task -> the functions that contain the bug or receive its result."""

RIGHT, WRONG, NO_LINE, UNDETECTED = "right", "wrong", "no line", "not detected"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The verdict on the line that `verify` reports for a bug, and the text of the report."""

    verdict: str
    report: str


def locate_bug(task: str, name: str, mesh: dict[str, int] | None = None) -> Outcome:
    """Returns where `verify` locates a bug in a task, on the mesh of the bug by default."""
    if name in MUTANT_FUNCTIONS:
        return _locate_mutant(_unchanged(task), name)
    bug, mesh = (
        (LONG_BUGS[name], mesh or CONTEXT) if task == "long" else (TASK_BUGS[name], mesh or TASK_BUGS[name].mesh)
    )
    text, wrong = changed(text_of(task), bug)
    task_runner = runner_of(task, text, bug.short).task_runner
    setting = Setting(mesh, short=bug.short)
    location = Locator(task_runner)(setting, task_runner.program(setting), "gradient", int(bug.short))
    if location is None:
        return Outcome(NO_LINE, "")
    file, _, number = location.line.partition(" ")[0].rpartition(":")
    is_right = file.endswith(f"{task}_task.py") and int(number) in wrong
    return Outcome(RIGHT if is_right else WRONG, location.text)


def _locate_mutant(case_runner: CaseRunner, name: str) -> Outcome:
    result = case_runner.mutant(name, 4)
    if not result.get("caught"):
        return Outcome(UNDETECTED, str(result.get("not_applicable", result)))
    if (located := result["located"]) is None:
        return Outcome(NO_LINE, result["not_located"])
    is_right = any(_is_in(located["line"], function) for function in MUTANT_FUNCTIONS[name])
    return Outcome(RIGHT if is_right else WRONG, located["text"])


def _is_in(line: str, function: Any) -> bool:
    file, _, number = line.partition(" ")[0].rpartition(":")
    lines, first = inspect.getsourcelines(function)
    return inspect.getsourcefile(function).endswith(file) and first <= int(number) < first + len(lines)


def text_of(task: str) -> str:
    """Returns the text of a task."""
    return (FOLDER / f"{task}.py").read_text(encoding="utf-8")


def changed(text: str, bug: Bug) -> tuple[str, set[int]]:
    """Returns (text of a task with a bug, numbers of the wrong lines)."""
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if line.strip().startswith(bug.anchor))
    rest = lines[at].partition("])")[2] if bug.anchor in lines[at] and not lines[at].strip().startswith("#") else ""
    indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    new = [indent + line for line in (bug.line + rest).splitlines()]
    lines[at : at + 1] = new
    return "\n".join(lines) + "\n", set(range(at + 1, at + 1 + len(new)))


@functools.cache
def _unchanged(task: str) -> CaseRunner:
    """Returns the case runner of a task without a bug. It reuses its reference runs."""
    return runner_of(task, text_of(task))


def runner_of(task: str, text: str, short: bool = False) -> CaseRunner:
    """Returns the case runner of a task with this text, in this process."""
    path = Path(tempfile.mkdtemp(dir=_TEXTS.name)) / f"{task}_task.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"located_{task}_{len(sys.modules)}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    data = {"shuffle": False} | ({"drop_remainder": False} if short else {})
    config = sk.Config(task="t.py:t", batch_size=BATCH, steps=2, data=data)
    return CaseRunner(TaskRunner(config, module.task, BATCH, steps=2), locate="all")


# ---- the page


def _write(outcomes: dict[str, dict[str, Outcome]], sharded: dict[str, Outcome]) -> None:
    mutants = {mutant.name: mutant.description for mutant in MUTANTS}
    of_tasks = [
        [f"`{name}`", f"`{bug.line.splitlines()[0]}`", *_verdicts(outcomes[name])] for name, bug in TASK_BUGS.items()
    ]
    of_mutants = [[f"`{name}`", mutants[name], *_verdicts(outcomes[name])] for name in MUTANT_FUNCTIONS]
    verdicts = {task: [row[task].verdict for row in outcomes.values()] for task in TASKS}
    totals = ", ".join(f"{task} {column.count(RIGHT)} of {len(column)}" for task, column in verdicts.items())
    of_sharded = []
    for case, (task, name, mesh) in SHARDED.items():
        sizes = " x ".join(f"{axis} {size}" for axis, size in mesh.items())
        of_sharded.append([sizes, task, f"`{name}`", sharded[case].verdict, *_report(task, sharded[case])])
    of_gpt = [[f"`{name}`", *_report("gpt", row["gpt"])] for name, row in outcomes.items()]
    PAGE.write_text(
        PAGE_TEXT.format(
            date=datetime.date.today().isoformat(),
            totals=totals,
            tasks=_table(["bug", "wrong line", *TASKS], of_tasks),
            mutants=_table(["mutant", "bug", *TASKS], of_mutants),
            sharded=_table(["mesh", "task", "bug", "verdict", "reported line", "report"], of_sharded),
            gpt=_table(["bug", "reported line", "report"], of_gpt),
        ),
        encoding="utf-8",
    )


def _verdicts(row: dict[str, Outcome]) -> list[str]:
    return [row[task].verdict for task in TASKS]


def _report(task: str, outcome: Outcome) -> list[str]:
    """Returns [`file:line (function)`, description] of a report; the file is that of the task without the bug."""
    line, _, description = outcome.report.partition("): ")
    if not description:
        return ["none", outcome.report]
    return [f"`{re.sub(r'.*_task[.]py', f'{task}.py', line)})`", description]


def _table(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows])


PAGE_TEXT = """# Located bugs

When a task gives a different result on a mesh than on one device, `spmdkit verify` reports the line of the first value
that differs ([verify](../howto/read_verify.md)). This page lists 28 bugs in five tasks, and whether `verify` reports
the right line.

- The tasks are small realistic programs in [tests/verify/located](../../tests/verify/located).
- A bug in a task is one added or changed line. It is located if `verify` reports this statement.
- A bug in spmdkit is a mutant. It is located if `verify` reports the function with the bug, or, for
  `key_shared_by_replicas`, a function that receives its result.
- The mesh is `data 4`. For `axis_omitted` and `reduction_over_wrong_axis` it is `replica 2 x data 2`.

| verdict | meaning |
| --- | --- |
| `right` | `verify` reports the line of the bug |
| `no line` | `verify` detects the bug and reports no line, because no single line is the first to differ |

A wrong line and an undetected bug fail a test
([tests/verify/test_verify_located.py](../../tests/verify/test_verify_located.py)).

Generated by `python -m tests.support.located --write` on {date}.
Bugs with the right line: {totals}.

## Bugs in a task

{tasks}

## Bugs in spmdkit

{mutants}

## Meshes that shard parameters or the sequence

- `data 2 x fsdp 2` also shards parameters.
- `data 2 x context 2` shards the sequence in a function of `sk.manual` with custom attention
  ([long](../../tests/verify/located/long.py)). `verify` also compares the values inside this function.

{sharded}

## Reports for gpt

A report names the JAX operation of the first value that differs, the shape of this value and the difference. The line
number is that of the task with the bug.

{gpt}
"""


def main(arguments: list[str]) -> None:
    """Prints the reports of bugs; `--write` also writes the page."""
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_disable_most_optimizations", True)
    tasks = [a for a in arguments if a in TASKS] or TASKS
    names = [a for a in arguments if a in TASK_BUGS or a in MUTANT_FUNCTIONS] or [*TASK_BUGS, *MUTANT_FUNCTIONS]
    outcomes = {name: {task: _printed(task, name) for task in tasks} for name in names}
    if "--write" in arguments:
        _write(outcomes, {case: _printed(*SHARDED[case]) for case in SHARDED})


def _printed(task: str, name: str, mesh: dict[str, int] | None = None) -> Outcome:
    outcome = locate_bug(task, name, mesh)
    print(f"{task:12} {name:28} {outcome.verdict:7} {outcome.report[-150:]}", flush=True)
    return outcome


if __name__ == "__main__":
    main(sys.argv[1:])
