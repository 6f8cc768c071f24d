"""Cloud TPU: GKE tells each host of a slice its number and the names of all; MEGASCALE_* join several slices.

TPU_WORKER_HOSTNAMES, or TPU_PROCESS_ADDRESSES with ports, lists the hosts of this slice in order; TPU_WORKER_ID is this
one. Processes are numbered slice by slice, and process 0, the first host of slice 0, is MEGASCALE_COORDINATOR_ADDRESS
(jax/_src/clusters/cloud_tpu_cluster.py). On a TPU VM without GKE nothing is set: its metadata server knows, and the
commands of `spmdkit launch --on tpu` ask it.
Sources: cloud.google.com/kubernetes-engine/docs/how-to/tpu-multislice; kubernetes-sigs/lws,
pkg/utils/accelerators/tpu.go.
"""

from __future__ import annotations

from collections.abc import Mapping

from spmdkit.cluster.environments.base import Answer, DetectedCluster, Partial, address, whole_number
from spmdkit.cluster.spec import ClusterSpec, Names

NAMES = Names("TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID", "TPU_PROCESS_ADDRESSES")

SLICES, SLICE, FIRST_HOST = "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS"

PORT = 8482
"""Where JAX meets on TPUs; 8471 and 8476 are libtpu's, 8080 and 8081 megascale's."""

REPAIR = (
    "All hosts of all slices start together. On GKE: kubectl get pods -o wide, with one pod for each host of the topology. On TPU VMs: "
    "gcloud compute tpus tpu-vm ssh NAME --worker=all --command=..., so that every worker runs it."
)


def read(env: Mapping[str, str]) -> Answer:
    """Returns the place of a host of a TPU slice."""
    worker = whole_number(env, NAMES.process_id)
    listed = env.get(NAMES.coordinator) or env.get(NAMES.num_processes)
    if worker is None or not listed:
        return None
    hosts = [_host(one) for one in listed.split(",")]
    num_slices, slice_ = whole_number(env, SLICES) or 1, whole_number(env, SLICE) or 0
    first = hosts[0] if num_slices == 1 else _host(env.get(FIRST_HOST, ""))
    num, process = len(hosts) * num_slices, worker + slice_ * len(hosts)
    if worker >= len(hosts) or slice_ >= num_slices or not first:
        found = ", ".join(f"{name}={env.get(name, '')!r}" for name in (*NAMES, SLICES, SLICE, FIRST_HOST))
        return Partial(
            f"the variables of Cloud TPU are no complete place for this host ({found})",
            "TPU_WORKER_ID counts the hosts of TPU_WORKER_HOSTNAMES from 0; several slices need MEGASCALE_NUM_SLICES, MEGASCALE_SLICE_ID and "
            "MEGASCALE_COORDINATOR_ADDRESS. GKE sets them for a JobSet with one pod for each host.",
            "starter",
        )
    spec = ClusterSpec(address(first, PORT) if num > 1 else None, num, process, names=NAMES)
    said = f"{NAMES.process_id}={worker} of {len(hosts)} hosts" + (
        f", {SLICE}={slice_} of {num_slices}" if num_slices > 1 else ""
    )
    return DetectedCluster(spec, "allocation", NAMES, said=said, repair=REPAIR)


def _host(text: str) -> str:
    """Returns the host of `host`, `host:port` or `[v6]:port`."""
    text = text.strip()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.rpartition(":")[0] if text.count(":") == 1 else text
