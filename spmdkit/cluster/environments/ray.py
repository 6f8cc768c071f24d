"""Ray: its processes have a job but no rank, so each worker needs variables. In ray.train's JaxTrainer with GPUs or
TPUs JAX is already initialized (ray/train/v2/jax/config.py), and `join` uses that cluster. Its torch backend sets
torchrun's variables. Names: Ray 2.60, 2026-11-23."""

from __future__ import annotations

from collections.abc import Mapping

from spmdkit.cluster.environments.base import Detection, Partial
from spmdkit.cluster.spec import OURS, Names

NAMES = Names(OURS.num_processes, OURS.process_id, OURS.coordinator)
"""Ray sets none: a runtime_env sets these for each worker."""

JOB, WORKER = "RAY_JOB_ID", "RAY_RAYLET_PID"


def read(env: Mapping[str, str]) -> Detection:
    """Returns the variables that a process of a Ray job needs for a rank."""
    if not env.get(JOB):
        return None
    role = "worker" if env.get(WORKER) else "driver"
    return Partial(
        f"this is a {role} of the Ray job {env[JOB]}, and Ray does not number processes",
        "Start it with `spmdkit launch --on ray`, train inside ray.train's JaxTrainer, or set the rank of each worker: "
        "runtime_env={'env_vars': {'SPMDKIT_COORDINATOR': 'HOST:PORT', 'SPMDKIT_NUM_PROCESSES': 'N', "
        "'SPMDKIT_PROCESS_ID': 'I'}}.",
        "allocation",
    )
