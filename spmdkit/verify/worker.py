"""A process that runs jobs: reads one job per line from its input, writes one response per line to its output.

    python -m spmdkit.verify.worker SPEC

It is a separate process, since fake devices and 64-bit types are set once per process, and since XLA may abort a
process in which it compiles a program that it cannot partition.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def main(path: str) -> None:
    """Responds to jobs until the input ends."""
    responses = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of the user's code is not a response
    spec = json.loads(Path(path).read_text(encoding="utf-8"))
    case_runner: Any = None
    for line in sys.stdin:
        job = json.loads(line)
        try:
            case_runner = case_runner or _open(spec)
            response = {"outcome": _run_job(case_runner, job, spec)}
        except BaseException as error:  # noqa: BLE001 - the requesting process reports it
            from spmdkit.faults.exit_handler import describe

            code, text = describe(error)
            response = {"error": {"code": code, "message": text}}
        print(json.dumps(response), file=responses, flush=True)


def _open(spec: dict[str, Any]) -> Any:
    import jax

    from spmdkit.cluster import detect_cluster, join
    from spmdkit.config import parse_config
    from spmdkit.program.task import load_task
    from spmdkit.verify.memory_check import check_memory
    from spmdkit.verify.runner import CaseRunner
    from spmdkit.verify.task_runner import TaskRunner

    jax.config.update("jax_enable_x64", spec["dtype"] == "float64")
    # XLA's expensive passes: twice the processor time, and the same collectives (GPT on 8 devices, 2026-11-20).
    jax.config.update("jax_disable_most_optimizations", True)
    join(detect_cluster({}), f"cpu:{spec['devices']}")
    config = parse_config(spec["config"], source=spec["source"], name=spec["source"])
    target, name = config.task_reference()
    task = load_task(target, name, config.folder, config.task_args)
    check_memory(task, spec["devices"], spec["jobs"])
    task_runner = TaskRunner(config, task, spec["batch_size"], spec["steps"], spec["dtype"])
    return CaseRunner(task_runner, Path(spec["folder"]), spec["locate"])


def _run_job(case_runner: Any, job: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    from spmdkit.verify.task_runner import Setting

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
