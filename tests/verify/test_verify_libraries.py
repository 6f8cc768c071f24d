"""`verify` on the models of equinox's, flax's and optax's own examples: no mesh differs, and nothing of them makes it
cry wolf."""

import importlib

import pytest

import spmdkit as sk
from spmdkit.verify.runner import CaseRunner
from spmdkit.verify.task_runner import Setting, TaskRunner

pytestmark = pytest.mark.promotes("natural code of the libraries' own examples")

LIBRARIES = ("equinox", "flax", "optax")
TASKS = {
    f"{library} {name}": make
    for library in LIBRARIES
    for name, make in importlib.import_module(f"tests.verify.libraries.{library}_examples").TASKS.items()
}
QUICK = ["equinox frozen_layer", "optax lookahead_mnist"]


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in TASKS])
def test_there_is_no_false_alarm(name):
    config = sk.Config(task="t.py:t", batch_size=16, steps=3, data={"shuffle": False})
    case_runner = CaseRunner(TaskRunner(config, TASKS[name](), 16, 3))
    case_runner.reference(Setting({}, short=case_runner.task_runner.short))
    assert case_runner.compare_with_plain_jax().get("passed", True)
    for mesh in ({"data": 4}, {"data": 2, "fsdp": 2}):
        found = case_runner.case(mesh, 1, whole=True)
        assert found.get("passed"), (mesh, found)
