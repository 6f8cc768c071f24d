"""A user-defined step that reads the state of its optimizer: a mistake in it is detected."""

import jax
import optax
import pytest

import spmdkit as sk
from spmdkit.verify.runner import CaseRunner
from spmdkit.verify.task_runner import TaskRunner
from tests.tasks import gan

pytestmark = pytest.mark.promotes("natural code of people who have their own models")


def case_runner(train_step, optimizer=gan.both):
    """Returns the case_runner of the GAN's parameters and data with a step of its own."""
    task = sk.Task(gan.init, train_step=train_step, optimizer=optimizer, train_data=gan.DATA)
    return CaseRunner(TaskRunner(sk.Config(task="t.py:t", batch_size=16), task, 16, steps=2))


@pytest.mark.slow
def test_two_optimizers_by_name_are_verified():
    of = case_runner(gan.train_step)
    found = of.case({"data": 4}, 1, whole=False)
    assert found["passed"] and not of.task_runner.watched
    assert 0 <= found["gradient_error"] < found["update_error"] + 1e-6 < 1e-4  # of how far the parameters move


@pytest.mark.slow
def test_a_mistake_in_such_a_step_is_seen(monkeypatch):
    right = gan.d_loss
    monkeypatch.setattr(gan, "d_loss", lambda D, G, x, z: right(D, G, x - x.mean(0), z))  # a statistic of one replica
    found = case_runner(gan.train_step).case({"data": 4}, 1, whole=False)
    assert not found["passed"] and found["failed"][:3] == ["loss", "gradient", "update"]


@pytest.mark.parametrize("reads", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_indexed_state_is_the_one_of_the_optimizer(reads):
    """The first of what is watched would be the gradient, which has the shape of Adam's moments."""

    def train_step(state, x):
        (loss, _), grads = sk.value_and_grad(
            lambda p, b, k: sk.mean(gan.d_loss(p["D"], p["G"], b, jax.random.normal(k, (len(b), 8)) * 0))
        )(state.params, x, state.key)
        size = sum((x**2).sum() for x in jax.tree.leaves(state.opt_state[0] if reads else grads))
        return state.apply_gradients(grads), {"loss": loss, "size": size}

    of = case_runner(train_step, optax.chain(optax.trace(0.9), optax.scale(-0.1)))
    found = of.case({"data": 4}, 1, whole=False)
    assert found["passed"], found
    assert of.task_runner.watched is not reads
