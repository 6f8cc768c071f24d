"""Real launchers of real processes: in this process, or in their own where they are signalled or killed."""

import os
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from spmdkit.launch import launch

REPOSITORY = Path(__file__).resolve().parents[2]
LAUNCHER = (
    "import sys; from spmdkit.launch.local import launch; "
    "sys.exit(launch([sys.executable, *sys.argv[3:]], int(sys.argv[1]), grace_s=4, max_restarts=int(sys.argv[2])))"
)


@dataclass
class Result:
    code: int
    out: str
    err: str
    wall_s: float


def environment(folder, env):
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu", "TMPDIR": str(folder), **env}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Returns a function that launches a script in this process."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "script.py"

    def run(script, num_processes=2, max_restarts=0, arguments=(), **env):
        path.write_text(textwrap.dedent(script))
        command, begin = [sys.executable, str(path), *arguments], time.monotonic()
        code = launch(command, num_processes, env=environment(tmp_path, env), grace_s=4, max_restarts=max_restarts)
        out, err = capsys.readouterr()
        return Result(code, out, err, time.monotonic() - begin)

    return run


class Launched:
    """A running launcher of `num_processes` copies of a script; `under`: words before its command."""

    def __init__(self, folder, script, num_processes, max_restarts, under, arguments):
        path = folder / "script.py"
        path.write_text(textwrap.dedent(script))
        self.start = time.monotonic()
        self.popen = subprocess.Popen(
            [*under, sys.executable, "-c", LAUNCHER, str(num_processes), str(max_restarts), str(path), *arguments],
            env=environment(folder, {}),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait(self, timeout_s=60):
        out, err = self.popen.communicate(timeout=timeout_s)
        return Result(self.popen.returncode, out, err, time.monotonic() - self.start)

    def read_until(self, text, count=1):
        """Reads standard output until `text` was seen `count` times; returns the lines."""
        lines = []
        while sum(text in line for line in lines) < count:
            line = self.popen.stdout.readline()
            assert line, f"ended before {text!r}: {lines}\n{self.popen.stderr.read()}"
            lines.append(line)
        return lines


@pytest.fixture
def start(tmp_path):
    started = []

    def start(script, num_processes=2, max_restarts=0, under=(), arguments=()):
        started.append(Launched(tmp_path, script, num_processes, max_restarts, under, arguments))
        return started[-1]

    yield start
    for launched in started:
        launched.popen.kill()
        launched.popen.wait()
        launched.popen.stdout.close()
        launched.popen.stderr.close()
