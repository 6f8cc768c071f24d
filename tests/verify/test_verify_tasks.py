"""`verify` on the natural programs of tests/tasks: each is equal to one device, and no rounding, draw or small gradient makes it cry wolf."""

import importlib

import jax
import pytest

import spmdkit as sk
from spmdkit.verify.judge import Judge
from spmdkit.verify.subject import Setting, Subject
from tests.support.tasks import MESHES, all_counted

pytestmark = pytest.mark.promotes("natural code of people who have their own models")

SETTINGS = {
    "byol_ema": {"ema": 0.9},
    "cnn_linen": {"ema": 0.9, "clip_norm": 0.5},
    "ranking": {"data": {"shuffle": False, "remainder": "mask"}},
    "tagging": {"data": {"shuffle": False, "remainder": "mask"}},
}
"""The configs of those that train with other than the common one."""

OPTIMIZERS = [*importlib.import_module("tests.tasks.test_optimizers").OPTIMIZERS]
NAMES = [c.name for c in all_counted() if c.name not in ("optimizers", "two_phases")]
NAMES += ["two_phases pretraining", "two_phases finetuning", *(f"optimizers {name}" for name in OPTIMIZERS)]
CASES = [("data 4", 1), ("data 2 x fsdp 2", 1), ("data 2 x tensor 2", 1), ("data 4", 2)]
QUICK = ["byol_ema", "optimizers apply_if_finite"]


def task_of(name):
    """Returns the task of a file, by its name; of the two that have several with theirs behind."""
    file, _, which = name.partition(" ")
    module = importlib.import_module(f"tests.tasks.test_{file}")
    if file == "optimizers":
        return module.task(module.OPTIMIZERS[which])
    if file == "two_phases":
        return module.pretraining if which == "pretraining" else module.finetuning(module.init(jax.random.key(0)))
    return module.task


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_there_is_no_false_alarm(name):
    settings = {"data": {"shuffle": False}} | SETTINGS.get(name, {})
    config = sk.Config(task="t.py:t", batch_size=16, steps=3, **settings)
    judge = Judge(Subject(config, task_of(name), 16, 3))
    judge.reference(Setting({}, short=judge.subject.short))
    assert judge.against_plain_jax().get("passed", True)
    for mesh, microbatches in CASES:
        found = judge.case(MESHES[mesh], microbatches, whole=microbatches == 1)
        skipped = microbatches > 1 and "train_step" in found.get("skipped", "")  # which takes none
        assert found.get("passed") or skipped, (mesh, found)
