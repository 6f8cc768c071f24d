"""The comparisons between all processes before the first step: inputs, data, program and initial state.

    same_start    after the join          config, source text of the task and its imports, spmdkit, versions, variables
    same_data     before tracing          length, structure and a sample of rows of both data sets
    same_program  before compilation      mesh, form, the lowered step, init, evaluation, warm-up and groups
    same_state    before the first step   a checksum of each leaf after init or restore

If processes differ, all exit with 78 and a message that names the processes and the difference.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
from collections.abc import Callable
from typing import Any

import jax

from spmdkit.cluster import Cluster
from spmdkit.config import Config, to_yaml
from spmdkit.data import CheckedStream, PerProcess, Source, open_data
from spmdkit.data.fingerprint import Fingerprint, fingerprint
from spmdkit.foundation.checksum import checksums
from spmdkit.foundation.timeouts import FIRST_COMPARISON_S
from spmdkit.mesh.mesh import describe_mesh
from spmdkit.metrics.environment import numeric_variables, package_versions
from spmdkit.program import source_digest
from spmdkit.program.program import Program
from spmdkit.program.task import Task
from spmdkit.step.state import TrainState

OWN_DATA = (
    "Every process reads its rows of one global batch, so data[i] has to be the same example everywhere. Give all "
    "processes the same data, or declare per-process data: Task(train_data=sk.per_process(source))."
)
PHASES = {
    "warmup": "program of a step while the reducer warms up",
    "start": "program of a step before groups train separately",
    "agreement": "program in which groups agree",
}


def same_start(cluster: Cluster, config: Config) -> None:
    """Compares the inputs of the processes before the task is imported."""
    cluster.same_everywhere("inputs of the run", lambda: start_facts(config), FIRST_COMPARISON_S)


def start_facts(config: Config) -> dict[str, str]:
    """Returns `{name: text}` of the inputs of a run that are known before user code runs."""
    versions = {f"version of {name}": str(version) for name, version in package_versions().items()}
    variables = numeric_variables(os.environ)
    package = {f"spmdkit/{name}": digest for name, digest in source_digest.package_digests().items()}
    facts = {"config": f"{to_yaml(config, hide_secrets=True)}\n", "version of python": platform.python_version()}
    facts |= {"values of ${env:...}, masked": hashlib.sha256(repr(config.variables()).encode()).hexdigest()}
    return facts | versions | variables | source_digest.texts(config) | package


def same_data(cluster: Cluster, make: Callable[[], Task], retries: int = 0, samples: bool = True) -> Task:
    """Returns the task of `make`, with the same data on all processes, or with per-process data and the lengths of all.
    Arrays in memory are opened once. `retries`: maximum number of further reads of a row that raises. `samples`:
    whether a sample of rows is compared."""
    if cluster.num_processes == 1:
        return make()
    made = list[Task]()
    prints = dict[str, Fingerprint]()

    def structure() -> dict[str, str]:
        task = make()
        given = task.named_data()
        opened = {name: open_data(x, name) for name, x in given.items()}
        made.append(task.with_data({name: _opened(given[name], x) for name, x in opened.items()}))
        prints.update({name: fingerprint(x, retries, reads_rows=samples) for name, x in opened.items()})
        kinds = {
            name: "of each process" if name in own(task) else str(found.examples) for name, found in prints.items()
        }
        return {f"{name}: examples": kind for name, kind in kinds.items()} | {
            f"{name}: an example": found.example for name, found in prints.items()
        }

    cluster.same_everywhere("data", structure, repair=OWN_DATA)
    task = made[-1]
    own_lengths = {name: prints[name].examples for name in own(task)}
    shared = {name: found.rows for name, found in prints.items() if name not in own_lengths}
    mine = {f"{name}: {row}": digest for name, rows in shared.items() for row, digest in rows.items()}
    gathered = cluster.gather("rows", [list(mine), own_lengths])
    readable = [set(rows) for rows, _ in gathered]
    rows = lambda: {row: mine[row] for row in mine if all(row in each for each in readable)}
    cluster.same_everywhere("data", rows, repair=OWN_DATA)
    lengths = {name: tuple(lengths[name] for _, lengths in gathered) for name in own_lengths}
    given = task.named_data()
    return task.with_data({name: dataclasses.replace(given[name], lengths=each) for name, each in lengths.items()})


def own(task: Task) -> list[str]:
    """Returns the per-process data sets of a task."""
    return [name for name, given in task.named_data().items() if isinstance(given, PerProcess)]


def _opened(given: Any, source: Source | CheckedStream) -> Any:
    """Returns the data of a task. Data read by example is opened again later, with the retries of the config."""
    if isinstance(given, PerProcess):
        return dataclasses.replace(given, source=_opened(given.source, source))
    return source if source.in_memory else given


def same_program(cluster: Cluster, make: Callable[[], Program]) -> Program:
    """Returns the program of `make`, which must be the same on all processes."""
    if cluster.num_processes == 1:
        return make()
    programs = list[Program]()

    def facts() -> dict[str, str]:
        programs.append(make())
        return program_facts(programs[0])

    cluster.same_everywhere("the program", facts)
    return programs[0]


def program_facts(program: Program) -> dict[str, str]:
    """Returns `{name: text}` of all programs that are compiled, now or later in the run."""
    later = dict[str, jax.stages.Lowered]()
    if program.has_eval:
        lowered = program.evaluator.lowered
        later |= {f"program of an evaluation{name and f' ({name})'}": each for name, each in lowered.items()}
    for phase in program.phases:
        later[PHASES.get(phase.name, f"program in which groups agree ({phase.name})")] = phase.lowered
    for name, other in program.other_shapes().items():
        later[f"program of a step ({name})"] = other.lowered
    if program.config.init_from is None:  # otherwise compared when there is no checkpoint, since it reads the source
        later["init"] = program.initial.lowered
    return {
        "config with auto chosen": f"{to_yaml(program.config, hide_secrets=True)}\n",
        "mesh": describe_mesh(program.sizes),
        "form": program.form,
        "program of a step": program.lowered.as_text(),
    } | {name: lowered.as_text() for name, lowered in later.items()}


def same_state(cluster: Cluster, step: int, state: TrainState) -> None:
    """Checks that all copies of the initial state are bitwise equal."""

    def facts() -> dict[str, str]:
        return {"step": str(step)} | {path: f"{number:016x}" for path, number in checksums(state).items()}

    cluster.same_everywhere("the state before the first step", facts)
