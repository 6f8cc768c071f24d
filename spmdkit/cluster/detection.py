"""Environment variables -> `ClusterSpec`: how many processes there are, which one this is, where they meet. Pure.

Every environment of `environments/` reads the same environment. The answer of the highest level wins (what was asked
for spmdkit by name, then what started this process, then what lent the host) and the lower ones are a line in the log.
Two of one level that disagree are an error, unless one of them has started the other's agents. Our variables about
devices, timeout and address hold whoever says how many processes there are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from spmdkit.cluster.environments import all_environments
from spmdkit.cluster.environments.base import LEVELS, Answer, DetectedCluster, Level, Partial
from spmdkit.cluster.environments.spmdkit import integer
from spmdkit.cluster.spec import ClusterSpec, split_address
from spmdkit.errors import ConfigError
from spmdkit.foundation.constants import COORDINATOR, DEVICES_PER_PROCESS, RENDEZVOUS_TIMEOUT_S, SERVICE
from spmdkit.foundation.formatting import nearest
from spmdkit.foundation.timeouts import RENDEZVOUS_S

Answers = Mapping[str, DetectedCluster | Partial]


def detect_cluster(env: Mapping[str, str], environment: str = "auto") -> ClusterSpec:
    """Returns this process's place in the cluster; a single process when no environment finds its variables.

    `environment`: auto, the name of the one to read, or none for a single process whatever is set.
    Raises: ConfigError when variables are malformed, incomplete or contradict each other.
    """
    environments = all_environments()
    if environment not in ("auto", "none", *environments):
        known = ["auto", "none", *environments]
        raise ConfigError(
            f"cluster.environment: {environment!r} is not known. It is one of {', '.join(known)}.{nearest(environment, known)}"
        )
    if environment not in ("auto", "none"):
        return _with_ours(_only(environment, environments[environment].read(env), environments[environment].NAMES), env)
    answers = {name: answer for name, module in environments.items() if (answer := module.read(env)) is not None}
    if environment == "none":
        return _with_ours(ClusterSpec(notes=_not_used(answers, "cluster.environment is none")), env)
    return _with_ours(resolve(answers), env)


def resolve(answers: Answers) -> ClusterSpec:
    """Returns the place that the answers of all environments come to.

    Raises: ConfigError when they disagree, or name processes that cannot meet.
    """
    demands = {name: answer for name, answer in answers.items() if isinstance(answer, Partial)}
    found = {name: answer for name, answer in answers.items() if isinstance(answer, DetectedCluster)}
    if not found:
        _refuse_incomplete(demands)
        return ClusterSpec(notes=tuple(f"one process: {p.why}. {p.repair}" for p in demands.values()))
    level = min((answer.level for answer in found.values()), key=LEVELS.index)
    name = _one_of({name: answer for name, answer in found.items() if answer.level == level})
    spec = found[name].spec
    for demand in demands.values():
        if LEVELS.index(demand.level) < LEVELS.index(level) and demand.num_processes not in (None, spec.num_processes):
            raise ConfigError(
                f"{demand.why}, and {name} has started {spec.num_processes} ({_said(found[name])}). {demand.repair} "
                f"Or leave the number to {name}."
            )
    others = {n: a for n, a in answers.items() if n != name and LEVELS.index(a.level) >= LEVELS.index(level)}
    return _told(name, found[name], _not_used(others, f"{name} says {_said(found[name])}"))


_WHY: Mapping[Level, str] = {
    "asked": "it is set for spmdkit by name",
    "starter": "it has started this process",
    "allocation": "it has lent this host, and nothing more specific is set",
}


def _told(name: str, found: DetectedCluster, notes: tuple[str, ...] = ()) -> ClusterSpec:
    """Returns the place, with who says so and why that one is followed."""
    by = f"{name} ({_said(found)}), since {_WHY[found.level]}"
    return dataclasses.replace(found.spec, notes=notes, found_by=by, repair=found.repair, role=found.role)


def _refuse_incomplete(partials: Mapping[str, Partial]) -> None:
    """Raises for what is asked or started and cannot be joined; the repairs of the allocation around it come last."""
    broken = [p for p in partials.values() if p.level != "allocation"]
    if not broken:
        return
    around = [f"{p.why}: {p.repair}" for p in partials.values() if p.level == "allocation"]
    raise ConfigError(" ".join([f"{broken[0].why}. {broken[0].repair}", *around]))


def _one_of(found: Mapping[str, DetectedCluster]) -> str:
    """Returns the name of the one to follow among those of one level."""
    started = lambda n, a: any(a.spec.num_processes == other.agents for m, other in found.items() if m != n)
    inner = {n: a for n, a in found.items() if not started(n, a)} or dict(found)
    places = {(a.spec.num_processes, a.spec.process_id) for a in inner.values()}
    if len(places) > 1:
        said = " and ".join(_said(answer) for answer in inner.values())
        named = " or ".join(f"cluster: {{environment: {name}}}" for name in inner)
        raise ConfigError(
            f"two starters disagree about this process: {said}. One is left over from somewhere else, or has started the other by "
            f"mistake. Name the right one in the config, {named}, or unset the variables of the other."
        )
    return next(iter(inner))


def _said(answer: DetectedCluster) -> str:
    """Returns `SLURM_STEP_NUM_TASKS=4, SLURM_PROCID=1`, or what the environment says itself."""
    if answer.said:
        return answer.said
    names, spec = answer.names, answer.spec
    return f"{names.num_processes}={spec.num_processes}, {names.process_id}={spec.process_id}"


def _not_used(others: Answers, because: str) -> tuple[str, ...]:
    """Returns one line for each answer that is not followed."""
    shown = {name: _said(a) if isinstance(a, DetectedCluster) else a.why for name, a in others.items()}
    return tuple(f"{name} is not used ({said}): {because}" for name, said in shown.items())


def _only(name: str, answer: Answer, names: tuple[str, ...]) -> ClusterSpec:
    if isinstance(answer, DetectedCluster):
        return dataclasses.replace(
            _told(name, answer), found_by=f"{name} ({_said(answer)}), since cluster.environment names it"
        )
    found = f"{answer.why}. {answer.repair}" if answer else f"found none of its variables ({', '.join(names)})."
    raise ConfigError(
        f"cluster.environment: {name} was asked for; {found} Start it with {name}, or set cluster.environment: auto."
    )


def _with_ours(spec: ClusterSpec, env: Mapping[str, str]) -> ClusterSpec:
    """Returns the place with what our variables say beside the number of processes."""
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
