"""Mistakes in five natural tasks (tests/verify/located), and the lines that `verify` reports for them.

    python -m tests.support.located --write        every mistake in every task -> docs/locate.md
    python -m tests.support.located gpt plain_key  one of them

A user's mistake is one line, inserted into the text of the task or in place of one of its lines, so the wrong line is
known. A toolkit mistake is a mutant of `verify`; its line is in the function that makes the mistake.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import importlib.util
import inspect
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
PAGE = ROOT / "docs" / "locate.md"
_TEXTS = tempfile.TemporaryDirectory(prefix="located-")
BATCH = 16
DATA, TWO = {"data": 4}, {"replica": 2, "data": 2}


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A wrong line.

    Attributes:
        line: the line, without its indent.
        at: the start of the line that it replaces: a comment, `# hidden` or `# loss`, or the line that it changes.
        short: batches may be short.
    """

    line: str
    at: str = "# hidden"
    mesh: dict[str, int] = dataclasses.field(default_factory=lambda: DATA)
    microbatches: int = 1
    short: bool = False


NAMES = '("replica", "data")'
USERS = {
    "statistic_of_a_shard": Mistake("h = h - h.mean(0)"),
    "variance_of_a_shard": Mistake(f"h = h / jnp.sqrt(jax.lax.pmean(h.var(0), {NAMES}) + 1)"),
    "statistic_of_one_replica": Mistake("h = h - sk.all_gather(h)[: len(h)].mean(0)"),
    "sum_for_a_mean": Mistake(f"h = h - jax.lax.psum(h.mean(0), {NAMES})"),
    "axis_forgotten": Mistake('h = h - jax.lax.pmean(h.mean(0), "data")', mesh=TWO),
    "largest_of_a_shard": Mistake("h = h / (1 + jnp.abs(h).max())"),
    "median_of_a_shard": Mistake("h = h - jnp.median(h, 0)"),
    "running_sum_of_a_shard": Mistake("h = h - jnp.cumsum(h, 0) / 16"),
    "neighbour_in_the_shard": Mistake("h = 0.8 * h + 0.2 * jnp.roll(h, 1, 0)"),
    "place_in_the_shard": Mistake("h = (h.T * (1 + jnp.arange(len(h)) / 16)).T"),
    "rows_for_the_batch": Mistake("h = h * (len(h) / 16)"),
    "key_forgotten": Mistake("h = h * jax.random.bernoulli(key, 0.8, h.shape)"),
    "key_of_the_device": Mistake(
        "h = h + 0.1 * jax.random.normal(jax.random.fold_in(jax.random.key(1), sk.replica_index()), h.shape[1:])"
    ),
    "gradient_by_rows": Mistake("h = jax.lax.stop_gradient(h) + (h - jax.lax.stop_gradient(h)) * (len(h) / 16)"),
    "mean_over_the_shard": Mistake(
        'loss = (loss * batch["weight"]).sum() / batch["weight"].sum()\nreturn sk.mean(loss)',
        "return sk.mean(loss",
    ),
    "times_replicas": Mistake("loss = loss * sk.num_replicas()", "# loss"),
    "divided_by_replicas": Mistake(f"loss = loss / jax.lax.psum(1, {NAMES})", "# loss"),
    "softmax_of_a_shard": Mistake("loss = loss * len(loss) * jax.nn.softmax(loss)", "# loss"),
    "hardest_of_a_shard": Mistake("loss = jnp.where(loss >= jnp.sort(loss)[len(loss) // 2], loss, 0)", "# loss"),
    "padding_counted": Mistake("loss = loss * (len(loss) / sk.example_mask().sum())", "# loss", short=True),
}
"""Users' mistakes, by name."""

CONTEXT, FSDP = {"data": 2, "context": 2}, {"data": 2, "fsdp": 2}
OF_LONG = {
    "softmax_of_a_shard": Mistake("total = weights.sum(-1, keepdims=True)", "total = "),
    "denominators_averaged": Mistake(
        'total = all_reduce(weights.sum(-1, keepdims=True), "sequence") / axis_size("sequence")', "total = "
    ),
    "places_in_the_shard": Mistake("places = jnp.arange(x.shape[1])", "places = "),
    "queries_of_the_other_shard": Mistake(
        'q = jnp.roll(all_gather(q, "sequence", dim=1), x.shape[1], 1)', "q = all_gather"
    ),
    "mean_of_the_shards_keys": Mistake("k = k - k.mean(1, keepdims=True)", "# sequence"),
    "shift_in_the_shard": Mistake("v = jnp.roll(v, 1, 1)", "# sequence"),
    "noise_of_the_shard": Mistake(
        'v = v + jax.random.normal(jax.random.fold_in(jax.random.key(0), axis_index("sequence")), v.shape)',
        "# sequence",
    ),
}
"""Users' mistakes in a part of `sk.manual` sharded over `context`, in the task `long`, by name."""

ON_FSDP = {
    "recurrent": ("key_forgotten", "statistic_of_a_shard"),
    "cnn": ("largest_of_a_shard", "running_sum_of_a_shard"),
    "gpt": ("rows_for_the_batch", "place_in_the_shard", "key_of_the_device"),
    "moe": ("times_replicas", "sum_for_a_mean"),
    "contrastive": ("mean_over_the_shard", "neighbour_in_the_shard"),
}
"""Kinds that are also checked on a mesh with sharded parameters, which maps replicas without a `shard_map`."""

OTHERS = {f"long {name}": ("long", name, CONTEXT) for name in OF_LONG}
OTHERS |= {f"{task} {name}": (task, name, FSDP) for task, names in ON_FSDP.items() for name in names}
"""Task and kind on meshes with more than replicas -> the arguments of `locate_line`."""

TOOLKITS = {
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
"""Mutants of `verify` that act on every task, with the functions that make the mistake or receive its result."""


@dataclasses.dataclass(frozen=True)
class Result:
    """The report of `verify` on a mistake: `right`, `silent`, `wrong` line, or `missed`, with its text."""

    verdict: str
    text: str


def locate_line(task: str, name: str, mesh: dict[str, int] | None = None) -> Result:
    """Returns the reported location of a mistake in a task, on its mesh or another mesh."""
    if name in TOOLKITS:
        return _locate_mutant(_judge_of(task), name)
    mistake, mesh = (OF_LONG[name], mesh or CONTEXT) if task == "long" else (USERS[name], mesh or USERS[name].mesh)
    text, wrong = changed(text_of(task), mistake)
    task_runner = runner_of(task, text, mistake.short).task_runner
    setting = Setting(mesh, mistake.microbatches, mistake.short)
    found = Locator(task_runner)(setting, task_runner.program(setting), "gradient", int(mistake.short))
    if found is None:
        return Result("silent", "")
    file, _, number = found.line.partition(" ")[0].rpartition(":")
    return Result("right" if file.endswith(f"{task}_task.py") and int(number) in wrong else "wrong", found.text)


def _locate_mutant(case_runner: CaseRunner, name: str) -> Result:
    found = case_runner.mutant(name, 4)
    if not found.get("caught"):
        return Result("missed", str(found.get("not_applicable", found)))
    if (located := found["located"]) is None:
        return Result("silent", found["not_located"])
    return Result("right" if any(_is_in(located["line"], fn) for fn in TOOLKITS[name]) else "wrong", located["text"])


def _is_in(line: str, function: Any) -> bool:
    file, _, number = line.partition(" ")[0].rpartition(":")
    lines, first = inspect.getsourcelines(function)
    return inspect.getsourcefile(function).endswith(file) and first <= int(number) < first + len(lines)


def text_of(task: str) -> str:
    """Returns the text of a task."""
    return (FOLDER / f"{task}.py").read_text(encoding="utf-8")


def changed(text: str, mistake: Mistake) -> tuple[str, set[int]]:
    """Returns the text with the mistake, and the numbers of the wrong lines."""
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if line.strip().startswith(mistake.at))
    rest = lines[at].partition("])")[2] if mistake.at in lines[at] and not lines[at].strip().startswith("#") else ""
    indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    new = [indent + line for line in (mistake.line + rest).splitlines()]
    lines[at : at + 1] = new
    return "\n".join(lines) + "\n", set(range(at + 1, at + 1 + len(new)))


@functools.cache
def _judge_of(task: str) -> CaseRunner:
    """Returns the case_runner of an unchanged task. It reuses earlier references."""
    return runner_of(task, text_of(task))


def runner_of(task: str, text: str, short: bool = False) -> CaseRunner:
    """Returns the case_runner of a task's text, in this process."""
    path = Path(tempfile.mkdtemp(dir=_TEXTS.name)) / f"{task}_task.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"located_{task}_{len(sys.modules)}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    data = {"shuffle": False} | ({"drop_remainder": False} if short else {})
    config = sk.Config(task="t.py:t", batch_size=BATCH, steps=2, data=data)
    return CaseRunner(TaskRunner(config, module.task, BATCH, steps=2), locate="all")


# ---- the table


def _write(found: dict[str, dict[str, Result]], others: dict[str, Result]) -> None:
    what = {name: f"`{mistake.line.splitlines()[0]}`" for name, mistake in USERS.items()}
    what |= {mutant.name: f"in the toolkit: {mutant.description}" for mutant in MUTANTS}
    rows = [["mistake", "line", *TASKS], ["---"] * (2 + len(TASKS))]
    rows += [[f"`{name}`", what[name], *(found[name][task].verdict for task in TASKS)] for name in found]
    total = {task: [row[task].verdict for row in found.values()] for task in TASKS}
    rows.append(["right", "", *(f"{verdicts.count('right')} of {len(verdicts)}" for verdicts in total.values())])
    lines = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    says = "\n".join(
        f"- {name}, {task}: {_words(result)}"
        for name, row in found.items()
        for task, result in row.items()
        if task == "gpt"
    )
    found_on = f"Found on {datetime.date.today().isoformat()}, all kinds with one text of package and tasks.\n\n"
    on_others = [
        (
            f"| {' x '.join(f'{axis} {size}' for axis, size in mesh.items())} | {task} | `{name}` | "
            f"{others[case].verdict} | {_words(others[case])} |"
        )
        for case, (task, name, mesh) in OTHERS.items()
    ]
    more = "\n".join(["| mesh | task | mistake | line | what is said |", "| --- | --- | --- | --- | --- |", *on_others])
    sections = [HEAD + found_on + lines, OTHER_HEAD + more, "## What is said (gpt)\n\n" + says]
    PAGE.write_text("\n\n".join(sections) + "\n", encoding="utf-8")


def _words(result: Result) -> str:
    return result.text.partition("_task.py:")[2] or result.text


HEAD = """# Where a mistake is

Written by `python -m tests.support.located --write`; the tasks are [tests/verify/located](../tests/verify/located), natural programs with one line changed or added, and the
toolkit itself with a mutant in it. `right`: `verify` names the statement that was changed (of the toolkit, the function that makes the mistake); `silent`: it says that no single line is to blame. A
`wrong` line, or a mistake that is not seen, is a failed test ([tests/verify/test_verify_located.py](../tests/verify/test_verify_located.py)). Meshes: four replicas, two times two where an axis is forgotten.

"""  # noqa: E501

OTHER_HEAD = """## On other meshes

Where parameters are cut too, and in a part of `sk.manual` that is cut over `context`, with its own attention ([long](../tests/verify/located/long.py)): values are looked at inside the part.

"""  # noqa: E501


def main(arguments: list[str]) -> None:
    """Prints the reports on mistakes, and writes the page of all mistakes."""
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_disable_most_optimizations", True)
    tasks = [a for a in arguments if a in TASKS] or TASKS
    names = [a for a in arguments if a in USERS or a in TOOLKITS] or [*USERS, *TOOLKITS]
    cases = {(task, name): (task, name) for name in names for task in tasks}
    if "--write" in arguments:
        cases |= {(case, "other meshes"): given for case, given in OTHERS.items()}
    found = {}
    for (task, name), given in cases.items():
        said = found[task, name] = locate_line(*given)
        print(f"{task:12} {name:28} {said.verdict:7} {said.text[-150:]}", flush=True)
    if "--write" in arguments:
        others = {case: found[case, "other meshes"] for case in OTHERS}
        _write({name: {task: found[task, name] for task in TASKS} for name in names}, others)


if __name__ == "__main__":
    main(sys.argv[1:])
