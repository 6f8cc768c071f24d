"""Runs on streams: resumed bitwise, rolled back, ended, evaluated."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.errors import CheckpointError, ConfigError, Preempted
from spmdkit.parameter_server.gradient import check_task
from spmdkit.program.feeds import with_streams
from spmdkit.verify.task_runner import Setting, TaskRunner
from tests.support import small_runs
from tests.support.core_runs import program_of
from tests.support.streams import counted, exact, example, uneven


def loss_fn(params, batch, key):
    row = batch["id"].astype(jnp.float32) / 1000
    return sk.mean((params["w"] * row - 1) ** 2), {"rows": sk.sum(jnp.ones_like(row)), "total": sk.sum(row % 7)}


def task_of(data, *hooks, **changes):
    init = lambda key: {"w": jnp.full(3, 0.1).sum()}
    return sk.Task(init, loss_fn, optax.adam(0.01), train_data=data, hooks=hooks, **changes)


def train(folder, stream, *hooks, allow=(), eval_data=None, **changes):
    values = {"steps": 12, "batch_size": 16, "checkpoint": {"every_steps": 4}, "log": {"every_steps": 1}}
    config = small_runs.config_of(folder, **values | changes)
    return sk.train(config, task=task_of(stream, *hooks, eval_data=eval_data), allow_change=allow)


def trained(folder):
    """Returns step -> what identifies the examples of a step, and the loss."""
    lines = small_runs.lines(folder, "metrics.jsonl")
    return {line["step"]: (line["loss"], line["total"], line["rows"]) for line in lines if "split" not in line}


def same(found, wanted):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return all(np.array_equal(jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a,
                              jax.random.key_data(b) if jnp.issubdtype(b.dtype, jax.dtypes.prng_key) else b)
               for a, b in pairs)  # fmt: skip


def stop_at(wanted):
    return sk.Hook("stop", after_step=lambda run, step, *_: sk.Stop(42, "test") if step == wanted else None)


@pytest.fixture(scope="module", params=["counted", "exact"])
def whole(request, tmp_path_factory):
    """Returns (stream, the last state of an uninterrupted run, its steps)."""
    data, folder = {"counted": counted, "exact": exact}[request.param], tmp_path_factory.mktemp("whole")
    state = train(folder, data).state
    return data, state, trained(folder)


@pytest.mark.forms(2)
@pytest.mark.parametrize("stop", [3, 10])
def test_a_stopped_run_continues_bitwise(tmp_path, whole, stop):
    data, state, steps = whole
    with pytest.raises(Preempted):
        train(tmp_path, data, stop_at(stop), data={"prefetch": 5})
    found = train(tmp_path, data, data={"workers": 1} if stop == 3 else {}).state
    assert trained(tmp_path) == steps and same(found, state)


def test_a_rollback_reads_the_same_batches_again(tmp_path, whole):
    data, _, steps = whole
    once = iter([True])
    back = sk.Hook("back", after_step=lambda run, step, *_: sk.Rollback(6, 2) if step == 7 and next(once, 0) else None)
    state = train(tmp_path, data, back).state
    totals = {step: total for step, (_, total, _) in trained(tmp_path).items()}
    plain = {step: total for step, (_, total, _) in steps.items()}
    assert totals == {step: plain[step] for step in range(1, 5)} | {
        step: plain[step + 2] if step + 2 in plain else totals[step] for step in range(5, 13)
    }
    other = train(tmp_path / "skipped", data, data={"skip_batches": [[5, 6]]})
    assert same(other.state, state)


def test_a_rollback_to_the_start(tmp_path, whole):
    data, state, steps = whole
    once = iter([True])
    back = sk.Hook("back", after_step=lambda run, step, *_: sk.Rollback(0) if step == 2 and next(once, 0) else None)
    found = train(tmp_path, data, back, checkpoint=None).state
    assert trained(tmp_path) == steps and same(found, state)


def test_a_changed_stream_ends_with_79(tmp_path):
    eight = {"data": {"shards": 8}}
    with pytest.raises(Preempted):
        train(tmp_path, counted, stop_at(5), **eight)

    @sk.stream
    def changed(shard, num_shards, seed):
        for number, row in enumerate(counted(shard, num_shards, seed)):
            yield example(1) if number == 6 else row

    with pytest.raises(CheckpointError, match=r"shard 0 of train_data.* 10 examples before its position"):
        train(tmp_path, changed, **eight)
    assert train(tmp_path, changed, allow=["train_data"], **eight).run.step == 12
    with pytest.raises(Preempted):
        train(tmp_path / "other", counted, stop_at(5))
    with pytest.raises(ConfigError, match=r"train_data: a stream of .*--allow-change train_data"):
        train(tmp_path / "other", exact)


def test_the_record_has_the_position_of_the_step(tmp_path):
    train(tmp_path, counted, steps=4, data={"prefetch": 5, "shards": 4})
    record = json.loads((tmp_path / "run/checkpoints/4/record.json").read_text())["record"]
    assert record["position"]["batch"] == 4 and record["position"]["num_shards"] == 4
    assert [shard["given"] for shard in record["position"]["shards"].values()] == [16] * 4


ROWS = np.concatenate([[example(100 * shard + i)["id"] for i in range(3 + shard)] for shard in range(8)])


def test_a_run_ends_with_its_stream(tmp_path, capfd):
    result = train(tmp_path, uneven, data={"repeat": False, "shards": 8}, eval_data=uneven, steps=50)
    steps = trained(tmp_path)
    assert result.run.step == max(steps) == 5 == int(result.state.step)  # 10 examples of the longest shard, 2 a step
    assert sum(rows for *_, rows in steps.values()) == len(ROWS)
    out, err = capfd.readouterr()
    assert "stopped at step 5: train_data has ended" in out
    assert "note: eval_data is a stream, which each evaluation reads to its end" in out + err
    assert result.evaluation["rows"] == len(ROWS)
    exactly = train(tmp_path / "exactly", uneven, data={"repeat": False, "shards": 8}, steps=5)
    assert same(result.state, exactly.state)
    again = train(tmp_path, uneven, data={"repeat": False, "shards": 8}, steps=50)
    assert again.already_finished and same(again.state, result.state)


@pytest.mark.parametrize("view", ["global", "replica"])
def test_a_batch_without_rows_changes_nothing(view):
    step = None
    if view == "replica":

        def step(state, batch):
            (loss, metrics), grads = sk.value_and_grad(lambda p, b, k: loss_fn(p, b, k))(state.params, batch, state.key)
            return state.apply_gradients(grads), {"loss": loss, **metrics}

    task = task_of(uneven, view=view, train_step=step) if step else task_of(uneven)
    if step:
        task = dataclasses.replace(task, loss_fn=None)
    program = program_of(task, batch_size=16, mesh={"data": 4}, data={"repeat": False, "shards": 8})
    state, rows = program.init(), []
    for number, batch in program.batches(stop=7):
        before = jax.device_get(state.replace(rng=None))
        state, _ = program.step(state, batch)
        rows.append(int(program.checks.rows))
        assert same(before, state.replace(rng=None)) == (number > 5)
    assert sum(rows[:5]) == len(ROWS) and rows[5:] == [0, 0] and int(state.step) == 5


def test_evaluation_on_a_part_of_a_stream(tmp_path):
    result = train(tmp_path, counted, eval_data=counted, steps=1, eval={"batches": 3})
    assert result.evaluation["rows"] == 48
    indexed = {"id": np.arange(40), "x": np.zeros((40, 3), np.float32)}
    indexed = train(tmp_path / "b", counted, eval_data=indexed, steps=1, eval={"batches": 2})
    assert indexed.evaluation["rows"] == 32


def test_meshes_train_on_the_same_batches(tmp_path):
    one = train(tmp_path / "1", exact, mesh={}, devices="cpu:1")
    four = train(tmp_path / "4", exact, mesh={"data": 2, "fsdp": 2}, devices="cpu:4", layout={"min_shard_bytes": 1})
    np.testing.assert_allclose(one.state.params["w"], four.state.params["w"], rtol=1e-5)
    rows = [{step: total for step, (_, total, _) in trained(tmp_path / name).items()} for name in "14"]
    assert rows[0] == pytest.approx(rows[1], rel=1e-5)


def test_a_short_shard_is_reported_once(tmp_path, capfd):
    short = sk.stream(lambda shard, *_: (example(i) for i in range(1 if shard == 0 else 40)))
    train(tmp_path, short, checkpoint={"every_steps": 2})
    assert capfd.readouterr().out.count("WARNING: the shards of train_data have unequal lengths") == 1


@pytest.mark.parametrize(
    ("data", "changes", "words"),
    [
        (counted, {"data": {"shuffle": False}}, r"data\.shuffle has no effect: it needs data with an index"),
        (counted, {"data": {"retries": 2}}, r"data\.retries has no effect"),
        ({"id": np.arange(32)}, {"data": {"shards": 4}}, r"data\.shards has no effect: it needs a stream"),
        ({"id": np.arange(32)}, {"data": {"workers": 4}}, r"data\.workers has no effect: it needs a stream"),
        (counted, {"data": {"shards": 5}}, r"read as 5 shards, and batch_size is 16"),
        (counted, {"on_nonfinite": {"save_batch": True}}, r"on_nonfinite\.save_batch has no effect"),
        (sk.per_process(counted), {}, "sk.per_process of a stream"),
        (exact, {"data": {"batched": True}}, r"data\.batched: true an example is a chunk"),
        (exact, {"data": {"repeat": False}, "sync": {"local_sgd": {"every": 2}}}, "repeat: false needs sync"),
    ],
)
def test_settings_that_do_not_fit_are_rejected(tmp_path, data, changes, words):
    with pytest.raises(ConfigError, match=words):
        train(tmp_path, data, **changes)


def test_parameter_server_rejects_a_stream(tmp_path):
    config = small_runs.config_of(tmp_path)
    with pytest.raises(ConfigError, match="parameter_server: train_data is a stream"):
        check_task(config, with_streams(task_of(counted), config))


def test_verify_uses_the_first_rows(tmp_path):
    config = small_runs.config_of(tmp_path, batch_size=16, mesh={}, data={"repeat": False, "shards": 8})
    runner = TaskRunner(config, task_of(uneven, eval_data=uneven), 16)
    assert runner.short and not runner.program(Setting({}, short=True), evaluated=False).schedule.always_full
