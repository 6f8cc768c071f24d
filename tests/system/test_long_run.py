"""A run of 20,000 steps and 500 saves keeps its size, and so do eight processes."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.leftover_files import leftover_files

pytestmark = [pytest.mark.processes, pytest.mark.slow]

STEPS, EVERY, MAX_KIB = 20_000, 40, 1024


def readings(child, metrics: Path, every: int, processes) -> list[tuple[str, int, int, int]]:
    """Returns (name, step, resident KiB, open files) of each process at new log steps, until `child` ends with 0.
    `processes()`: pid -> name, of those that live."""
    seen, read, known = [], 0, {}
    while child.poll() is None:
        lines = metrics.read_text().splitlines() if metrics.is_file() else []
        if len(lines) > read:
            read, step = len(lines), every * sum('"split"' not in line for line in lines)
            known |= processes()
            for pid, name in known.items():
                with contextlib.suppress(FileNotFoundError, StopIteration):  # it has just ended
                    status = Path(f"/proc/{pid}/status").read_text().splitlines()
                    kib = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
                    seen.append((name, step, kib, len(list(Path(f"/proc/{pid}/fd").iterdir()))))
        time.sleep(0.2)
    output, _ = child.communicate(timeout=60)
    assert child.returncode == 0, output
    assert not [pid for pid in known if Path(f"/proc/{pid}").exists()], "a process is left"
    return seen


def growth(seen, name: str, first: int, last: int) -> tuple[str, int, int, int]:
    """Returns (name, readings, KiB per 1,000 steps, more open files at the end) of the steps from `first` on."""
    steps, kib, files = np.array([row[1:] for row in seen if row[0] == name and first <= row[1] < last]).T
    found = name, len(kib), round(1000 * np.polyfit(steps, kib, 1)[0]), more_at_least(files)
    print(*found, f"{kib[0]} to {kib[-1]} KiB, {files.min()} to {files.max()} files")
    return found


def test_memory_grows_at_most_one_mebibyte(real_folder):
    """Per 1,000 steps with 25 saves."""
    child = real_folder.start(
        "train", "run.yaml", f"steps={STEPS}", f"checkpoint.every_steps={EVERY}", "log.every_steps=100"
    )
    seen = readings(child, real_folder.path / "run" / "metrics.jsonl", 100, lambda: {child.pid: "run"})
    _, num, grown, files = growth(seen, "run", STEPS // 10, STEPS + 1)
    assert num > 50 and grown < MAX_KIB and files <= 2


def more_at_least(files: np.ndarray) -> int:
    """Returns how many more files are open in the last fifth of the readings than in the first: the fewest of each,
    since a save in progress has 5 to 11 open files."""
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
    child = real_folder.start("launch", "-n", "8", "--", *train, "devices=cpu:8", "eval.every_steps=100")
    seen = readings(child, real_folder.path / "run" / "metrics.jsonl", 20, lambda: below(child.pid))
    rows = [growth(seen, name, steps // 10, steps) for name in sorted({row[0] for row in seen})]
    assert {row[0] for row in rows} == {f"process {i}" for i in range(8)} | {"service_process", "launcher"}
    assert all(grown < MAX_KIB and files <= 2 for _, _, grown, files in rows), rows
    assert sum(event["event"] == "saved" for event in real_folder.events()) >= steps // every
    assert leftover_files(real_folder.path, temporary, ["task.py", "run.yaml", "run", "__pycache__"]) == []
