"""Each task of this folder equals its plain JAX script."""

import dataclasses

import jax
import pytest

import spmdkit as sk
from tests.support.forms import slow_except
from tests.support.tasks import (
    MESHES,
    PAGE,
    NaturalTask,
    assert_same,
    line_of,
    natural_task,
    page,
    repeated_work,
    task_names,
    train,
)
from tests.tasks import classifier, optimizers

pytestmark = [pytest.mark.promotes("natural code of people who have their own models"), pytest.mark.locations]

FAST = ("cnn_linen", "cnn_nnx", "gpt", "mixup", "nnx_metrics", "optimizers MultiSteps", "streaming")
"""Tasks that found a defect when they were written, and one of each library."""

FAMILIES = ("adafactor", "clip", "lamb", "lion", "muon", "schedule_free")
"""Optimizers of different families; `clip` has SGD with momentum."""

FAST_FORMS = [
    *((name, "data 2 x fsdp 2") for name in (*FAST, *(f"optimizers {name}" for name in FAMILIES))),
    *((name, "data 2 x tensor 2") for name in ("cnn_linen", "gpt")),
]
"""The fast suite runs them on the mesh with the mapped form and sharded parameters."""


@pytest.mark.forms(6)
@pytest.mark.parametrize(
    ("name", "mesh"), slow_except(FAST_FORMS, [(name, mesh) for name in task_names() for mesh in MESHES])
)
def test_task_equals_plain_script(name, mesh):
    task = natural_task(name)
    trained, (losses, params, opt_state, *more) = train(task, mesh), task.plain()
    assert_same(trained, (losses, params, opt_state))
    task.check(trained, *more)


@pytest.mark.slow
def test_two_losses_equal_with_microbatches():
    task = natural_task("mlm_nsp")
    assert_same(train(task, "data 4", microbatches=2), task.plain())


@pytest.mark.parametrize("name", slow_except(["lion"], optimizers.OPTIMIZERS))
def test_doubled_gradient_is_detected(name):
    """The loss of the same parameters is the same, and with some optimizers the parameters too. Their state differs."""
    right = natural_task(f"optimizers {name}")
    double = lambda params: jax.tree.map(lambda x: 2 * x - jax.lax.stop_gradient(x), params)
    wrong_loss = lambda params, batch, key: sk.mean(classifier.losses_of(double(params), batch))
    wrong = NaturalTask(dataclasses.replace(right.task, loss_fn=wrong_loss), right.plain)
    with pytest.raises(AssertionError, match=r"opt_state|Not equal to tolerance"):
        assert_same(train(wrong, "one device"), wrong.plain())


@pytest.mark.parametrize(
    ("name", "mesh"),
    slow_except([("pinn", "data 4")], [(n, m) for n in ("pinn", "ppo") for m in ("data 4", "data 2 x fsdp 2")]),
)
def test_replicated_work_is_a_finding(name, mesh):
    task = natural_task(name)
    train_step, lines = task.repeating
    [found] = repeated_work(dataclasses.replace(task.task, train_step=train_step), mesh)
    assert line_of(found.source) in lines
    assert 'sk.shard(x, "rows", None)' in found.fix
    assert repeated_work(task.task, mesh) == []


def test_page_of_tasks_is_current():
    assert PAGE.read_text() == page(), "python -m tests.support.tasks"
