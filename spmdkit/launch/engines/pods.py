"""Shared code of the Kubernetes engines: a manifest from a template, a volume and resources."""

from __future__ import annotations

import json
from string import Template
from typing import Any

import yaml

from spmdkit.launch.engines.base import REQUIRED, ClusterJob, Option, Rendered

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
    """Returns the command for a manifest. Kubernetes replaces `$(NAME)`, so it is escaped as `$$(NAME)`."""
    return [word.replace("$(", "$$(") for word in job.command()]


def rendered(job: ClusterJob, template: str, comment: str, needs: str, **more: Any) -> Rendered:
    """Returns a manifest and the `kubectl apply` command for it.

    Args:
        template: YAML, in which `$NAME` is replaced by JSON. Empty values are omitted.
        comment: a line above the manifest.
        more: additional values of the template.
    """
    options, volume = job.options, job.options["volume"]
    labels = {"kueue.x-k8s.io/queue-name": options["queue"]} if options["queue"] else {}
    values = {
        **options,
        "words": words(job),
        "metadata": {"name": job.name, "namespace": options["namespace"], "labels": labels} | more.pop("metadata", {}),
        "volumes": [{"name": "runs", "persistentVolumeClaim": {"claimName": volume}}] if volume else [],
        "mounts": [{"name": "runs", "mountPath": "/runs"}] if volume else [],
        **more,
    }
    document = yaml.safe_load(
        Template(template).substitute({name: json.dumps(value) for name, value in values.items()})
    )
    text = yaml.safe_dump(_without_empty(document), sort_keys=False, width=160)
    name = f"{job.name}.yaml"
    return Rendered({name: f"# {comment}\n{text}"}, (("kubectl", "apply", "-f", name),), f"kubectl, with {needs}")


def resources(job: ClusterJob, tpu_chips: int = 0) -> dict[str, Any]:
    """Returns the resource limits and requests of one container."""
    devices = {"google.com/tpu": str(tpu_chips)} if tpu_chips else {}
    if job.whole("gpus"):
        devices["nvidia.com/gpu"] = job.options["gpus"]
    requested = {name: job.options[name] for name in ("cpu", "memory")}
    return {"limits": devices, "requests": {**requested, **devices}}


def _without_empty(value: Any) -> Any:
    """Returns a mapping without its empty values, at any depth."""
    if isinstance(value, dict):
        cleaned = {key: _without_empty(x) for key, x in value.items()}
        return {key: x for key, x in cleaned.items() if x not in ({}, [], None, "")}
    return [_without_empty(x) for x in value] if isinstance(value, list) else value
