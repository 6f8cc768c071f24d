"""What is not finite ends a run with 77, is skipped, is gone back from, or is said: each by choice, for loss, gradient,
metrics and evaluation."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import spmdkit as sk
from spmdkit import checkpoint
from spmdkit.cluster import detect_cluster, join
from spmdkit.errors import ConfigError, NonFiniteError
from spmdkit.run.hooks import finite
from spmdkit.run.recovery import skipped_batches
from tests.support import small_runs

ROWS, BATCH = 96, 16
CLEAN = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)


def loss_fn(params, batch, key):
    return sk.mean((batch @ params["w"] - batch.sum(-1)) ** 2), {"one": sk.mean(jnp.ones(len(batch)))}


def make_task(data=CLEAN, **changes):
    given = {"train_data": data, "eval_data": CLEAN[:8], **changes}
    return sk.Task(
        lambda key: {"w": jnp.zeros((3,))}, given.pop("loss_fn", loss_fn), optax.sgd(0.05, momentum=0.9), **given
    )


def train(tmp_path, task, **changes):
    values = {"steps": 12, "batch_size": BATCH, "data": {"shuffle": False}, "checkpoint": {}}
    return small_runs.train(tmp_path, task, **values | {"log": {"every_steps": 4, "progress": "plain"}} | changes)


def lines(tmp_path, name="metrics.jsonl"):
    return small_runs.lines(tmp_path, name)


def poisoned_evaluation(params, batch):
    return {"loss": sk.mean(batch @ params["w"]), "worst": sk.max(jnp.where(params["w"][0] > 0, jnp.inf, batch[:, 0]))}


def test_nonfinite_evaluation_ends_the_run_with_77(tmp_path, capfd):
    task = make_task(eval_fn=poisoned_evaluation)
    train(tmp_path / "b", task, on_nonfinite={"evaluation": "continue"})
    assert "'worst' is inf" in capfd.readouterr().out
    with pytest.raises(NonFiniteError, match=r"evaluation .* step 12: 'worst' is inf.*of step 12\.") as caught:
        train(tmp_path, task)
    assert caught.value.exit_code == 77
    assert [row["step"] for row in checkpoint.ls(tmp_path / "run" / "checkpoints")] == [12]  # the state is finite
    assert "fault" in [line["event"] for line in lines(tmp_path, "events.jsonl")]  # "saved" of step 6 may come after it


def metric_fn(params, batch, key):
    loss, _ = loss_fn(params, batch, key)
    return loss, {"rate": sk.mean(jnp.where(batch[:, 0] > 90, jnp.nan, 1.0))}


def test_nonfinite_metric_ends_the_run(tmp_path):
    data = CLEAN.copy()
    data[3 * BATCH + 5] = [100, 0, 0]  # step 4, a log step
    with pytest.raises(
        NonFiniteError,
        match=r"not finite at step 4: a metric \('rate' is nan\), after batch 4 \(16 rows of train_data: 48 to 63\)",
    ):
        train(tmp_path, make_task(data, loss_fn=metric_fn))
    assert (
        int(train(tmp_path / "b", make_task(data, loss_fn=metric_fn), on_nonfinite={"metrics": "continue"}).state.step)
        == 12
    )


def test_eval_prints_before_it_ends_with_77(tmp_path, monkeypatch, capsys):
    from typer.testing import CliRunner

    from spmdkit import cli
    from spmdkit.run import loop

    monkeypatch.setattr(loop, "evaluate", lambda config, cluster, **_: (4, {"loss": float("nan")}))
    monkeypatch.setattr(cli, "_join", lambda path, overrides: (config, join(detect_cluster({}), "cpu:2")))
    for policy in ("stop", "continue"):
        config = sk.Config(task="t.py:t", on_nonfinite={"evaluation": policy})
        found = CliRunner().invoke(cli.app, ["eval", "unused.yaml"])
        assert "step 4 eval  loss nan" in found.output
        assert isinstance(found.exception, NonFiniteError) == (policy == "stop"), found.exception


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("num", [2, 37])
def test_joined_codes_find_every_step(cut, num):
    """On eight devices, of which one alone may know."""
    mesh = Mesh(np.array(jax.devices()[:8]), ("fsdp",))
    placed = NamedSharding(mesh, PartitionSpec("fsdp") if cut else PartitionSpec())
    bits = {5: 2, 16: 8, 21: 1, num: 3}
    codes = [
        (step, jax.device_put(np.int32([0] * 5 + [bits.get(step, 0)] + [0] * 2), placed)) for step in range(1, num + 1)
    ]
    assert finite._joined_codes(codes)() == sorted((step, bit) for step, bit in bits.items() if step <= num)
    assert finite._joined_codes([(step, jnp.zeros((), jnp.int32)) for step, _ in codes])() == []


BAD = 6  # the step, and the number, of the batch that is poisoned


def poisoned(step=BAD, row=11, value=np.nan):
    """Returns the data with one number of one row, on the second of two replicas, that is not finite."""
    data = CLEAN.copy()
    data[(step - 1) * BATCH % ROWS + row, 1] = value
    return data


def by_hand(left_out=(), steps=12):
    """Returns the parameters after SGD with momentum, in float64, without the batches that are left out."""
    w, momentum, x = np.zeros(3), np.zeros(3), CLEAN.astype(np.float64)
    for number in range(1, steps + 1):
        rows = x[np.arange((number - 1) * BATCH, number * BATCH) % ROWS]
        if number in left_out:
            continue
        momentum = 0.9 * momentum + 2 * rows.T @ (rows @ w - rows.sum(-1)) / BATCH
        w = w - 0.05 * momentum
    return w


def params(result):
    return np.asarray(result.state.params["w"])


def test_skip_names_the_batch_and_its_row(tmp_path, capfd):
    data = poisoned()
    result = train(tmp_path, make_task(data), on_nonfinite={**SKIP, "save_batch": True}, steps=10)
    np.testing.assert_allclose(params(result), by_hand({BAD}, 10), rtol=1e-6)
    assert int(result.state.step) == 10
    events = [e for e in lines(tmp_path, "events.jsonl") if e["event"] == "skipped"]
    assert [(e["step"], e["batch"], e["not_finite"]) for e in events] == [(6, 6, ["loss", "gradient"])]
    printed = capfd.readouterr().out
    assert (
        "left out: not finite at step 6: the loss, the gradient, after batch 6 (16 rows of train_data: 80 to 95; row "
        "91 is not finite in the data)" in printed
    )
    with np.load(tmp_path / "run/nonfinite/6.npz") as dumped:
        np.testing.assert_array_equal(dumped["rows"], np.arange(80, 96))
        np.testing.assert_array_equal(dumped["examples"], data[80:96])


SKIP = {"loss": "skip", "gradient": "skip", "metrics": "skip"}


def test_infinite_loss_between_log_steps_stops(tmp_path):
    def step(state, batch):
        (loss, _), grads = sk.value_and_grad(loss_fn)(state.params, batch, state.key)
        return state.apply_gradients(grads), {"loss": jnp.where(state.step + 1 == BAD, jnp.inf, loss)}

    with pytest.raises(NonFiniteError, match="not finite at step 6: the loss, after batch 6"):
        train(tmp_path, make_task(train_step=step))


def test_run_that_skips_every_step_stops(tmp_path):
    with pytest.raises(NonFiniteError, match="3 steps in a row were left out"):
        train(tmp_path, make_task(np.full_like(CLEAN, np.nan)), on_nonfinite={**SKIP, "max_consecutive": 3})


ROLLBACK = {"loss": "rollback", "gradient": "rollback", "metrics": "rollback"}


def test_rollback_equals_a_run_without_the_batch(tmp_path):
    changes = {"checkpoint": {"every_steps": 4, "keep": 9}, "ema": 0.9, "steps": 10}
    back = train(tmp_path / "a", make_task(poisoned()), on_nonfinite=ROLLBACK, **changes)
    data = {"shuffle": False, "skip_batches": [BAD]}
    clean = train(tmp_path / "b", make_task(poisoned()), **changes | {"data": data})
    same_state(back, clean)
    told = lambda name: [(m["step"], m["loss"]) for m in lines(tmp_path / name) if "split" not in m]
    assert told("a") == told("b") and len(told("a")) == 4
    np.testing.assert_allclose(params(back), by_hand({BAD}, 11), rtol=1e-6)
    (event,) = [e for e in lines(tmp_path / "a", "events.jsonl") if e["event"] == "rolled_back"]
    assert (event["step"], event["from_step"], event["skipped_batches"]) == (4, 8, [BAD])


def same_state(one, other):
    for a, b in zip(jax.tree.leaves(one.state), jax.tree.leaves(other.state), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_skipped_batch_survives_a_kill_before_saving(tmp_path, monkeypatch):
    from spmdkit.run.run import Run

    changes = {"checkpoint": {"every_steps": 4, "keep": 9}, "on_nonfinite": ROLLBACK, "steps": 10}

    def killed(run, step, values, wait_s):
        if step == 5 and run.program.schedule.skipped:
            raise KeyboardInterrupt  # after the way back, before step 8 saves what is left out
        dispatched(run, step, values, wait_s)

    dispatched = Run.dispatched
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Run, "dispatched", killed)
        train(tmp_path, make_task(poisoned()), **changes)
    data = {"shuffle": False, "skip_batches": [BAD]}
    clean = train(tmp_path / "b", make_task(poisoned()), **changes | {"data": data})
    again = train(tmp_path, make_task(poisoned()), **changes)
    same_state(again, clean)
    assert len([e for e in lines(tmp_path, "events.jsonl") if e["event"] == "rolled_back"]) == 1


def test_trained_batches_cannot_be_skipped(tmp_path):
    train(tmp_path, make_task(), steps=4)
    data = lambda *batches: {"shuffle": False, "skip_batches": list(batches)}
    with pytest.raises(ConfigError, match=r"skip_batches names batch 3, and step 4 .* from 5 on"):
        train(tmp_path, make_task(), steps=8, data=data(3))
    result = train(tmp_path, make_task(), steps=8, data=data([5, 6]))
    np.testing.assert_allclose(params(result), by_hand({5, 6}, 10), rtol=1e-6)
    program = result.program
    skipped_batches.take(program, ((1, 9),), 4, {})  # as written by a rollback: those after step 4
    assert program.schedule.skipped == ((5, 9),)
    again = train(tmp_path, make_task(), steps=9)  # what is left out stays left out
    np.testing.assert_allclose(params(again), by_hand({5, 6}, 11), rtol=1e-6)


def test_ways_back_that_lead_nowhere_end_the_run(tmp_path):
    with pytest.raises(NonFiniteError, match="after 2 rollbacks"):
        train(tmp_path, make_task(np.full_like(CLEAN, np.nan)), on_nonfinite={**ROLLBACK, "max_consecutive": 2})


def noisy(spike_at=None, steps=40, factor=30.0):
    """Returns data of batches whose losses vary, with one that is far above the others."""
    data = np.random.default_rng(1).normal(size=(steps * BATCH, 3)).astype(np.float32)
    if spike_at is not None:
        data[(spike_at - 1) * BATCH : spike_at * BATCH] *= factor
    return data


def steady_loss(params, batch, key):
    return sk.mean(((batch - params["w"]) ** 2).sum(-1))


SPIKE = {"loss_fn": steady_loss, "eval_data": None}
AT = 22


@pytest.mark.forms(1)
@pytest.mark.parametrize("then", ["skip", "rollback"])
def test_spike_is_skipped_and_noise_is_not(tmp_path, then, capfd):
    spike = {"action": then, "window": 32}
    changes = {"steps": 30, "ema": 0.9, "on_spike": spike, "checkpoint": {"every_steps": 8, "keep": 9}}
    result = train(tmp_path, make_task(noisy(AT), **SPIKE), **changes)
    printed = capfd.readouterr().out
    assert f"a spike at step {AT}: the loss, after batch {AT}" in printed and printed.count("a spike") == 1
    if then == "rollback":
        data = {"shuffle": False, "skip_batches": [AT]}
        clean = train(tmp_path / "b", make_task(noisy(AT), **SPIKE), **changes | {"data": data})
        same_state(result, clean)
    else:
        w, x = np.zeros(3), noisy(AT).astype(np.float64)
        momentum = 0
        for step in range(1, 31):
            rows = x[(step - 1) * BATCH : step * BATCH]
            if step != AT:
                momentum = 0.9 * momentum + 2 * (w - rows.mean(0))
                w = w - 0.05 * momentum
        np.testing.assert_allclose(params(result), w, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_spike_can_stop_or_be_reported(tmp_path, capfd):
    with pytest.raises(NonFiniteError, match=f"a spike at step {AT}: the loss, after batch {AT}"):
        train(tmp_path, make_task(noisy(AT), **SPIKE), steps=30, on_spike={"action": "stop", "window": 32})
    train(tmp_path / "b", make_task(noisy(AT), **SPIKE), steps=30, on_spike={"action": "continue", "window": 32})
    assert f"a spike at step {AT}: the loss is" in capfd.readouterr().out


@pytest.mark.slow
def test_spike_limit_survives_a_restart(tmp_path, capfd):
    changes = {"on_spike": {"window": 32}, "checkpoint": {"every_steps": 21}}
    whole = train(tmp_path / "a", make_task(noisy(AT), **SPIKE), steps=30, **changes)
    train(tmp_path / "b", make_task(noisy(AT), **SPIKE), steps=21, **changes)
    again = train(tmp_path / "b", make_task(noisy(AT), **SPIKE), steps=30, **changes)
    assert capfd.readouterr().out.count(f"a spike at step {AT}") == 2
    same_state(whole, again)


def test_warmup_noise_and_steady_losses_are_no_spikes():
    from spmdkit.run.hooks.spikes import limit_of

    random = np.random.default_rng(0)
    falling = np.exp(-np.arange(400) / 100) * (1 + 0.1 * random.normal(size=400))
    noise = 2 + 0.3 * random.normal(size=400)
    for losses in (falling, noise, np.full(400, 0.7)):
        assert not [i for i in range(32, 400) if losses[i] > limit_of(losses[max(0, i - 128) : i], 6.0)]
        assert 10 * losses[:200].max() > limit_of(losses[:200], 6.0)


@pytest.mark.forms(1)
@pytest.mark.parametrize("checkpoint", [None, {"every_steps": 3}])
def test_last_update_without_a_loss_is_checked(tmp_path, checkpoint):
    task = dataclasses.replace(
        make_task(eval_data=None), optimizer=optax.sgd(lambda count: jnp.where(count == 9, jnp.inf, 0.01))
    )
    with pytest.raises(NonFiniteError, match="the state is not finite at step 10: 'params/w'"):
        train(tmp_path, task, steps=10, checkpoint=checkpoint)
    events = [line["event"] for line in lines(tmp_path, "events.jsonl")]
    assert "fault" in events and "stopped" not in events
