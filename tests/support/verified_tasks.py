"""Case runners of the natural programs of tests/tasks, and their results on `verify`'s mutants.

python -m tests.support.verified_tasks --write    every mutant on every task -> docs/development/mutants.md
python -m tests.support.verified_tasks mlm_nsp    on one
"""

from __future__ import annotations

import datetime
import sys
from pathlib import Path

import jax

import spmdkit as sk
from spmdkit.verify.mutants import MUTANTS
from spmdkit.verify.runner import CaseRunner
from spmdkit.verify.task_runner import Setting, TaskRunner
from tests.support.optax_promotion import let_optax_promote
from tests.support.tasks import natural_task, task_names

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "development" / "mutants.md"
DEVICES, BATCH, STEPS = 4, 16, 3
MISSED = "NOT CAUGHT"
CAUGHT = "caught by "

NAMES = task_names()
ONE_OF_EACH = list({name.partition(" ")[0]: name for name in reversed(NAMES)}.values())[::-1]
"""Names of tasks, the first variant of each."""


def runner_of(name: str) -> CaseRunner:
    """Returns the case runner of a task, with its reference run."""
    task = natural_task(name)
    settings = {"data": {"shuffle": False}, **task.settings}
    config = sk.Config(task="t.py:t", batch_size=BATCH, steps=STEPS, **settings)
    case_runner = CaseRunner(TaskRunner(config, task.task, BATCH, STEPS))
    case_runner.reference(Setting({}, short=case_runner.task_runner.short))
    return case_runner


def mutants_of(name: str) -> dict[str, str]:
    """Returns mutant -> the check that detected it on a task, MISSED, or why it does not apply."""
    case_runner = runner_of(name)
    results = {mutant.name: case_runner.mutant(mutant.name, DEVICES) for mutant in MUTANTS}
    describe = lambda o: o["not_applicable"] if "not_applicable" in o else CAUGHT + o["by"] if o["caught"] else MISSED
    return {mutant: describe(result) for mutant, result in results.items()}


# ---- the page

HEAD = """# Mutants on forty tasks

`python -m tests.support.verified_tasks --write` writes this page. It runs every mutant of `verify` on every task of
[tests/tasks](../../tests/tasks), on four devices in three steps of 16 rows, float32. A mutant is not applicable to a
task that does not use what it changes; the report of `verify` states the reason. A mutant that is not caught fails a
test ([tests/verify/test_verify_tasks.py](../../tests/verify/test_verify_tasks.py)). Mutants that are applicable to none
of these tasks are caught on others ([tests/verify/test_verify_mutants.py](../../tests/verify/test_verify_mutants.py)).

"""


def _write(outcomes: dict[str, dict[str, str]]) -> None:
    rows = [["mutant", "description", "caught", "not applicable", "not caught"], ["---"] * 5]
    for mutant in MUTANTS:
        of_mutant = {name: results[mutant.name] for name, results in outcomes.items()}
        caught = sum(text.startswith(CAUGHT) for text in of_mutant.values())
        missed = [name for name, text in of_mutant.items() if text == MISSED]
        others = str(len(of_mutant) - caught - len(missed))
        rows.append([f"`{mutant.name}`", mutant.description, str(caught), others, ", ".join(missed) or "none"])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    date = f"Run on {datetime.date.today().isoformat()}, {len(outcomes)} tasks.\n\n"
    PAGE.write_text(HEAD + date + table + "\n", encoding="utf-8")


def main(arguments: list[str]) -> None:
    """Prints the results of mutants, and writes the page of all tasks."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_disable_most_optimizations", True)
    let_optax_promote()
    outcomes: dict[str, dict[str, str]] = {}
    for name in [a for a in arguments if not a.startswith("--")] or ONE_OF_EACH:
        outcomes[name] = mutants_of(name)
        for mutant, text in outcomes[name].items():
            print(f"{name:24} {mutant:28} {text}", flush=True)
    if "--write" in arguments:
        _write({name: outcomes[name] for name in ONE_OF_EACH})


if __name__ == "__main__":
    main(sys.argv[1:])
