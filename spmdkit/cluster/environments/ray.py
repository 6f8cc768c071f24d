"""Ray: its processes have a job and no rank. Inside of ray.train's JaxTrainer JAX is joined already; elsewhere a place
has to be given to each.

Ray 2.60 sets RAY_JOB_ID for the processes of a job and RAY_RAYLET_PID for its workers (2026-11-23). `ray.train` keeps
ranks in its own context; with GPUs or TPUs its JaxTrainer calls `jax.distributed.initialize` before the user's function
(ray/train/v2/jax/config.py), which `join` takes as it is; its torch backend sets torchrun's variables.
"""

from __future__ import annotations

from collections.abc import Mapping

from spmdkit.cluster.environments.base import Answer, Partial
from spmdkit.cluster.spec import OURS, Names

NAMES = Names(OURS.num_processes, OURS.process_id, OURS.coordinator)
"""Ray has none of its own: these are what a runtime_env gives to each worker."""

JOB, WORKER = "RAY_JOB_ID", "RAY_RAYLET_PID"


def read(env: Mapping[str, str]) -> Answer:
    """Returns what a process of a Ray job needs to have a place."""
    if not env.get(JOB):
        return None
    what = "worker" if env.get(WORKER) else "driver"
    return Partial(
        f"this is a {what} of the Ray job {env[JOB]}, and Ray numbers no processes",
        "Start it by `spmdkit launch --on ray`, train inside of ray.train's JaxTrainer, or give each worker its place in runtime_env={'env_vars': "
        "{'SPMDKIT_COORDINATOR': 'HOST:PORT', 'SPMDKIT_NUM_PROCESSES': 'N', 'SPMDKIT_PROCESS_ID': 'I'}}.",
        "allocation",
    )
