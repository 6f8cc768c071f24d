"""A run of 20,000 steps and 500 saves stays as large as it is."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

pytestmark = [pytest.mark.processes, pytest.mark.slow]

STEPS, EVERY, MOST_KIB = 20_000, 40, 1024


def resident_kib(child: subprocess.Popen) -> int:
    lines = Path(f"/proc/{child.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def test_memory_grows_by_at_most_a_mebibyte_in_a_thousand_steps_of_25_saves(real_folder):
    child = real_folder.start(
        "train", "run.yaml", f"steps={STEPS}", f"checkpoint.every_steps={EVERY}", "log.every_steps=100"
    )
    seen, metrics, read = [], real_folder.path / "run" / "metrics.jsonl", 0
    while child.poll() is None:
        lines = metrics.read_text().splitlines() if metrics.is_file() else []
        if len(lines) > read:
            read, step = len(lines), 100 * sum('"split"' not in line for line in lines)
            try:
                seen.append((step, resident_kib(child), len(list(Path(f"/proc/{child.pid}/fd").iterdir()))))
            except (FileNotFoundError, StopIteration):
                break
        time.sleep(0.2)
    output, _ = child.communicate(timeout=60)
    assert child.returncode == 0, output
    steps, kib, files = np.array([row for row in seen if row[0] >= STEPS // 10]).T
    grown = 1000 * np.polyfit(steps, kib, 1)[0]
    print(
        f"{len(kib)} readings: {grown:.0f} KiB in 1,000 steps, {kib[0]} to {kib[-1]} KiB, {files.min()} to {files.max()} files"
    )
    assert len(kib) > 50
    assert grown < MOST_KIB
    fifth = len(files) // 5
    assert np.median(files[-fifth:]) <= np.median(files[:fifth]) + 2
