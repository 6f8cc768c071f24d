"""Programs of tests/user_programs: each as plain JAX (before.py) and under spmdkit (after.py, run.yaml), their
differences, and docs/coming_from/parallel_jax.md.

`python -m tests.support.user_programs` writes the blocks of the page between markers.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.util
import re
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import flax.linen as nn
import jax
import numpy as np

import spmdkit as sk
from spmdkit.program.program import Program

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "user_programs"
PAGE = ROOT / "docs" / "coming_from" / "parallel_jax.md"
MESHES: dict[str, dict[str, int]] = {
    "one": {},
    "data 4": {"data": 4},
    "data 2 x fsdp 2": {"data": 2, "fsdp": 2},
    "data 2 x tensor 2": {"data": 2, "tensor": 2},
}
MOST_LINES = 5
"""Changed lines of a program, at most."""


@dataclass(frozen=True)
class UserProgram:
    """A program of tests/user_programs.

    Attributes:
        by_replica: the mathematics depends on the number of replicas, so before.py runs on as many devices.
        reductions: reductions per step of the compiled program on {data: 4}.
        meshes: the names of its MESHES.
        names: mesh axis -> its name in the program.
    """

    by_replica: bool = False
    reductions: int = 1
    meshes: tuple[str, ...] = tuple(MESHES)
    names: Mapping[str, str] = field(default_factory=dict)


PROGRAMS = {
    "imagenet_pmap": UserProgram(by_replica=True),
    "lm1b_logical_axes": UserProgram(reductions=2),
    "gemma_nnx": UserProgram(),
    "midgpt_constraints": UserProgram(),
    "explicit_sharding": UserProgram(),
    "shard_map_dp_tp": UserProgram(names={"data": "dp", "tensor": "tp"}),
    "equinox_filter_shard": UserProgram(),
    "haiku_pmap": UserProgram(),
}
"""By the name of their folder, in the order of the page."""
QUICK_MESHES = ("data 4", "data 2 x tensor 2")
"""Meshes of the default tests; the others are slow."""


@contextlib.contextmanager
def machine_with(num: int) -> Iterator[None]:
    """Context in which JAX has `num` devices, for programs that use all devices of their machine."""
    devices, count = (lambda *_: _DEVICES()[:num]), (lambda *_: num)
    machine = {"devices": devices, "local_devices": devices, "device_count": count, "local_device_count": count}
    with mock.patch.multiple(jax, **machine), nn.logical_axis_rules(()):  # rules of after.py end with the context
        yield


_DEVICES = jax.devices


def module_of(name: str, file: str) -> ModuleType:
    """Returns before.py or after.py of a program, imported again for the devices of the context."""
    spec = importlib.util.spec_from_file_location(f"{name}_{file}", FOLDER / name / f"{file}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def plain_jax(name: str, num_devices: int) -> tuple[list[float], Any]:
    """Returns the losses and the last parameters of before.py. Cached."""
    with machine_with(num_devices):
        return jax.device_get(module_of(name, "before").train())  # type: ignore[no-any-return]


def expected(name: str, mesh: str) -> tuple[list[float], Any]:
    """Returns what after.py has to give on a mesh."""
    return plain_jax(name, MESHES[mesh].get("data", 1) if PROGRAMS[name].by_replica else 1)


def config_of(name: str, mesh: str) -> sk.Config:
    """Returns the config of a program on a mesh. Small leaves are also sharded over `fsdp`."""
    small = ["layout.min_shard_bytes=1"] if "fsdp" in MESHES[mesh] else []
    names = PROGRAMS[name].names
    axes = ", ".join(f"{names.get(axis, axis)}: {size}" for axis, size in MESHES[mesh].items())
    return sk.load_config(FOLDER / name / "run.yaml", overrides=[f"mesh={{{axes}}}", *small])


@functools.cache
def program_of(name: str, mesh: str) -> Program:
    """Returns the program of after.py and run.yaml on one of MESHES. Cached, with its compiled step."""
    num = int(np.prod([1, *MESHES[mesh].values()]))
    with machine_with(num):
        program = Program(config_of(name, mesh), module_of(name, "after").task, jax.devices())
        program.compiled  # noqa: B018 - traced while JAX has these devices
        return program


# ---- differences


def code_lines(path: Path) -> list[str]:
    """Returns the lines of a file with code: no comments, docstrings of the module and empty lines."""
    with path.open("rb") as file:
        tokens = list(tokenize.tokenize(file.readline))
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)
    rows = {row for t in tokens if t.type not in skipped for row in range(t.start[0], t.end[0] + 1)}
    lines = path.read_text().splitlines()
    return [line for row, line in enumerate(lines, 1) if row in rows and row > 1]


def differences(name: str) -> list[tuple[list[str], list[str]]]:
    """Returns the lines of before.py that after.py replaces or deletes, each with the new lines."""
    return _changes(*(code_lines(FOLDER / name / f"{file}.py") for file in ("before", "after")))


def _changes(before: list[str], after: list[str]) -> list[tuple[list[str], list[str]]]:
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    return [(before[a:b], after[c:d]) for what, a, b, c, d in matcher.get_opcodes() if what != "equal"]


def changed_lines(name: str) -> list[str]:
    """Returns the lines of after.py that a user adds or modifies."""
    return [line for _, new in differences(name) for line in new]


# ---- the page


def table(name: str) -> str:
    """Returns the rows of the page for a program: its changed lines, the config and the whole program."""
    lines = [(FOLDER / name / f"{file}.py").read_text().splitlines() for file in ("before", "after")]
    changed = [(_block(old), _block(new)) for old, new in _changes(*lines)]
    cells = "\n".join(f"<tr><td>\n\n{old}\n\n</td><td>\n\n{new}\n\n</td></tr>" for old, new in changed if old or new)
    config = (FOLDER / name / "run.yaml").read_text().rstrip()
    before = (FOLDER / name / "before.py").read_text().rstrip()
    return (
        f"<table><tr><th>before</th><th>under spmdkit: {len(changed_lines(name))} lines</th></tr>\n{cells}</table>\n\n"
        f"```{{code-block}} yaml\n{config}\n```\n\n"
        f"<details><summary>The whole program before</summary>\n\n```{{code-block}} python\n{before}\n```\n\n</details>"
    )


def _block(lines: list[str]) -> str:
    text = "\n".join(lines).strip("\n")
    return f"```{{code-block}} python\n{text}\n```" if text else ""


def page() -> str:
    """Returns docs/coming_from/parallel_jax.md with current blocks."""
    block = lambda found: f"<!-- {found[1]} -->\n\n{table(found[1])}\n\n<!-- end -->"
    return re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", block, PAGE.read_text(), flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(page())
