"""What an engine is: how a job of some processes is written for one kind of scheduler. One file each in this folder.

An engine is a module with

    OPTIONS: Mapping[str, Option]        what `--set NAME=VALUE` may say, each with its default and a sentence
    render(job) -> Rendered              files and commands, as text

`render` is pure, so that what is printed is what is run. Each process gets its rank from the engine's environment
(cluster/environments/). Rendered text is for people, who change it: comments explain what is not obvious.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from spmdkit.errors import ConfigError, ExitCode
from spmdkit.foundation.formatting import nearest

REQUIRED = "<required>"

AGAIN = int(ExitCode.PREEMPTED)
"""The exit code that requests another start."""

FINAL = tuple(int(code) for code in (ExitCode.CHECK_FAILED, ExitCode.NOT_FINITE, ExitCode.CONFIG, ExitCode.CHECKPOINT))
"""Codes that another start would end with again."""


class Option(NamedTuple):
    """One setting of an engine. `default` is a text as well; REQUIRED: it has to be given."""

    default: str
    help: str


@dataclass(frozen=True)
class ClusterJob:
    """What is to be started."""

    arguments: tuple[str, ...]  # of spmdkit: `("train", "config.yaml", "steps=100")`
    num_processes: int  # all together
    name: str  # letters, digits and dashes
    max_restarts: int = 0  # how often a failure is followed by another start; 42 always is
    grace_s: int = 120  # seconds between the notice and the end
    options: Mapping[str, str] = field(default_factory=dict)  # of the engine, complete
    here: str = "."  # the folder in which `launch` was called, absolute

    @property
    def folder(self) -> str:
        """The folder to run in: the option, or where `launch` was called."""
        return self.options["folder"] or self.here

    def command(self) -> list[str]:
        """Returns the words that one process runs: a command of spmdkit, or a script of the user's."""
        script = [] if self.arguments[0].endswith(".py") else ["-m", "spmdkit"]
        return [self.options.get("python", "python"), *script, *self.arguments]

    def whole(self, name: str, least: int = 0) -> int:
        """Returns an option that is a whole number.

        Raises: ConfigError when it is not.
        """
        text = self.options[name]
        if not (text.isascii() and text.isdigit()) or int(text) < least:
            raise ConfigError(
                f"--set {name}={text}: expected a whole number of at least {least}. Try --set {name}={max(least, 1)}."
            )
        return int(text)


@dataclass(frozen=True)
class Rendered:
    """What starts a job."""

    files: Mapping[str, str]  # name -> text, written before the commands are run
    commands: tuple[tuple[str, ...], ...]  # run one after the other in the folder of the files
    needs: str  # what has to be on the machine that runs the commands, for a message


class Engine(Protocol):
    """The module of an engine."""

    OPTIONS: Mapping[str, Option]

    def render(self, job: ClusterJob) -> Rendered:
        """Returns what starts `job`."""


def complete(engine: str, options: Mapping[str, Option], given: Mapping[str, str]) -> dict[str, str]:
    """Returns every option of an engine, as given or by default.

    Raises: ConfigError for one that is not known, or is not given and has no default.
    """
    for name in given:
        if name not in options:
            known = f"It has {', '.join(options)}.{nearest(name, list(options))}"
            raise ConfigError(f"--set {name}: --on {engine} has no such option. {known}")
    found = {name: given.get(name, option.default) for name, option in options.items()}
    missing = [name for name, value in found.items() if value == REQUIRED]
    if missing:
        listed = "; ".join(f"{name}: {options[name].help}" for name in missing)
        raise ConfigError(f"--on {engine} needs --set {missing[0]}=... ({listed}). Add it to the command.")
    bad = [name for name, value in found.items() if any(ord(c) < 32 or ord(c) == 127 for c in value)]
    if bad:
        raise ConfigError(f"--set {bad[0]} holds a control character. Give it in one line.")
    return found


def restart_loop(job: ClusterJob, run: str, wait_s: int, stop: str = "") -> str:
    """Returns shell that runs `run`, and starts it again where its exit code `$code` allows that."""
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
