"""Runs by a parameter server, over threads: records, checkpoints that synchronous runs share, refusals."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.parameter_server import trainer as parameter_server
from spmdkit.plan.command import make_plan
from spmdkit.verify.report import VerifyOptions, verify_config
from tests.support.parameter_servers import FailingThreads
from tests.support.small_runs import X, config_of, events, line_task, lines, train

ROOT = Path(__file__).parents[2]
ALONE = {"parameter_server": {"servers": 1, "workers": 1, "max_staleness": 0, "transport": "threads"}}
TWO = {"parameter_server": {"workers": 2, "transport": "threads"}}


def changed(**changes):
    """Returns the task of a line with something changed."""
    return dataclasses.replace(line_task(), **changes)


def trained(folder):
    """Returns the records of training steps."""
    return [line for line in lines(folder, "metrics.jsonl") if line.get("split") != "eval"]


def test_run_alternates_with_synchronous_training(tmp_path):
    """Two servers, no server, one, and two: a synchronous run has the same state, and each leaf all updates."""
    loss = lambda params, batch, key: sk.mean((batch["x"] * params["w"] + params["b"] - 2 * batch["x"]) ** 2)
    init = lambda key: {"w": jnp.zeros(()), "b": jnp.ones(())}
    task = changed(init=init, loss_fn=loss, optimizer=optax.adam(0.05))
    for servers, steps in ((2, 7), (0, 14), (1, 20), (2, 26)):
        sync = {"parameter_server": {**ALONE["parameter_server"], "servers": servers}} if servers else "every_step"
        found = train(tmp_path / "both", task, steps=steps, sync=sync)
        record = json.loads((tmp_path / "both" / "run" / "checkpoints" / str(steps) / "record.json").read_text())
        tables = record["record"].get("parameter_server", {}).get("servers", [])
        rows = [row for table in tables for row in table["parts"]]
        assert len(tables) == servers and {applied for _, _, applied in rows} <= {steps}, rows
        assert all(low - 1 + len(above) == steps for _, (low, above), _ in rows), rows
        assert sorted(path for paths, *_ in rows for path in paths) == ["b", "w"] * bool(servers)
    expected = train(tmp_path / "alone", task, steps=26)
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-7)
    jax.tree.map(close, (found.state.params, found.state.opt_state), (expected.state.params, expected.state.opt_state))
    assert found.evaluation["loss"] == pytest.approx(expected.evaluation["loss"], rel=1e-3)
    assert [event["step"] for event in events(tmp_path / "both", "restored")] == [7, 14, 20]
    assert int(found.state.step) == 26


def test_run_reports_roles_and_staleness(tmp_path):
    slope = lambda params, batch, key: sk.mean(0 * batch["x"] + 3 * params["w"])
    task = changed(loss_fn=slope, optimizer=lambda rate: optax.sgd(rate), tokens=lambda batch: 2 * batch["x"].size)
    rate = {"name": "linear_schedule", "init_value": 0.1, "end_value": 0.0, "transition_steps": 40}
    train(tmp_path, task, sync=TWO, steps=40, eval={"every_steps": 20}, learning_rate=rate)
    roles = events(tmp_path, "roles")[0]
    assert (roles["coordinator"], roles["servers"], roles["workers"]) == (0, 1, 2)
    last = trained(tmp_path)[-1]
    assert last["step"] == 40 and last["pushes_per_s"] > 0 and last["staleness_max"] >= last["staleness"]
    assert {"loss", "examples_per_s", "step_time_s"} <= last.keys()
    assert last["worker_0_pushes"] + last["worker_1_pushes"] == 40 and last["pushes_dropped"] == 0
    assert last["gradient_norm"] == pytest.approx(3) and last["tokens_per_s"] == 2 * last["examples_per_s"]
    assert last["learning_rate"] == pytest.approx(0.1 / 40) and last["peak_memory_bytes"] > 2**20
    assert last["epoch"] == 40 * config_of(tmp_path, steps=40).batch_size / len(X)
    assert sum(lines(tmp_path, "counts.jsonl")[-1]["staleness_counts"]) == 40
    assert [line for line in lines(tmp_path, "metrics.jsonl") if line.get("split") == "eval"][-1]["step"] == 40
    assert train(tmp_path, task, sync=TWO, steps=40, learning_rate=rate).already_finished


def test_dead_server_is_restored_from_the_checkpoint(tmp_path, monkeypatch):
    made, killed = [], []
    mortals = lambda *args: made.append(FailingThreads(*args)) or made[-1]
    monkeypatch.setattr(parameter_server, "Threads", mortals)
    due = parameter_server._Monitor._due

    def due_and_kill(self, stats):
        due(self, stats)
        if self.run.saved_step and not killed:
            self.run.saves.finish_save()
            killed.append(self.run.saved_step)
            made[0].servers[0].kill()

    monkeypatch.setattr(parameter_server._Monitor, "_due", due_and_kill)
    train(tmp_path, sync=TWO, steps=400, checkpoint={"every_steps": 20})
    assert killed and events(tmp_path, "server_lost")[0]["server"] == 0
    assert [event["step"] for event in events(tmp_path, "servers_restored")] == killed
    assert [event["step"] for event in events(tmp_path, "rolled_back")] == killed
    steps = [line["step"] for line in trained(tmp_path)]
    assert steps == sorted(set(steps)) and steps[-1] == 400


def test_a_file_adds_a_worker(tmp_path):
    """The coordinator also saves by seconds."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "workers").write_text("3\n")
    train(tmp_path, sync=TWO, steps=150, checkpoint={"every_seconds": 0.01})
    assert [event["worker"] for event in events(tmp_path, "worker_started")] == [0, 1, 2]
    last = trained(tmp_path)[-1]
    assert last["worker_2_pushes"] > 0 and sum(last[f"worker_{i}_pushes"] for i in range(3)) == 150
    assert len(events(tmp_path, "saved")) >= 2


LOSS = line_task().loss_fn
SKIPS = {"on_nonfinite": {"loss": "skip", "gradient": "skip", "max_consecutive": 3}}


@pytest.mark.parametrize(
    "changes, options, words",
    [
        ({"loss_fn": lambda p, b, k: LOSS(p, b, k) / 0}, {}, r"loss of batch \d+ is not finite on worker"),
        (
            {"eval_fn": lambda params, batch: {"worst": sk.max(batch["x"][:, 0] / 0)}},
            {"checkpoint": {"every_steps": 1000}},
            "the evaluation of step 20: 'worst' is inf",
        ),
        (
            {"optimizer": optax.sgd(lambda count: jnp.where(count == 19, jnp.inf, 0.01)), "eval_data": None},
            {"checkpoint": None},
            "the state is not finite at step 20: 'params/w'",
        ),
        ({"train_data": {"x": np.full_like(X, np.nan)}}, SKIPS, "pushes in a row were skipped after update 0"),
    ],
    ids=["loss", "last evaluation", "last update", "all skipped"],
)
def test_nonfinite_values_end_the_run_with_77(tmp_path, changes, options, words):
    with pytest.raises(sk.SpmdkitError, match=words) as error:
        train(tmp_path, changed(**changes), sync=TWO, **options)
    assert error.value.exit_code == 77
    is_saved = "evaluation" in words  # its state is finite
    assert len(list((tmp_path / "run").glob("checkpoints/20"))) == is_saved
    assert options is not SKIPS or sum(event["pushes"] for event in events(tmp_path, "skipped")) >= 3


def test_permitted_nonfinite_values_are_reported(tmp_path, capfd):
    bad = lambda batch: {"bad": sk.mean(batch["x"][:, 0] / 0)}
    task = changed(
        loss_fn=lambda params, batch, key: (LOSS(params, batch, key), bad(batch)), eval_fn=lambda p, batch: bad(batch)
    )
    train(tmp_path, task, sync=TWO, on_nonfinite={"metrics": "continue", "evaluation": "continue"})
    assert "step 20: 'bad' is nan" in capfd.readouterr().out


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"workers": 2, "aggregate": 3}, "aggregate: is 3 of 2 workers"),
        ({"worker": 2}, "sync.parameter_server.worker: unknown key. Did you mean"),
        ({"servers": 0}, "sync.parameter_server.servers: should be greater than or equal to 1, found 0"),
        ({"partition": "size"}, "should be greedy, round_robin or {rules:"),
        ({"partition": {"rules": [["w", 1]]}}, "gives 'w' to server 1, found servers: 1"),
        ({"overlap": True, "max_staleness": 0}, "overlap: is true, which makes gradients stale"),
        ({"aggregate": 2, "max_staleness": 3}, "max_staleness: has no effect with aggregate"),
        ({"reducer": "bfloat16"}, "reducer: keeps or rounds something"),
        ({"on_spike": {"action": "skip"}}, "on_spike: acts on the steps of one program"),
        ({"on_nonfinite": "rollback"}, "on_nonfinite: is rollback"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:20],
)
def test_incompatible_settings_are_refused_with_the_repair(tmp_path, changes, words):
    of_run = changes.keys() & {"reducer", "on_spike", "on_nonfinite"}
    changes = {"sync": "parameter_server", **changes} if of_run else {"sync": {"parameter_server": changes}}
    with pytest.raises(sk.SpmdkitError) as error:
        config_of(tmp_path, **changes)
    assert words in str(error.value) and error.value.exit_code == 78, error.value


def test_commands_of_one_step_name_the_alternative(tmp_path):
    config = config_of(tmp_path, sync=TWO, task=f"{ROOT / 'examples' / 'linear_regression.py'}:task")
    for needs in (sk.build, make_plan, lambda config: verify_config(config, VerifyOptions())):
        with pytest.raises(sk.SpmdkitError, match="the same command with sync=every_step") as error:
            needs(config)
        assert error.value.exit_code == 78


def test_user_train_step_and_hooks_are_refused(tmp_path):
    stepped = {"loss_fn": None, "train_step": lambda s, b: (s, {}), "eval_data": None}
    for changes, words in (
        (stepped, "the task has a train_step"),
        ({"hooks": [sk.Hook("mine")]}, r"has hooks \(mine\)"),
    ):
        with pytest.raises(sk.SpmdkitError, match=words):
            train(tmp_path, changed(**changes), sync=TWO)


def test_ray_needs_its_package_and_an_importable_task(tmp_path):
    found = importlib.util.find_spec("ray") is not None
    words = "Name it there" if found else r"pip install 'spmdkit\[ray\]'.*transport: threads"
    with pytest.raises(sk.SpmdkitError, match=words) as error:
        train(tmp_path, sync="parameter_server")
    assert error.value.exit_code == 78
