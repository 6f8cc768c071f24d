"""Slurm: a task of a step (`srun`) has a rank; a job without a step allocates hosts and starts no process.

A step sets SLURM_STEP_NODELIST, SLURM_STEP_NUM_TASKS, SLURM_STEP_ID and each task's SLURM_PROCID
(slurm.schedmd.com/srun.html). SLURM_NTASKS and SLURM_PROCID are not sufficient: a batch script has them too. The shell
of `salloc` is an "interactive step" with one task and the number 4294967290 (Slurm 22.05, 2026-11-22).

Process 0 is on the first host of the step. The port is derived from the job number and the step number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from spmdkit.cluster.environments.base import DetectedCluster, Detection, Partial, address, port_of, shown, whole_number
from spmdkit.cluster.spec import ClusterSpec, Names

NAMES = Names("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_NODELIST")

JOB, STEP, TASKS = "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NTASKS"

FIRST_INTERNAL_STEP = 0xFFFFFFF0
"""Steps with this number or a higher one (batch, extern, interactive) are internal to Slurm, not a user's `srun`."""

PORTS_BETWEEN_STEPS = 61
"""A prime, so that the first steps of jobs with consecutive numbers get different ports."""

REPAIR = (
    "All tasks of the step run one command and connect to the step's first host at this port. squeue --steps shows the "
    "step; srun --ntasks=N --kill-on-bad-exit=1 python -m spmdkit train ... ends all tasks when one ends."
)


def read(env: Mapping[str, str]) -> Detection:
    """Returns the cluster of a task of a step; for a job without a step, the missing `srun`."""
    job, step = whole_number(env, JOB), whole_number(env, STEP)
    if job is None:
        return None
    if step is None or step >= FIRST_INTERNAL_STEP:
        return _allocation(env, job)
    num_tasks, task = whole_number(env, NAMES.num_processes), whole_number(env, NAMES.process_id)
    hosts = env.get(NAMES.coordinator)
    if not num_tasks or task is None or task >= num_tasks or not hosts:
        return Partial(
            f"step {step} of the Slurm job {job} does not give this task a rank ({shown(env, *NAMES)})",
            "Slurm sets all three for each task. Start it with srun --ntasks=N, or set cluster.environment: none for "
            "one process.",
            "starter",
        )
    port = port_of(job + PORTS_BETWEEN_STEPS * step)
    coordinator = address(first_host(hosts), port) if num_tasks > 1 else None
    return DetectedCluster(ClusterSpec(coordinator, num_tasks, task, names=NAMES), "starter", repair=REPAIR)


def _allocation(env: Mapping[str, str], job: int) -> Partial:
    num_tasks = whole_number(env, TASKS)
    tasks = "" if num_tasks is None else f" of {num_tasks} task{'s' * (num_tasks != 1)}"
    return Partial(
        f"this is inside the Slurm job {job}{tasks}, but not in one of its steps",
        f"To use the tasks of the job, start it with srun: `srun --ntasks={num_tasks or 'N'} python -m spmdkit train "
        "...`.",
        "allocation",
        num_tasks,
    )


def first_host(hosts: str) -> str:
    """Returns the first host of a list in Slurm's notation: `a` of `a,b`, `n007` of `n[007-015],x`, `r1n3` of
    `r[1-2]n[3,5]`."""
    first = re.split(r",(?![^\[]*\])", hosts)[0]
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", first)
