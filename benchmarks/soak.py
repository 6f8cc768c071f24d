"""A long run with a random fault per minute, rotating logs and checkpoints in an object store.

    make soak                                                                    an hour
    python benchmarks/soak.py --faults 10 --every 30 --processes 2 --store local --folder build/soak

The faults are drawn from a printed seed. Every process is sampled each 5 s: the launcher, the coordination service,
the local S3 server (moto), and the training processes, each of which lives until the next fault that ends its attempt.
Afterwards a run without faults trains the same number of steps, without the batches that rollbacks skipped, and both
are compared bitwise.

Goodput (Google's ML productivity goodput, its runtime part), from the events of process 0 in events.jsonl:

wall          from the first `compiled` to the last event
faults        for each later `restored` or `rolled_back` to step s: from the beginning of the save of s (`saved` minus
              `seconds`; without one, the save before) until training continues (`compiled`, or `rolled_back`). This
              is the repeated work, the detection and the restart. Overlapping intervals count once.
checkpoints   `held_s` of each `saved` outside of these intervals
goodput       1 - (faults + checkpoints) / wall
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import os
import platform
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from spmdkit.checkpoint.location import Location, resolve
from spmdkit.config import load_config
from spmdkit.faults.injection.fault import CHECKPOINT_FAULTS, CLOCK_STEP_S, KINDS, NETWORK, Fault
from spmdkit.metrics import read_lines
from spmdkit.metrics.events import parse_time
from spmdkit.tools.drill import compare, figures
from spmdkit.tools.drill.corrupt import newest
from spmdkit.tools.drill.driver import Driver
from spmdkit.tools.drill.job import DrillRequest, run_job
from tests.support.buckets import BUCKET, server

CONFIG = ROOT / "benchmarks/chaos/run.yaml"
DRAWN = tuple(kind for kind in KINDS if kind not in (*NETWORK, "object-store"))
"""Network faults need network namespaces, from which the S3 server is not reachable. The server stays up."""
TIMEOUTS = {"heartbeat": 10, "step": 20, "hook": 20, "import": 90, "compile": 90, "restore": 60, "save": 40}
MAX_MB, BACKUPS = 0.02, 2
SETTINGS = [
    "steps=100000000",
    "hooks=[task.py:pause, task.py:number_lines]",
    "checkpoint={every_steps: 100, every_seconds: null, keep: 5}",
    "eval.every_steps=200",
    "replica_check.every_steps=20",
    f"log={{every_steps: 20, progress: plain, max_mb: {MAX_MB}, backups: {BACKUPS}}}",
    *(f"watchdog.{name}_timeout_s={seconds}" for name, seconds in TIMEOUTS.items()),
]
SAMPLE_S, WARM_UP_S = 5.0, 60.0
"""The first minute of a process is not part of its slope: its first save and evaluation allocate."""
RECOVERY_S = 120.0
"""The run ends one interval after the last fault, and at most this much later if training has not passed it."""
GRACE_S = 120.0


def draw(seed: int, count: int, num_processes: int, every_s: float, every_steps: int | None = None) -> list[Fault]:
    """Returns a random fault for each interval of seconds, or of steps.

    The clock of process 0 is not set: its events are timed. No checkpoint is damaged in the first two intervals, in
    which there may be a single one.
    """
    rng = random.Random(seed)
    first = [kind for kind in DRAWN if kind not in CHECKPOINT_FAULTS]
    kinds = [rng.choice(first if number < 2 else DRAWN) for number in range(count)]
    processes = [rng.randrange(int(kind == "clock"), num_processes) for kind in kinds]
    at = lambda number: {"seconds": every_s * number} if every_steps is None else {"step": every_steps * number}
    return [Fault(*both, **at(number)) for number, both in enumerate(zip(kinds, processes, strict=True), 1)]


class Observer(Driver):
    """Injects the faults, samples memory and descriptors of every process, and stops the run after `seconds`."""

    def __init__(self, seconds: float, fixed: Mapping[int, str], *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._fixed, self._end = dict(fixed), time.monotonic() + seconds
        self._next, self._is_stopping = 0.0, False
        self.samples: dict[tuple[str, int], list[tuple[float, float, int]]] = {}

    def on_service(self, pid: int) -> None:
        super().on_service(pid)
        self._fixed = {each: role for each, role in self._fixed.items() if role != SERVICE_ROLE} | {pid: SERVICE_ROLE}

    def on_poll(self, children: Sequence[Any]) -> None:
        super().on_poll(children)
        for timeline in self.bars:  # no page is drawn, and it grows with each change of the activity
            del timeline.bars[:-1]
        now = time.monotonic()
        if now >= self._next:
            self._next = now + SAMPLE_S
            roles = {child.popen.pid: f"process {child.process}" for child in children if child.exit is None}
            for pid, role in {**self._fixed, **roles}.items():
                with contextlib.suppress(OSError):  # it has ended
                    self.samples.setdefault((role, pid), []).append((now, *usage(pid)))
        waits = bool(self._queue or self._pending or self._unrecovered()) and now < self._end + RECOVERY_S
        if now >= self._end and not waits and not self._is_stopping:
            self._is_stopping = True
            os.kill(os.getpid(), signal.SIGTERM)


SERVICE_ROLE = "coordination service"


def usage(pid: int) -> tuple[float, int]:
    """Returns the resident memory of a process in MB and the number of its open files."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6, len(os.listdir(f"/proc/{pid}/fd"))


# ---- memory ----------------------------------------------------------------------------------------------------------


def memory(samples: Mapping[tuple[str, int], Sequence[tuple[float, float, int]]]) -> dict[str, Any]:
    """Returns for each role the slope of its memory and open files per hour, from all lives that are long enough."""
    lives: dict[str, list[np.ndarray]] = {}
    for (role, _), rows in samples.items():
        lives.setdefault(role, []).append(np.array(rows, float))
    return {role: of_role(each) for role, each in sorted(lives.items())}


def of_role(lives: Sequence[np.ndarray]) -> dict[str, Any]:
    late = [rows[rows[:, 0] >= rows[0, 0] + WARM_UP_S] for rows in lives]
    long = [rows for rows in late if len(rows) and rows[-1, 0] - rows[0, 0] >= WARM_UP_S / 2]
    return {
        "lives": len(lives),
        "long_lives": len(long),
        "longest_s": round(max(rows[-1, 0] - rows[0, 0] for rows in lives)),
        "rss_mb": [round(each(rows[:, 1].max() for rows in lives), 1) for each in (min, max)],
        "open_files": [int(each(rows[:, 2].max() for rows in lives)) for each in (min, max)],
        "rss_mb_per_hour": slope(long, 1),
        "open_files_per_hour": slope(long, 2),
        "each_life": [[round(r[-1, 0] - r[0, 0]), slope([r], 1), slope([r], 2)] for r in long],
    }


def slope(lives: Sequence[np.ndarray], column: int) -> list[float] | None:
    """Returns (slope per hour, lower, upper) of a column over lives with different levels.

    The interval (95 %) is from the residuals of blocks of 30 s of the same life, which are correlated (cluster-robust
    variance: Liang and Zeger, Longitudinal data analysis using generalized linear models, 1986).
    """
    if not lives:
        return None
    x = [(rows[:, 0] - rows[:, 0].mean()) / 3600 for rows in lives]
    y = [rows[:, column] - rows[:, column].mean() for rows in lives]
    weight = sum(float(each @ each) for each in x)
    found = sum(float(a @ b) for a, b in zip(x, y, strict=True)) / weight
    size = max(1, round(30 / SAMPLE_S))
    blocks = [
        float((a * (b - found * a))[at : at + size].sum())
        for a, b in zip(x, y, strict=True)
        for at in range(0, len(a), size)
    ]
    correction = len(blocks) / max(1, len(blocks) - 1 - len(lives))
    half = 1.96 * math.sqrt(correction * sum(each * each for each in blocks)) / weight
    return [round(found, 2), round(found - half, 2), round(found + half, 2)]


# ---- goodput ---------------------------------------------------------------------------------------------------------


def goodput(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the goodput and its parts in seconds, as described above."""
    rows = [(parse_time(event["time"]), event) for event in events if event["process"] == 0]
    begin = next(when for when, event in rows if event["event"] == "compiled")
    end = max(when for when, _ in rows)
    saves = {0: begin}  # step -> when its save began
    held: list[tuple[float, float]] = []
    lost: list[tuple[float, float]] = []
    since: float | None = None
    for when, event in rows:
        name, step = event["event"], event.get("step")
        if name == "saved":
            saves[step] = when - event["seconds"]
            held.append((when, event["held_s"]))
        elif name in ("restored", "started", "rolled_back") and when > begin:
            saves = {saved: at for saved, at in saves.items() if saved <= step}
            first = saves[max(saves)]
            if name == "rolled_back":
                lost.append((first, when))
            else:
                since = first
        elif name == "compiled" and since is not None:
            lost.append((since, when))
            since = None
    if since is not None:
        lost.append((since, end))
    faults_s = covered(lost)
    checkpoints_s = sum(s for when, s in held if not any(first <= when <= last for first, last in lost))
    wall_s = end - begin
    return {
        "wall_s": round(wall_s, 3),
        "faults_s": round(faults_s, 3),
        "checkpoints_s": round(checkpoints_s, 3),
        "goodput": round(1 - (faults_s + checkpoints_s) / wall_s, 4),
    }


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Returns the seconds in at least one interval."""
    total, reached = 0.0, -math.inf
    for first, last in sorted(intervals):
        total += max(0.0, last - max(first, reached))
        reached = max(reached, last)
    return total


# ---- logs ------------------------------------------------------------------------------------------------------------


def check_logs(run_dir: Path) -> dict[str, Any]:
    """Returns the number of rotated streams, and what is wrong with the retained files: too large, too many, or a line
    lost between the newest ones."""
    wrong, rotated, num_bytes = [], 0, 0
    for folder in sorted(run_dir.glob("logs/attempt_*/p*")):
        files = sorted(folder.glob("stdout*.txt"), key=lambda path: int(path.stem.partition(".")[2] or 0))
        rotated += len(files) > 1
        num_bytes += sum(path.stat().st_size for path in files)
        if len(files) > BACKUPS + 1 or any(path.stat().st_size > MAX_MB * 1e6 for path in files):
            wrong.append(f"{folder}: {len(files)} files, limit {BACKUPS + 1} of {MAX_MB} MB")
        for part in (files[:1], files[1:]):
            numbers = [int(n) for n in re.findall(r"^line (\d+) ", "".join(p.read_text() for p in part), re.M)]
            if numbers != list(range(numbers[0], numbers[0] + len(numbers))) if numbers else False:
                wrong.append(f"{folder}: a line is missing")
    return {"rotated": rotated, "bytes": num_bytes, "wrong": wrong}


# ---- the run ---------------------------------------------------------------------------------------------------------


def soak(folder: Path, url: str | None, asked: argparse.Namespace) -> dict[str, Any]:
    """Returns the result of a run with faults and of one without."""
    run_dir, num = folder / "run", asked.processes
    faults = draw(asked.seed, asked.faults, num, asked.every, asked.every_steps)
    seconds = 0 if asked.every_steps else asked.every * (asked.faults + 1)
    print(f"seed {asked.seed}: {' '.join(map(str, faults))}", flush=True)
    settings = [*SETTINGS, *asked.setting, *([f"checkpoint.directory={url}"] if url else [])]
    checkpoints = resolve(url or run_dir / "checkpoints")
    fixed = dict.fromkeys(child_processes(), "object store") | {os.getpid(): "launcher"}
    observer = Observer(seconds, fixed, run_dir, num, faults, asked.seed, checkpoints=checkpoints)
    code = train(settings, run_dir, observer, num, 2 * len(faults) + 3)
    injected = [figures.injection_row(each, observer.attempts[0].begin) for each in observer.injections]
    step = newest(checkpoints)
    is_timed = lambda seconds: seconds is not None and seconds < CLOCK_STEP_S / 2  # not by a clock that was set forward
    result = {
        "command": f"benchmarks/soak.py {' '.join(sys.argv[1:])}".strip(),
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, jax {jax.__version__}",
        "seed": asked.seed,
        "seconds": round(observer.attempts[-1].end - observer.attempts[0].begin),
        "exit_code": code,
        "attempts": len(observer.attempts),
        "step": step,
        "saves": observer.num_saves // num,
        "requested": observer.num_requested,
        "lost_commits": observer.lost_commits,
        "remaining_processes": len(child_processes()) - bool(url),
        "logs": check_logs(run_dir),
        **goodput(read_lines(run_dir / "events.jsonl")),
        **{
            f"{name}_s": figures.spread([row[f"{name}_s"] for row in injected if is_timed(row[f"{name}_s"])])
            for name in ("detection", "recovery")
        },
        "steps_repeated": sum(row["steps_lost"] or 0 for row in injected if not row["overtaken"]),
        "memory": memory(observer.samples),
        "faults": [{key: row[key] for key in ROW if row[key] is not None} for row in injected],
    }
    (folder / "soak.json").write_text(json.dumps(result, indent=1) + "\n")  # the comparison may raise
    return {"different": different(folder, checkpoints, settings, step, num), **result}


ROW = ("kind", "process", "at_s", "step", "phase", "detection_s", "recovery_s", "exit_code", "restored", "failed")


def train(settings: Sequence[str], run_dir: Path, observer: Driver, num: int, max_restarts: int) -> int:
    config = load_config(CONFIG, [*settings, f"run_dir={run_dir}"])
    return run_job(DrillRequest(CONFIG, settings, (), num), config, run_dir, observer, max_restarts, GRACE_S)


def different(folder: Path, checkpoints: Location, settings: Sequence[str], step: int, num: int) -> list[str]:
    """Trains the same steps without faults, and one more: the evaluation after the last step is not part of the run
    that was stopped. Returns the differences in state and metrics."""
    clean, disturbed = folder / "undisturbed", folder / "run"
    local = disturbed / "checkpoints" / str(step)
    if not isinstance(checkpoints, Path):
        for name in (checkpoints / str(step)).sizes():
            (checkpoints / str(step) / name).download(local / name)
    if not step:
        return ["the run has saved no step"]
    path = disturbed / "skipped_batches.json"
    skipped = json.loads(path.read_text())["skipped_batches"] if path.exists() else []
    print(f"without faults, {step} steps, skipped batches {skipped}", flush=True)
    rest = [
        f"steps={step + 1}",
        "hooks=[]",
        f"checkpoint={{every_steps: {step}, every_seconds: null, directory: null}}",
    ]
    rest = [*rest, f"data.skip_batches={json.dumps(skipped)}", "replica_check=null"]
    code = train([*settings, *rest], clean, Driver(clean, num), num, 0)
    if code:
        return [f"the run without faults exited with {code}"]
    shutil.rmtree(clean / "checkpoints" / str(step + 1))
    lines = [json.dumps(line) for line in read_lines(clean / "metrics.jsonl") if line["step"] <= step]
    (clean / "metrics.jsonl").write_text("\n".join(lines))
    return [
        text for text in (compare.different_leaf(clean, disturbed), compare.different_record(clean, disturbed)) if text
    ]


def save(result: Mapping[str, Any]) -> None:
    """Writes benchmarks/results/soak.json: a row for each role, and the complete result."""
    sys.path.insert(0, str(Path(__file__).parent))
    import results

    with_interval = lambda found: "" if found is None else f"{found[0]:g} ({found[1]:g} to {found[2]:g})"
    rows = [
        {
            "process": role,
            "lives": row["lives"],
            "longest, s": row["longest_s"],
            "memory, MB": " to ".join(f"{value:.0f}" for value in row["rss_mb"]),
            "MB per hour": with_interval(row["rss_mb_per_hour"]),
            "open files": " to ".join(map(str, row["open_files"])),
            "files per hour": with_interval(row["open_files_per_hour"]),
        }
        for role, row in result["memory"].items()
    ]
    note = (
        "Memory and open files are the largest of each life, smallest and largest of all lives; slopes are those after "
        "the first minute of the lives, with 95 % intervals."
    )
    path = results.save("soak", rows, "make soak", note=note)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"result": result}, indent=1) + "\n")


def child_processes() -> list[int]:
    pid = os.getpid()
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("setting", nargs="*", help="key=value of the config")
    parser.add_argument("--faults", type=int, default=60, help="number of faults")
    parser.add_argument("--every", type=float, default=60, help="seconds between them")
    parser.add_argument("--every-steps", type=int, help="steps between them, instead of seconds")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--store", choices=("s3", "local"), default="s3")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/soak")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/soak.json")
    asked = parser.parse_args()
    shutil.rmtree(asked.folder, ignore_errors=True)
    asked.folder.mkdir(parents=True)
    with server("s3") if asked.store == "s3" else contextlib.nullcontext({}) as variables:
        os.environ.update(variables)
        url = f"s3://{BUCKET}/soak/checkpoints" if asked.store == "s3" else None
        result = soak(asked.folder.resolve(), url, asked)
    (asked.folder / "soak.json").write_text(json.dumps(result, indent=1) + "\n")
    if asked.save:
        save(result)
    print(json.dumps({key: value for key, value in result.items() if key not in ("faults", "memory")}, indent=1))
    failed = [row for row in result["faults"] if "failed" in row]
    wrong = [
        result["lost_commits"],
        result["different"],
        result["logs"]["wrong"],
        failed,
        result["remaining_processes"],
    ]
    return int(any(wrong) or result["exit_code"] != 42 or len(result["faults"]) != result["requested"])


if __name__ == "__main__":
    sys.exit(main())
