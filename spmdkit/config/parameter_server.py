"""`sync: {parameter_server: {...}}`: its options, and incompatible settings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, WithJsonSchema
from pydantic.functional_validators import PlainValidator

from spmdkit.config import fields, wording
from spmdkit.config.fields import Section, Wants
from spmdkit.config.problems import Problem
from spmdkit.errors import ConfigError
from spmdkit.foundation import plugins

NAME = "parameter_server"

_EXAMPLE = '{rules: [["embed/.*", 0]]}'


def _partition(value: Any) -> str | list[tuple[str, int]]:
    if not isinstance(value, dict):
        return fields.choice(value, ("greedy", "round_robin"), "{rules: [[path pattern, server], ...]}")
    rules = value.get("rules")
    if set(value) != {"rules"} or not isinstance(rules, list) or not rules:
        raise Wants("greedy, round_robin or a mapping {rules: [[path pattern, server], ...]}", _EXAMPLE)
    for rule in rules:
        pair = isinstance(rule, list | tuple) and len(rule) == 2 and isinstance(rule[0], str)
        if not pair or isinstance(rule[1], bool) or not isinstance(rule[1], int) or rule[1] < 0:
            raise Wants(
                "rules that are pairs [regular expression over paths of parameters, number of a server from 0]",
                _EXAMPLE,
            )
        try:
            re.compile(rule[0])
        except (re.error, OverflowError, RecursionError) as error:
            raise Wants(f"rules with regular expressions ({error})", _EXAMPLE) from None
    return [(pattern, server) for pattern, server in rules]


Partition = Annotated[
    str | list[tuple[str, int]],
    PlainValidator(_partition),
    WithJsonSchema({"anyOf": [{"enum": ["greedy", "round_robin"]}, {"type": "object", "required": ["rules"]}]}),
]


class ParameterServer(Section):
    """Servers and workers."""

    servers: fields.Few = Field(default=1, description="Servers; each holds some leaves of the parameters.")
    workers: fields.Few = Field(
        default=2, description="Workers; each has its own mesh and computes gradients of batch_size examples."
    )
    partition: Partition = Field(
        default="greedy",
        description=(
            "Which server holds a leaf: greedy (by size), round_robin, or "
            "{rules: [[path pattern, server], ...]}, the rest greedily."
        ),
    )
    aggregate: fields.Few = Field(
        default=1,
        description=(
            "Number of workers with gradients that are averaged into one update; later ones are dropped "
            "(backup workers). 1: each gradient is one update."
        ),
    )
    max_staleness: Annotated[int, Field(ge=0, le=fields.INT32_MAX)] | None = Field(
        default=None, description="Staler gradients, in updates, are dropped; null: none."
    )
    scale_by_staleness: fields.Flag = Field(
        default=False, description="Divide an update by the staleness of its gradient, from two on."
    )
    overlap: fields.Flag | None = Field(
        default=None,
        description=(
            "Push and pull while the next gradient is computed, which adds one update of staleness; null: "
            "where possible."
        ),
    )
    transport: Literal["ray", "threads"] = Field(
        default="ray",
        description=("ray: one process each (extra `ray`); threads: all in this process, on its devices."),
    )
    address: fields.Name = Field(
        default="local", description="local: a private Ray on this machine; or the address of a Ray cluster."
    )

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
    """Raises ConfigError with a parameter server: for everything that needs one compiled step."""
    if is_chosen(config):
        raise ConfigError(
            "sync: parameter_server trains with programs of servers and workers, and this needs the one compiled "
            "step of all devices. Look at a worker's step: the same command with sync=every_step."
        )


def problems(config: Any) -> Iterator[Problem]:
    """Yields invalid options, and incompatible settings."""
    _, given = plugins.split(config.sync)
    if wrong := plugins.options_problem(NAME, given):
        yield Problem(("sync",), wrong)
        return
    try:
        section = ParameterServer.model_validate(given)
    except ValidationError as error:
        for found in wording.translate(ParameterServer, error.errors(include_url=False)):
            yield Problem(("sync", NAME, *found.path), found.text)
        return
    yield from _of_options(section)
    yield from _of_config(config)


def _of_options(section: ParameterServer) -> Iterator[Problem]:
    at = lambda key: ("sync", NAME, key)
    if section.aggregate > section.workers:
        yield Problem(
            at("aggregate"),
            f"is {section.aggregate} of {section.workers} workers. Try aggregate: {section.workers}, or more workers.",
        )
    if section.aggregate > 1 and section.max_staleness is not None:
        yield Problem(at("max_staleness"), "has no effect with aggregate, which drops whatever is stale. Remove it.")
    if section.aggregate > 1 and section.scale_by_staleness:
        yield Problem(
            at("scale_by_staleness"), "has no effect with aggregate, which drops whatever is stale. Remove it."
        )
    if section.max_staleness == 0 and section.scale_by_staleness:
        yield Problem(at("scale_by_staleness"), "has no effect with max_staleness: 0. Remove it.")
    if section.overlap and section.aggregate > 1:
        yield Problem(
            at("overlap"), "is true, and with aggregate a worker waits for the parameters of the next round. Remove it."
        )
    if section.overlap and section.max_staleness == 0:
        yield Problem(
            at("overlap"),
            "is true, which makes gradients stale, and max_staleness is 0: all would be dropped. Remove it.",
        )
    if section.transport == "threads" and section.address != "local":
        yield Problem(at("address"), "has no effect with transport: threads. Remove it.")
    for pattern, server in () if isinstance(section.partition, str) else section.partition:
        if server >= section.servers:
            yield Problem(
                at("partition"),
                (
                    f"gives '{pattern}' to server {server}, found servers: {section.servers}. Servers count from 0. "
                    "Fix the rule."
                ),
            )


def _of_config(config: Any) -> Iterator[Problem]:
    """Settings that need one step of all devices, or hooks around it."""
    why = "with sync: parameter_server each worker has its own step"
    if plugins.is_reference(config.reducer) or plugins.split(config.reducer)[0] not in ("sum", "ordered"):
        yield Problem(("reducer",), f"keeps or rounds something from step to step, and {why}. Use reducer: sum.")
    for key in ("on_spike", "replica_check", "profile", "budget"):
        if getattr(config, key) is not None:
            yield Problem((key,), f"looks at the steps of one program, and {why}. Remove it, or use sync: every_step.")
    if config.hooks:
        yield Problem(
            ("hooks",), f"stand around the steps of one program, and {why}. Remove them, or use sync: every_step."
        )
    if config.model_state != "global":
        yield Problem(
            ("model_state",), "is not global, and the first server holds one model state. Use model_state: global."
        )
    if "rollback" in config.policies().values():
        yield Problem(
            ("on_nonfinite",), f"is rollback, and {why}, none of which can take updates back. Use stop or skip."
        )
    if config.checkpoint and config.checkpoint.best:
        yield Problem(
            ("checkpoint", "best"), "is not kept with sync: parameter_server. Remove it; keep_every keeps more."
        )
