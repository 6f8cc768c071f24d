"""One function makes the state from which a run continues: a checkpoint, else `init_from`, else `init`."""

import dataclasses

import jax
import numpy as np
import pytest

import spmdkit as sk
from spmdkit.checkpoint import Checkpoints
from spmdkit.cli import main
from spmdkit.cluster import detect_cluster, join
from spmdkit.errors import CheckpointError, ConfigError
from spmdkit.program.program import Program
from spmdkit.run.loop import evaluate
from tests.support.small_runs import config_of, events, line_task, train

st = pytest.importorskip("safetensors.numpy")

W = np.full((1, 1), 1.75, np.float32)


@pytest.fixture
def weights(tmp_path):
    st.save_file({"layer.weight": W, "bias": np.zeros(2)}, tmp_path / "m.safetensors")
    return {"file": str(tmp_path / "m.safetensors"), "names": [("layer.weight", "w"), ("bias", None)]}


def test_a_run_starts_from_weights_and_restarts_without_them(tmp_path, weights, capsys):
    before = train(tmp_path, init_from=weights, steps=10)
    shown = capsys.readouterr().out
    assert f"init_from: 1 of 1 leaves (4 B) from {weights['file']}" in shown
    assert events(tmp_path, "started")[0]["step"] == 0
    (tmp_path / "m.safetensors").unlink()
    after = train(tmp_path, init_from=weights)
    assert "init_from" not in capsys.readouterr().out
    assert events(tmp_path, "restored")[0]["step"] == 10
    whole = train(tmp_path / "other", dataclasses.replace(line_task(), init=lambda key: {"w": W}))
    assert np.array_equal(after.state.params["w"], whole.state.params["w"])
    assert abs(before.state.params["w"] - 2) < abs(W - 2)


def test_a_rollback_to_step_0_is_one_to_the_weights(tmp_path, weights):
    back, seen = iter([sk.Rollback(to_step=0)]), []

    def after_step(run, step, state, metrics):
        return next(back, None) if step == 7 else None

    def before_step(run, step, state):
        if step == 1:
            seen.append(jax.device_get(state.params["w"]))

    hooks = [sk.Hook("back", after_step=after_step, before_step=before_step)]
    train(tmp_path, dataclasses.replace(line_task(), hooks=hooks), init_from=weights)
    assert len(seen) == 2 and np.array_equal(seen, [W, W])


def test_the_initial_state_is_evaluated(tmp_path, weights):
    config = config_of(tmp_path, init_from=weights)
    cluster = join(detect_cluster({}), config.devices)
    step, values = evaluate(config, cluster, line_task(), initial=True)
    x = line_task().eval_data["x"]
    assert step == 0 and values["loss"] == pytest.approx(np.mean((0.25 * x) ** 2), rel=1e-5)
    with pytest.raises(CheckpointError, match="spmdkit eval --initial"):
        evaluate(config, cluster, line_task())


def test_servers_start_from_the_weights(tmp_path, weights):
    result = train(
        tmp_path,
        init_from=weights,
        steps=3,
        learning_rate=1e-7,
        optimizer={"name": "sgd"},
        sync={"parameter_server": {"servers": 1, "workers": 1, "transport": "threads"}},
    )
    assert result.state.params["w"] == pytest.approx(W, abs=1e-5)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    settings = {
        "ema": 0.9,
        "checkpoint": {"every_steps": 5, "best": {"metric": "loss", "mode": "max"}},
        "eval": {"every_steps": 5},
    }
    train(folder, **settings)
    config = config_of(folder, devices="cpu:4", mesh={"fsdp": 4}, batch_size=32, **settings)
    return folder, Program(config, line_task(), jax.devices()[:4])


def test_parameters_are_loaded_on_the_host(run):
    folder, program = run
    newest = sk.load_params(folder / "run")
    assert isinstance(newest["w"], np.ndarray) and np.array_equal(newest["w"], program.restore().params["w"])
    assert np.array_equal(sk.load_params(f"{folder}/run@10", what="ema")["w"], program.restore(10, "ema")["w"])
    assert np.array_equal(sk.load_params(f"{folder}/run@best")["w"], program.restore("best", what="params")["w"])
    with pytest.raises(ConfigError, match=r"load_params: unknown 'parms'.*Did you mean 'params'"):
        sk.load_params(folder / "run", what="parms")
    with pytest.raises(ConfigError, match="not a directory"):
        sk.load_params(folder / "nowhere")
    with pytest.raises(CheckpointError, match="has steps"):
        sk.load_params(f"{folder}/run@7")


def test_the_best_step_is_exported(run, tmp_path, capsys):
    folder, program = run
    out = str(tmp_path / "model.safetensors")
    assert main(["checkpoint", "export", f"{folder}/run", out, "--best", "--what", "params,ema"]) == 0
    assert capsys.readouterr().out.strip() == out
    best, found = program.restore("best"), st.load_file(out)
    assert best.step != program.restore().step
    assert found == {"params/w": best.params["w"], "ema/w": best.ema["w"]}


def test_a_program_restores_onto_its_mesh(run):
    _, program = run
    state = program.restore(10)
    assert state.step == 10 and jax.tree.map(lambda x: x.sharding, state) == program.state_sharding
    part = program.restore(10, what="opt_state")
    assert jax.tree.all(jax.tree.map(np.array_equal, part, state.opt_state))
    assert np.isfinite(program.eval(state)["loss"])
    with pytest.raises(ConfigError, match=r"what='model_state', and the state of this program has no model_state"):
        program.restore(what="model_state")
    with pytest.raises(ConfigError, match="Did you mean 'params'"):
        program.restore(what="parms")


@pytest.mark.parametrize("mesh", [{"data": 2}, {"fsdp": 2}])
def test_a_run_starts_from_another_run(run, tmp_path, mesh):
    folder, _ = run
    still = {"steps": 1, "optimizer": {"name": "sgd"}, "learning_rate": 0.0}
    result = train(tmp_path, init_from=f"{folder}/run@10", mesh=mesh, **still)
    assert np.array_equal(result.state.params["w"], sk.load_params(f"{folder}/run@10")["w"])
    assert f"{folder}/run@10" in Checkpoints(tmp_path / "run/checkpoints").read_record(1)["config"]
