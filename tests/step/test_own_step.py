"""A `train_step` of the user's own: what the program owns whatever it returns, and settings that it leaves out."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.errors import ConfigError
from tests.support.natural_runs import BATCH, STEPS, program_of

DATA = np.random.default_rng(0).normal(size=(BATCH * STEPS, 4)).astype(np.float32)


def init(key):
    return {"w": jnp.zeros(4)}


def loss_of(params, batch):
    return jnp.mean((batch @ params["w"] - 1) ** 2)


def forgets_the_step(state, batch):
    """As one writes it who updates by hand: no `step + 1`."""
    loss, grads = jax.value_and_grad(loss_of)(state.params, batch)
    params = jax.tree.map(lambda p, g: p - 0.1 * g, state.params, grads)
    return state.replace(params=params), {"loss": loss, "drawn": jax.random.uniform(state.key)}


def updates_often(state, batch):
    """Four updates, as in PPO, each from a key of its own."""
    drawn = []
    for _ in range(4):
        drawn.append(jax.random.uniform(state.key))
        state = state.apply_gradients(jax.grad(loss_of)(state.params, batch))
    return state, {f"drawn{i}": x for i, x in enumerate(drawn)}


def sets_it_back(state, batch):
    return state.replace(step=jnp.int32(7), rng=jnp.zeros_like(state.rng)), {"drawn": jax.random.uniform(state.key)}


def task(train_step, **more):
    return sk.Task(init, train_step=train_step, optimizer=optax.sgd(0.1), train_data=DATA, **more)


@pytest.mark.forms(3)
@pytest.mark.parametrize("train_step", [forgets_the_step, updates_often, sets_it_back])
@pytest.mark.parametrize("settings", [{"mesh": {"data": 4}}, {"mesh": {}, "hooked": True}], ids=["data 4", "hook"])
def test_program_counts_steps_and_derives_keys(train_step, settings):
    seen = lambda old, new, metrics: (new, metrics | {"counted": new.step - old.step})
    hooks = [sk.Hook("counts", in_step=seen)] if settings.get("hooked") else []
    program = program_of(task(train_step, hooks=hooks), settings["mesh"])
    state, drawn = program.init(), []
    root = np.asarray(state.rng)
    for step, batch in program.batches():
        state, metrics = program.step(state, batch)
        assert int(state.step) == step and (np.asarray(state.rng) == root).all()
        assert int(metrics.pop("counted", 1)) == 1
        drawn += [float(x) for name, x in metrics.items() if name.startswith("drawn")]
    assert len(set(drawn)) == len(drawn) == STEPS * (4 if train_step is updates_often else 1)


def test_groups_that_train_alone_count_too():
    program = program_of(task(forgets_the_step), {"data": 4}, sync={"local_sgd": {"every": 1}})
    state = program.init()
    for step, batch in program.batches():
        state, _ = program.step(state, batch)
        assert int(state.step) == step


def averages_itself(state, batch):
    ema = jax.tree.map(lambda e, p: 0.5 * e + 0.5 * p, state.ema, state.params)
    return state.replace(ema=ema), {"loss": loss_of(state.params, batch)}


def clips_by_the_optimizer(state, batch):
    loss, grads = jax.value_and_grad(loss_of)(state.params, batch)
    updates, opt_state = state.optimizer.update(grads, state.opt_state, state.params)
    return state.replace(params=optax.apply_updates(state.params, updates), opt_state=opt_state), {"loss": loss}


def wraps(state, batch):
    loss, grads = jax.value_and_grad(sk.remat(loss_of))(state.params, batch)
    return state.apply_gradients(grads), {"loss": loss}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ema": 0.9}, r"ema: 0.9 has no effect.*state.apply_gradients"),
        ({"clip_norm": 1.0}, r"clip_norm: 1.0 has no effect.*optax.clip_by_global_norm"),
        ({"precision": "bfloat16"}, r"precision.compute: bfloat16 has no effect.*precision: float32"),
        ({"remat": "full"}, r"remat: full has no effect.*sk.remat"),
    ],
    ids=lambda x: next(iter(reversed(x))) if isinstance(x, dict) else "",
)
def test_what_a_step_leaves_out_is_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        program_of(task(forgets_the_step), **{"mesh": {}} | settings)


def reduces_itself(state, batch):
    loss, grads = jax.value_and_grad(loss_of)(state.params, batch)
    return state.apply_gradients(sk.pmean(grads)), {"loss": sk.pmean(loss)}


@pytest.mark.parametrize("reducer", ["ordered", "int8"])
def test_reducer_is_rejected_if_step_sums_gradients(reducer):
    """One that keeps an error is refused as one that keeps nothing is: none of them sees what `sk.pmean` adds."""
    with pytest.raises(
        ConfigError, match=r"has no effect: train_step never calls sk.value_and_grad.*sk.pmean\(grads\)"
    ):
        program_of(task(reduces_itself, view="replica"), {"data": 4}, reducer=reducer)
    program_of(task(reduces_itself, view="replica"), {"data": 4})


@pytest.mark.parametrize(
    ("train_step", "settings"),
    [
        (averages_itself, {"ema": 0.9}),
        (clips_by_the_optimizer, {"clip_norm": 1.0}),
        (wraps, {"remat": "full", "ema": 0.9}),
    ],
)
def test_custom_computation_is_not_rejected(train_step, settings):
    program = program_of(task(train_step), {}, **settings)
    state = program.init()
    for _, batch in program.batches(stop=1):
        state, metrics = program.step(state, batch)
    assert float(metrics["loss"]) == pytest.approx(1.0)  # of parameters that begin at zero


@pytest.mark.parametrize("view", ["global", "replica"])
@pytest.mark.parametrize("mesh", [{}, {"data": 4}])
def test_number_made_while_a_step_is_traced_is_refused(view, mesh):
    def train_step(state, batch):
        noisy = batch + np.random.normal(size=(4,)).astype(np.float32)
        state = state.apply_gradients(jax.grad(loss_of)(state.params, noisy))
        return state, {}

    if view == "replica":
        own = lambda state, batch: train_step(state, jax.lax.pmean(batch.mean(0, keepdims=True), ("replica", "data")))
    with pytest.raises(ConfigError, match=r"test_own_step\.py:\d+: train_step uses a number that is made while it is"):
        program_of(task(own if view == "replica" else train_step, view=view), mesh)
