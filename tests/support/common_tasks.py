"""Runs a common task as a user writes it: a plain program, and the lines that the task adds to it."""

import json
import subprocess
import textwrap

import jax
import numpy as np
import optax

import spmdkit as sk
from tests.support.command_line import Folder
from tests.support.natural_runs import BATCH, by_hand

X = np.linspace(-1, 1, 32 * 4, dtype=np.float32).reshape(32, 4)
ROWS = {"x": X, "y": np.stack([X.sum(1)] * 8, 1)}
"""The data of the plain program."""

STEPS = 4
BASE = {
    "steps": str(STEPS),
    "batch_size": str(BATCH),
    "log": "{every_steps: 1, progress: plain}",
}


def code_lines(text):
    """Returns the lines of a text that count: all but blank lines and imports."""
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith(("import ", "from "))]


def loss_of(params, batch):
    """Returns the loss of the plain program."""
    return ((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2).mean()


def plain(data, loss=loss_of, optimizer=None, params=None, steps=STEPS):
    """Returns the `Run` of the plain JAX loop over rows in order."""
    params = {"w": jax.numpy.zeros((4, 8)), "b": jax.numpy.zeros(8)} if params is None else params
    return by_hand(lambda *args: (loss(*args), {}), params, data, optimizer or optax.sgd(0.1), steps)


class UserFolder(Folder):
    """A folder with the program of a user. `with_lines` writes it and counts what the task needs."""

    def with_lines(self, limit, code="", task=None, config="", commands=(), given="", base=None, plain_task=None):
        """Writes the plain program with `code` after its functions, arguments of `Task` and lines of the config.

        Args:
            limit: the largest number of lines. Imports do not count.
            commands: those other than `spmdkit train`, which the test runs.
            given: code of the plain program that any trainer needs, such as another model.
            base: lines of the plain program's config, and `plain_task` arguments of its `Task`.
        """
        lines = [*code_lines(code), *(task or {}).values(), *code_lines(config), *commands]
        assert len(lines) <= limit, f"{len(lines)} lines, more than {limit}: {lines}"
        code = "\n".join(["data = DATA", textwrap.dedent(given), textwrap.dedent(code)])
        self.write(code, {"train_data": "data"} | (plain_task or {}) | (task or {}), BASE | (base or {}))
        keys = {line.partition(":")[0] for line in config.splitlines() if line[:1].isalpha()}
        with open(self.path / "run.yaml") as file:
            base = [line for line in file if line.partition(":")[0] not in keys]
        (self.path / "run.yaml").write_text("".join(base) + config)

    def train(self, *overrides, run="run"):
        """Trains, and returns the losses of all steps."""
        self.does("train", "run.yaml", f"run_dir={run}", *overrides)
        return self.losses(run)

    def losses(self, run="run"):
        return [line["loss"] for line in self.records(run) if "split" not in line]

    def runs(self, commands):
        """Runs commands as in a shell."""
        for command in commands:
            name, *arguments = command.split()
            if name == "spmdkit":
                self.does(*arguments)
            else:
                subprocess.run(command, shell=True, check=True)

    def records(self, run="run"):
        return [json.loads(line) for line in (self.path / run / "metrics.jsonl").read_text().splitlines()]

    def params(self, run="run"):
        return sk.load_params(self.path / run)

    def continues_bitwise(self, *overrides):
        """Asserts that a run that stops and continues equals the run in `run`."""
        self.train("steps=2", *overrides, run="other")
        assert self.train(*overrides, run="other") == self.losses()
        assert jax.tree.all(jax.tree.map(np.array_equal, self.params("other"), self.params()))
