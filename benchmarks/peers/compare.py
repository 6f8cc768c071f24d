"""The train step of spmdkit against that of other frameworks on the CPUs of this machine, in alternating rounds.

    python benchmarks/peers/compare.py --torch PYTHON --keras PYTHON [--only gpt_1m/1 lstm/2] [--rounds 10]

A cell is a model (models.py) on a number of devices. Each framework trains it in a separate process that stays open;
all have the same initial parameters, rows and optimizer (AdamW in float32). First the losses of five steps are
compared. Then each round runs one block of steps in each process, one process at a time, in an order that rotates; a
ratio is of the two blocks of one round, spmdkit / peer. spmdkit runs the loop of `train` with its defaults; the others
run their usual loop, and read the loss each ten steps (Keras: `fit`).

Writes benchmarks/results/peers.json, in which the rows of other cells stay, and ends with one line of JSON. Levanter is
not compared: the newest release on PyPI, 1.1, has conflicting requirements.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import results
from models import MODELS
from worker import SIGN

NAME = "peers"
START_TIMEOUT_S = 600
BLOCK_TIMEOUT_S = 300
TOLERANCE = 1e-3
"""Of the relative difference of losses. Measured: 3e-4 with TensorFlow and an embedding, 1e-5 with all others."""


class Peer(NamedTuple):
    """A framework: the environment of its Python, its script and arguments, and the highest ratio that is aimed at."""

    environment: str
    script: str
    arguments: tuple[str, ...] = ()
    goal: float | None = None


PEERS = {
    1: {
        "torch eager": Peer("torch", "torch_worker.py", ("eager",)),
        "torch.compile": Peer("torch", "torch_worker.py", ("compile",), 0.90),
        "flax, jit": Peer("jax", "flax_worker.py"),
        "Keras on TensorFlow": Peer("keras", "keras_worker.py", ("tensorflow",)),
        "Keras on JAX": Peer("keras", "keras_worker.py", ("jax",)),
    },
    2: {
        "torch DDP": Peer("torch", "torch_worker.py", ("ddp",), 0.80),
        "torch DDP, compiled": Peer("torch", "torch_worker.py", ("ddp-compile",)),
        "flax, shard_map": Peer("jax", "flax_worker.py"),
        "TensorFlow MirroredStrategy": Peer("keras", "keras_worker.py", ("tensorflow",), 0.80),
        "Keras on JAX, DataParallel": Peer("keras", "keras_worker.py", ("jax",), 0.80),
    },
}
CELLS = [f"{model}/{num}" for model in MODELS for num in PEERS]
OURS = Peer("jax", "spmdkit_worker.py")


class Process:
    """An open worker: `losses` of its first steps, `versions`, and the seconds of its blocks."""

    def __init__(self, peer: Peer, cell: str, python: str):
        model, num = cell.split("/")
        self.child = subprocess.Popen(
            [python, str(HERE / peer.script), model, num, *peer.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        )
        self.seconds: list[float] = []
        self.errors: list[str] = []
        threading.Thread(target=lambda: self.errors.extend(self.child.stderr or ()), daemon=True).start()
        started = self._read(START_TIMEOUT_S)
        self.losses, self.versions = started["losses"], started["versions"]

    def train(self, steps: int) -> None:
        """Measures one block."""
        assert self.child.stdin is not None
        print(steps, file=self.child.stdin, flush=True)
        self.seconds.append(self._read(BLOCK_TIMEOUT_S))

    def close(self) -> None:
        """Ends the process; the processes that it has started end with it."""
        with contextlib.suppress(BrokenPipeError):
            assert self.child.stdin is not None
            self.child.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(20)
        self.child.kill()

    def _read(self, timeout_s: float) -> Any:
        assert self.child.stdout is not None
        timer = threading.Timer(timeout_s, self.child.kill)
        timer.start()
        try:
            for line in self.child.stdout:
                if line.startswith(SIGN):
                    return json.loads(line.removeprefix(SIGN))
        finally:
            timer.cancel()
        self.child.wait()
        raise RuntimeError(f"{' '.join(self.child.args[1:])} ended: {''.join(self.errors[-6:])}")  # type: ignore[index]


def measure(cell: str, pythons: dict[str, str], rounds: int) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Returns the rows of a cell and the versions of the packages. Peers that do not run are reported and skipped."""
    steps, peers = MODELS[cell.split("/")[0]].steps, PEERS[int(cell.split("/")[1])]
    open_processes: dict[str, Process] = {}
    try:
        ours = open_processes["spmdkit"] = Process(OURS, cell, pythons[OURS.environment])
        for name, peer in peers.items():
            if peer.environment not in pythons:
                continue
            try:
                open_processes[name] = Process(peer, cell, pythons[peer.environment])
                print(f"{cell} {name}: started", file=sys.stderr, flush=True)
            except RuntimeError as error:
                print(f"{cell} {name}: {error}", file=sys.stderr, flush=True)
        differences = {name: _difference(process.losses, ours.losses) for name, process in open_processes.items()}
        if wrong := {name: d for name, d in differences.items() if d > TOLERANCE}:
            raise RuntimeError(f"{cell}: losses differ from those of spmdkit by {wrong}, more than {TOLERANCE}")
        order = list(open_processes.values())
        for _ in range(rounds + 1):  # the first is not counted
            for process in order:
                process.train(steps)
            order = order[1:] + order[:1]
        rows = [
            _row(cell, name, peers[name], process, ours, differences[name]) for name, process in _others(open_processes)
        ]
    finally:
        for process in open_processes.values():
            process.close()
    versions: dict[str, str] = {}
    for process in open_processes.values():
        versions |= process.versions
    return rows, versions


def _others(processes: dict[str, Process]) -> list[tuple[str, Process]]:
    return [(name, process) for name, process in processes.items() if name != "spmdkit"]


def _difference(losses: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))


def _row(cell: str, name: str, peer: Peer, process: Process, ours: Process, difference: float) -> dict[str, Any]:
    model, num = cell.split("/")
    ratio = results.interval([a / b for a, b in zip(ours.seconds[1:], process.seconds[1:], strict=True)])
    milliseconds = lambda seconds: statistics.median(seconds[1:]) / MODELS[model].steps * 1e3
    return {
        "model": model,
        "devices": int(num),
        "peer": name,
        "loss, difference": f"{difference:.0e}",
        "peer, ms": milliseconds(process.seconds),
        "spmdkit, ms": milliseconds(ours.seconds),
        "ratio (95 %)": ratio,
        "goal": ""
        if peer.goal is None
        else f"{peer.goal:.2f} {'met' if results.is_met(ratio, peer.goal) else 'missed'}",
    }


def merged(rows: list[dict[str, Any]], measured: list[str]) -> list[dict[str, Any]]:
    """Returns the new rows and the saved rows of the cells that were not measured, in the order of `CELLS`."""
    path = results.FOLDER / f"{NAME}.json"
    saved = json.loads(path.read_text())["rows"] if path.exists() else []
    cell = lambda row: f"{row['model']}/{row['devices']}"
    return sorted(rows + [row for row in saved if cell(row) not in measured], key=lambda row: CELLS.index(cell(row)))


def main() -> None:
    """Measures the requested cells; saves each when it is done."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--torch", help="Python of an environment with torch")
    parser.add_argument("--keras", help="Python of an environment with TensorFlow, Keras and JAX")
    parser.add_argument("--only", nargs="*", default=CELLS, choices=CELLS, metavar="MODEL/DEVICES", help="cells")
    parser.add_argument("--rounds", type=int, default=10, help="rounds that count")
    options = parser.parse_args()
    pythons = {"jax": sys.executable, "torch": options.torch, "keras": options.keras}
    rows: list[dict[str, Any]] = []
    versions: dict[str, str] = {}
    for number, cell in enumerate(options.only):
        found, of_cell = measure(cell, {k: v for k, v in pythons.items() if v}, options.rounds)
        rows, versions = rows + found, versions | of_cell
        for row in found:
            print(json.dumps(row), file=sys.stderr, flush=True)
        results.save(
            NAME,
            merged(rows, options.only[: number + 1]),
            "make bench-peers",
            note=f"Medians of {options.rounds} alternating rounds; ratio: spmdkit / peer.",
            versions=versions,
        )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
