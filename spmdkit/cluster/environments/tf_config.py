"""TensorFlow's TF_CONFIG: the hosts by role, and the task of this process. Chief and workers train together, the
evaluator evaluates each new checkpoint.

    {"cluster": {"chief": ["a:2222"], "worker": ["b:2222", "c:2222"]}, "task": {"type": "worker", "index": 1}}

Process 0 is the chief, or worker 0 if there is no chief. An evaluator is not listed in the cluster. `ps` has no
equivalent (`sync: parameter_server` starts its own servers).
Source: tensorflow.org/guide/distributed_training, "Setting up the TF_CONFIG environment variable".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from spmdkit.cluster.environments.base import DetectedCluster, Detection, Partial, is_address
from spmdkit.cluster.spec import ClusterSpec, Names

VARIABLE = "TF_CONFIG"
NAMES = Names(VARIABLE, VARIABLE, VARIABLE)

TRAINS, FIRST = ("chief", "master", "worker"), ("chief", "master")
"""Roles that train, in process order; the first two have at most one task in total."""

EXAMPLE = '{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}'

REPAIR = (
    f"Every task has the same cluster in {VARIABLE} and its own task, and all are started. "
    "Process 0 is the chief, or worker 0."
)


def read(env: Mapping[str, str]) -> Detection:
    """Returns the cluster of a task of TF_CONFIG."""
    text = env.get(VARIABLE)
    if not text:
        return None
    task = _task(text)
    if task is None:
        return None
    if isinstance(task, str):
        return Partial(f"{VARIABLE} is set, and {task}", f"It is one JSON object, for example {EXAMPLE}.", "starter")
    cluster, kind, index = task
    hosts = [host for role in TRAINS for host in cluster.get(role, [])]
    if kind == "evaluator":
        spec = ClusterSpec(names=NAMES)
        return DetectedCluster(spec, "allocation", description="task evaluator", repair=REPAIR, role="evaluator")
    if kind == "ps":
        return Partial(
            f"this is task ps {index} of {VARIABLE}, but every process of spmdkit trains",
            "Start chief, workers and evaluator only. mesh: {fsdp: -1} shards the parameters over all devices; "
            "sync: {parameter_server: {servers: 1, workers: 2}} starts asynchronous servers.",
            "starter",
            len(hosts),
        )
    if kind not in cluster or index >= len(cluster[kind]):
        return Partial(
            f"this is task {kind} {index} of {VARIABLE}; its cluster has { ({k: len(v) for k, v in cluster.items()}) }",
            f"The task is one of the cluster, counted from 0. For example {EXAMPLE}.",
            "starter",
        )
    process = index + sum(len(cluster.get(role, [])) for role in TRAINS[: TRAINS.index(kind)])
    if not is_address(hosts[0]):
        return Partial(f"{hosts[0]!r} of {VARIABLE} is no host:port", f"For example {EXAMPLE}.", "starter")
    spec = ClusterSpec(hosts[0] if len(hosts) > 1 else None, len(hosts), process, names=NAMES)
    return DetectedCluster(spec, "allocation", description=f"task {kind} {index} of {len(hosts)}", repair=REPAIR)


def _task(text: str) -> tuple[dict[str, list[str]], str, int] | str | None:
    """Returns (hosts by role, role, index), a message about the error, or None for the first task without a cluster: a
    single process, as in TensorFlow."""
    try:
        given: Any = json.loads(text)
        cluster, task = given.get("cluster") or {}, given.get("task") or {}
        hosts = {
            str(role): [str(host) for host in named] for role, named in cluster.items() if not isinstance(named, str)
        }
        kind, index = str(task.get("type", "worker")), int(task.get("index", 0))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        return f"cannot be read ({type(error).__name__}: {str(error)[:80]})"
    if not cluster and index == 0 and kind in TRAINS:
        return None
    if index < 0 or not any(hosts.get(role) for role in TRAINS) or any(len(hosts.get(role, ())) > 1 for role in FIRST):
        return f"its cluster has no tasks that train, or several chiefs: {text[:120]!r}"
    return hosts, kind, index
