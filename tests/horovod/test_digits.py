"""Horovod's pytorch_mnist.py, carried over: its calls are there as they were, and on 2 and 4 processes it equals one
device."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from tests.horovod.digits_worker import EXAMPLE, load
from tests.support.environment import environment_of_a_user
from tests.support.ranks import run_ranks

HERE = Path(__file__).parent
STEPS_A_EPOCH, EPOCHS, LEARNING_RATE = 10, 5, 0.05


def calls_of_hvd(text):
    """Returns every call of hvd in a program, as it stands there, in the order of the text."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    found = [
        (node.lineno, node.col_offset, ast.unparse(node)) for node in calls if ast.unparse(node.func).startswith("hvd.")
    ]
    return [call for *_, call in sorted(found)]


def test_every_call_matches_names_and_arguments_of_horovod():
    original = json.loads((HERE / "calls_of_pytorch_mnist.json").read_text())["calls"]
    assert calls_of_hvd(EXAMPLE.read_text()) == original


def one_device(example, size):
    """Returns the parameters after 50 steps of plain JAX and optax on whole batches, at `size` times the learning
    rate."""
    data, _ = example.digits()
    sampler = example.DistributedSampler(len(data["labels"]), num_replicas=1, rank=0)
    params, optimizer = example.Net(42).params, optax.sgd(LEARNING_RATE * size, momentum=0.5)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, images, labels, keys):
        gradients = jax.grad(example.nll_loss)(params, images, labels, keys, "float32")
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    for epoch in range(1, EPOCHS + 1):
        sampler.set_epoch(epoch)
        for places in sampler.batches(example.NUM_TRAIN // STEPS_A_EPOCH):
            keys = example.example_keys(42, epoch, places)
            params, state = step(params, state, data["images"][places], data["labels"][places], keys)
    return params


@pytest.mark.processes
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_fifty_steps_on_several_processes_equal_one_device(size, tmp_path):
    example = load()
    batch = example.NUM_TRAIN // STEPS_A_EPOCH // size
    arguments = ["--batch-size", str(batch), "--epochs", str(EPOCHS), "--lr", str(LEARNING_RATE)]
    ended = run_ranks(
        [sys.executable, "-m", "tests.horovod.digits_worker", str(tmp_path), *arguments], size, timeout_s=240
    )
    assert [process.code for process in ended] == [0] * size, ended[0].output
    expected = one_device(example, size)
    of_ranks = [np.load(tmp_path / f"{rank}.npz") for rank in range(size)]
    for name, value in expected.items():
        assert all(of_rank[name].tobytes() == of_ranks[0][name].tobytes() for of_rank in of_ranks), name
        error = np.linalg.norm(of_ranks[0][name] - value) / np.linalg.norm(value)
        assert error < 1e-5, (name, error)
        moved = np.linalg.norm(value - example.Net(42).params[name]) / np.linalg.norm(value)
        assert moved > 0.01, name  # it has been trained at all
    accuracy = float(ended[0].output.rpartition("Accuracy: ")[2].partition("%")[0])
    assert accuracy > 50
    assert "Test set" not in ended[1].output


@pytest.mark.processes
def test_launch_starts_a_script_with_its_arguments(tmp_path):
    script = (
        "import os, sys; print('rank', os.environ['SPMDKIT_PROCESS_ID'], 'of', "
        "os.environ['SPMDKIT_NUM_PROCESSES'], sys.argv[1:])"
    )
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, "-m", "spmdkit", "launch", "-n", "2", "--", "script.py", "--lr", "0.1"]
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment_of_a_user(), capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    assert all(f"rank {rank} of 2 ['--lr', '0.1']" in ended.stdout for rank in range(2)), ended.stdout
