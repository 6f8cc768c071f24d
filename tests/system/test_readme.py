"""Every block and command of the README, as a reader would copy them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

import spmdkit as sk

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return [
        text
        for found, text in re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
        if found == language
    ]


def test_the_readme_is_short():
    (task,) = blocks("python")
    assert len(task.splitlines()) <= 22 and len(README.splitlines()) <= 120


def test_every_command_of_the_readme_runs(folder):
    (task,), (config,), (typed,) = blocks("python"), blocks("yaml"), blocks("")
    (folder.path / "my_task.py").write_text(task)
    (folder.path / "my_task.yaml").write_text(config)
    lines = typed.splitlines()
    assert len(lines) == 2
    for line in lines:
        code, output = folder.run(*line.removeprefix("spmdkit ").split())
        assert code == 0, (line, output)
    for run in ("my_task", "two_processes"):
        assert folder.params(f"runs/{run}")["w"].item() == pytest.approx(2, abs=0.05)


def test_each_mesh_of_the_readme_is_valid():
    meshes = re.findall(r"`(\{[^`]*-1[^`]*\})`", README)
    assert len(meshes) >= 9
    for mesh in meshes:
        sk.Config(task="t.py:t", steps=1, batch_size=64, mesh=yaml.safe_load(mesh))


def test_every_make_target_of_the_readme_exists():
    targets = re.findall(r"`make ([\w-]+)`", README)
    assert targets
    for target in targets:
        done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, timeout=60)
        assert done.returncode == 0, target


def test_every_link_and_folder_of_the_readme_exists():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
    assert all((ROOT / name).is_dir() for name in ("configs", "examples"))
