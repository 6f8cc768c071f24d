"""Runs by a parameter server, over threads: records, checkpoints that synchronous runs share, refusals."""

import dataclasses
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.errors import NonFiniteError
from spmdkit.parameter_server import trainer as parameter_server
from spmdkit.plan.command import make_plan
from spmdkit.verify.report import VerifyOptions, verify_config
from tests.support.small_runs import X, config_of, events, line_task, lines, train

ROOT = Path(__file__).parents[2]
ALONE = {"parameter_server": {"servers": 1, "workers": 1, "max_staleness": 0, "transport": "threads"}}
TWO = {"parameter_server": {"workers": 2, "transport": "threads"}}


def test_a_run_goes_on_synchronously_and_back_and_is_the_synchronous_run(tmp_path):
    found = None
    for steps, sync in ((7, ALONE), (14, "every_step"), (20, ALONE)):
        found = train(tmp_path / "both", steps=steps, sync=sync)
    expected = train(tmp_path / "alone")
    np.testing.assert_allclose(found.state.params["w"], expected.state.params["w"], rtol=1e-5)
    for mine, other in zip(
        jax.tree.leaves(found.state.opt_state), jax.tree.leaves(expected.state.opt_state), strict=True
    ):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-7)
    assert found.evaluation["loss"] == pytest.approx(expected.evaluation["loss"], rel=1e-3)
    assert [event["step"] for event in events(tmp_path / "both", "restored")] == [7, 14]
    assert int(found.state.step) == 20


def test_a_run_goes_on_with_fewer_servers_and_with_more_and_each_leaf_has_all_updates(tmp_path):
    loss = lambda params, batch, key: sk.mean((batch["x"] * params["w"] + params["b"] - 2 * batch["x"]) ** 2)
    init = lambda key: {"w": jnp.zeros(()), "b": jnp.ones(())}
    task = sk.Task(init, loss, optax.sgd(0.05, momentum=0.5), train_data=line_task().train_data)
    for servers, steps in ((2, 15), (1, 30), (2, 45)):
        train(tmp_path, task, steps=steps, sync={"parameter_server": {**TWO["parameter_server"], "servers": servers}})
        record = json.loads((tmp_path / "run" / "checkpoints" / str(steps) / "record.json").read_text())
        tables = record["record"]["parameter_server"]["servers"]
        rows = [row for table in tables for row in table["parts"]]
        assert len(tables) == servers and {applied for _, _, applied in rows} == {steps}, rows
        assert all(low - 1 + len(above) == steps for _, (low, above), _ in rows), rows
        assert sorted(path for paths, *_ in rows for path in paths) == ["b", "w"]


def test_a_run_tells_who_does_what_and_how_stale_gradients_are(tmp_path):
    result = train(tmp_path, sync=TWO, steps=40, eval={"every_steps": 20}, checkpoint={"every_steps": 10, "keep": 10})
    roles = events(tmp_path, "roles")[0]
    assert (roles["coordinator"], roles["servers"], roles["workers"]) == (0, 1, 2)
    assert {event["worker"] for event in events(tmp_path, "worker_started")} == {0, 1}
    told = [line for line in lines(tmp_path, "metrics.jsonl") if line.get("split") != "eval"]
    assert (
        told[-1]["step"] == 40 and told[-1]["pushes_per_s"] > 0 and told[-1]["staleness_max"] >= told[-1]["staleness"]
    )
    assert {"loss", "examples_per_s", "step_time_s"} <= told[-1].keys()
    assert told[-1]["worker_0_pushes"] + told[-1]["worker_1_pushes"] == 40 and told[-1]["pushes_dropped"] == 0
    assert sum(lines(tmp_path, "counts.jsonl")[-1]["staleness_counts"]) == 40
    saved = sorted(int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved[-1] == 40
    record = json.loads((tmp_path / "run" / "checkpoints" / "40" / "record.json").read_text())
    assert record["record"]["parameter_server"]["servers"][0]["applied"] == 40
    assert [line for line in lines(tmp_path, "metrics.jsonl") if line.get("split") == "eval"][-1]["step"] == 40
    assert result.evaluation is not None
    assert train(tmp_path, sync=TWO, steps=40).already_finished


def test_a_server_that_dies_comes_back_from_the_checkpoint(tmp_path, monkeypatch):
    made, killed = [], []
    transport = parameter_server._transport
    monkeypatch.setattr(parameter_server, "_transport", lambda *args: made.append(transport(*args)) or made[-1])
    due = parameter_server._Watch._due

    def due_and_kill(self, stats):
        due(self, stats)
        if self.run.saved_step and not killed:
            self.run.saves.settle()
            killed.append(self.run.saved_step)
            made[0].servers[0].kill()

    monkeypatch.setattr(parameter_server._Watch, "_due", due_and_kill)
    train(tmp_path, sync=TWO, steps=1000, checkpoint={"every_steps": 20})
    assert killed and events(tmp_path, "server_lost")[0]["server"] == 0
    assert [event["step"] for event in events(tmp_path, "servers_restored")] == killed
    assert [event["step"] for event in events(tmp_path, "rolled_back")] == killed
    told = [line["step"] for line in lines(tmp_path, "metrics.jsonl") if line.get("split") != "eval"]
    assert told == sorted(set(told)) and told[-1] == 1000


def test_a_worker_joins_when_a_file_says_so_and_the_coordinator_saves_every_so_many_seconds(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "workers").write_text("3\n")
    train(tmp_path, sync=TWO, steps=150, checkpoint={"every_seconds": 0.01})
    assert [event["worker"] for event in events(tmp_path, "worker_started")] == [0, 1, 2]
    told = [line for line in lines(tmp_path, "metrics.jsonl") if line.get("split") != "eval"][-1]
    assert told["worker_2_pushes"] > 0 and sum(told[f"worker_{i}_pushes"] for i in range(3)) == 150
    assert len(events(tmp_path, "saved")) >= 2


def test_what_is_not_finite_ends_the_run_with_77(tmp_path):
    task = line_task()
    bad = sk.Task(task.init, lambda p, b, k: task.loss_fn(p, b, k) / 0, task.optimizer, train_data=task.train_data)
    with pytest.raises(sk.SpmdkitError, match=r"loss of batch \d+ is not finite on worker") as error:
        train(tmp_path, bad, sync=TWO)
    assert error.value.exit_code == 77


def changed(**changes):
    """Returns the task of a line with something changed."""
    return dataclasses.replace(line_task(), **changes)


def test_a_last_evaluation_that_is_not_finite_ends_the_run_with_77_and_is_not_saved(tmp_path):
    task = changed(eval_fn=lambda params, batch: {"worst": sk.max(batch["x"][:, 0] / 0)})
    with pytest.raises(NonFiniteError, match="the evaluation of step 20: 'worst' is inf"):
        train(tmp_path, task, sync=TWO, checkpoint={"every_steps": 1000})
    assert not list((tmp_path / "run" / "checkpoints").glob("20"))
    train(tmp_path / "said", task, sync=TWO, on_nonfinite={"evaluation": "continue"})


def test_a_last_update_that_is_not_finite_ends_the_run_with_77_also_where_nothing_is_saved(tmp_path):
    task = changed(optimizer=optax.sgd(lambda count: jnp.where(count == 19, jnp.inf, 0.01)), eval_data=None)
    with pytest.raises(NonFiniteError, match="the state is not finite at step 20: 'params/w'"):
        train(tmp_path, task, sync=TWO, checkpoint=None)


def test_a_run_in_which_every_push_is_left_out_ends_with_77(tmp_path):
    task = changed(train_data={"x": np.full_like(X, np.nan)})
    with pytest.raises(NonFiniteError, match="pushes in a row were skipped after update 0"):
        train(tmp_path, task, sync=TWO, on_nonfinite={"loss": "skip", "gradient": "skip", "max_consecutive": 3})
    assert sum(event["pushes"] for event in events(tmp_path, "skipped")) >= 3


def test_a_metric_that_may_be_not_finite_is_said(tmp_path, capfd):
    own, bad = line_task().loss_fn, lambda batch: {"bad": sk.mean(batch["x"][:, 0] / 0)}
    task = changed(loss_fn=lambda params, batch, key: (own(params, batch, key), bad(batch)), eval_data=None)
    train(tmp_path, task, sync=TWO, on_nonfinite={"metrics": "continue"})
    assert "step 20: 'bad' is nan" in capfd.readouterr().out


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"sync": {"parameter_server": {"workers": 2, "aggregate": 3}}}, "aggregate: is 3 of 2 workers"),
        ({"sync": {"parameter_server": {"worker": 2}}}, "sync.parameter_server.worker: unknown key. Did you mean"),
        (
            {"sync": {"parameter_server": {"servers": 0}}},
            "sync.parameter_server.servers: should be greater than or equal to 1, found 0",
        ),
        ({"sync": {"parameter_server": {"partition": "size"}}}, "should be greedy, round_robin or {rules:"),
        (
            {"sync": {"parameter_server": {"partition": {"rules": [["w", 1]]}}}},
            "gives 'w' to server 1, found servers: 1",
        ),
        (
            {"sync": {"parameter_server": {"overlap": True, "max_staleness": 0}}},
            "overlap: is true, which makes gradients stale",
        ),
        (
            {"sync": {"parameter_server": {"aggregate": 2, "max_staleness": 3}}},
            "max_staleness: has no effect with aggregate",
        ),
        ({"sync": "parameter_server", "reducer": "bfloat16"}, "reducer: keeps or rounds something"),
        ({"sync": "parameter_server", "on_spike": {"action": "skip"}}, "on_spike: looks at the steps of one program"),
        ({"sync": "parameter_server", "on_nonfinite": "rollback"}, "on_nonfinite: is rollback"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:20],
)
def test_what_does_not_go_together_is_refused_with_the_repair(tmp_path, changes, words):
    with pytest.raises(sk.SpmdkitError) as error:
        config_of(tmp_path, **changes)
    assert words in str(error.value) and error.value.exit_code == 78, error.value


def test_a_step_of_an_earlier_spmdkit_says_the_way_on():
    record = {parameter_server.RECORD: {"servers": [{"applied": 4, "settled": [5, []]}]}}
    run = SimpleNamespace(step=4, checkpoints=SimpleNamespace(steps=lambda: [4], read_record=lambda step: record))
    with pytest.raises(sk.SpmdkitError, match=r"earlier spmdkit.*without sync.parameter_server until") as error:
        parameter_server.saved_tables(run)
    assert error.value.exit_code == 79


def test_whoever_needs_the_one_step_says_what_to_do_instead(tmp_path):
    config = config_of(tmp_path, sync=TWO, task=f"{ROOT / 'examples' / 'linear_regression.py'}:task")
    for needs in (sk.build, make_plan, lambda config: verify_config(config, VerifyOptions())):
        with pytest.raises(sk.SpmdkitError, match="the same command with sync=every_step") as error:
            needs(config)
        assert error.value.exit_code == 78


def test_a_step_of_ones_own_and_hooks_are_refused(tmp_path):
    own = sk.Task(
        line_task().init,
        None,
        line_task().optimizer,
        train_data={"x": np.ones((64, 1), np.float32)},
        train_step=lambda s, b: (s, {}),
    )
    with pytest.raises(sk.SpmdkitError, match="the task has a train_step"):
        train(tmp_path, own, sync=TWO)
    task = line_task()
    hooked = sk.Task(task.init, task.loss_fn, task.optimizer, train_data=task.train_data, hooks=[sk.Hook("mine")])
    with pytest.raises(sk.SpmdkitError, match=r"has hooks \(mine\)"):
        train(tmp_path, hooked, sync=TWO)


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_it_says_how_to_install_it(tmp_path):
    with pytest.raises(sk.SpmdkitError, match=r"pip install 'spmdkit\[ray\]'.*transport: threads") as error:
        train(tmp_path, sync="parameter_server")
    assert error.value.exit_code == 78


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_a_task_that_other_processes_cannot_find_is_refused(tmp_path):
    with pytest.raises(sk.SpmdkitError, match="Name it there"):
        train(tmp_path, sync="parameter_server")
