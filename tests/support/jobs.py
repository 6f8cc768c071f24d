"""Real jobs with one injected fault: the command, the fault at a step, and the time until the job ends.

The task's data source and hook read FAULTS, `{process: [kind, step]}`. A fault that fires writes a file with the time,
so that a missing injection fails its test.
"""

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tests.support.environment import environment_of_a_user
from tests.support.forks import Child, Forks, Process

REPOSITORY = Path(__file__).resolve().parents[2]

TASK = '''
import ctypes, json, os, signal, sys, threading, time
import jax.numpy as jnp
import numpy as np
import optax
import spmdkit as sk

ME = os.environ.get("SPMDKIT_PROCESS_ID", "0")
KIND, STEP = json.loads(os.environ.get("FAULTS", "{}")).get(ME, ["", 0])

with open(f"pid-{ME}.txt", "w") as file:
    file.write(str(os.getpid()))

def fired():
    with open(f"fired-{ME}", "a") as file:
        file.write(f"{time.monotonic()}\\n")

def act(kind):
    fired()
    if kind == "sleep":
        time.sleep(600)
    if kind == "gil":
        ctypes.PyDLL(None).sleep(600)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "raise":
        raise ValueError("the source is broken")

SAVE_S = float(os.environ.get("SAVE_S", "0"))
if SAVE_S:
    from pathlib import Path
    rename = os.rename
    def slowly(source, target, **options):
        if "tmp" in str(source):
            with open("slow-saves", "a") as file:
                file.write(f"{target}\\n")
            time.sleep(SAVE_S)  # as a disk that commits slowly
        return rename(source, target, **options)
    os.rename = slowly

if KIND == "save":
    rename = os.rename
    def never(source, target, **options):
        if "tmp" in str(source):
            act("sleep")  # as a disk that does not answer
        return rename(source, target, **options)
    os.rename = never

if KIND == "import":
    act("sleep")

X = np.linspace(-1, 1, 64 * 4, dtype=np.float32).reshape(64, 4)
PAUSE_S = float(os.environ.get("PAUSE_S", "0.02"))
reads = [0]

class Source:
    def __len__(self):
        return 64
    def __getitem__(self, i):
        reads[0] += threading.current_thread() is not threading.main_thread()  # of batches, and not of what a start compares
        return {"x": X[i], "y": X[i].sum()}

def around(step):
    if KIND.startswith("hook ") and step == STEP:
        act(KIND.removeprefix("hook "))
    time.sleep(STEP if KIND == "drag" else PAUSE_S)

class Slow(Source):
    """Each read of process ME after so many steps acts."""
    def __getitem__(self, i):
        mine = 8 // int(os.environ.get("SPMDKIT_NUM_PROCESSES", "1"))
        if KIND.startswith("data ") and reads[0] >= STEP * mine:
            act(KIND.removeprefix("data "))
        return super().__getitem__(i)

def loss_fn(params, batch, key):
    if KIND == "slow" and key is not None:
        time.sleep(STEP)  # while it is traced
    return sk.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)

class Evaluated(Source):
    def __getitem__(self, i):
        if KIND == "evaluation" and threading.current_thread() is not threading.main_thread():
            act("sleep")
        time.sleep(STEP / 64 if KIND == "slow" else 0)
        return super().__getitem__(i)

task = sk.Task(
    lambda key: {"w": jnp.zeros(4)}, loss_fn, optax.sgd(0.1), train_data=Slow(), eval_data=Evaluated() if "EVALUATED" in os.environ else None,
    hooks=[sk.Hook("mine", before_step=lambda run, step, state: around(step))],
)
'''  # noqa: E501

CONFIG = """
task: task.py:task
run_dir: run
steps: 100000
batch_size: 8
devices: cpu:2
mesh: {data: -1}
checkpoint: {every_steps: 5, every_seconds: null}
log: {every_steps: 5, progress: plain}
"""


@dataclass
class Ended:
    """How a command ended. `after_s`: seconds since the fault fired, or since the start."""

    code: int
    output: str
    after_s: float


class Job:
    """A folder with a task and a config, and a command that runs in it."""

    def __init__(self, folder: Path, forks: Forks):
        self.folder, self._forks = folder, forks
        (folder / "task.py").write_text(TASK)
        (folder / "run.yaml").write_text(CONFIG)
        self.started: list[subprocess.Popen | Child] = []
        self.awaited: list[subprocess.Popen | Child] = []

    def start(
        self, *arguments: str, faults: dict | None = None, output: IO | None = None, fresh: bool = False, **env: str
    ) -> subprocess.Popen | Child:
        """Starts `spmdkit ARGUMENTS`, forked with what it launches unless `fresh`, with its output in `output`."""
        told = {"PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu", "TMPDIR": str(self.folder), **env}
        told["FAULTS"] = json.dumps({str(p): fault for p, fault in (faults or {}).items()})
        if not fresh and output is None:
            process = Process(list(arguments), self.folder, told, forks=arguments[0] == "launch")
            self.started.append(self._forks.start(process))
            return self.started[-1]
        popen = subprocess.Popen(
            [sys.executable, "-m", "spmdkit", *arguments],
            cwd=self.folder,
            env=environment_of_a_user() | told,
            stdout=subprocess.PIPE if output is None else output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.started.append(popen)
        return popen

    def train(self, *overrides: str, n: int = 1, **options) -> subprocess.Popen | Child:
        """Starts a training job of `n` processes."""
        launch = ["launch", "-n", str(n), "--"] if n > 1 else []
        return self.start(*launch, "train", "run.yaml", f"devices=cpu:{max(n, 2)}", *overrides, **options)

    def by_hand(self, *overrides: str, n: int = 2, faults: dict | None = None) -> list[subprocess.Popen | Child]:
        """Starts `n` processes manually, without the launcher."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            coordinator = f"127.0.0.1:{server.getsockname()[1]}"
        place = lambda p: {
            "SPMDKIT_PROCESS_ID": str(p),
            "SPMDKIT_NUM_PROCESSES": str(n),
            "SPMDKIT_COORDINATOR": coordinator,
        }
        return [
            self.start("train", "run.yaml", f"devices=cpu:{n}", *overrides, faults=faults, **place(p)) for p in range(n)
        ]

    def end_of(self, popen: subprocess.Popen | Child, timeout_s: float = 90) -> Ended:
        """Waits for the end. The test fails on a timeout."""
        begin = time.monotonic()
        output, _ = popen.communicate(timeout=timeout_s)
        ended = time.monotonic()
        self.awaited.append(popen)
        fired = self.fired()
        code = popen.returncode if popen.returncode >= 0 else 128 - popen.returncode
        after_s = ended - (min(fired) if fired else begin)
        print(f"{os.environ.get('PYTEST_CURRENT_TEST', '').rpartition('::')[2]} code={code} after_s={after_s:.2f}")
        return Ended(code, output, after_s)

    def fired(self) -> list[float]:
        """Returns the times at which faults fired."""
        return [float(line) for path in self.folder.glob("fired-*") for line in path.read_text().split()]

    def steps(self) -> list[int]:
        """Returns the logged steps."""
        try:  # the next run may rename the metrics of a run without a checkpoint at any time
            lines = (self.folder / "run" / "metrics.jsonl").read_text().splitlines()
        except FileNotFoundError:
            lines = []
        return [json.loads(line)["step"] for line in lines if line.endswith("}")]

    def saved(self) -> list[int]:
        """Returns the saved steps."""
        folder = self.folder / "run" / "checkpoints"
        return sorted(int(p.name) for p in folder.glob("*") if p.name.isdigit()) if folder.is_dir() else []

    def events(self) -> list[dict]:
        """Returns the run's events."""
        path = self.folder / "run" / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []

    def wait_for(self, condition, timeout_s: float = 90) -> None:
        """Returns once `condition()` is true."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            for popen in self.started:
                if popen not in self.awaited and popen.poll() is not None:
                    raise AssertionError(f"ended with {popen.returncode}:\n{popen.communicate()[0]}")
            assert time.monotonic() < deadline, "it never came true"
            time.sleep(0.02)

    def processes(self) -> dict[int, int]:
        """Returns process number -> pid of the running processes of this folder's job."""
        alive = {pid for pid, _ in self._alive()}
        found = {int(path.stem[4:]): int(path.read_text() or 0) for path in self.folder.glob("pid-*.txt")}
        return {process: pid for process, pid in found.items() if pid in alive}

    def service_processes(self) -> list[int]:
        """Returns the pids of the processes that run a coordination service for this folder's job."""
        return [
            pid
            for pid, command in self._alive()
            if any(part.endswith("cluster/service/service.py") for part in command)
        ]

    def left(self, within_s: float = 10.0) -> list[str]:
        """Returns remains of a job that has ended: processes, open ports, locks, temporary files and folders. The
        service ends shortly after the job.

        Partial files in `checkpoints` are ignored, since the next start removes them.
        """
        deadline = time.monotonic() + within_s
        while (found := self._left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def _left(self) -> list[str]:
        runs = [path.parent for path in self.folder.glob("*/run.lock")]
        kept = {
            *runs,
            *self.folder.glob("__pycache__"),
            *self.folder.glob("*.*"),
            *self.folder.glob("fired-*"),
            self.folder / "shift",
        }
        return [
            *(f"process {pid}: {' '.join(command)[:200]}" for pid, command in self._alive(anywhere=True)),
            *(f"port {port}" for run in runs for port in _ports(run) if _is_open(port)),
            *(f"lock {path}" for run in runs for path in (run, run / "run.lock") if _is_locked(path)),
            *(f"{path} of TMPDIR" for path in set(self.folder.iterdir()) - kept),
            *(f"{path}, half written" for path in self.folder.rglob("*.partial")),
        ]

    def _alive(self, anywhere: bool = False) -> Iterator[tuple[int, list[str]]]:
        """Yields (pid, command line) of the processes whose working directory is this folder; `anywhere`: or with its
        variables."""
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                ours = anywhere and f"TMPDIR={self.folder}" in (path / "environ").read_text(errors="replace").split(
                    "\0"
                )
                if not ours and os.readlink(path / "cwd") != str(self.folder):
                    continue
                if (path / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    yield int(path.name), (path / "cmdline").read_text().split("\0")

    def close(self) -> None:
        """Kills remaining processes."""
        for popen in self.started:
            for pid in {*self.processes().values(), *self.service_processes(), popen.pid}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            popen.wait(timeout=30)
            if isinstance(popen, subprocess.Popen) and popen.stdout is not None:
                popen.stdout.close()


def _ports(run: Path) -> set[int]:
    """Returns the rendezvous ports of a run on this machine."""
    try:
        variables = json.loads((run / "environment.json").read_text())["variables"]
    except FileNotFoundError:
        return set()
    return {
        int(variables[name].rpartition(":")[2])
        for name in ("SPMDKIT_COORDINATOR", "SPMDKIT_SERVICE")
        if name in variables
    }


def _is_open(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def _is_locked(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
