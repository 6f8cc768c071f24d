"""Every mutant is caught on a small task, and where it cannot act the reason is said."""

import contextlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import spmdkit as sk
from spmdkit.checkpoint import state_dict
from spmdkit.data import feed
from spmdkit.ops import ring_attention, vocab
from spmdkit.ops.pipeline import parts
from spmdkit.program import init_state
from spmdkit.step import accumulator, gradient, multi_term_loss, reduction, replica_collectives
from spmdkit.step.metrics import mean
from spmdkit.step.model_state import agreement
from spmdkit.verify import mutations
from spmdkit.verify.mutants import MUTANTS, Mutant, TaskFacts
from spmdkit.verify.mutations import patched, resolve_seam
from spmdkit.verify.runner import CaseRunner
from spmdkit.verify.task_runner import TaskRunner
from tests.support import verify_tasks as tasks
from tests.support.verify_tasks import case_runner

pytestmark = pytest.mark.promotes("tasks as users write them: masks of bools times numbers")

ROOT = Path(__file__).parents[2]

TABLES = (
    replica_collectives,
    agreement,
    feed,
    gradient,
    mean,
    reduction,
    multi_term_loss,
    accumulator,
    state_dict,
    ring_attention,
    vocab,
    parts,
)
"""Modules with a table of seams."""

OF_OPS = {"vocabulary_offset", "wrong_ring_step", "stage_gradient_dropped"}
"""Mutants that act on an op of the model."""

OF_NATURAL_TASKS = {"constant_summed", "count_without_gradient", "state_averaged"}
"""Mutants that act on what a tame loss has not: an inner derivative, learned weights, keys and counters in the
state."""

OF_COUNTS = ("mean_of_means", "mean_over_shard", "count_without_gradient", "clip_by_replica_norm", "duplicate_padding")
"""Mutants that have to do with what a mean is divided by."""


@pytest.mark.forms(4)
@pytest.mark.parametrize("name", [mutant.name for mutant in MUTANTS if mutant.name not in OF_OPS | OF_NATURAL_TASKS])
def test_a_mutant_is_caught(name):
    found = case_runner(tasks.right, drop_remainder=False).mutant(name, 4)
    assert found.get("caught"), found


@pytest.mark.forms(1)
@pytest.mark.parametrize("name", sorted(OF_OPS))
def test_a_mutant_of_an_op_is_caught(name):
    found = tasks.language_judge().mutant(name, 4)
    assert found.get("caught"), found


@pytest.mark.forms(1)
@pytest.mark.parametrize("name", sorted(OF_NATURAL_TASKS))
def test_a_mutant_of_a_natural_task_is_caught(name):
    found = tasks.natural_judge().mutant(name, 4)
    assert found.get("caught"), found


@pytest.mark.slow
@pytest.mark.forms(1)
@pytest.mark.parametrize("name", OF_COUNTS)
def test_mutant_of_counts_is_caught_with_two_means(name):
    found = case_runner(tasks.two_means, drop_remainder=False).mutant(name, 4)
    assert found.get("caught"), found


@pytest.mark.slow
def test_mutant_of_padding_is_caught_in_a_metric():
    found = case_runner(tasks.real_rows_counted, drop_remainder=False, steps=3).mutant("padding_among_examples", 4)
    assert found.get("caught") and found["by"].startswith("metric"), found


def test_natural_task_equals_one_device_and_plain_jax():
    found = tasks.natural_judge().case({"data": 2, "fsdp": 2}, 1, whole=True)
    assert found["passed"], found
    plain = tasks.natural_judge().compare_with_plain_jax()
    assert plain["passed"] and plain["gradient_error"] < 1e-6, plain


@pytest.mark.slow
@pytest.mark.forms(1)
@pytest.mark.parametrize(
    ("mistake", "quantity"),
    [
        (mutations.type_replicas, "gradient"),
        (mutations.average_state, "loss"),
        (mutations.count_without_gradient, None),
    ],
)
def test_mistake_in_the_toolkit_itself_is_found(mistake, quantity):
    """The mistake is in the toolkit for every program, one device too, as it was before the repair."""
    with mistake(None) as acted:
        case_runner = tasks.new_natural_runner()
        case, plain = case_runner.case({"data": 4}, 1, whole=False), case_runner.compare_with_plain_jax()
    assert acted
    if quantity is None:  # wrong on every mesh alike: only plain JAX knows
        assert not plain["passed"] and plain["gradient_error"] > 1e-2
    else:
        assert plain["passed"] and not case["passed"] and quantity in case["failed"], case


@pytest.mark.forms(1)
@pytest.mark.parametrize("axis", ["tensor", "context", "pipeline"])
def test_model_with_ops_equals_one_device(axis):
    found = tasks.language_judge().case({"data": 2, axis: 2}, 1, whole=False)
    assert found["passed"], found


@pytest.mark.slow
def test_unused_sum_over_replicas_is_not_applicable():
    found = case_runner(tasks.counts_devices).mutant("batch_statistics_per_replica", 4)
    assert "change no number" in found["not_applicable"], found


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("key_shared_by_replicas", "sk.example_keys"),
        ("batch_statistics_per_replica", "no collective"),
        ("padding_gathered", "does not use sk.all_gather"),
        ("padding_among_examples", "sk.example_mask"),
        ("constant_summed", "no derivative with respect to a constant"),
        ("vocabulary_offset", "neither sk.embed"),
        ("wrong_ring_step", "does not use sk.attention"),
        ("stage_gradient_dropped", "does not use sk.pipeline"),
    ],
)
def test_a_mutant_that_cannot_act_says_why(name, reason):
    found = case_runner(tasks.metric_of_a_replica).mutant(name, 4)
    assert "caught" not in found and reason in found["not_applicable"]


def test_clipping_by_shard_is_caught_beside_frozen_leaves():
    init = lambda key: tasks.init(key) | {"base": jnp.ones((16, 8))}
    loss_fn = lambda params, batch, key: sk.mean(
        tasks.examples_loss({"w": params["w"] + params["base"], "b": params["b"]}, batch)
    )
    task = sk.Task(init, loss_fn, optax.adam(1e-2), train_data=tasks.data(), frozen=["base"])
    found = CaseRunner(TaskRunner(sk.Config(task="t.py:t", batch_size=32), task, 32, steps=2))
    assert found.mutant("clip_by_shard_norm", 4)["caught"]


def test_page_has_the_reasons_of_the_program():
    """docs/measured/verify.md is written from verify.json; a reason there is one that `verify` reports of the task as
    it is now."""
    measured = ROOT / "docs" / "measured"
    page = (measured / "verify.md").read_text(encoding="utf-8")
    nothing = TaskFacts(num_devices=8, uses=frozenset(), gradient_norm=1.0)
    for name, sweeps in json.loads((measured / "verify.json").read_text(encoding="utf-8"))["configs"].items():
        found = next(iter(sweeps.values()))
        tried, not_tried = found["mutants"], found["not_applicable"]
        assert {*tried, *not_tried} <= {mutant.name for mutant in MUTANTS}, name
        assert "NOT CAUGHT" not in tried.values() and all(f"| {m.name} |" in page for m in MUTANTS), name
        for mutant in MUTANTS:
            reason = not_tried.get(mutant.name)
            assert reason is None or reason in [mutant.unused, mutant.no_effect, mutant.settings(nothing)], (
                name,
                mutant.name,
            )
            assert tried.get(mutant.name, reason or "-") in page


def test_missed_mutant_is_reported(monkeypatch):
    monkeypatch.setattr("spmdkit.verify.compare.Errors.failed", lambda *_: [])
    assert case_runner(tasks.right, drop_remainder=False).mutant("reduction_doubled", 4)["caught"] is False


@pytest.mark.parametrize(
    ("idle", "outcome"), [("it is zero here", {"not_applicable": "it is zero here"}), ("", {"caught": False})]
)
def test_mutant_without_effect_is_not_applicable(idle, outcome, monkeypatch):
    apply = lambda setting: contextlib.nullcontext(["acted"])
    mutant = Mutant("idle", "nothing", apply, lambda num: [{"data": 2}], no_effect=idle)
    monkeypatch.setattr("spmdkit.verify.mutants.by_name", lambda name: mutant)
    found = case_runner(tasks.right, drop_remainder=False).mutant("idle", 2)
    assert outcome.items() <= found.items()


def test_a_mutant_leaves_the_package_as_it_was():
    before = {name: vars(owner)[name] for owner, name in seams()}
    for mutant in MUTANTS:
        with pytest.raises(ZeroDivisionError), mutant.apply(None):
            raise ZeroDivisionError
    assert before == {name: vars(owner)[name] for owner, name in seams()}


@pytest.mark.parametrize("owner", [CaseRunner, gradient])
def test_a_seam_that_is_gone_is_an_error(owner):
    with pytest.raises((AttributeError, KeyError)), patched(owner, "no_such_function", lambda f: f):
        pass


@pytest.mark.parametrize("module", TABLES, ids=lambda module: module.__name__)
def test_seam_is_found_by_its_role(module, monkeypatch):
    """A function of another name in the table is the one that is replaced: verify knows none by its own name."""

    def renamed():
        return "right"

    monkeypatch.setattr(module, "renamed", renamed, raising=False)
    monkeypatch.setattr(renamed, "__qualname__", "renamed")
    role = next(iter(module.SEAMS))
    monkeypatch.setitem(module.SEAMS, role, renamed)
    with patched(module, role, lambda original: lambda: f"not {original()}"):
        assert module.renamed() == "not right"
    assert module.renamed() == "right"


def seams():
    yield from ((jax, "shard_map"), (init_state, "clip_by_global_norm"), (lax, "psum"), (lax, "pmean"))
    yield from (resolve_seam(module, role) for module in TABLES for role in module.SEAMS)
