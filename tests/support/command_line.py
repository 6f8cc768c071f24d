"""Runs the command line in this process: arguments, output, exit code, and files that must not change."""

import shutil
import sys
import textwrap
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from spmdkit import cli
from spmdkit.faults import exit_handler
from spmdkit.run.run import Run
from spmdkit.run.trainer import SpmdTrainer
from tests.support.messages import Parts

TASK = """
import jax
import jax.numpy as jnp
import numpy as np
import optax
import spmdkit as sk

x = np.linspace(-1, 1, 32 * 4, dtype=np.float32).reshape(32, 4)
DATA = {"x": x, "y": np.stack([x.sum(1)] * 8, 1)}

def init(key):
    return {"w": jnp.zeros((4, 8)), "b": jnp.zeros(8)}

def loss_fn(params, batch, key):
    error = batch["x"] @ params["w"] + params["b"] - batch["y"]
    return sk.mean(error**2)

class Examples:
    def __len__(self):
        return 32
    def __getitem__(self, i):
        return {"x": DATA["x"][i], "y": DATA["y"][i]}
"""
ARGUMENTS = {"init": "init", "loss_fn": "loss_fn", "optimizer": "optax.sgd(0.1)", "train_data": "DATA"}
CONFIG = {
    "task": "task.py:task",
    "run_dir": "run",
    "steps": "4",
    "batch_size": "8",
    "devices": "cpu:4",
    "mesh": "{data: -1}",
    "checkpoint": "{every_steps: 2}",
}
NEVER = (
    "Traceback (most recent",
    "this is a bug in spmdkit",
    "site-packages",
    "<class '",
    "<spmdkit.",
    "Traced<",
    "ShapeDtypeStruct",
    "PyTreeDef",
    "pydantic",
    "During handling",
)
MAX_CHARS, MAX_LINES = 1200, 12
"""Limits of a message."""

NOTHING: Mapping[str, Any] = MappingProxyType({})
_succeeded: set[tuple[str, ...]] = set()
"""Files and commands of repairs that have ended with 0. They are not run again: many mistakes have the same repair."""


@pytest.fixture
def alone(monkeypatch):
    """What a command leaves behind in a process of its own, taken back here."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [n for n in sys.modules if n.startswith("spmdkit_task_")]:
        monkeypatch.delitem(sys.modules, name)


class ExitCalled(BaseException):
    """Raised in place of `os._exit`."""


class Folder:
    """A folder with `task.py` and `run.yaml`, and the commands that run in it."""

    def __init__(self, path, monkeypatch, capfd):
        self.path, self._monkeypatch, self._capfd = path, monkeypatch, capfd
        monkeypatch.chdir(path)

    def write(self, code="", task=None, config=None):
        """Writes the task with `code` after the valid functions, and a config. The value None omits a line."""
        arguments = {name: value for name, value in {**ARGUMENTS, **(task or {})}.items() if value is not None}
        call = ", ".join(f"{name}={value}" for name, value in arguments.items())
        (self.path / "task.py").write_text(f"{TASK}\n{textwrap.dedent(code)}\ntask = sk.Task({call})\n")
        lines = {name: value for name, value in {**CONFIG, **(config or {})}.items() if value is not None}
        (self.path / "run.yaml").write_text("".join(f"{name}: {value}\n" for name, value in lines.items()))

    def copy_run(self, source, name="run"):
        """Copies a run directory next to the config, as if it had been trained here."""
        shutil.copytree(source, self.path / name, dirs_exist_ok=True)
        (self.path / name / "report.html").unlink(missing_ok=True)
        config = self.path / name / "config.yaml"
        config.write_text(config.read_text().replace(str(source.parent), str(self.path)))

    def leaves(self, *arguments):
        """Runs a command as `spmdkit` does, without the end of the process, and returns its exit code."""
        left = []

        def exit_process(code):
            left.append(code)
            raise ExitCalled

        self._monkeypatch.setattr(exit_handler, "exit_process", exit_process)
        try:
            code = cli.main(list(arguments))
        except ExitCalled:
            code = left[0]
        return code

    def does(self, *command):
        """Runs a command that succeeds, and returns its output."""
        code = self.leaves(*command)
        out, err = self._capfd.readouterr()
        assert code == 0, f"{' '.join(command)}: exit code {code}\n{out}{err}"
        return out + err

    def stop_before_training(self, is_new):
        """Runs end with exit code 0 after their checks: a new one before it claims its directory, and one that
        continues after it has restored."""
        stage = (Run, "__init__") if is_new else (SpmdTrainer, "compile")
        self._monkeypatch.setattr(*stage, lambda *_, **__: exit_handler.exit_process(0))

    def repair(self, repairs, command, run):
        """Replaces texts in the user's files and in `command`, and asserts that the command ends with 0.

        `run`: the state of the run directory: text that identifies it.
        """
        files = [self.path / name for name in ("task.py", "run.yaml")]
        for path in files:
            path.write_text(_replaced(path.read_text(), repairs))
        repaired = [word for text in command if (word := _replaced(text, repairs))]
        if (key := (run, *(path.read_text() for path in files), *repaired)) not in _succeeded:
            self.does(*repaired)
            _succeeded.add(key)

    def run_files(self):
        """Returns path -> bytes of the metrics and checkpoints of a run."""
        files = [self.path / "run" / "metrics.jsonl", *(self.path / "run" / "checkpoints").rglob("*")]
        return {file.relative_to(self.path): file.read_bytes() for file in files if file.is_file()}

    def fails(self, code, expected, command=("train", "run.yaml"), may_train=False):
        """Asserts that a command ends with `code` and the expected message, without internals, and changes no files.

        `may_train`: the mistake is detected during training, so new lines and checkpoints may be added.
        """
        before = self.run_files()
        self._capfd.readouterr()
        found = self.leaves(*command)
        output, error = self._capfd.readouterr()
        shown = f"exit code {found}\n--- standard output\n{output}\n--- standard error\n{error}"
        assert found == code, shown
        missing = expected.missing(error)
        assert not missing, f"not said: {missing}\n{shown}"
        for part in NEVER:
            assert part not in output + error, f"said: {part}\n{shown}"
        message = error.strip()
        assert message and len(message) < MAX_CHARS, f"{len(message)} characters\n{shown}"
        lines = message.splitlines()
        assert len(lines) <= MAX_LINES, f"{len(lines)} lines\n{shown}"
        assert len(set(lines)) == len(lines), f"a line is said twice\n{shown}"
        after = self.run_files()
        for path, content in before.items():
            assert path in after, f"{path} is gone\n{shown}"
            same = after[path].startswith(content) if may_train and path.suffix == ".jsonl" else after[path] == content
            assert same, f"{path} is changed\n{shown}"
        if not may_train:
            assert after.keys() == before.keys(), shown
        return message


def _replaced(text, repairs):
    for old, new in repairs:
        text = text.replace(old, new)
    return text


class Case(NamedTuple):
    """One mistake: the difference from valid files, and the expected message.

    `expected`: the parts of the message. `code`: Python after the valid functions. `task`: arguments of `Task`.
        `config`: lines.
    """

    expected: Parts
    code: str = ""
    task: Mapping[str, str | None] = NOTHING
    config: Mapping[str, str | None] = NOTHING
    exit: int = 78
    overrides: tuple[str, ...] = ()
    may_train: bool = False

    def run(self, folder):
        """Asserts that `spmdkit train` prints the message in this folder, and returns it."""
        folder.write(self.code, self.task, self.config)
        command = ("train", "run.yaml", *self.overrides)
        return folder.fails(self.exit, self.expected, command=command, may_train=self.may_train)

    def run_and_repair(self, folder, repairs, is_new):
        """Asserts that `spmdkit train` prints the message, and that the same command starts to train after the repair.

        Args:
            repairs: pairs of a text in the files or the command, and its replacement.
            is_new: train in a new directory after the repair.
        """
        if not self.may_train:
            folder.stop_before_training(is_new)
        self.run(folder)
        command = ("train", "run.yaml", *self.overrides, *["run_dir=repaired"] * is_new)
        folder.repair(repairs, command, f"new {is_new}, trains {self.may_train}")
