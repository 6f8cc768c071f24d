"""Several real processes: the same numbers as one, and no hang."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest

from spmdkit.checkpoint.record import read_record, write_record

pytestmark = pytest.mark.processes


def test_launched_processes_continue_before_a_damaged_checkpoint(folder, undisturbed):
    """A bit that one of two processes reads is damage to both. ZeRO over processes sends no reduce_scatter before jax
    0.12: it would change the order of all-reduces."""
    code, output = folder.train("steps=30")
    assert code == 0, output
    directory = folder.path / "run/checkpoints"
    # As of a file so large that only the arrays' own checksums cover it, and process 0 alone does not see the damage.
    write_record(directory / "30", dataclasses.replace(read_record(directory, 30), digests={}))
    data = max((directory / "30/state").rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    zero = "mesh={fsdp: 4}", "layout={zero: 2, min_shard_bytes: 0}"
    code, output = folder.run("launch", "-n", "2", "--", "train", "run.yaml", *zero, timeout_s=240)
    assert code == 0 and "2 processes" in output, output
    assert "checkpoint 30 is damaged" in output and "[0] continuing at step 21" in output, output
    assert (directory / "30.damaged").is_dir()
    restored = [event["step"] for event in folder.events() if event["event"] == "restored"]
    assert restored == [20, 20]  # one of each process
    kinds = {c["op"] for c in json.loads((folder.path / "run" / "plan.json").read_text())["collectives"]}
    scatters = "reduce_scatter" if jax.__version_info__ >= (0, 12) else "all_to_all"
    assert kinds & {"reduce_scatter", "all_to_all"} == {scatters}
    folder.assert_equals(undisturbed, tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [(), pytest.param((("ordered", 4), ("sum", 1), ("sum", 4)), marks=pytest.mark.slow)],
    ids=["ordered", "and sum"],
)
def test_ordered_reducer_gives_same_bits_on_all_processes(folder, more):
    """1 x 4 and 2 x 2 devices: an all-reduce over processes adds in another order than inside a process; with `sum`
    the last bits differ."""
    runs = {}
    for reducer, processes in (("ordered", 1), ("ordered", 2), *more):
        name = f"{reducer}{processes}"
        code, output = folder.train(f"run_dir={name}", f"reducer={reducer}", "steps=10", processes=processes)
        assert code == 0, output
        params = {path: x.tobytes() for path, x in folder.params(name).items()}
        runs[reducer, processes] = params, folder.metrics(name)
    assert all(runs[name] == runs["ordered", 1] for name in runs if name[0] == "ordered")
    if more:
        assert runs["sum", 1] != runs["sum", 4], "the test would not notice another order"


@pytest.mark.slow
@pytest.mark.parametrize(
    "reducer, mesh",
    [("int8", "{data: 4}"), ("{hierarchical: {inner: sum, outer: int8}}", "{replica: 2, data: 2}")],
)
def test_rounding_reducers_give_same_bits_on_two_processes(folder, reducer, mesh):
    """What crosses processes is integers and their scales, which each adds up in the order of the devices. The loss is
    an all-reduce."""
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


@pytest.mark.slow
def test_groups_in_two_processes_equal_one_process(folder):
    """Trained, evaluated and exported as the mean of the groups; that of one process is stopped and restarted."""
    sync = ["sync={local_sgd: {every: 5}}", "steps=20", "eval.every_steps=10"]
    code, output = folder.train(*sync, "run_dir=two", processes=2)
    assert code == 0, output
    code, output = folder.train(*sync, "run_dir=one", "steps=10")
    assert code == 0, output
    code, output = folder.train(*sync, "run_dir=one")
    assert code == 0 and "continuing at step 11" in output, output
    assert {name: x.shape for name, x in folder.params("two").items()} == {"w": (8, 32), "b": (32,), "v": (32,)}
    folder.assert_equals(folder, run="two", of="one", tolerance=1e-5)
