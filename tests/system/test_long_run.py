"""A run of 20,000 steps and 500 saves stays as large as it is, and so do eight processes of one."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.left_behind import left_behind

pytestmark = [pytest.mark.processes, pytest.mark.slow]

STEPS, EVERY, MOST_KIB = 20_000, 40, 1024


def resident_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def test_memory_grows_at_most_one_mebibyte(real_folder):
    child = real_folder.start(
        "train", "run.yaml", f"steps={STEPS}", f"checkpoint.every_steps={EVERY}", "log.every_steps=100"
    )
    seen, metrics, read = [], real_folder.path / "run" / "metrics.jsonl", 0
    while child.poll() is None:
        lines = metrics.read_text().splitlines() if metrics.is_file() else []
        if len(lines) > read:
            read, step = len(lines), 100 * sum('"split"' not in line for line in lines)
            try:
                seen.append((step, resident_kib(child.pid), len(list(Path(f"/proc/{child.pid}/fd").iterdir()))))
            except (FileNotFoundError, StopIteration):
                break
        time.sleep(0.2)
    output, _ = child.communicate(timeout=60)
    assert child.returncode == 0, output
    steps, kib, files = np.array([row for row in seen if row[0] >= STEPS // 10]).T
    grown = 1000 * np.polyfit(steps, kib, 1)[0]
    print(
        f"{len(kib)} readings: {grown:.0f} KiB in 1,000 steps, {kib[0]} to {kib[-1]} KiB, {files.min()} to "
        f"{files.max()} files"
    )
    assert len(kib) > 50
    assert grown < MOST_KIB
    assert more_at_least(files) <= 2


def more_at_least(files: np.ndarray) -> int:
    """Returns how many more files are open in the last fifth of the readings than in the first: the fewest of each,
    since a save that is under way has 5 to 11 of its own, and whether a reading meets one hangs on the machine's
    speed."""
    fifth = len(files) // 5
    return int(files[-fifth:].min() - files[:fifth].min())


def below(pid: int) -> dict[int, str]:
    """Returns the processes that a process has started, and those that they have, with what each is."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has just ended
    found = [pid]
    for parent in found:
        found += [child for child, its in parents.items() if its == parent]
    return {child: what_is(child) for child in found}


def what_is(pid: int) -> str:
    """Returns "process 3" of a process of the job, "service_process" of the one that holds the coordination service,
    otherwise "launcher"."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    number = next((v for v in variables if v.startswith(b"SPMDKIT_PROCESS_ID=")), None)
    if number is not None:
        return f"process {number.partition(b'=')[2].decode()}"
    return "service_process" if b"service.py" in Path(f"/proc/{pid}/cmdline").read_bytes() else "launcher"


def test_eight_processes_keep_their_size_and_leave_nothing(real_folder, tmp_path_factory, monkeypatch):
    temporary = tmp_path_factory.mktemp("temporary")
    monkeypatch.setenv("TMPDIR", str(temporary))
    steps, every = 2000, 10  # the first evaluation, which compiles, is before the first reading that counts
    train = ["train", "run.yaml", f"steps={steps}", f"checkpoint.every_steps={every}", "log.every_steps=20"]
    begin = time.monotonic()
    child = real_folder.start("launch", "-n", "8", "--", *train, "devices=cpu:8", "eval.every_steps=100")
    seen, metrics, read, started = [], real_folder.path / "run" / "metrics.jsonl", 0, {}
    while child.poll() is None:
        lines = metrics.read_text().splitlines() if metrics.is_file() else []
        if len(lines) > read:
            read, step = len(lines), 20 * sum('"split"' not in line for line in lines)
            started |= below(child.pid)
            for pid, what in started.items():
                try:
                    seen.append((what, step, resident_kib(pid), len(list(Path(f"/proc/{pid}/fd").iterdir()))))
                except (FileNotFoundError, StopIteration):
                    continue  # it has just ended
        time.sleep(0.2)
    output, _ = child.communicate(timeout=60)
    assert child.returncode == 0, output
    told = []
    for what in sorted({row[0] for row in seen}):
        at, kib, files = np.array([row[1:] for row in seen if row[0] == what and steps // 10 <= row[1] < steps]).T
        grown = 1000 * np.polyfit(at, kib, 1)[0]
        size = (round(grown), int(kib[0]), int(kib[-1]))
        told.append((what, len(kib), *size, int(files.min()), int(files.max()), more_at_least(files)))
    for row in told:
        print("{}: {} readings, {} KiB in 1,000 steps, {} to {} KiB, {} to {} files, {} more in the end".format(*row))
    print(f"{time.monotonic() - begin:.0f} s")
    assert {row[0] for row in told} == {f"process {i}" for i in range(8)} | {"service_process", "launcher"}
    assert all(row[2] < MOST_KIB and row[7] <= 2 for row in told), told
    events = [json.loads(line) for line in (real_folder.path / "run" / "events.jsonl").read_text().splitlines()]
    assert sum(event["event"] == "saved" for event in events) >= steps // every
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()], "a process is left"
    assert left_behind(real_folder.path, temporary, ["task.py", "run.yaml", "run", "__pycache__"]) == []
