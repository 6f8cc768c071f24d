"""Common tasks about training: each with at most one line more than the shortest form in Accelerate, Lightning, Keras,
torchrun, Hydra or Levanter."""

import json
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.common_tasks.test_weights import ALL_ROWS, IN_ORDER, close
from tests.support.command_line import TASK
from tests.support.common_tasks import STEPS, code_lines, loss_of, plain
from tests.support.forks import Process

pytestmark = pytest.mark.locations

RATE = {"learning_rate": "0.1"}
BY_RATE = {"optimizer": "lambda rate: optax.sgd(rate)"}
FORWARD = 'error = batch["x"] @ params["w"]'


def executed(code, user, **names):
    """Returns the names that a user's code defines after that of `task.py`."""
    exec((user.path / "task.py").read_text() + textwrap.dedent(code), names)
    return names


def test_31_the_best_and_load_it(user):
    """The third step and the fourth go uphill."""
    keys = "checkpoint: {best: {metric: loss, mode: min}}\neval: {every_steps: 1}\n"
    line = 'params = sk.load_params("run@best")'
    uphill = {"optimizer": "optax.sgd(lambda step: jnp.where(step < 2, 0.1, -0.1))", "eval_data": "data"}
    user.with_lines(2 + 1, config=keys, commands=[line], plain_task=uphill)
    user.train(IN_ORDER)
    close(executed(line, user)["params"], plain(ALL_ROWS, steps=2).params)
    assert not np.allclose(user.params()["w"], plain(ALL_ROWS, steps=2).params["w"])


def test_33_accumulation(user):
    user.with_lines(2 + 1, config="microbatches: 2\n")
    losses = user.train(IN_ORDER, "devices=cpu:2")
    expected = plain(ALL_ROWS)
    close((losses, user.params()), (expected.losses, expected.params))


def test_34_bfloat16_with_parameters_in_float32(user):
    user.with_lines(1 + 1, config="precision: bfloat16\n")
    losses, params = user.train(IN_ORDER), user.params()
    expected = plain(ALL_ROWS)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(params))
    np.testing.assert_allclose(losses, expected.losses, rtol=2e-2)
    assert not np.allclose(losses, expected.losses, rtol=1e-5), "it computes in float32"


def test_35_profile(user):
    user.with_lines(
        1 + 1, config="profile: {steps: [2, 4]}\n", commands=["spmdkit profile run"], base={"devices": "cpu:2"}
    )
    user.train()
    found = json.loads(user.does("profile", "run", "--json", "--top", "99"))
    assert found["steps"] == [2, 3, 4] and found["devices"] == 2 and found["step_s"] > 0
    assert 0 < found["exposed"] <= found["collectives"] < 1 and 0 <= found["idle"] < 1 - found["collectives"]
    rows = found["operations"]
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    number = next(n for n, line in enumerate(TASK.splitlines(), 1) if FORWARD in line)
    assert any(row["source"] == f"{user.path}/task.py:{number}" for row in rows)
    assert any(row["collective"] and row["name"].startswith("all-reduce") and row["calls"] == 1 for row in rows)
    text = user.does("profile", "run", "--top", "3").splitlines()
    assert "steps 2 to 4, 2 devices" in text[0] and "exposed communication" in text[1] and len(text) == 7


def test_36_sweep_in_a_process(user):
    line = "results = [sk.train(task=task, learning_rate=rate, **settings) for rate in (0.1, 0.05)]"
    user.with_lines(0 + 1, commands=[line], plain_task=BY_RATE)
    settings = {"steps": STEPS, "batch_size": 8, "devices": "cpu:4", "mesh": {"data": -1}, "log": {"progress": "off"}}
    first, second = executed(line, user, settings=settings)["results"]
    assert first.run_dir != second.run_dir
    assert [result.history[-1]["learning_rate"] for result in (first, second)] == [0.1, 0.05]
    assert not np.allclose(first.state.params["w"], second.state.params["w"])


def test_37_resume_with_another_learning_rate(user):
    command = "spmdkit train run.yaml steps=4 learning_rate=0.05 data.shuffle=false"
    user.with_lines(3 + 1, commands=[command], base=RATE | {"steps": "2"}, plain_task=BY_RATE)
    user.train(IN_ORDER)
    user.runs([command])
    expected = plain(ALL_ROWS, optimizer=optax.sgd(lambda step: jnp.where(step < 2, 0.1, 0.05)))
    close((user.losses(), user.params()), (expected.losses, expected.params))


def test_38_unit_test(user):
    """No other trainer has a line in the table; the limit is that of the first form of this task."""
    code = """
        params, batch = task.init(jax.random.key(0)), {name: x[:8] for name, x in DATA.items()}
        found, gradient = jax.value_and_grad(lambda p: loss_fn(p, batch, None).value)(params)
        np.testing.assert_allclose(found, np.mean(DATA["y"][:8] ** 2), rtol=1e-6)
    """
    user.with_lines(3, commands=code_lines(code))
    found = executed(code, user)
    close(found["gradient"], jax.grad(loss_of)(found["params"], found["batch"]))


@pytest.mark.processes
def test_39_processes_on_one_machine(user, forks):
    command = "spmdkit launch -n 2 -- train run.yaml data.shuffle=false devices=cpu:2 profile.steps=[2,3]"
    user.with_lines(1 + 1, commands=[command])
    (ended,) = forks.run([Process(command.split()[1:], user.path, forks=True)], 100)
    assert ended.code == 0, ended.output
    expected = plain(ALL_ROWS)
    close((user.losses(), user.params()), (expected.losses, expected.params))
    environment = json.loads((user.path / "run/environment.json").read_text())
    assert environment["num_processes"] == 2
    assert json.loads(user.does("profile", "run", "--json"))["devices"] == 2  # one of each process


def test_40_base_config_and_environment(user, monkeypatch):
    user.with_lines(1 + 1, config="base: base.yaml\nlearning_rate: ${env:RATE:0.1}\n", plain_task=BY_RATE)
    (user.path / "base.yaml").write_text("data: {shuffle: false}\nlearning_rate: 7\n")
    monkeypatch.setenv("RATE", "0.05")
    losses = user.train()
    expected = plain(ALL_ROWS, optimizer=optax.sgd(0.05))
    close((losses, user.params()), (expected.losses, expected.params))
