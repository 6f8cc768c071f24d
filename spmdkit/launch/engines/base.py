"""The interface of an engine: it renders a job of several processes for one kind of scheduler. One file per engine.

An engine is a module with

    OPTIONS: Mapping[str, Option]        the options of `--set NAME=VALUE`, each with its default and a description
    render(job) -> Rendered              files and commands, as text

`render` is pure, so the printed text is exactly what runs. Each process gets its rank from the engine's environment
(cluster/environments/). Users edit the rendered text: its comments explain what is not obvious.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from spmdkit import errors
from spmdkit.errors import ConfigError, ExitCode
from spmdkit.foundation.formatting import nearest

REQUIRED = "<required>"

AGAIN = int(ExitCode.PREEMPTED)
"""The exit code that requests a restart."""

FINAL = tuple(map(int, errors.FINAL))
"""Exit codes that are not restarted."""


class Option(NamedTuple):
    """One option of an engine. `default` is text; REQUIRED: the user must set it."""

    default: str
    help: str


@dataclass(frozen=True)
class ClusterJob:
    """The job to start."""

    arguments: tuple[str, ...]  # arguments of spmdkit: `("train", "config.yaml", "steps=100")`
    num_processes: int  # in total
    name: str  # letters, digits and dashes
    max_restarts: int = 0  # restarts after a failure; exit code 42 always restarts
    grace_s: int = 120  # seconds between the stop notice and termination
    options: Mapping[str, str] = field(default_factory=dict)  # options of the engine, with the defaults
    here: str = "."  # absolute path of the folder in which `launch` was called

    @property
    def folder(self) -> str:
        """The folder to run in: the option, or the folder in which `launch` was called."""
        return self.options["folder"] or self.here

    def command(self) -> list[str]:
        """Returns the command line of one process: an spmdkit command, or a user's script."""
        script = [] if self.arguments[0].endswith(".py") else ["-m", "spmdkit"]
        return [self.options.get("python", "python"), *script, *self.arguments]

    def whole(self, name: str, least: int = 0) -> int:
        """Returns the value of an integer option.

        Raises: ConfigError when it is not an integer.
        """
        text = self.options[name]
        if not (text.isascii() and text.isdigit()) or int(text) < least:
            raise ConfigError(
                f"--set {name}={text}: expected a whole number of at least {least}. Try --set {name}={max(least, 1)}."
            )
        return int(text)


@dataclass(frozen=True)
class Rendered:
    """The files and commands that start a job."""

    files: Mapping[str, str]  # name -> text, written before the commands run
    commands: tuple[tuple[str, ...], ...]  # run in sequence in the folder of the files
    needs: str  # program required on the machine that runs the commands, for a message


class Engine(Protocol):
    """The module of an engine."""

    OPTIONS: Mapping[str, Option]

    def render(self, job: ClusterJob) -> Rendered:
        """Returns the files and commands that start `job`."""


def complete(engine: str, options: Mapping[str, Option], given: Mapping[str, str]) -> dict[str, str]:
    """Returns every option of an engine, as set or by default.

    Raises: ConfigError for an unknown option, or an option without a value and a default.
    """
    for name in given:
        if name not in options:
            known = f"It has {', '.join(options)}.{nearest(name, list(options))}"
            raise ConfigError(f"--set {name}: --on {engine} has no such option. {known}")
    values = {name: given.get(name, option.default) for name, option in options.items()}
    missing = [name for name, value in values.items() if value == REQUIRED]
    if missing:
        listed = "; ".join(f"{name}: {options[name].help}" for name in missing)
        raise ConfigError(f"--on {engine} needs --set {missing[0]}=... ({listed}). Add it to the command.")
    bad = [name for name, value in values.items() if any(ord(c) < 32 or ord(c) == 127 for c in value)]
    if bad:
        raise ConfigError(f"--set {bad[0]} holds a control character. Give it in one line.")
    return values


def restart_loop(job: ClusterJob, run: str, wait_s: int, stop: str = "") -> str:
    """Returns shell code that runs `run`, and restarts it while its exit code `$code` allows that."""
    return f"""starts=0
while true; do
  {run}
  case $code in
    0|{"|".join(map(str, FINAL))}) exit $code ;;
    {AGAIN}) ;;
    *) [ $starts -lt {job.max_restarts} ] || exit $code; starts=$((starts + 1)) ;;
  esac
{stop}  sleep {wait_s}
done
"""
