"""Every block and command of the README, as a reader would copy them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return [
        text
        for found, text in re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
        if found == language
    ]


def commands():
    lines = [line for block in blocks("") for line in block.splitlines() if line.strip()]
    return [line for line in lines if not line.startswith("make")], [line for line in lines if line.startswith("make")]


def test_task_of_the_readme_is_about_twenty_lines():
    (task,) = blocks("python")
    assert len(task.splitlines()) <= 22


def test_every_command_of_the_readme_runs(folder):
    (task,) = blocks("python")
    first, second = blocks("yaml")
    (folder.path / "my_task.py").write_text(task)
    (folder.path / "my_task.yaml").write_text(first)
    typed, _ = commands()
    assert len(typed) == 3
    for line in typed:
        code, output = folder.run(*line.replace(".venv/bin/spmdkit ", "").split())
        assert code == 0, (line, output)
    assert folder.params("runs/my_task")["w"].item() == pytest.approx(2, abs=0.05)
    assert folder.params("runs/four")["w"].item() == pytest.approx(2, abs=0.05)
    assert folder.params("runs/two_processes")["w"].item() == pytest.approx(2, abs=0.05)
    (folder.path / "my_task.yaml").write_text(second)
    code, output = folder.run("config", "check", "my_task.yaml")
    assert code == 0, output


def test_every_make_target_of_the_readme_exists():
    _, typed = commands()
    assert typed
    for line in typed:
        done = subprocess.run(["make", "--dry-run", *line.split()[1:]], cwd=ROOT, capture_output=True, timeout=60)
        assert done.returncode == 0, line


def test_every_link_and_folder_of_the_readme_exists():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
    for name in ("configs", "examples"):
        assert (ROOT / name).is_dir()
