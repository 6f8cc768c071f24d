"""A worker process: reads one job per line from stdin, writes one response per line to stdout.

    python -m spmdkit.verify.worker SPEC

It is a separate process, since fake devices and 64-bit types are set once per process, and since XLA may abort the
process when it compiles a program that it cannot partition.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import jax

from spmdkit.cluster import detect_cluster, join
from spmdkit.config import Config, parse_config
from spmdkit.errors import ConfigError
from spmdkit.faults.exit_handler import describe
from spmdkit.foundation.formatting import format_bytes
from spmdkit.foundation.trees import tree_bytes
from spmdkit.program.init_state import init_on_one_device
from spmdkit.program.task import Task, load_task
from spmdkit.verify.runner import CaseRunner
from spmdkit.verify.task_runner import Setting, TaskRunner

COPIES = 6
"""Arrays of parameter size per device: parameters, gradient, two moments, recorded gradient, recorded update.
Activations are small."""

MEMINFO = Path("/proc/meminfo")


def main(path: str) -> None:
    """Responds to jobs until stdin is closed."""
    responses = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of the user's code is not a response
    spec = json.loads(Path(path).read_text(encoding="utf-8"))
    case_runner: CaseRunner | None = None
    for line in sys.stdin:
        job = json.loads(line)
        try:
            case_runner = case_runner or _open(spec)
            response = {"outcome": _run_job(case_runner, job, spec)}
        except BaseException as error:  # noqa: BLE001 - the requesting process reports it
            code, text = describe(error)
            response = {"error": {"code": code, "message": text}}
        print(json.dumps(response), file=responses, flush=True)


def _open(spec: dict[str, Any]) -> CaseRunner:
    jax.config.update("jax_enable_x64", spec["dtype"] == "float64")
    # XLA's expensive passes double the CPU time and give the same collectives (GPT on 8 devices, 2026-11-20).
    jax.config.update("jax_disable_most_optimizations", True)
    join(detect_cluster({}), f"cpu:{spec['devices']}")
    config = parse_config(spec["config"], source=spec["source"], name=spec["source"])
    target, name = config.task_reference()
    task = load_task(target, name, config.folder, config.task_args)
    check_memory(task, config, spec["devices"], spec["jobs"])
    task_runner = TaskRunner(config, task, spec["batch_size"], spec["steps"], spec["dtype"])
    return CaseRunner(task_runner, Path(spec["folder"]), spec["locate"])


def check_memory(task: Task, config: Config, num_devices: int, jobs: int) -> None:
    """Rejects a task if its state, replicated on every fake device of every process, exceeds the free memory."""
    free = available_bytes()
    params = tree_bytes(init_on_one_device(task, config)[0])
    needed = COPIES * params * num_devices * jobs
    if free is not None and needed > free:
        raise ConfigError(
            f"verify runs the complete task on {num_devices} fake devices in {jobs} process{'es' * (jobs > 1)}: "
            f"parameters of {format_bytes(params)} need about {format_bytes(needed)}, {format_bytes(free)} are free. "
            "A small model has the same mathematics. Shrink it by overrides, for example task_args.width=64 "
            "task_args.layers=2, or use --jobs 1 and fewer --devices."
        )


def available_bytes() -> int | None:
    """Returns the memory that new processes can use without swapping, or None if the system does not report it."""
    try:
        lines = MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    fields = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(fields[0]) * 1024 if fields else None


def _run_job(case_runner: CaseRunner, job: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    if job["kind"] == "open":
        return {}
    if job["kind"] == "reference":
        reference = case_runner.reference(Setting({}, short=case_runner.task_runner.short))
        plain = case_runner.compare_with_plain_jax()
        outcome = {
            "tolerances": reference.tolerance,
            "moved": reference.moved,
            "dtype": reference.dtype,
            "plain": plain,
            "watched": case_runner.task_runner.watched,
        }
        return outcome | {"below_noise": reference.noise.leaves}
    if job["kind"] == "mutant":
        return case_runner.mutant(job["name"], spec["devices"])
    return case_runner.case(job["mesh"], job["microbatches"], job["whole"])


if __name__ == "__main__":
    main(sys.argv[1])
