"""A run continues with another schedule, average, precision, chain or head: unchanged leaves keep their values."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.errors import CheckpointError, ConfigError
from tests.support import small_runs

X = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
SCHEDULE = optax.linear_schedule(0.1, 0.0, 8)


def train(folder, optimizer, steps, head=False, reset=(), **changes):
    def init(key):
        params = {"w": jnp.ones(3)}
        return {**params, "head": {"v": jnp.full(3, 2.0)}} if head else params

    def loss_fn(params, batch, key):
        extra = (batch @ params["head"]["v"]) ** 2 if head else 0.0
        return sk.mean((batch @ params["w"] - 1) ** 2 + extra)

    task = sk.Task(init, loss_fn, optimizer, X)
    log = {"every_steps": 1, "progress": "plain"}
    config = small_runs.config_of(folder, steps=steps, batch_size=16, checkpoint={}, log=log, **changes)
    return sk.train(config, task=task, reset=reset, allow_change=["task"]).state


def scale_of(state):
    (found,) = [x for x in jax.tree.leaves(state, is_leaf=is_schedule) if is_schedule(x)]
    return int(found.count)


def is_schedule(x):
    return isinstance(x, optax.ScaleByScheduleState)


def test_schedule_for_a_number_and_back(tmp_path, capfd):
    train(tmp_path, optax.adamw(0.1), 3)
    state = train(tmp_path, optax.adamw(SCHEDULE), 5)
    assert scale_of(state.opt_state) == 5 and int(state.opt_state[0].count) == 5
    assert "the count of a schedule, is set to 3" in capfd.readouterr().out
    assert int(train(tmp_path, optax.adamw(0.1), 6).opt_state[0].count) == 6


def test_config_without_the_average_evaluates_a_run_that_has_it(tmp_path):
    state = train(tmp_path, optax.sgd(0.1), 3, ema=0.5)
    task = sk.Task(lambda key: {"w": jnp.ones(3)}, lambda p, batch, key: sk.mean(batch @ p["w"]), optax.sgd(0.1), X)
    program = sk.build(small_runs.config_of(tmp_path, steps=3, batch_size=16, checkpoint={}), task=task)
    np.testing.assert_array_equal(program.restore(3).params["w"], state.params["w"])
    assert program.restore(3).ema is None


def test_average_on_and_off(tmp_path):
    before = train(tmp_path, optax.sgd(0.1), 3)
    state = train(tmp_path, optax.sgd(0.0), 4, ema=0.5)
    np.testing.assert_array_equal(state.ema["w"], before.params["w"])
    assert train(tmp_path, optax.sgd(0.1), 5).ema is None


def test_clip_in_the_chain_keeps_the_moments(tmp_path):
    train(tmp_path / "a", optax.adam(SCHEDULE), 5)
    train(tmp_path / "b", optax.adam(SCHEDULE), 3)
    chain = optax.chain(optax.clip_by_global_norm(1e6), optax.adam(SCHEDULE))
    changed, plain = train(tmp_path / "b", chain, 5), train(tmp_path / "a", optax.adam(SCHEDULE), 5)
    np.testing.assert_allclose(changed.params["w"], plain.params["w"], rtol=1e-6)


def test_precision_of_parameters_is_converted(tmp_path):
    train(tmp_path, optax.adam(0.1), 3)
    state = train(tmp_path, optax.adam(0.1), 4, precision={"params": "bfloat16"})
    assert state.params["w"].dtype == jnp.bfloat16 and int(state.opt_state[0].count) == 4


def test_new_head_is_named_and_reset(tmp_path):
    before = train(tmp_path, optax.adam(0.0), 3)
    with pytest.raises(CheckpointError, match=r"params/head/v: not in the checkpoint(.|\n)*train --reset 'PATTERN'"):
        train(tmp_path, optax.adam(0.0), 4, head=True)
    with pytest.raises(ConfigError, match=r"--reset tail/\.\*: no leaf matches.*: w, head/v"):
        train(tmp_path, optax.adam(0.0), 4, head=True, reset=["tail/.*"])
    state = train(tmp_path, optax.adam(0.0), 4, head=True, reset=["head/.*"])
    np.testing.assert_array_equal(state.params["head"]["v"], 2.0)
    np.testing.assert_array_equal(state.params["w"], before.params["w"])
    assert float(state.opt_state[0].mu["w"][0]) != 0 and int(state.opt_state[0].count) == 4
    state = train(tmp_path, optax.adam(0.0), 5, reset=["head/.*"])  # and without it again


def test_optimizer_is_reset_once(tmp_path):
    before = train(tmp_path, optax.sgd(0.1, momentum=0.9), 3)
    with pytest.raises(CheckpointError, match="train --reset opt_state"):
        train(tmp_path, optax.adam(SCHEDULE), 4)
    state = train(tmp_path, optax.adam(SCHEDULE), 4, reset=["opt_state"])
    assert (int(state.opt_state[0].count), scale_of(state.opt_state)) == (1, 4)
    assert not np.array_equal(state.params["w"], before.params["w"])
    state = train(tmp_path, optax.adam(SCHEDULE), 6, reset=["opt_state"])  # a restart of the same command
    assert (int(state.opt_state[0].count), scale_of(state.opt_state)) == (3, 6)


def test_average_is_reset_to_the_parameters_of_the_start(tmp_path):
    train(tmp_path, optax.sgd(0.1), 3, ema=0.5)
    state = train(tmp_path, optax.sgd(0.0), 4, ema=0.5, reset=["ema"])
    np.testing.assert_allclose(state.ema["w"], state.params["w"])


FROZEN = {"head": {"train_only": ["w"]}, "w": {"groups": [{"match": "w", "frozen": True}]}}


@pytest.mark.parametrize(
    ("frozen", "before", "mesh"), [("head", True, {"fsdp": 2}), ("w", False, {"data": 2}), ("w", True, {"data": 2})]
)
def test_parameters_are_frozen_or_trained_after_a_reset_of_the_optimizer(tmp_path, frozen, before, mesh):
    settings = [FROZEN[frozen], {}] if before else [{}, FROZEN[frozen]]
    layout = {"layout": {"min_shard_bytes": 1}} if "fsdp" in mesh else {}
    start = train(tmp_path, optax.adam(0.1), 3, head=True, mesh=mesh, **layout, **settings[0])
    again = lambda **more: train(tmp_path, optax.adam(0.1), 4, head=True, mesh=mesh, **layout, **settings[1], **more)
    with pytest.raises(CheckpointError, match=r"2 leaves differ(.|\n)*frozen parameters: train --reset opt_state\. Or"):
        again()
    state = again(reset=["opt_state"])
    values = {
        "w": (start.params["w"], state.params["w"]),
        "head": (start.params["head"]["v"], state.params["head"]["v"]),
    }
    moved = {name for name, (old, new) in values.items() if not np.array_equal(old, new)}
    assert moved == ({"w", "head"} if before else {"w", "head"} - {frozen})
    assert int(state.opt_state[0].count) == 1
