"""A whole run in this process: what it writes, when it saves, how it ends."""

from __future__ import annotations

import gzip
import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit import checkpoint
from spmdkit.checkpoint.record import read_record, write_record
from spmdkit.cluster import detect_cluster, join
from spmdkit.errors import NonFiniteError
from spmdkit.program.program import Program
from spmdkit.run.run import Run
from spmdkit.run.trainer import run_steps
from tests.support.small_runs import config_of, lines

RNG = np.random.default_rng(0)
X = RNG.normal(size=(256, 1)).astype(np.float32)


def make_task(explode_at=None, learning_rate=0.1):
    def init(key):
        return {"w": jnp.zeros((1, 1))}

    def loss_fn(params, batch, key):
        error = batch["x"] @ params["w"] - 2 * batch["x"]
        return sk.mean(error**2)

    def train_step(state, batch):
        (loss, metrics), grads = sk.value_and_grad(loss_fn)(state.params, batch, state.key)
        if explode_at is not None:
            grads = {"w": jnp.where(state.step + 1 == explode_at, jnp.nan, grads["w"])}
        return state.apply_gradients(grads), {"loss": loss, **metrics}

    return sk.Task(
        init, loss_fn, optax.sgd(learning_rate), train_data={"x": X}, eval_data={"x": X[:33]}, train_step=train_step
    )


def make_config(tmp_path, **changes):
    return config_of(tmp_path, **{"checkpoint": {}, "log": {"every_steps": 5, "progress": "off"}, **changes})


class Slow:
    """Batches that come every three seconds of a clock."""

    def __init__(self, batches, now):
        self._batches, self._now = batches, now
        self.close = batches.close

    def __next__(self):
        self._now[0] += 3.0
        return next(self._batches)


def train(config, task):
    return sk.train(config, join(detect_cluster({}), config.devices), task)


def test_run_leaves_every_documented_file(tmp_path):
    config = make_config(
        tmp_path,
        checkpoint={"every_steps": 10},
        eval={"every_steps": 10},
        log={"every_steps": 5, "progress": "off", "trackers": ["tensorboard"]},
        profile={"steps": [8, 9]},
    )
    result = train(config, make_task())
    run = tmp_path / "run"
    for name in ("config.yaml", "metrics.jsonl", "events.jsonl", "environment.json", "report.html"):
        assert (run / name).stat().st_size > 0, name
    assert [p.name for p in sorted((run / "checkpoints").iterdir())] == ["10", "20"]
    assert any((run / "tensorboard").iterdir())
    (trace,) = (run / "profile").rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert [e["args"]["step_num"] for e in events if e.get("name") == "train"] == ["8", "9"]
    assert not any("spmdkit/plan/" in str(e.get("name")) or "liveness.py" in str(e.get("name")) for e in events)
    names = [e["event"] for e in lines(tmp_path, "events.jsonl")]
    assert names == ["started", "running", "compiled", "saved", "saved", "compiled", "stopped"]
    metrics = lines(tmp_path, "metrics.jsonl")
    assert [m["step"] for m in metrics if "split" not in m] == [1, 5, 10, 15, 20]
    assert [m["step"] for m in metrics if m.get("split") == "eval"] == [10, 20]
    assert {"loss", "examples_per_s", "step_time_s", "input_wait_s"} <= set(metrics[1])
    assert sk.load_config(run / "config.yaml").steps == 20
    assert not result.already_finished
    assert '<span class="pill mark good">finished</span>' in (run / "report.html").read_text()
    assert train(config, make_task()).already_finished


def test_the_state_is_saved_every_so_many_seconds(tmp_path):
    config = make_config(tmp_path, checkpoint={"every_seconds": 10, "keep": 9})
    cluster = join(detect_cluster({}), config.devices)
    program = Program(config, make_task(), cluster.devices)
    now = [0.0]
    with Run(config, cluster, program, clock=lambda: now[0]) as run:
        state = run.restore_or_init()
        run_steps(run, state, Slow(program.stream(1), now))
        run.finish(lambda: None)
    # Every 3 s a step: due at 12 s and then 12 s after each; the last step always.
    assert [row["step"] for row in checkpoint.ls(tmp_path / "run" / "checkpoints")] == [4, 8, 12, 16, 20]


def test_nonfinite_gradient_stops_with_77(tmp_path):
    config = make_config(tmp_path, checkpoint={"every_steps": 5})
    with pytest.raises(NonFiniteError, match="newest checkpoint is of step 10") as caught:
        train(config, make_task(explode_at=11))
    assert caught.value.exit_code == 77
    assert [row["step"] for row in checkpoint.ls(tmp_path / "run" / "checkpoints")] == [5, 10]
    assert lines(tmp_path, "events.jsonl")[-1]["event"] == "fault"


def test_continued_run_with_nonfinite_state_ends_with_77(tmp_path):
    config = make_config(tmp_path, checkpoint={"every_steps": 10}, on_nonfinite="continue")
    with pytest.raises(NonFiniteError, match="at step 20"):
        train(config, make_task(explode_at=11))
    assert [row["step"] for row in checkpoint.ls(tmp_path / "run" / "checkpoints")] == [10]


def test_moving_average_is_evaluated_and_exported(tmp_path):
    from safetensors.numpy import load_file

    config = make_config(tmp_path, ema=0.5, eval={"every_steps": 20, "params": "ema"})
    result = train(config, make_task())
    folder = tmp_path / "run" / "checkpoints"
    for which in ("params", "ema"):
        checkpoint.export(folder, None, tmp_path / f"{which}.safetensors", what=[which])
    ema = load_file(tmp_path / "ema.safetensors")["w"]
    params = load_file(tmp_path / "params.safetensors")["w"]
    assert not np.array_equal(ema, params)
    np.testing.assert_array_equal(ema, np.asarray(result.state.ema["w"]))
    by_hand = float(np.mean((X[:33] @ ema - 2 * X[:33]) ** 2))
    assert lines(tmp_path, "metrics.jsonl")[-1]["loss"] == pytest.approx(by_hand, rel=1e-5)


@pytest.mark.slow
def test_changed_random_keys_are_reported(tmp_path, capfd):
    make = lambda steps: make_config(tmp_path, steps=steps, log={"every_steps": 5, "progress": "plain"})
    train(make(5), make_task())
    train(make(10), make_task())
    assert "randomness" not in capfd.readouterr().err + str([e["event"] for e in lines(tmp_path, "events.jsonl")])
    folder = tmp_path / "run/checkpoints"
    record = read_record(folder, 10)
    assert record.user.pop("randomness") == {"version": 2, "impl": "threefry2x32"}
    write_record(folder / "10", record)  # as it was before keys hung below tags
    result = train(make(15), make_task())
    assert int(result.state.step) == 15
    printed = capfd.readouterr()
    assert (printed.out + printed.err).count("randomness continues differently") == 1
    (event,) = [e for e in lines(tmp_path, "events.jsonl") if e["event"] == "randomness_changed"]
    assert event["step"] == 10 and event["before"] == {"version": 1} and event["now"]["version"] == 2
