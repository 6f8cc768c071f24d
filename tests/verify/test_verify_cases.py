"""A right task is equal to one device; a wrong one is not, and is told which mistake it is."""

import jax
import numpy as np
import pytest

import spmdkit as sk
from spmdkit.errors import ConfigError
from spmdkit.foundation import plugins
from spmdkit.program import padding_check
from spmdkit.program.step_context import reducer_of
from spmdkit.verify import compare, worker
from spmdkit.verify.cases import exact_reducer, reducer_note
from spmdkit.verify.diagnosis import Difference, diagnose, pattern
from spmdkit.verify.noise import leaf_errors
from spmdkit.verify.probes import one_ulp
from spmdkit.verify.task_runner import Setting
from tests.support import verify_tasks as tasks
from tests.support.verify_tasks import case_runner

pytestmark = pytest.mark.promotes("tasks as users write them: masks of bools times numbers")


@pytest.mark.forms(1)
@pytest.mark.parametrize("mesh", [{"data": 4}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=str)
def test_a_right_task_is_equal_to_one_device(mesh):
    found = case_runner(tasks.right, drop_remainder=False).case(mesh, 1, whole=mesh == {"data": 4})
    assert found["passed"], found
    assert found["gradient_error"] < 2e-6
    if mesh == {"data": 4}:
        assert found["restore_error"] == 0 and found["eval_error"] < 1e-6


EXACT = {"sum": "sum", "ordered": "ordered", "sparse_rows": {"sparse_rows": {"leaves": ["w"], "rows": 2}}}


def test_every_reducer_but_adasum_is_compared_where_exact():
    config = lambda reducer: sk.Config(task="t.py:t", reducer=reducer)
    for name, choice in EXACT.items():
        assert plugins.split(exact_reducer(config(choice)))[0] == name and reducer_note(config(choice)) is None
    for name in set(plugins.names("reducers")) - {*EXACT, "adasum"}:
        proven = exact_reducer(config(name))
        assert proven == {name: dict(reducer_of(config(name)).exact_options)}
        assert f"reducer {name} is not exact. verify compares {proven}, which is." in reducer_note(config(name))
        assert reducer_note(config(proven)) is None
    assert exact_reducer(config("adasum")) == "sum"
    assert reducer_note(config("adasum")).endswith("verify compares sum and does not check adasum")


@pytest.mark.slow
def test_mistake_is_found_under_an_inexact_reducer():
    found = case_runner(tasks.summed_twice, reducer="int8").case({"data": 2}, 1, whole=False)
    assert found["diagnosis"]["kind"] == "reduced twice" and found["reducer"] == {"int8": {"block": 1}}, found


@pytest.mark.forms(4)
@pytest.mark.parametrize(
    ("loss_fn", "kind", "says"),
    [
        (tasks.mean_of_means, "mean of means", "the loss counts 4, on one device 1"),
        (tasks.plain_key, "key folded by device", "sk.example_keys()"),
        (tasks.own_statistics, "batch statistics", "BatchNorm(axis_name="),
        (tasks.summed_twice, "reduced twice", "4 times the right ones, and 4 is the size of data"),
        (tasks.divided_twice, "not reduced", "1/4 of the right ones, and 4 is the size of data"),
        (tasks.one_leaf, "one leaf", "only leaf 'b'"),
        (tasks.metric_of_a_replica, "metric", "'largest'"),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_kind_of_mistake_is_reported(loss_fn, kind, says):
    found = case_runner(loss_fn).case({"data": 4}, 1, whole=False)
    assert not found["passed"]
    diagnosis = found["diagnosis"]
    assert diagnosis["kind"] == kind
    assert says in f"{diagnosis['found']} {diagnosis['repair']}"


@pytest.mark.slow
def test_uneven_counts_differ_in_short_batch_only():
    assert case_runner(tasks.own_normalisation).case({"data": 4}, 1, whole=False)["passed"]
    found = case_runner(tasks.own_normalisation, drop_remainder=False).case({"data": 4}, 1, whole=False)
    assert found["diagnosis"]["kind"] == "uneven counts"
    assert "only in the short batch" in found["diagnosis"]["found"]


def test_padding_that_counts_is_refused_by_the_reference():
    assert case_runner(tasks.counts_padding).case({"data": 4}, 1, whole=False)["passed"]
    with pytest.raises(ConfigError, match="in loss_fn padding rows count: metric 'loss' is"):
        case_runner(tasks.counts_padding, drop_remainder=False).case({"data": 4}, 1, whole=False)


def test_padding_that_counts_differs_from_the_reference(monkeypatch):
    """The reference of a short batch has no padding: the mistake is not made on both sides."""
    monkeypatch.setattr(padding_check, "changes", lambda *args: [])
    found = case_runner.__wrapped__(tasks.counts_padding, False).case({"data": 4}, 1, whole=False)
    assert not found["passed"] and found["gradient_error"] > 1e-3
    assert found["diagnosis"]["kind"] == "uneven counts"
    assert "only in the short batch" in found["diagnosis"]["found"]


def test_model_state_of_one_replicas_examples_is_told():
    found = case_runner(tasks.state_of_a_replica, stateful=True).case({"data": 4}, 1, whole=False)
    assert found["diagnosis"]["kind"] == "model state"
    assert found["failed"] == ["state"]


@pytest.mark.slow
def test_accumulation_on_one_device_is_compared():
    diagnosis = case_runner(tasks.own_statistics).case({}, 2, whole=False)["diagnosis"]
    assert diagnosis["kind"] == "batch statistics" and "set microbatches: 1" in diagnosis["repair"]
    assert case_runner(tasks.summed_twice).case({}, 2, whole=False)["passed"]


def test_gathered_rows_are_those_of_a_microbatch():
    runner = case_runner(tasks.right, drop_remainder=False)
    assert runner.case({"data": 4}, 2, whole=False)["passed"]
    assert "the gathered rows are those of a microbatch" in runner.case({}, 2, whole=False)["skipped"]


def test_unsuitable_mesh_is_skipped_with_the_reason():
    found = case_runner(tasks.right, drop_remainder=False).case({"pipeline": 2}, 1, whole=False)
    assert "pipeline" in found["skipped"] and "passed" not in found


def test_task_too_large_for_memory_is_rejected(tmp_path, monkeypatch):
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    1000 kB\n")
    monkeypatch.setattr(worker, "MEMINFO", tmp_path / "meminfo")
    init = lambda key: {"w": jax.numpy.zeros((1000, 100))}
    task = sk.Task(init, tasks.right, train_data=tasks.data())
    with pytest.raises(sk.SpmdkitError, match=r"390.6 KiB need about 9.2 MiB, 1000.0 KiB are free"):
        worker.check_memory(task, sk.Config(task="t.py:t"), 4, 1)
    monkeypatch.setattr(worker, "MEMINFO", tmp_path / "none")
    worker.check_memory(task, sk.Config(task="t.py:t"), 4, 1)


# ---- numbers and words


def test_error_is_relative_to_leaf_or_tree():
    expected = {"large": np.full(4, 500.0), "zero": np.zeros(2), "count": np.array(3)}
    found = {"large": np.full(4, 500.5), "zero": np.array([0.1, 0.0]), "count": np.array(4)}
    errors = leaf_errors(found, expected)
    assert errors == {"large": pytest.approx(1e-3), "zero": pytest.approx(0.1), "count": 1.0}
    assert leaf_errors({}, {"a": np.ones(2)}) == {"a": np.inf}
    nan = compare.Errors({"gradient": float("nan")}, {})
    assert nan.failed({"gradient": 1e-5}) == ["gradient"]


def test_one_ulp_moves_floats_and_no_integers():
    x = np.array([1.0, -3.0, 1e-8], np.float32)
    moved = one_ulp(np.random.default_rng(0))({"x": x, "n": np.arange(3)})
    assert np.all(np.abs(moved["x"].view(np.int32) - x.view(np.int32)) == 1)
    np.testing.assert_array_equal(moved["n"], np.arange(3))


def test_tolerance_has_a_floor_and_a_ceiling():
    reference = case_runner(tasks.right, drop_remainder=False).reference(Setting({}, short=True))
    results = reference.results
    floor = compare.FLOOR_ULPS * np.finfo(np.float32).eps
    still, _, _ = compare.tolerances(results, [results], np.finfo(np.float32).eps)
    assert still["gradient"] == pytest.approx(floor) and still["restore"] == 0
    assert floor <= reference.tolerance["gradient"] < 1e-4


@pytest.mark.parametrize(
    ("factor", "mesh", "microbatches", "kind", "names"),
    [
        (8.0, {"data": 8}, 1, "reduced twice", "data"),
        (4.01, {"replica": 2, "data": 2}, 1, "reduced twice", "replica x data"),
        (0.5, {"data": 4, "tensor": 2}, 1, "not reduced", "tensor"),
        (4.0, {"data": 2}, 4, "reduced twice", "microbatches"),
    ],
)
def test_factor_names_the_axes_of_its_size(factor, mesh, microbatches, kind, names):
    finding = Difference("gradient", "w", 1.0, factor=factor)
    found = diagnose(finding, mesh, microbatches, lambda: False, lambda: False)
    assert found.kind == kind and f"the size of {names}" in found.found


def test_wrong_update_is_a_mistake_of_the_optimizer():
    finding = Difference("update", "w", 0.5, factor=0.7)
    found = diagnose(finding, {"fsdp": 4}, 1, lambda: False, lambda: False)
    assert found.kind == "optimizer" and "0.7 times" in found.found


def test_what_failed_cases_have_in_common_is_said():
    case = lambda microbatches=1, **mesh: {"mesh": mesh, "microbatches": microbatches}
    assert pattern([case(tensor=2), case(tensor=4, data=2)], [case(data=8)]) == "only with tensor > 1"
    assert pattern([case(2, data=2), case(4)], [case(data=8)]) == "only with accumulation"
    assert pattern([case(data=2)], [case(data=8)]) == "" == pattern([], [case()])
