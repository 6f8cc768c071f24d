"""Several real processes: the same numbers as one, and nothing that hangs."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("processes", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_several_processes_equal_one(folder, undisturbed, processes):
    code, output = folder.train(processes=processes)
    assert code == 0, output
    assert f"{processes} processes" in output
    ours, theirs = folder.params(), undisturbed.params()
    for name in theirs:
        assert np.linalg.norm(ours[name] - theirs[name]) < 1e-5 * np.linalg.norm(theirs[name]), name
    for ours_line, their_line in zip(folder.metrics(), undisturbed.metrics(), strict=True):
        assert ours_line["loss"] == pytest.approx(their_line["loss"], rel=1e-5)


def test_zero_over_processes_sends_no_reduce_scatter_where_that_would_spoil_all_reduces(folder, undisturbed):
    code, output = folder.train("mesh={fsdp: 4}", "layout={zero: 2, min_shard_bytes: 0}", processes=4)
    assert code == 0, output
    kinds = {c["op"] for c in json.loads((folder.path / "run" / "plan.json").read_text())["collectives"]}
    scatters = "reduce_scatter" if jax.__version_info__ >= (0, 12) else "all_to_all"
    assert kinds & {"reduce_scatter", "all_to_all"} == {scatters}
    ours, theirs = folder.params(), undisturbed.params()
    for name in theirs:
        assert np.linalg.norm(ours[name] - theirs[name]) < 1e-5 * np.linalg.norm(theirs[name]), name


def test_a_run_of_one_process_continues_in_two(folder, undisturbed):
    code, output = folder.train("steps=60")
    assert code == 0, output
    code, output = folder.run("launch", "-n", "2", "--", "train", "run.yaml", "mesh={data: 2, fsdp: 2}", timeout_s=240)
    assert code == 0, output
    assert "[0] continuing at step 61" in output
    ours, theirs = folder.params(), undisturbed.params()
    for name in theirs:
        assert np.linalg.norm(ours[name] - theirs[name]) < 1e-5 * np.linalg.norm(theirs[name]), name


def test_a_config_that_differs_between_processes_is_refused(folder):
    (folder.path / "task.py").write_text(
        (folder.path / "task.py")
        .read_text()
        .replace(
            "@sk.task\ndef task(",
            "import os\nif os.environ.get('SPMDKIT_PROCESS_ID') == '1':\n    raise ValueError('boom')\n\n@sk.task\ndef "
            "task(",
        )
    )
    code, output = folder.run("launch", "-n", "2", "--", "train", "run.yaml")
    assert code == 78, output
    assert "boom" in output


@pytest.mark.parametrize(
    "more",
    [(), pytest.param((("sum", 1), ("sum", 4)), marks=pytest.mark.slow)],
    ids=["ordered", "and sum"],
)
def test_the_ordered_reducer_gives_the_same_bits_on_any_number_of_processes(folder, more):
    """1 x 4, 2 x 2 and 4 x 1: an all-reduce over processes adds in another order than one inside a process: with `sum`
    the last bits differ."""
    runs = {}
    for reducer, processes in (("ordered", 1), ("ordered", 2), ("ordered", 4), *more):
        name = f"{reducer}{processes}"
        code, output = folder.train(f"run_dir={name}", f"reducer={reducer}", "steps=10", processes=processes)
        assert code == 0, output
        params = {path: x.tobytes() for path, x in folder.params(name).items()}
        runs[reducer, processes] = params, folder.metrics(name)
    assert all(runs[name] == runs["ordered", 1] for name in runs if name[0] == "ordered")
    if more:
        assert runs["sum", 1] != runs["sum", 4], "the test would not notice another order"


@pytest.mark.parametrize(
    "reducer, mesh",
    [
        pytest.param("int8", "{data: 4}", marks=pytest.mark.slow),
        ("{hierarchical: {inner: sum, outer: int8}}", "{replica: 2, data: 2}"),
    ],
)
def test_rounding_reducers_over_two_processes_are_those_of_one_with_the_same_devices(folder, reducer, mesh):
    """Bit for bit: what crosses processes is integers and their scales, which each adds up in the order of the devices.
    The loss is an all-reduce."""
    params, losses = [], []
    for processes in (1, 2):
        name = f"of{processes}"
        settings = f"run_dir={name}", f"reducer={reducer}", f"mesh={mesh}", "steps=10", "eval.every_steps=null"
        code, output = folder.train(*settings, processes=processes)
        assert code == 0, output
        params.append({path: x.tobytes() for path, x in folder.params(name).items()})
        losses.append([line["loss"] for line in folder.metrics(name)])
    assert params[0] == params[1]
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_groups_in_several_processes_are_those_in_one_and_are_exported_as_their_mean(folder):
    """Trained, evaluated, stopped in the middle and started again; the mean of the groups is what is exported."""
    sync = ["sync={local_sgd: {every: 5}}", "steps=40"]
    code, output = folder.train(*sync, "run_dir=two", processes=2)
    assert code == 0, output
    code, output = folder.train(*sync, "run_dir=one", "steps=20")
    assert code == 0, output
    code, output = folder.train(*sync, "run_dir=one")
    assert code == 0 and "continuing at step 21" in output, output
    ours, theirs = folder.params("two"), folder.params("one")
    assert {name: x.shape for name, x in ours.items()} == {"w": (8, 32), "b": (32,), "v": (32,)}
    for name in theirs:
        assert np.linalg.norm(ours[name] - theirs[name]) < 1e-5 * np.linalg.norm(theirs[name]), name
    ours, theirs = (
        {(line["step"], line.get("split")): line["loss"] for line in folder.metrics(run)} for run in ("two", "one")
    )
    assert len(ours) > 8 and all(theirs[place] == pytest.approx(loss, rel=1e-5) for place, loss in ours.items())
