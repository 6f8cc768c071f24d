"""What the engines on Kubernetes share: a container, its volume and its resources, and YAML that reads as people write
it."""

from __future__ import annotations

from typing import Any

import yaml

from spmdkit.launch.engines.base import REQUIRED, ClusterJob, Option

OPTIONS = {
    "image": Option(REQUIRED, "container image with your project and spmdkit"),
    "namespace": Option("default", "namespace of the cluster"),
    "folder": Option("/app", "folder of the project in the image"),
    "python": Option("python", "Python in the image"),
    "gpus": Option("0", "nvidia.com/gpu of each pod"),
    "cpu": Option("", "cores that each pod requests, such as 4"),
    "memory": Option("", "memory that each pod requests, such as 32Gi"),
    "volume": Option("", "claim of a volume that all pods can write (ReadWriteMany), mounted at /runs for run_dir"),
    "queue": Option("", "local queue of Kueue"),
}


def words(job: ClusterJob) -> list[str]:
    """Returns the command for a manifest, where Kubernetes replaces `$(NAME)` unless it is written `$$(NAME)`."""
    return [word.replace("$(", "$$(") for word in job.command()]


def resources(job: ClusterJob, **more: int) -> dict[str, Any]:
    """Returns limits and requests of one container."""
    devices = {name.replace("__", ".").replace("_", "/"): str(count) for name, count in more.items() if count}
    if job.whole("gpus"):
        devices["nvidia.com/gpu"] = job.options["gpus"]
    requested = {name: job.options[name] for name in ("cpu", "memory") if job.options[name]}
    found = {"limits": devices, "requests": {**requested, **devices}}
    return {kind: values for kind, values in found.items() if values}


def volumes(job: ClusterJob) -> tuple[list[Any], list[Any]]:
    """Returns (volumes of a pod, mounts of its container)."""
    if not job.options["volume"]:
        return [], []
    claim = {"name": "runs", "persistentVolumeClaim": {"claimName": job.options["volume"]}}
    return [claim], [{"name": "runs", "mountPath": "/runs"}]


def metadata(job: ClusterJob) -> dict[str, Any]:
    """Returns name, namespace and the label of a queue."""
    labels = {"labels": {"kueue.x-k8s.io/queue-name": job.options["queue"]}} if job.options["queue"] else {}
    return {"name": job.name, "namespace": job.options["namespace"], **labels}


def without_empty(value: Any) -> Any:
    """Returns a mapping without what is empty, at any depth."""
    if isinstance(value, dict):
        kept = {key: without_empty(x) for key, x in value.items()}
        return {key: x for key, x in kept.items() if x not in ({}, [], None, "")}
    return [without_empty(x) for x in value] if isinstance(value, list) else value


def manifest(document: Any, comment: str) -> str:
    """Returns YAML with a comment above."""
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    return head + yaml.safe_dump(without_empty(document), sort_keys=False, width=160)
