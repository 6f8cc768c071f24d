"""Cloud TPU VMs: `gcloud ... ssh --worker=all` runs one script on every host.

TPU VMs set no variables. The script queries the metadata server (`agent-worker-number`, `worker-network-endpoints`, and
MEGASCALE_* of `tpu-env` for several slices, as jax/_src/clusters/cloud_tpu_cluster.py), and sets spmdkit's three
variables. `-n` is not used: each TPU host runs one process.
Source: cloud.google.com/tpu/docs/run-in-container, managing-tpus-tpu-vm.
"""

from __future__ import annotations

import shlex

from spmdkit.launch.engines.base import AGAIN, REQUIRED, ClusterJob, Option, Rendered, restart_loop

OPTIONS = {
    "tpu": Option(REQUIRED, "name of the TPU VM or queued resource's node"),
    "zone": Option(REQUIRED, "its zone, such as us-central2-b"),
    "project": Option("", "project; empty: gcloud's"),
    "folder": Option("~", "folder of the project on every host"),
    "python": Option("python3", "Python that has spmdkit[tpu], on every host"),
}

PORT = 8482

PLACE = """attribute() {
  curl -sf -H 'Metadata-Flavor: Google' "http://${GCE_METADATA_HOST:-metadata.google.internal}/computeMetadata/v1/instance/attributes/$1"
}
megascale() { printf '%s\\n' "$environment" | sed -n "s/^$1: *'\\{0,1\\}\\([^']*\\)'\\{0,1\\} *$/\\1/p"; }
worker=$(attribute agent-worker-number) || { echo 'no metadata server: this is no TPU VM' >&2; exit 78; }
# name:id:address of each host, or its name alone
hosts=$(attribute worker-network-endpoints | tr ',' '\\n' | sed 's/^[^:]*:[^:]*://')
environment=$(attribute tpu-env)
each=$(printf '%s\\n' "$hosts" | wc -l)
slices=$(megascale MEGASCALE_NUM_SLICES); slice=$(megascale MEGASCALE_SLICE_ID); first=$(megascale MEGASCALE_COORDINATOR_ADDRESS)
first=${first:-$(printf '%s\\n' "$hosts" | head -n 1)}
export SPMDKIT_COORDINATOR="${first%%:*}:PORT"
export SPMDKIT_NUM_PROCESSES=$((each * ${slices:-1})) SPMDKIT_PROCESS_ID=$((worker + each * ${slice:-0}))
"""


def render(job: ClusterJob) -> Rendered:
    """Returns the script of a host, and the commands that copy it to all hosts and run it."""
    folder = job.options["folder"]
    run = f"{shlex.join(job.command())}\n  code=$?"
    script = f"""#!/bin/bash
# Runs on every host of the TPU: queries its rank, trains, and starts again after {AGAIN} (stopped and saved).
{PLACE.replace("PORT", str(PORT))}
{restart_loop(job, run, 5)}"""
    name = f"{job.name}.sh"
    project = ("--project", job.options["project"]) if job.options["project"] else ()
    to = ("--zone", job.options["zone"], *project, "--worker=all")
    at, tpu = ("gcloud", "compute", "tpus", "tpu-vm"), job.options["tpu"]
    copy = (*at, "scp", name, f"{tpu}:{folder}/", *to)
    start = (*at, "ssh", tpu, *to, f"--command=cd {folder} && bash {name}")
    return Rendered({name: script}, (copy, start), "gcloud")
