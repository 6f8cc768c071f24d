"""The options of `sync: {parameter_server: {...}}`, and incompatible settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from spmdkit.config import fields, wording
from spmdkit.config.fields import Section
from spmdkit.config.problems import Problem, key_path
from spmdkit.errors import ConfigError
from spmdkit.foundation import plugins

NAME = "parameter_server"


class PartitionRules(Section):
    """Assigns leaves to servers by path: [[path pattern, server], ...]."""

    rules: list[Annotated[tuple[fields.Pattern, Annotated[int, Field(ge=0)]], Field(strict=False)]] = Field(
        min_length=1
    )
    """Pairs [regular expression over paths of parameters, number of a server from 0]."""


Partition = Annotated[
    Literal["greedy", "round_robin"] | PartitionRules,
    fields.expects(
        "greedy, round_robin or {rules: [[path pattern, server], ...]}, pairs of a regular expression over paths of "
        "parameters and the number of a server from 0",
        '{rules: [["embed/.*", 0]]}',
        ("greedy", "round_robin"),
    ),
]


class ParameterServer(Section):
    """Servers and workers."""

    servers: fields.Few = 1
    """Number of servers; each stores some leaves of the parameters."""
    workers: fields.Few = 2
    """Number of workers; each has a mesh and computes gradients of batch_size examples."""
    partition: Partition = "greedy"
    """Assignment of leaves to servers: greedy (by size), round_robin, or {rules: [[path pattern, server], ...]}, with
    unmatched leaves assigned greedily."""
    aggregate: fields.Few = 1
    """Number of gradients of different workers averaged into one update; later gradients are dropped (backup workers).
    1: each gradient is one update."""
    max_staleness: Annotated[int, Field(ge=0, le=fields.INT32_MAX)] | None = None
    """Gradients with a higher staleness (in updates) are dropped; null: no limit."""
    scale_by_staleness: fields.Flag = False
    """Divide an update by the staleness of its gradient, if that is 2 or more."""
    overlap: fields.Flag | None = None
    """Push and pull while the next gradient is computed, which adds one update of staleness; null: where possible."""
    transport: Literal["ray", "threads"] = "ray"
    """ray: one process each (extra `ray`); threads: all in this process, on its devices."""
    address: fields.Name = "local"
    """local: a private Ray on this machine; or the address of a Ray cluster."""

    @property
    def overlaps(self) -> bool:
        """Whether workers push and pull while they compute."""
        return self.max_staleness != 0 and self.aggregate == 1 if self.overlap is None else self.overlap


def is_chosen(config: Any) -> bool:
    """Returns whether a config uses a parameter server."""
    return not plugins.is_reference(config.sync) and plugins.split(config.sync)[0] == NAME


def options(config: Any) -> ParameterServer:
    """Returns the options of a checked config."""
    return ParameterServer.model_validate(plugins.split(config.sync)[1])


def refuse(config: Any) -> None:
    """Raises ConfigError with a parameter server, for features that need one compiled step."""
    if is_chosen(config):
        raise ConfigError(
            "sync: parameter_server trains with programs of servers and workers, and this needs the one compiled "
            "step of all devices. To analyze the step of a worker, run the same command with sync=every_step."
        )


def problems(config: Any) -> Iterator[Problem]:
    """Yields the problems of invalid options and incompatible settings."""
    _, mapping = plugins.split(config.sync)
    if wrong := plugins.options_problem(NAME, mapping):
        yield Problem(("sync",), wrong)
        return
    try:
        section = ParameterServer.model_validate(mapping)
    except ValidationError as error:
        for problem in wording.translate(ParameterServer, error.errors(include_url=False)):
            yield Problem(("sync", NAME, *problem.path), problem.text)
        return
    yield from _of_options(section)
    yield from _of_config(config)


def _of_options(section: ParameterServer) -> Iterator[Problem]:
    several, stale = section.aggregate > 1, "has no effect with aggregate, which drops whatever is stale. Remove it."
    fresh = section.max_staleness == 0
    for key, wrong, text in (
        (
            "aggregate",
            section.aggregate > section.workers,
            f"is {section.aggregate} of {section.workers} workers. Try aggregate: {section.workers}, or more workers.",
        ),
        ("max_staleness", several and section.max_staleness is not None, stale),
        ("scale_by_staleness", several and section.scale_by_staleness, stale),
        (
            "scale_by_staleness",
            fresh and section.scale_by_staleness,
            "has no effect with max_staleness: 0. Remove it.",
        ),
        (
            "overlap",
            section.overlap and several,
            "is true, and with aggregate a worker waits for the parameters of the next round. Remove it.",
        ),
        (
            "overlap",
            section.overlap and fresh,
            "is true, which makes gradients stale, and max_staleness is 0: all would be dropped. Remove it.",
        ),
        (
            "address",
            section.transport == "threads" and section.address != "local",
            "has no effect with transport: threads. Remove it.",
        ),
    ):
        if wrong:
            yield Problem(("sync", NAME, key), text)
    for pattern, server in () if isinstance(section.partition, str) else section.partition.rules:
        if server >= section.servers:
            text = f"gives '{pattern}' to server {server}, found servers: {section.servers}. Servers count from 0."
            yield Problem(("sync", NAME, "partition"), f"{text} Fix the rule.")


def _of_config(config: Any) -> Iterator[Problem]:
    """Yields settings that need one step over all devices, or hooks around it."""
    why = "with sync: parameter_server each worker has its own step"
    exact = not plugins.is_reference(config.reducer) and plugins.split(config.reducer)[0] in ("sum", "ordered")
    looks = f"acts on the steps of one program, and {why}. Remove it, or use sync: every_step."
    for key, wrong, text in (
        ("reducer", not exact, f"keeps or rounds something from step to step, and {why}. Use reducer: sum."),
        *((key, getattr(config, key), looks) for key in ("on_spike", "replica_check", "profile", "budget", "hooks")),
        *(
            (key, getattr(config, key), f"applies to the optimizer of one program, and {why}. Remove it.")
            for key in ("groups", "train_only")
        ),
        (
            "model_state",
            config.model_state != "global",
            "is not global, and the first server holds one model state. Use model_state: global.",
        ),
        (
            "on_nonfinite",
            "rollback" in config.policies().values(),
            f"is rollback, and {why}, none of which can take updates back. Use stop or skip.",
        ),
        (
            "checkpoint.best",
            config.checkpoint and config.checkpoint.best,
            "is not kept with sync: parameter_server. Remove it; keep_every keeps more.",
        ),
    ):
        if wrong:
            yield Problem(key_path(key), text)
