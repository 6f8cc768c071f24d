"""A batch size that changes during a run: by a schedule of the config, and by `--allow-change batch_size`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmdkit as sk
from spmdkit.data import Schedule, continued
from spmdkit.errors import ConfigError, Preempted
from tests.support import small_runs
from tests.support.core_runs import program_of
from tests.support.forms import slow_except
from tests.support.streams import counted, exact

SIZES = {0: 8, 3: 16, 7: 8}
MESHES = [{"data": 4}, {"fsdp": 4}, {"data": 2, "fsdp": 2}]


def simulated(num, sizes, drop_remainder, count):
    """Returns (epoch, places in it) of the first batches, one after the other."""
    found, epoch, first = [], 0, 0
    for number in range(1, count + 1):
        size = sizes[max(start for start in sizes if start < number)]
        if first >= num or (drop_remainder and first + size > num):
            epoch, first = epoch + 1, 0
        found.append((epoch, list(range(first, min(first + size, num)))))
        first += size
    return found


@pytest.mark.parametrize("drop_remainder", [True, False])
@pytest.mark.parametrize(
    "num,sizes",
    [
        (50, {0: 7}),
        (50, {0: 7, 5: 16}),
        (50, {0: 16, 1: 3, 30: 50, 31: 1, 140: 13}),
        (48, SIZES),
        (9000, {0: 9000, 3: 4}),
    ],
)
def test_batches_take_the_next_examples(num, sizes, drop_remainder):
    parts = tuple(sizes.items())
    schedule = Schedule(num, max(sizes.values()), shuffle=False, drop_remainder=drop_remainder, sizes=parts)
    for step, (epoch, places) in enumerate(simulated(num, sizes, drop_remainder, 200), 1):
        indices, mask = schedule.batch(step)
        assert len(indices) == schedule.size(step) and indices[mask].tolist() == places
        assert schedule.epoch(step) == epoch
    of_epochs = [epoch for epoch, _ in simulated(num, sizes, drop_remainder, 500)]
    assert schedule.steps_of(2) == of_epochs.index(2) and schedule.passes(schedule.steps_of(2)) == 2


def test_sizes_of_one_batch_size_are_those_of_a_plain_schedule():
    for step in (1, 77, 4000):
        plain, sized = Schedule(1797, 64, seed=3), Schedule(1797, 64, seed=3, sizes=((0, 64),))
        assert plain.digest(step) == sized.digest(step) and plain.epoch(step) == sized.epoch(step)


def test_sizes_continue_after_a_change():
    assert continued(((0, 32),), 100, ((0, 64),)) == ((0, 32), (100, 64))
    assert continued(((0, 32), (50, 64)), 50, ((0, 32),)) == ((0, 32),)
    assert continued((), 0, ((0, 8), (5, 8), (9, 4))) == ((0, 8), (9, 4))


def loss_fn(params, batch, key):
    row = batch["id"].astype(jnp.float32) / 48
    return sk.mean((params["w"] * row - 1) ** 2), {"rows": sk.sum(jnp.ones_like(row)), "ids": sk.sum(batch["id"] % 97)}


TASK = dataclasses.replace(
    small_runs.line_task(),
    init=lambda key: {"w": jnp.full((), 0.1)},
    loss_fn=loss_fn,
    train_data={"id": np.arange(48, dtype=np.int32)},
    eval_data=None,
)


def trained(program, steps=12):
    """Returns (the parameters, metrics of each step)."""
    state, found = program.init(), []
    for _, batch in program.batches(stop=steps):
        state, metrics = program.step(state, batch)
        found.append({name: float(x) for name, x in metrics.items()})
    return jax.device_get(state.params), found


@pytest.mark.parametrize("drop_remainder", slow_except([False], [True, False]))
def test_steps_equal_one_device_on_every_mesh(drop_remainder):
    settings = {"batch_size": SIZES, "data": {"drop_remainder": drop_remainder}}
    params, metrics = trained(program_of(TASK, **settings))
    assert [x["rows"] for x in metrics[:9]] == [8] * 3 + ([16, 16] if drop_remainder else [16, 8]) + [16, 16, 8, 8]
    for mesh in MESHES:
        for_mesh, found = trained(program_of(TASK, mesh=mesh, microbatches=2, **settings))
        assert for_mesh["w"] == pytest.approx(params["w"], rel=1e-5)
        for one, other in zip(metrics, found, strict=True):
            assert one == pytest.approx(other, rel=1e-5)


def lines(folder):
    return {
        x["step"]: (x["loss"], x["rows"], x["ids"]) for x in small_runs.lines(folder, "metrics.jsonl") if "rows" in x
    }


def train(folder, task, *, stop=None, allow=(), **changes):
    hook = sk.Hook("stop", after_step=lambda run, step, *_: sk.Stop(42, "test") if step == stop else None)
    values = {"steps": 12, "batch_size": SIZES, "checkpoint": {"every_steps": 2}, "log": {"every_steps": 1}} | changes
    task = dataclasses.replace(task, hooks=[hook])
    return sk.train(small_runs.config_of(folder, **values), task=task, allow_change=allow)


@pytest.mark.parametrize("data", slow_except([exact], [None, counted, exact]), ids=["indexed", "counted", "exact"])
def test_a_run_continues_bitwise_across_a_change(tmp_path, data):
    task = TASK if data is None else dataclasses.replace(TASK, train_data=data)
    whole = train(tmp_path / "whole", task)
    for stop in (2, 3, 5):
        with pytest.raises(Preempted):
            train(tmp_path / "parts", task, stop=stop)
    parts = train(tmp_path / "parts", task)
    assert [rows for _, rows, _ in lines(tmp_path / "whole").values()] == [8] * 3 + [16] * 4 + [8] * 5
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    assert parts.state.params["w"] == whole.state.params["w"]


@pytest.mark.parametrize("data", slow_except([None], [None, exact]), ids=["indexed", "stream"])
def test_a_changed_batch_size_skips_and_repeats_no_row(tmp_path, data):
    """Also after restarts without the flag, and after a rollback to a step before the change."""
    task = TASK if data is None else dataclasses.replace(TASK, train_data=data)
    whole = train(tmp_path / "whole", task, batch_size={0: 8, 4: 16})
    train(tmp_path / "parts", task, steps=4, batch_size=8)
    with pytest.raises(ConfigError, match="batch_size"):
        train(tmp_path / "parts", task, batch_size=16)
    train(tmp_path / "parts", task, steps=6, batch_size=16, allow=["batch_size"])
    parts = train(tmp_path / "parts", task, batch_size=16)
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole") and parts.run.step == 12
    assert parts.state.params["w"] == whole.state.params["w"]


def test_a_short_batch_after_a_change_needs_the_schedule(tmp_path):
    changes = {"data": {"drop_remainder": False}, "steps": 5}
    train(tmp_path, TASK, batch_size=8, **changes | {"steps": 1})
    with pytest.raises(ConfigError) as error:
        train(tmp_path, TASK, batch_size=16, allow=["batch_size"], **changes)
    assert "Name the sizes of the whole run: batch_size: {0: 8, 1: 16}" in str(error.value)
    train(tmp_path, TASK, batch_size={0: 8, 1: 16}, allow=["batch_size"], **changes)
    assert [rows for _, rows, _ in lines(tmp_path).values()] == [8, 16, 16, 8, 16]


def test_a_rollback_over_a_change_reads_the_same_rows(tmp_path):
    once = iter([True])
    back = sk.Hook("back", after_step=lambda run, step, *_: sk.Rollback(2) if step == 5 and next(once, 0) else None)
    config = {"batch_size": SIZES, "checkpoint": {"every_steps": 2}, "log": {"every_steps": 1}, "steps": 8}
    sk.train(small_runs.config_of(tmp_path / "a", **config), task=dataclasses.replace(TASK, hooks=[back]))
    sk.train(small_runs.config_of(tmp_path / "b", **config), task=TASK)
    assert lines(tmp_path / "a") == lines(tmp_path / "b")


@pytest.mark.parametrize(
    "given,text",
    [
        ({"batch_size": {5: 8}}, "a mapping that starts at 0"),
        ({"batch_size": {0: 8, 4: 0}}, "batch_size"),
        ({"batch_size": {0: 8, 4: 9}, "microbatches": 2}, "splits batch_size 9 into 2 parts"),
        ({"batch_size": {0: 8, 4: 6}, "mesh": {"data": 4}}, "is 6; the mesh splits a batch into data(4) = 4"),
        ({"batch_size": {0: 8, 4: 6}, "sync": {"parameter_server": {}}}, "is a schedule, and with sync"),
    ],
)
def test_schedules_that_do_not_fit_are_refused(given, text):
    with pytest.raises(ConfigError) as error:
        sk.Config(task="a.py:task", **given)
    assert text in str(error.value)


def test_sizes_of_a_json_config_have_text_as_keys():
    assert sk.Config(task="a.py:task", batch_size={"2000": 64, "0": 32}).batch_size == {0: 32, 2000: 64}
