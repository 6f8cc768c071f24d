"""Slurm: a batch script with one `srun` step. Its tasks get their ranks from cluster/environments/slurm.py.

- `--kill-on-bad-exit=1`: when one task fails, Slurm kills the others after KillWait (30 s by default).
- `--signal=USR1@N`: each task receives USR1 N seconds before the limit: all save and exit with 42, as after `scancel`.
- After 42 the job is always requeued, after other failures `--max-restarts` times (SLURM_RESTART_COUNT).
Source: slurm.schedmd.com/sbatch.html, srun.html; tested on Slurm 22.05.8 by tests/engines/test_slurm.py.
"""

from __future__ import annotations

import shlex

from spmdkit.errors import ConfigError
from spmdkit.launch.engines.base import AGAIN, FINAL, ClusterJob, Option, Rendered

OPTIONS = {
    "partition": Option("", "partition to request; empty: the cluster's default"),
    "account": Option("", "account that pays; empty: yours"),
    "time": Option("24:00:00", "time limit of one start"),
    "tasks_per_node": Option("1", "processes on each node"),
    "gpus_per_task": Option("0", "GPUs of each process; 0: none are requested"),
    "cpus_per_task": Option("1", "cores of each process"),
    "folder": Option("", "folder to run in, the same on every node; empty: where launch is called"),
    "python": Option("python", "Python that has spmdkit, on every node"),
    "setup": Option("", "a line of shell before the start, such as `module load cuda; source ~/venv/bin/activate`"),
}


def render(job: ClusterJob) -> Rendered:
    """Returns a batch script and the `sbatch` command for it.

    Raises: ConfigError when the processes do not fill their nodes.
    """
    each = job.whole("tasks_per_node", 1)
    if job.num_processes % each:
        raise ConfigError(
            f"-n {job.num_processes} with --set tasks_per_node={each}: the last node would have "
            f"{job.num_processes % each}. All nodes have the same number. Try -n {job.num_processes // each * each or each}."
        )
    options = {
        "job-name": job.name,
        "nodes": str(job.num_processes // each),
        "ntasks-per-node": str(each),
        "cpus-per-task": str(job.whole("cpus_per_task", 1)),
        "gpus-per-task": job.options["gpus_per_task"] if job.whole("gpus_per_task") else "",
        "partition": job.options["partition"],
        "account": job.options["account"],
        "time": job.options["time"],
        "chdir": job.folder,
        "output": f"{job.name}-%j.out",
        "open-mode": "append",
        "signal": f"USR1@{job.grace_s}",
    }
    lines = [f"#SBATCH --{name}={shlex.quote(value)}" for name, value in options.items() if value]
    script = f"""#!/bin/bash
{chr(10).join(lines)}
#SBATCH --requeue

# USR1 comes {job.grace_s} s before the time limit, to every task: all save and leave with {AGAIN}.
{job.options["setup"] or "# No setup."}
srun --kill-on-bad-exit=1 {shlex.join(job.command())}
code=$?
case $code in
  0|{"|".join(map(str, FINAL))}) ;;  # done, or another start would end with it again
  {AGAIN}) echo "stopped and saved: in the queue again"; scontrol requeue "$SLURM_JOB_ID"; sleep 60 ;;
{_after_failure(job.max_restarts) if job.max_restarts else "  # Every other code ends the job: --max-restarts is 0."}
esac
exit $code
"""
    return Rendered(
        {f"{job.name}.sbatch": script}, (("sbatch", f"{job.name}.sbatch"),), "sbatch, on a login node of the cluster"
    )


def _after_failure(max_restarts: int) -> str:
    """Returns the lines that start the job again, at most `max_restarts` times."""
    return f"""  *) starts=${{SLURM_RESTART_COUNT:-0}}
     if [ "$starts" -lt {max_restarts} ]; then
       echo "ended with $code: in the queue again, restart $((starts + 1)) of {max_restarts}"
       scontrol requeue "$SLURM_JOB_ID"; sleep 60
     fi ;;"""
