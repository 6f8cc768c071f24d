"""Cloud TPU: GKE gives each host of a slice its index and the names of all hosts; MEGASCALE_* join several slices.

TPU_WORKER_HOSTNAMES, or TPU_PROCESS_ADDRESSES with ports, lists the hosts of this slice. Processes are numbered slice
by slice; the first host of slice 0 is MEGASCALE_COORDINATOR_ADDRESS (jax/_src/clusters/cloud_tpu_cluster.py).
On a TPU VM without GKE no variable is set: `spmdkit launch --on tpu` queries its metadata server.
Sources: cloud.google.com/kubernetes-engine/docs/how-to/tpu-multislice; kubernetes-sigs/lws,
pkg/utils/accelerators/tpu.go.
"""

from __future__ import annotations

from collections.abc import Mapping

from spmdkit.cluster.environments.base import DetectedCluster, Detection, Partial, address, shown, whole_number
from spmdkit.cluster.spec import ClusterSpec, Names

NAMES = Names("TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID", "TPU_PROCESS_ADDRESSES")

SLICES, SLICE, FIRST_HOST = "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS"

PORT = 8482
"""The port of JAX's coordination service on TPUs. libtpu uses 8471 and 8476, megascale 8080 and 8081."""

REPAIR = (
    "All hosts of all slices start together. On GKE: kubectl get pods -o wide shows one pod per host of the topology. "
    "On TPU VMs, run the command on every worker: gcloud compute tpus tpu-vm ssh NAME --worker=all --command=... ."
)


def read(env: Mapping[str, str]) -> Detection:
    """Returns the cluster of a host of a TPU slice."""
    worker = whole_number(env, NAMES.process_id)
    listed = env.get(NAMES.coordinator) or env.get(NAMES.num_processes)
    if worker is None or not listed:
        return None
    hosts = [_host(one) for one in listed.split(",")]
    num_slices, slice_ = whole_number(env, SLICES) or 1, whole_number(env, SLICE) or 0
    first = hosts[0] if num_slices == 1 else _host(env.get(FIRST_HOST, ""))
    num, process = len(hosts) * num_slices, worker + slice_ * len(hosts)
    if worker >= len(hosts) or slice_ >= num_slices or not first:
        return Partial(
            "the variables of Cloud TPU do not give this host a rank "
            f"({shown(env, *NAMES, SLICES, SLICE, FIRST_HOST)})",
            "TPU_WORKER_ID counts the hosts of TPU_WORKER_HOSTNAMES from 0. Several slices need MEGASCALE_NUM_SLICES, "
            "MEGASCALE_SLICE_ID and MEGASCALE_COORDINATOR_ADDRESS. GKE sets them for a JobSet with one pod per host.",
            "starter",
        )
    spec = ClusterSpec(address(first, PORT) if num > 1 else None, num, process, names=NAMES)
    description = f"{NAMES.process_id}={worker} of {len(hosts)} hosts" + (
        f", {SLICE}={slice_} of {num_slices}" if num_slices > 1 else ""
    )
    return DetectedCluster(spec, "allocation", description=description, repair=REPAIR)


def _host(text: str) -> str:
    """Returns the host of `host`, `host:port` or `[v6]:port`."""
    text = text.strip()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.rpartition(":")[0] if text.count(":") == 1 else text
