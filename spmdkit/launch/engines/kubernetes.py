"""Kubernetes: a JobSet with one indexed Job that has one pod per process. On TPUs: one Job per slice, one pod per host.

JobSet restarts all pods when one fails. Exit code 42 does not count (`RestartJobSetAndIgnoreMaxRestarts`). Codes after
which a restart would fail in the same way end the JobSet immediately. Others count up to `--max-restarts`. A Job ends
at its first failed pod (`podFailurePolicy`), and its message contains the exit code. A pod gets its rank from
cluster/environments/jobset.py, a TPU pod from cloud_tpu.py.
Source: jobset.sigs.k8s.io, kubernetes-sigs/jobset 08dfbdf; kubernetes.io/docs/tasks/job/pod-failure-policy;
cloud.google.com/kubernetes-engine/docs/how-to/tpu-multislice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from spmdkit.errors import ConfigError
from spmdkit.foundation.timeouts import POD_GRACE_MARGIN_S
from spmdkit.launch.engines import pods
from spmdkit.launch.engines.base import FINAL, ClusterJob, Option, Rendered

OPTIONS = {
    **pods.OPTIONS,
    "tpu": Option("", "accelerator of GKE, such as tpu-v5p-slice or tpu-v6e-slice; empty: no TPU"),
    "topology": Option("", "topology of one slice, such as 4x4x4; with tpu"),
    "chips": Option("4", "chips of one host; with tpu"),
    "slices": Option("1", "slices; with tpu"),
}


TEMPLATE = """
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: $metadata
spec:
  failurePolicy:
    maxRestarts: $restarts
    rules:
    - name: stopped
      action: RestartJobSetAndIgnoreMaxRestarts
      onJobFailureReasons: [PodFailurePolicy]
      onJobFailureMessagePatterns: [.* exit code (42) .*]
    - name: final
      action: FailJobSet
      onJobFailureReasons: [PodFailurePolicy]
      onJobFailureMessagePatterns: [$final]
  network: {enableDNSHostnames: true, publishNotReadyAddresses: true}
  coordinator: {replicatedJob: workers, jobIndex: 0, podIndex: 0}
  replicatedJobs:
  - name: workers
    replicas: $slices
    template:
      spec:
        parallelism: $hosts
        completions: $hosts
        completionMode: Indexed
        backoffLimit: 0
        podFailurePolicy:
          rules:  # by its code first: a host that is drained ends its pod too, by TERM, which saves and leaves with 42
          - {action: FailJob, onExitCodes: {containerName: spmdkit, operator: NotIn, values: [0]}}
          - {action: FailJob, onPodConditions: [{type: DisruptionTarget, status: 'True'}]}
        template:
          spec:
            restartPolicy: Never
            terminationGracePeriodSeconds: $grace
            nodeSelector: $selector
            containers:
            - name: spmdkit
              image: $image
              workingDir: $folder
              command: $words
              env: $env
              resources: $resources
              volumeMounts: $mounts
            volumes: $volumes
"""


def render(job: ClusterJob) -> Rendered:
    """Returns a JobSet and the `kubectl apply` command for it. One failed pod restarts all pods.

    Raises: ConfigError when a topology and the number of hosts do not match.
    """
    slices, tpu = _slices(job), job.options["tpu"]
    hosts = job.num_processes // slices
    one_job_a_slice = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    gke = "cloud.google.com/gke-tpu"
    return pods.rendered(
        job,
        TEMPLATE,
        f"{job.num_processes} pods, one process each. 42 (stopped and saved) starts all again without being counted.",
        "the JobSet controller in the cluster",
        metadata={"annotations": one_job_a_slice} if tpu else {},
        restarts=job.max_restarts,
        final=f".* exit code ({'|'.join(map(str, FINAL))}) .*",
        slices=slices,
        hosts=hosts,
        grace=job.grace_s + POD_GRACE_MARGIN_S,
        selector={f"{gke}-accelerator": tpu, f"{gke}-topology": job.options["topology"]} if tpu else {},
        env=[] if tpu else _rank_variables(hosts),
        resources=pods.resources(job, job.whole("chips", 1) if tpu else 0),
    )


def _rank_variables(hosts: int) -> list[dict[str, Any]]:
    """Returns the variables that give a pod its rank; Kubernetes sets JOB_COMPLETION_INDEX."""
    names = {
        "JOBSET_COORDINATOR": "coordinator",
        "JOBSET_JOB_INDEX": "job-index",
        "JOBSET_JOBS": "replicatedjob-replicas",
    }
    field: Callable[[str], dict[str, Any]] = lambda name: {
        "fieldRef": {"fieldPath": f"metadata.annotations['jobset.sigs.k8s.io/{name}']"}
    }
    variables: list[dict[str, Any]] = [{"name": name, "valueFrom": field(key)} for name, key in names.items()]
    return [*variables, {"name": "JOBSET_PODS", "value": str(hosts)}]


def _slices(job: ClusterJob) -> int:
    """Returns the number of slices.

    Raises: ConfigError when the number of hosts of all slices is not the number of processes.
    """
    topology, tpu, slices = job.options["topology"], job.options["tpu"], job.whole("slices", 1)
    if bool(topology) != bool(tpu):
        raise ConfigError(
            "--set tpu and --set topology go together. For example --set tpu=tpu-v5p-slice --set topology=2x2x2."
        )
    if not tpu:
        if slices > 1:
            raise ConfigError(
                f"--set slices={slices} is for TPUs. Add --set tpu=... and --set topology=..., or leave it out."
            )
        return 1
    parts = topology.split("x")
    if len(parts) not in (2, 3) or not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise ConfigError(f"--set topology={topology}: expected chips along each direction. Try --set topology=2x2x2.")
    hosts = max(1, math.prod(map(int, parts)) // job.whole("chips", 1)) * slices
    if hosts != job.num_processes:
        raise ConfigError(
            f"-n {job.num_processes} with {slices} slice{'s' * (slices > 1)} of {topology} and {job.options['chips']} "
            f"chips a host: that is {hosts} hosts, one process each. Try -n {hosts}."
        )
    return slices
