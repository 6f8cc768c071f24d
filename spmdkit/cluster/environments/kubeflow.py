"""Kubeflow Trainer, runtime `jax-distributed`: one pod per process, with JAX's three variables. They may also be set
manually.

JAX_COORDINATOR_ADDRESS is `NAME-node-0-0.NAME:29500`, the first pod. Names: kubeflow/trainer 8c0f505 (2026-08-21),
pkg/runtime/framework/plugins/jax/jax.go; jax.distributed.initialize reads the same.
"""

from __future__ import annotations

from collections.abc import Mapping

from spmdkit.cluster.environments.base import DetectedCluster, Detection, Partial, is_address, shown, whole_number
from spmdkit.cluster.spec import ClusterSpec, Names

NAMES = Names("JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_COORDINATOR_ADDRESS")

REPAIR = (
    "All pods of a TrainJob start together or not at all: kubectl describe trainjob NAME; "
    "kubectl get pods -l jobset.sigs.k8s.io/jobset-name=NAME."
)


def read(env: Mapping[str, str]) -> Detection:
    """Returns the cluster of a pod of a TrainJob."""
    if not any(env.get(name) for name in NAMES):
        return None
    num, process = whole_number(env, NAMES.num_processes), whole_number(env, NAMES.process_id)
    meeting = env.get(NAMES.coordinator, "")
    if not num or process is None or process >= num or (num > 1 and not is_address(meeting)):
        return Partial(
            f"JAX's variables do not give this process a rank ({shown(env, *NAMES)})",
            "A TrainJob with runtimeRef jax-distributed and a trainer section sets all three in each pod. Set numNodes "
            "there, or all three variables in each process.",
            "starter",
            num,
        )
    spec = ClusterSpec(meeting if num > 1 else None, num, process, names=NAMES)
    return DetectedCluster(spec, "allocation", repair=REPAIR)
