"""Optimizers that train other parameters than they evaluate: schedule-free ones, lookahead, and those of the user."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

import spmdkit as sk
from spmdkit.cli import main
from spmdkit.errors import ConfigError, UserCodeError
from tests.support.fixed_numbers import normal
from tests.support.natural_runs import BATCH, STEPS, leaf_errors, program_of

random = np.random.default_rng(0)
DATA = {
    "x": random.normal(size=(BATCH * STEPS, 6)).astype(np.float32),
    "y": random.normal(size=(BATCH * STEPS, 4)).astype(np.float32),
}
MESHES = {"one": {}, "data 4": {"data": 4}, "fsdp 4": {"fsdp": 4}, "data 2 x fsdp 2": {"data": 2, "fsdp": 2}}


def init(key):
    return {"w": normal(0, 6, 4) / 2, "b": jnp.zeros(4)}


def losses(params, batch):
    return ((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2).mean(-1)


def loss_fn(params, batch, key):
    return sk.mean(losses(params, batch))


def pair(key):
    return optax.LookaheadParams.init_synced(init(key))


def only_weights(params):
    return {name: name == "w" for name in params}


free = optax.contrib.schedule_free_sgd(0.3)
lookahead = optax.lookahead(optax.adam(0.1), sync_period=2, slow_step_size=0.5)
OPTIMIZERS = {
    "schedule_free": (free, lambda state, y: optax.contrib.schedule_free_eval_params(state, y)),
    "in a chain": (optax.chain(optax.clip(0.5), free), lambda s, y: optax.contrib.schedule_free_eval_params(s[1], y)),
    "of weights": (
        optax.masked(free, only_weights),
        lambda s, y: (
            y
            | {"w": optax.contrib.schedule_free_eval_params(s.inner_state, {"w": y["w"], "b": optax.MaskedNode()})["w"]}
        ),
    ),
    "lookahead": (lookahead, lambda state, params: params.slow),
    "of the user": (optax.adam(0.1), lambda state, params: jax.tree.map(lambda p: 0.5 * p, params)),
}


@functools.cache
def by_hand(name):
    """Returns (parameters after the last step, the parameters to evaluate, their loss over all rows) in plain JAX."""
    optimizer, evaluated = OPTIMIZERS[name]

    @jax.jit
    def start():
        params = (pair if name == "lookahead" else init)(jax.random.key(0))
        return params, optimizer.init(params)

    @jax.jit
    def stepped(params, state, batch):
        of_loss = params.fast if name == "lookahead" else params
        updates, state = optimizer.update(jax.grad(lambda p: losses(p, batch).mean())(of_loss), state, params)
        params = optax.apply_updates(params, updates)
        chosen = evaluated(state, params)
        return params, state, chosen, losses(chosen, DATA).mean()

    params, state = start()
    for step in range(STEPS):
        batch = jax.tree.map(lambda x: x[step * BATCH : (step + 1) * BATCH], DATA)  # noqa: B023 - used immediately
        params, state, chosen, loss = stepped(params, state, batch)
    return params, chosen, float(loss)


def task_of(name, **more):
    of_user = {"eval_params": lambda state: jax.tree.map(lambda p: 0.5 * p, state.params)}
    start = pair if name == "lookahead" else init
    data = {"train_data": DATA, "eval_data": DATA}
    return sk.Task(start, loss_fn, OPTIMIZERS[name][0], **data, **(of_user if name == "of the user" else {}), **more)


def own_step(state, batch):
    """The step of lookahead as optax documents it."""
    (loss, _), grads = sk.value_and_grad(loss_fn)(state.params.fast, batch, state.key)
    return state.apply_gradients(grads), {"loss": loss}


def trained(program):
    state = program.init()
    for _, batch in program.batches():
        state, _ = program.step(state, batch)
    return state


@pytest.mark.forms(4)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", [*OPTIMIZERS, "lookahead in a step"])
def test_the_right_parameters_are_evaluated(name, mesh):
    own = {"train_step": own_step} if name.endswith("step") else {}
    name = name.removesuffix(" in a step")
    program = program_of(task_of(name, **own), MESHES[mesh])
    state, (params, evaluated, loss) = trained(program), by_hand(name)
    assert max(leaf_errors(jax.device_get(state.params), jax.device_get(params)).values()) <= 1e-5
    found = jax.device_get(program.eval_params(state))
    assert max(leaf_errors(found, jax.device_get(evaluated)).values()) <= 1e-5
    assert program.eval(state)["loss"] == pytest.approx(loss, rel=1e-5)


def test_groups_evaluate_the_mean(tmp_path):
    program = program_of(task_of("schedule_free"), {"data": 4}, sync={"local_sgd": {"every": 3}})
    state = trained(program)
    one = jax.tree.map(lambda x: x.mean(0), jax.device_get((state.params, state.opt_state.z)))
    expected = jax.tree.map(lambda y, z: (y - 0.1 * z) / 0.9, *one)
    assert max(leaf_errors(jax.device_get(program.eval_params(state)), expected).values()) <= 1e-5


def test_optimizers_that_evaluate_what_they_train_are_unchanged():
    program = program_of(sk.Task(init, loss_fn, optax.adam(0.1), train_data=DATA))
    assert not program.has_eval_params
    assert "evaluation" not in program.explain()
    assert "evaluation    of the parameters that optax.lookahead defines" in program_of(task_of("lookahead")).explain()


def test_mistakes_are_reported():
    make = lambda optimizer, **more: program_of(sk.Task(init, loss_fn, optimizer, train_data=DATA, **more))
    with pytest.raises(ConfigError, match=r"Return optax\.LookaheadParams\.init_synced\(params\) from init"):
        make(lookahead)
    with pytest.raises(ConfigError, match=r"Task.eval_params returned TrainState"):
        make(optax.sgd(0.1), eval_params=lambda state: state)
    with pytest.raises(ConfigError, match=r"eval_params is defined as .* and is called as eval_params\(state\)"):
        make(optax.sgd(0.1), eval_params=lambda state, params: params)
    with pytest.raises(UserCodeError, match=r"Task\.eval_params"):
        make(optax.sgd(0.1), eval_params=lambda state: state.params["missing"])


TASK = """
import spmdkit as sk
from tests.natural import test_eval_params as made

task = made.task_of("{name}")
"""


@pytest.mark.parametrize("name", ["schedule_free", "of the user"])
def test_a_run_selects_and_exports_them(tmp_path, name, capsys):
    (tmp_path / "t.py").write_text(TASK.format(name=name))
    (tmp_path / "t.yaml").write_text(
        f"task: t.py:task\nrun_dir: {tmp_path}/run\nbatch_size: {BATCH}\nsteps: {STEPS}\nmesh: {{data: 2}}\n"
        "data: {shuffle: false}\ndevices: cpu:2\neval: {every_steps: 1}\ncheckpoint: {every_steps: 1, "
        "best: {metric: loss, mode: min}}\n"
    )
    assert main(["train", f"{tmp_path}/t.yaml"]) == 0
    _, evaluated, loss = by_hand(name)
    params, _, _ = by_hand(name)
    for what, expected in (("params", evaluated), ("training", params)):
        out = tmp_path / f"{what}.safetensors"
        assert main(["checkpoint", "export", f"{tmp_path}/run", str(out), "--what", what]) == 0
        assert max(leaf_errors(load_file(out), jax.device_get(expected)).values()) <= 1e-5
    capsys.readouterr()
    assert main(["eval", f"{tmp_path}/t.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(loss, rel=1e-5)
