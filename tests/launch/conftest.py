"""Real launchers of real processes, each bounded in time: killing the launcher kills what it started."""

import os
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

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


class Launched:
    """A running launcher of `num_processes` copies of a script; `under`: words before its command."""

    def __init__(self, folder, script, num_processes, max_restarts, under, env, arguments):
        path = folder / "script.py"
        path.write_text(textwrap.dedent(script))
        self.start = time.monotonic()
        self.popen = subprocess.Popen(
            [*under, sys.executable, "-c", LAUNCHER, str(num_processes), str(max_restarts), str(path), *arguments],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu", "TMPDIR": str(folder), **env},
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

    def start(script, num_processes=2, max_restarts=0, under=(), arguments=(), **env):
        started.append(Launched(tmp_path, script, num_processes, max_restarts, under, env, arguments))
        return started[-1]

    yield start
    for launched in started:
        launched.popen.kill()
        launched.popen.wait()
        launched.popen.stdout.close()
        launched.popen.stderr.close()
