"""Horovod's semantics, and its pytorch_mnist.py ported to JAX, on 2, 3 and 4 processes: one set of processes runs the
whole table of semantics.py and then the example.

Three processes run the table with all dtypes and shapes, and the digits; two and four run few, and patterns. The last
tests start processes as users do.
"""

import ast
import functools
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from tests.horovod import semantics
from tests.horovod.semantics import EXAMPLE, ROWS, example
from tests.support.environment import environment_of_a_user
from tests.support.forks import Process

SIZES = [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
STEPS_PER_EPOCH, EPOCHS, LEARNING_RATE = 10, 2, 0.05


@pytest.fixture(scope="module")
def job(tmp_path_factory, forks):
    """Returns size -> (how each process ended, the folder of its files); the processes of a size run once."""

    @functools.cache
    def of(size):
        out = tmp_path_factory.mktemp(f"ranks{size}")
        batch = example(size != 3).NUM_TRAIN // STEPS_PER_EPOCH // size
        options = ["--batch-size", str(batch), "--epochs", str(EPOCHS), "--lr", str(LEARNING_RATE)]
        command = [semantics.__file__, str(out), *options, *["short"] * (size != 3)]
        return forks.together([Process(command, out)] * size, timeout_s=280 if size == 2 else 900), out

    return of


@pytest.mark.processes
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("row", ROWS)
def test_each_row_holds_on_every_rank(job, size, row):
    _, out = job(size)
    for rank in range(size):
        rows = json.loads((out / f"{rank}.json").read_text())
        assert row in rows, f"rank {rank} did not get here: an earlier row failed"
        assert rows[row] is None, f"rank {rank} of {size}: {rows[row]}"


def one_device(size):
    """Returns the parameters after the steps of plain JAX and optax on whole batches, at `size` times the learning
    rate."""
    digits = example(size != 3)
    data, _ = digits.digits()
    sampler = digits.DistributedSampler(len(data["labels"]), num_replicas=1, rank=0)
    params, optimizer = digits.Net(42).params, optax.sgd(LEARNING_RATE * size, momentum=0.5)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, images, labels, keys):
        gradients = jax.grad(digits.nll_loss)(params, images, labels, keys, "float32")
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    for epoch in range(1, EPOCHS + 1):
        sampler.set_epoch(epoch)
        for indices in sampler.batches(digits.NUM_TRAIN // STEPS_PER_EPOCH):
            keys = digits.example_keys(42, epoch, indices)
            params, state = step(params, state, data["images"][indices], data["labels"][indices], keys)
    return params


@pytest.mark.processes
@pytest.mark.parametrize("size", SIZES)
def test_steps_of_several_processes_equal_one_device(job, size):
    ended, out = job(size)
    assert [process.code for process in ended] == [0] * size, ended[0].output
    of_ranks = [np.load(out / f"{rank}.npz") for rank in range(size)]
    for name, value in one_device(size).items():
        assert all(of_rank[name].tobytes() == of_ranks[0][name].tobytes() for of_rank in of_ranks), name
        assert np.linalg.norm(of_ranks[0][name] - value) / np.linalg.norm(value) < 1e-5, name
        assert np.linalg.norm(value - example().Net(42).params[name]) / np.linalg.norm(value) > 0.01, name  # it trains
    assert float(ended[0].output.rpartition("Accuracy: ")[2].partition("%")[0]) > 30
    assert "Test set" not in ended[1].output


def test_every_call_matches_names_and_arguments_of_horovod():
    calls = [node for node in ast.walk(ast.parse(EXAMPLE.read_text())) if isinstance(node, ast.Call)]
    calls.sort(key=lambda node: (node.lineno, node.col_offset))
    original = json.loads(Path(__file__).with_name("calls_of_pytorch_mnist.json").read_text())["calls"]
    assert [text for text in map(ast.unparse, calls) if text.startswith("hvd.")] == original


@pytest.mark.processes
def test_launch_starts_a_script_with_its_arguments(tmp_path):
    values = "os.environ['SPMDKIT_PROCESS_ID'], 'of', os.environ['SPMDKIT_NUM_PROCESSES'], sys.argv[1:]"
    (tmp_path / "script.py").write_text(f"import os, sys; print('rank', {values})")
    command = [sys.executable, "-m", "spmdkit", "launch", "-n", "2", "--", "script.py", "--lr", "0.1"]
    options = {"env": environment_of_a_user(), "capture_output": True, "text": True, "timeout": 60}
    ended = subprocess.run(command, cwd=tmp_path, **options)
    assert ended.returncode == 0, ended.stderr
    assert all(f"rank {rank} of 2 ['--lr', '0.1']" in ended.stdout for rank in range(2)), ended.stdout


SCRIPT = """
import numpy as np
import spmdkit.horovod as hvd
hvd.init()
hvd.barrier()
if hvd.rank() == 1:
    raise ValueError("no data here")
try:
    hvd.allreduce(np.ones(3))
except hvd.HorovodInternalError as error:
    print("raised:", error)
    raise
"""


@pytest.mark.processes
def test_rank_that_raises_is_named_without_waiting(tmp_path, forks):
    (tmp_path / "script.py").write_text(SCRIPT)
    first, second = forks.together([Process(["script.py"], tmp_path)] * 2)
    assert (first.code, second.code) == (1, 1)
    assert "raised: rank 1 ended (ValueError: no data here) while rank 0 waits in allreduce Average" in first.output
    assert "ValueError: no data here" in second.output
