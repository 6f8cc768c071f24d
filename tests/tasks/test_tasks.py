"""Each task of this folder equals its plain JAX script, and is at most ten lines longer."""

import dataclasses
import importlib

import jax
import pytest

import spmdkit as sk
from tests.support.forms import slow_except
from tests.support.tasks import (
    MESHES,
    PAGE,
    all_counted,
    assert_same,
    line_of,
    natural_task,
    page,
    repeated_work,
    task_names,
    train,
)
from tests.tasks import classifier, optimizers

pytestmark = pytest.mark.promotes("natural code of people who have their own models")

FAST = (
    "clip",
    "cnn_linen",
    "cnn_nnx",
    "gan",
    "linear_recurrence",
    "mixup",
    "mlm_nsp",
    "nnx_metrics",
    "noisy_sgd",
    "optimizers muon",
    "optimizers MultiSteps",
    "pinn",
    "ppo",
    "streaming",
)
"""Tasks that found a defect when they were written, and one of each library."""

FAST_FORMS = [(name, "data 2 x fsdp 2") for name in FAST]
"""The fast suite runs them on the mesh with the mapped form and sharded parameters."""


@pytest.mark.parametrize(
    ("name", "mesh"), slow_except(FAST_FORMS, [(name, mesh) for name in task_names() for mesh in MESHES])
)
def test_task_equals_plain_script(name, mesh):
    task = natural_task(name)
    trained, (losses, params, opt_state, *more) = task.run(mesh), task.plain()
    assert_same(trained, (losses, params, opt_state))
    task.check(trained, *more)


def test_two_losses_equal_with_microbatches():
    task = natural_task("mlm_nsp")
    assert_same(train(task.task, "data 4", microbatches=2), task.plain())


@pytest.mark.parametrize("name", slow_except(["lion"], optimizers.OPTIMIZERS))
def test_doubled_gradient_is_detected(name):
    """The loss of the same parameters is the same, and with some optimizers the parameters too. Their state differs."""
    double = lambda params: jax.tree.map(lambda x: 2 * x - jax.lax.stop_gradient(x), params)
    wrong_loss = lambda params, *more: optimizers.loss_fn(double(params), *more)
    wrong = sk.Task(classifier.init, wrong_loss, optimizers.OPTIMIZERS[name], train_data=classifier.DATA)
    with pytest.raises(AssertionError, match=r"opt_state|Not equal to tolerance"):
        assert_same(train(wrong, "one device"), optimizers.plain(optimizers.OPTIMIZERS[name]))


@pytest.mark.parametrize("mesh", ["data 4", "data 2 x fsdp 2"])
@pytest.mark.parametrize("name", ["pinn", "ppo"])
def test_replicated_work_is_a_finding(name, mesh):
    module = importlib.import_module(f"tests.tasks.{name}")
    [found] = repeated_work(dataclasses.replace(module.task, train_step=module.repeating), mesh)
    assert line_of(found.source) in module.REPEATED_LINES
    assert 'sk.shard(x, "rows", None)' in found.fix
    assert repeated_work(module.task, mesh) == []


@pytest.mark.parametrize("counted", all_counted(), ids=lambda c: c.name)
def test_task_is_at_most_ten_lines_longer(counted):
    assert 0 < counted.task <= counted.plain + 10, counted


def test_page_of_tasks_is_current():
    assert PAGE.read_text() == page(), "python -m tests.support.tasks --write"
