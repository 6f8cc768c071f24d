"""Environment variables -> `ClusterSpec`: number of processes, rank of this process, rendezvous address. Pure.

Every module of `environments/` reads the variables. The detection of the highest level is used; the others are logged.
It is an error if two detections of one level disagree, unless one environment has started the other's agents. spmdkit's
variables for devices, timeout and address always apply.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from spmdkit.cluster.environments import all_environments
from spmdkit.cluster.environments.base import LEVELS, DetectedCluster, Detection, Level, Partial
from spmdkit.cluster.environments.spmdkit import integer
from spmdkit.cluster.spec import ClusterSpec, split_address
from spmdkit.errors import ConfigError
from spmdkit.foundation.constants import COORDINATOR, DEVICES_PER_PROCESS, RENDEZVOUS_TIMEOUT_S, SERVICE
from spmdkit.foundation.formatting import nearest
from spmdkit.foundation.timeouts import RENDEZVOUS_S

Detections = Mapping[str, DetectedCluster | Partial]


def detect_cluster(env: Mapping[str, str], environment: str = "auto") -> ClusterSpec:
    """Returns the rank of this process and the size of its cluster; one process if no environment is detected.
    `environment`: `auto`; the name of the only environment to read; `none`: one process, whatever is set.

    Raises:
        ConfigError: variables are malformed, incomplete, or contradict each other.
    """
    environments = all_environments()
    if environment not in ("auto", "none", *environments):
        known = ["auto", "none", *environments]
        raise ConfigError(
            f"cluster.environment is {environment!r}. It is one of {', '.join(known)}.{nearest(environment, known)}"
        )
    if environment not in ("auto", "none"):
        module = environments[environment]
        return _with_spmdkit_variables(_of_one(environment, module.read(env), module.NAMES), env)
    detections = {name: found for name, module in environments.items() if (found := module.read(env)) is not None}
    if environment == "none":
        spec = ClusterSpec(notes=_unused(detections, "cluster.environment is none"))
        return _with_spmdkit_variables(spec, env)
    return _with_spmdkit_variables(resolve(detections), env)


def resolve(detections: Detections) -> ClusterSpec:
    """Returns the cluster that follows from the detections of all environments.

    Raises:
        ConfigError: they disagree, or describe processes that cannot connect.
    """
    partials = {name: each for name, each in detections.items() if isinstance(each, Partial)}
    clusters = {name: each for name, each in detections.items() if isinstance(each, DetectedCluster)}
    if not clusters:
        _check_complete(partials)
        return ClusterSpec(notes=tuple(f"one process: {each.why}. {each.repair}" for each in partials.values()))
    level = min((each.level for each in clusters.values()), key=LEVELS.index)
    name = _innermost({name: each for name, each in clusters.items() if each.level == level})
    spec = clusters[name].spec
    for partial in partials.values():
        is_higher = LEVELS.index(partial.level) < LEVELS.index(level)
        if is_higher and partial.num_processes not in (None, spec.num_processes):
            raise ConfigError(
                f"{partial.why}, but {name} has started {spec.num_processes} ({_described(clusters[name])}). "
                f"{partial.repair} Or let {name} set the number."
            )
    others = {
        n: each for n, each in detections.items() if n != name and LEVELS.index(each.level) >= LEVELS.index(level)
    }
    return _with_source(name, clusters[name], _unused(others, f"{name} has {_described(clusters[name])}"))


_WHY: Mapping[Level, str] = {
    "explicit": "it is set for spmdkit",
    "starter": "it started this process",
    "allocation": "it allocated this host, and nothing more specific is set",
}


def _with_source(name: str, found: DetectedCluster, notes: tuple[str, ...] = ()) -> ClusterSpec:
    """Returns the cluster, with the environment that it was read from and the reason for its use."""
    by = f"{name} ({_described(found)}), since {_WHY[found.level]}"
    return dataclasses.replace(found.spec, notes=notes, found_by=by, repair=found.repair, role=found.role)


def _check_complete(partials: Mapping[str, Partial]) -> None:
    """Raises if processes were requested or started but cannot join."""
    broken = [partial for partial in partials.values() if partial.level != "allocation"]
    if not broken:
        return
    around = [f"{partial.why}: {partial.repair}" for partial in partials.values() if partial.level == "allocation"]
    raise ConfigError(" ".join([f"{broken[0].why}. {broken[0].repair}", *around]))


def _innermost(clusters: Mapping[str, DetectedCluster]) -> str:
    """Returns the environment to use among those of one level: the one that has not started another's agents."""
    started_agents: Callable[[str, DetectedCluster], bool] = lambda name, cluster: any(
        cluster.spec.num_processes == other.agents for n, other in clusters.items() if n != name
    )
    inner = {name: cluster for name, cluster in clusters.items() if not started_agents(name, cluster)} or dict(clusters)
    ranks = {(cluster.spec.num_processes, cluster.spec.process_id) for cluster in inner.values()}
    if len(ranks) > 1:
        described = " and ".join(_described(cluster) for cluster in inner.values())
        named = " or ".join(f"cluster: {{environment: {name}}}" for name in inner)
        raise ConfigError(
            f"two environments disagree about this process: {described}. One is left over from another job, or has "
            f"started the other by mistake. Name the right one in the config, {named}, or unset the other's variables."
        )
    return next(iter(inner))


def _described(found: DetectedCluster) -> str:
    """Returns `SLURM_STEP_NUM_TASKS=4, SLURM_PROCID=1`, or the environment's description."""
    if found.description:
        return found.description
    spec = found.spec
    return f"{spec.names.num_processes}={spec.num_processes}, {spec.names.process_id}={spec.process_id}"


def _unused(others: Detections, because: str) -> tuple[str, ...]:
    shown = {name: _described(each) if isinstance(each, DetectedCluster) else each.why for name, each in others.items()}
    return tuple(f"{name} is not used ({described}): {because}" for name, described in shown.items())


def _of_one(name: str, detection: Detection, names: tuple[str, ...]) -> ClusterSpec:
    if isinstance(detection, DetectedCluster):
        by = f"{name} ({_described(detection)}), since cluster.environment names it"
        return dataclasses.replace(_with_source(name, detection), found_by=by)
    missing = f"none of its variables is set ({', '.join(names)})."
    problem = f"{detection.why}. {detection.repair}" if detection else missing
    raise ConfigError(
        f"cluster.environment is {name}, but {problem} Start the job with {name}, or set cluster.environment: auto."
    )


def _with_spmdkit_variables(spec: ClusterSpec, env: Mapping[str, str]) -> ClusterSpec:
    coordinator = env.get(COORDINATOR) if spec.num_processes > 1 else None
    service = env.get(SERVICE) if coordinator else None
    if coordinator:
        split_address(coordinator)
    if service:
        split_address(service, SERVICE)
    return dataclasses.replace(
        spec,
        coordinator=coordinator or spec.coordinator,
        devices_per_process=integer(env, DEVICES_PER_PROCESS, default=0, least=1) or None,
        rendezvous_timeout_s=_timeout(env),
        service=service or None,
    )


def _timeout(env: Mapping[str, str]) -> float:
    text = env.get(RENDEZVOUS_TIMEOUT_S)
    if not text:
        return RENDEZVOUS_S
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 86400:
        raise ConfigError(
            f"{RENDEZVOUS_TIMEOUT_S}={text!r}: expected seconds, more than 0 and less than a day. "
            f"Set {RENDEZVOUS_TIMEOUT_S}={RENDEZVOUS_S:.0f}."
        )
    return value
