"""A script that keeps its training loop (`sk.start_run`) has checkpoints, signals, metrics and a plan."""

from __future__ import annotations

import difflib
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import spmdkit as sk
from spmdkit.errors import ConfigError, NonFiniteError
from spmdkit.metrics import read_lines
from spmdkit.run import script
from tests.support.forks import REPOSITORY, Forks, Process

SCRIPTS = REPOSITORY / "examples" / "scripts"
RUNS = {"flax_epochs": ("flax", 32), "gpt_sharded": ("gpt", 30), "equinox_tutorial": ("rnn", 30)}
QUIET = {"log": {"progress": "off", "every_steps": 4}}

FAULT = """
import json, os, runpy, signal, sys, time
import jax, numpy as np
import spmdkit as sk
from spmdkit.run import script

name, number, step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
jax.config.update("jax_num_cpu_devices", 4)
start, runs = script.start_run, []

def start_run(*args, **settings):
    def fire(run, at, *_):
        if at == step:
            os.kill(os.getpid(), number)
            while run.signals.requested is None:  # a separate thread reads the signal
                time.sleep(0.01)

    runs.append(start(*args, **settings, hooks=[sk.Hook("fault", order=2000, after_step=fire)]))
    return runs[-1]

sk.start_run = start_run
runpy.run_path(name, run_name="__main__")
np.savez("end.npz", *[np.asarray(x) for x in jax.tree.leaves(runs[-1].state) if hasattr(x, "dtype")])
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hook = sys.excepthook
    yield
    sys.excepthook = hook
    for run in list(script._open):
        run.__exit__(ValueError, ValueError("left open"), None)


@pytest.fixture
def updated():
    before = {}

    def update(name, value):
        before.setdefault(name, getattr(jax.config, name))
        jax.config.update(name, value)

    yield update
    for name, value in before.items():
        jax.config.update(name, "allow" if value is None else value)


@pytest.mark.parametrize("name", RUNS)
def test_a_script_changes_at_most_ten_lines(name):
    before, after = (_lines(SCRIPTS / f"{name}{suffix}.py") for suffix in ("", "_run"))
    changes = [c for c in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes() if c[0] != "equal"]
    assert 0 < sum(max(i2 - i1, j2 - j1) for _, i1, i2, j1, j2 in changes) <= 10


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line.strip()]


def _fork(forks: Forks, folder: Path, name: str, number: int = 0, step: int = -1) -> tuple[int, str]:
    (folder / "fault.py").write_text(FAULT)
    arguments = ["fault.py", str(SCRIPTS / f"{name}_run.py"), str(number), str(step)]
    (ended,) = forks.run([Process(arguments, folder)])
    return ended.code, ended.output


def _end(folder: Path) -> list[np.ndarray]:
    with np.load(folder / "end.npz") as file:
        return [file[name] for name in file.files]


@pytest.mark.processes
@pytest.mark.parametrize("name", ["flax_epochs", *(pytest.param(n, marks=pytest.mark.slow) for n in list(RUNS)[1:])])
def test_a_killed_script_continues_bitwise(name, forks, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    assert _fork(forks, whole, name)[0] == 0
    assert _fork(forks, killed, name, 9, 18)[0] == -9
    code, output = _fork(forks, killed, name)
    directory, steps = RUNS[name]
    assert code == 0, output
    assert "continuing at step" in output
    for x, y in zip(_end(whole), _end(killed), strict=True):
        np.testing.assert_array_equal(x, y)
    run = killed / "runs" / directory
    losses = {line["step"]: line["loss"] for line in read_lines(run / "metrics.jsonl")}
    assert losses == {line["step"]: line["loss"] for line in read_lines(whole / "runs" / directory / "metrics.jsonl")}
    assert max(losses) == steps
    plan = json.loads((run / "plan.json").read_text())
    assert plan["flops"] > 0 and plan["fits"]
    assert (run / "report.html").exists()


JOIN = """
import jax, numpy as np
import spmdkit as sk
sk.join_processes(devices="cpu:4")
from jax.sharding import Mesh, NamedSharding, PartitionSpec

mesh = Mesh(np.array(jax.devices()), ("dp",))
put = lambda x, spec: jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda i: x[i])
step = jax.jit(lambda w, x: (w * 0.9 + x.mean(0), (w**2).sum()))
run = sk.start_run(step, put(np.ones(8, np.float32), PartitionSpec("dp")), steps=6, checkpoint={"every_steps": 2})
for x in run.batches(np.random.default_rng(0).normal(size=(9, 4, 8)).astype(np.float32)):
    loss = run.step(run.state, put(x, PartitionSpec("dp")))[1]
run.close()
print("processes", jax.process_count(), "mesh", mesh.size, "loss", float(loss))
"""


@pytest.mark.processes
def test_the_processes_of_a_launcher_are_one_run(forks, tmp_path):
    (tmp_path / "mine.py").write_text(JOIN)
    ended = forks.together([Process(["mine.py"], tmp_path)] * 2)
    assert [e.code for e in ended] == [0, 0], ended
    lines = [next(line for line in e.output.splitlines() if line.startswith("processes 2 mesh 4")) for e in ended]
    assert lines[0] == lines[1]
    assert {e["step"] for e in read_lines(tmp_path / "runs/mine/events.jsonl") if e["event"] == "saved"} == {2, 4, 6}
    assert (tmp_path / "runs/mine/plan.json").exists()


@pytest.mark.processes
def test_a_signal_saves_and_exits_with_42(forks, tmp_path):
    code, output = _fork(forks, tmp_path, "gpt_sharded", 15, 17)
    assert code == 42, output
    assert "Traceback" not in output and "saved. Start the same command again" in output
    saved = [e["step"] for e in read_lines(tmp_path / "runs/gpt/events.jsonl") if e["event"] == "saved"]
    assert saved[-1] == 18  # the hook runs after the decision of step 17


# ---- in this process

TX = optax.sgd(0.1, momentum=0.9)


@jax.jit
def train_step(state, x):
    loss, grads = jax.value_and_grad(lambda w: ((x @ w - x.sum(-1)) ** 2).mean())(state["params"])
    updates, opt_state = TX.update(grads, state["opt_state"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state, "count": state["count"] + 1}, {
        "loss": loss,
        "x": {"mean": x.mean()},
    }


def first_state(devices=1):
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:devices]), ("dp",)), PartitionSpec("dp"))
    params = jax.device_put(jnp.linspace(-1, 1, 8), sharding)
    return {"params": params, "opt_state": TX.init(params), "count": 0}


def rows(num=100):
    rng = np.random.default_rng(0)
    return (rng.normal(size=(4, 8)).astype(np.float32) for _ in range(num))


def start(state=None, step=train_step, steps=6, **settings):
    return sk.start_run(
        step, first_state() if state is None else state, steps=steps, run_dir="run", **{**QUIET, **settings}
    )


def train(run, num=100):
    state = run.state
    for x in run.batches(rows(num)):
        state, _ = run.step(state, x)
    run.close()
    return state


def test_a_state_is_restored_on_the_shardings_of_the_script():
    expected = first_state()
    for x in rows(6):
        expected, _ = train_step(expected, x)
    with start(first_state(4), checkpoint={"every_steps": 2}) as run:
        for x in run.batches(rows(3)):
            state, _ = run.step(run.state, x)
    assert state["params"].sharding.mesh.size == 4
    second = start(first_state(2))
    restored = second.state
    assert second.start_step == 3 and restored["count"] == 3 and type(restored["count"]) is int
    assert restored["params"].sharding == first_state(2)["params"].sharding
    np.testing.assert_array_equal(restored["params"], state["params"])
    final = train(second)
    np.testing.assert_allclose(final["params"], expected["params"], rtol=1e-6)
    assert int(final["count"]) == 6


def test_arrays_on_no_device_stay_so():
    state = {"params": jnp.ones(8), "opt_state": TX.init(jnp.ones(8)), "count": np.int32(0), "key": jax.random.key(1)}
    step = jax.jit(
        lambda state, x: (
            state
            | train_step({**state, "key": None} and {k: state[k] for k in ("params", "opt_state", "count")}, x)[0],
            x.sum(),
        )
    )
    train(start(state, step, steps=2), 2)
    run = start(state, step, steps=3)
    assert not run.state["params"].committed
    assert isinstance(run.state["count"], np.int32) and run.state["count"] == 2
    assert jnp.array_equal(jax.random.key_data(run.state["key"]), jax.random.key_data(state["key"]))
    train(run)


def test_metrics_are_named_and_written():
    train(start(), 6)
    lines = read_lines(Path("run/metrics.jsonl"))
    assert [line["step"] for line in lines] == [1, 4, 6]
    assert {"loss", "x/mean"} <= lines[0].keys()
    assert "examples_per_s" in lines[1]


def test_unnamed_scalars_and_other_orders_of_results():
    def step(w, x):
        w, loss = w * 0.5, (w * x).sum()
        return loss, {"norm": jnp.linalg.norm(w)}, x[None], w, loss + 1

    run = start(jnp.ones(3), jax.jit(step), steps=2)
    loss, *_, w, _ = run.step(run.state, np.ones(3, np.float32))
    assert float(loss) == 3 and run.state is w
    run.step(w, np.ones(3, np.float32))
    run.close()
    line = read_lines(Path("run/metrics.jsonl"))[0]
    assert line.items() >= {"loss": 3.0, "result_2": 4.0}.items() and "norm" in line


def test_a_hook_ends_a_script_and_replaces_its_state():
    def after_step(run, step, state, metrics):
        zero = state.replace(params=state.params * 0)
        return sk.ReplaceState(zero) if step == 1 else sk.Stop(why="enough") if step == 3 else None

    run = start(hooks=[sk.Hook("mine", after_step=after_step)])
    state, _ = run.step(run.state, next(rows()))
    assert not np.any(state["params"]) and run.state["params"] is state["params"]
    for x in run.batches(rows()):
        state, _ = run.step(state, x)
    assert run.is_done
    with pytest.raises(ConfigError, match="ended at step 3 of 6"):
        run.step(state, next(rows()))
    run.close()
    assert read_lines(Path("run/events.jsonl"))[-1]["why"] == "enough"
    assert train(start())["count"] == 3, "a run that a hook ended stays ended"


def test_a_loss_that_is_not_finite_ends_a_script():
    run = start()
    state, _ = run.step(run.state, np.ones((4, 8), np.float32))
    with pytest.raises(NonFiniteError, match="not finite at step 4"):
        for _ in range(3):
            state, _ = run.step(state, np.full((4, 8), np.inf, np.float32))
    assert read_lines(Path("run/events.jsonl"))[-1]["code"] == 77


@pytest.mark.parametrize(
    "setting", [("jax_transfer_guard", "disallow"), ("jax_debug_nans", True), ("jax_disable_jit", True)], ids=str
)
def test_settings_of_jax_apply_to_the_step_alone(setting, updated):
    put = lambda x: jax.device_put(x, jax.devices()[0])
    state = jax.tree.map(put, first_state())
    expected = train_step(train_step(state, put(np.ones((4, 8), np.float32)))[0], put(np.ones((4, 8), np.float32)))[0]
    updated(*setting)
    run = start(state, steps=2, checkpoint={"every_steps": 1})
    for _ in range(2):
        run.step(run.state, put(np.ones((4, 8), np.float32)))
    run.close()
    restored = start(state, steps=2).state
    updated("jax_transfer_guard", "allow")
    np.testing.assert_allclose(restored["params"], expected["params"], rtol=1e-6)


def test_an_error_of_a_script_saves_its_last_step():
    with pytest.raises(ValueError, match="mine"), start() as run:
        run.step(run.state, next(rows()))
        raise ValueError("mine")
    events = [event["event"] for event in read_lines(Path("run/events.jsonl"))]
    assert events[-2:] == ["emergency_saved", "fault"]
    assert train(start())["count"] == 6


def test_a_script_that_does_not_close_its_run_continues_from_its_checkpoint(capfd):
    run = start(checkpoint={"every_steps": 2})
    for x in rows(3):
        run.step(run.state, x)
    script._close_at_exit()
    assert "without run.close()" in capfd.readouterr().err
    assert start().start_step == 2


BAD = {
    "setting": (lambda: start(mesh={"data": 2}), "mesh has no effect"),
    "hook": (lambda: start(hooks=["reduce_on_plateau"]), "the hook reduce_on_plateau has no effect"),
    "policy": (lambda: start(on_nonfinite="skip"), "on_nonfinite.loss needs a step"),
    "state": (lambda: start({"f": jax.nn.relu}), "the state holds no arrays"),
    "results": (lambda: train(start(step=lambda state, x: (state["params"], 1.0))), "none of them has the structure"),
    "two": (lambda: train(start(step=lambda state, x: (state, state))), "2 of them have the structure"),
    "rollback": (lambda: train(start(hooks=[sk.Hook("h", after_step=lambda *_: sk.Rollback())])), "sk.Rollback in a"),
    "open": (lambda: start() and start(), "another run of this process is open"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_message(name):
    make, text = BAD[name]
    with pytest.raises(ConfigError) as error:
        make()
    assert text in str(error.value)
