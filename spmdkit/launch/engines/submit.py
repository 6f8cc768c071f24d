"""`launch --on`: prints the files of an engine in full; without --dry-run, also writes and runs them."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from spmdkit.errors import ConfigError
from spmdkit.foundation import files, redact
from spmdkit.foundation.files import not_writable
from spmdkit.foundation.formatting import nearest
from spmdkit.launch.engines import all_engines
from spmdkit.launch.engines.base import ClusterJob, Rendered, complete

NAME = re.compile(r"[a-z]([-a-z0-9]{0,40}[a-z0-9])?")


def prepared(
    engine: str,
    arguments: Sequence[str],
    num_processes: int,
    settings: Sequence[str],
    name: str,
    max_restarts: int,
    grace_s: float,
) -> Rendered:
    """Returns the files and commands that start a job on an engine; `settings`: `NAME=VALUE` of its options.

    Raises:
        ConfigError: an engine, option or name is unknown or malformed.
    """
    engines = all_engines()
    if engine not in engines:
        raise ConfigError(
            f"--on {engine} is not known. It is one of {', '.join(engines)}.{nearest(engine, list(engines))}"
        )
    if num_processes < 1:
        raise ConfigError(f"launch -n {num_processes}: at least one process is needed. Try -n 2.")
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"--name {name}: small letters, digits and dashes, at most 42, a letter first (it becomes the name of "
            "hosts). Try --name run."
        )
    if max_restarts < 0 or not 1 <= grace_s < 86400:
        raise ConfigError(
            f"--max-restarts {max_restarts} --grace-s {grace_s:g}: restarts from 0, seconds from 1 to less than a day. "
            "Try --grace-s 120."
        )
    values = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {setting}: expected NAME=VALUE. Try --set {key or 'image'}=...")
        values[key] = value
    options, here = complete(engine, engines[engine].OPTIONS, values), str(Path.cwd())
    job = ClusterJob(tuple(arguments), num_processes, name, max_restarts, int(grace_s), options, here)
    return engines[engine].render(job)


def submit(rendered: Rendered, into: Path, run: bool, print_line: Callable[[str], None] = print) -> int:
    """Prints files and commands. With `run`, writes the files into a folder, runs the commands there, and returns the
    exit code of the first that fails.

    Raises:
        ConfigError: a command is missing on this machine, or the folder cannot be written.
    """
    for name, text in rendered.files.items():
        print_line(f"--- {into / name}")
        print_line(redact.redact_text(text.rstrip("\n")))
    print_line(f"--- in {into}")
    for command in rendered.commands:
        print_line(f"$ {redact.redact_text(shlex.join(command))}")
    if not run:
        return 0
    for command in rendered.commands:
        if shutil.which(command[0]) is None:
            raise ConfigError(
                f"{command[0]} is not on this machine's PATH. The commands above need {rendered.needs}. Run this "
                "there, or with --dry-run and take the text."
            )
    try:
        into.mkdir(parents=True, exist_ok=True)
        for name, text in rendered.files.items():
            files.write_text(into / name, text)
    except OSError as error:
        raise not_writable(into, error) from error
    codes = (_run(command, into) for command in rendered.commands)
    code = next(filter(None, codes), 0)
    return code if code >= 0 else 128 - code


def _run(command: Sequence[str], folder: Path) -> int:
    """Runs a command. SIGTERM and SIGHUP are forwarded; Ctrl-C reaches the command directly."""
    with subprocess.Popen(command, cwd=folder) as process:
        forwarded = (signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, lambda sent, _: process.send_signal(sent)) for number in forwarded}
        before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            return process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def launch_on(
    engine: str,
    arguments: Sequence[str],
    num_processes: int,
    settings: Sequence[str],
    name: str,
    max_restarts: int,
    grace_s: float | None,
    dry_run: bool,
) -> int:
    """Prints the files and commands of a job. Unless `dry_run`, runs them from `launch_NAME`; returns the exit code.

    Raises:
        ConfigError: as `prepared` and `submit`, or an argument of the command holds a secret.
    """
    redact.register_command_secrets([*arguments, *settings], files=False)
    secrets = [word for word in (*arguments, *settings) if redact.redact_text(word) != word]
    if secrets and not dry_run:
        raise ConfigError(
            f"--on {engine}: {redact.redact_text(secrets[0])} contains a secret, which would be written to the files of "
            "the job. Write it into the config file on the hosts, or let the task read a variable that they set. "
            "--dry-run prints the files without it."
        )
    rendered = prepared(
        engine, arguments, num_processes, settings, name, max_restarts, 120.0 if grace_s is None else grace_s
    )
    return submit(rendered, Path(f"launch_{name}"), not dry_run, lambda text: print(text, flush=True))
