"""Kubernetes JobSet: pods of indexed Jobs get their index as JOB_COMPLETION_INDEX. JobSet sets no variable; a manifest
exposes its annotations as variables (`fieldRef`), as `spmdkit launch --on kubernetes` does:

    JOBSET_COORDINATOR    metadata.annotations['jobset.sigs.k8s.io/coordinator']       job-workers-0-0.job
    JOBSET_JOB_INDEX      metadata.annotations['jobset.sigs.k8s.io/job-index']         0, for several replicas of a Job
    JOBSET_JOBS           metadata.annotations['jobset.sigs.k8s.io/replicatedjob-replicas']   1
    JOBSET_PODS           parallelism of one Job, as a number

Names: kubernetes-sigs/jobset 08dfbdf (2026-08-18), api/jobset/v1alpha2/jobset_types.go;
kubernetes.io/docs/concepts/workloads/controllers/job, "Completion mode".
"""

from __future__ import annotations

from collections.abc import Mapping

from spmdkit.cluster.environments.base import (
    FIRST_PORT,
    DetectedCluster,
    Detection,
    Partial,
    address,
    shown,
    whole_number,
)
from spmdkit.cluster.spec import ClusterSpec, Names

NAMES = Names("JOBSET_PODS", "JOB_COMPLETION_INDEX", "JOBSET_COORDINATOR")

JOBS, JOB = "JOBSET_JOBS", "JOBSET_JOB_INDEX"

REPAIR = (
    "Pods connect by name through the JobSet's headless service: kubectl get pods "
    "-l jobset.sigs.k8s.io/jobset-name=NAME -o wide; kubectl describe pod POD for a pod that is Pending."
)


def read(env: Mapping[str, str]) -> Detection:
    """Returns the cluster of a pod of a JobSet, or the variables that an indexed Job does not set."""
    index = whole_number(env, NAMES.process_id)
    if index is None:
        return None
    pods, host = whole_number(env, NAMES.num_processes), env.get(NAMES.coordinator)
    jobs, job = whole_number(env, JOBS), whole_number(env, JOB)
    num, process = (pods or 0) * (jobs or 1), index + (job or 0) * (pods or 0)
    if not pods and not host:
        return Partial(
            f"this is pod {index} of an indexed Job of Kubernetes without the number of pods and the first address",
            "Set JOBSET_PODS and JOBSET_COORDINATOR in the manifest, as `spmdkit launch --on kubernetes` does.",
            "allocation",
        )
    if not pods or not host or index >= pods or process >= num:
        return Partial(
            f"the variables of the JobSet do not give this pod a rank ({shown(env, *NAMES, JOBS, JOB)})",
            "JOBSET_PODS is the parallelism of one Job, JOBSET_COORDINATOR the annotation that spec.coordinator "
            "creates. `spmdkit launch --on kubernetes` writes both.",
            "starter",
        )
    spec = ClusterSpec(address(host, FIRST_PORT) if num > 1 else None, num, process, names=NAMES)
    description = f"{NAMES.num_processes}={pods}, {NAMES.process_id}={index}" + (
        f", {JOB}={job} of {jobs}" if (jobs or 1) > 1 else ""
    )
    return DetectedCluster(spec, "allocation", description=description, repair=REPAIR)
