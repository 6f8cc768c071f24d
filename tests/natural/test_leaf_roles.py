"""Parameters that the optimizer does not train: frozen ones, and those that their gradient overwrites (flax's FP8)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.linen import fp8_ops
from flax.training.train_state import TrainState

import spmdkit as sk
from spmdkit.errors import ConfigError
from spmdkit.plan.collectives_bill import read_bill
from spmdkit.plan.flops import count
from spmdkit.plan.hlo.text import parse
from tests.support.fixed_numbers import normal
from tests.support.natural_runs import (
    BATCH,
    STEPS,
    assert_same_run,
    by_hand,
    keep_gradient,
    leaf_errors,
    program_of,
    train,
)

pytestmark = pytest.mark.promotes("flax's FP8 layers multiply float8 by float32")

random = np.random.default_rng(0)
DATA = {
    "x": random.normal(size=(BATCH * STEPS, 16)).astype(np.float32),
    "y": random.normal(size=BATCH * STEPS).astype(np.float32),
    "keep": random.uniform(size=BATCH * STEPS) < np.linspace(0.2, 0.9, BATCH * STEPS),
}
MESHES = {"one": {}, "data 4": {"data": 4}, "fsdp 4": {"fsdp": 4}, "data 2 x fsdp 2": {"data": 2, "fsdp": 2}}
PATTERN = "_overwrite_with_gradient/.*"


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        dense = lambda num: nn.Dense(num, dot_general_cls=fp8_ops.Fp8DotGeneral, dtype=jnp.float32)
        return dense(1)(nn.tanh(dense(8)(x)))[:, 0]


def init(key):
    return Model().init(key, DATA["x"][:1])


def losses(params, batch):
    return (Model().apply(params, batch["x"]) - batch["y"]) ** 2


def flax_run(loss_fn, optimizer):
    """Returns (losses, parameters) of flax's own `TrainState`, which overwrites these leaves."""
    state = jax.jit(lambda key: TrainState.create(apply_fn=None, params=init(key), tx=optimizer))(jax.random.key(0))
    found = []

    @jax.jit
    def stepped(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    for step in range(STEPS):
        batch = jax.tree.map(lambda x: x[step * BATCH : (step + 1) * BATCH], DATA)  # noqa: B023 - used immediately
        state, loss = stepped(state, batch)
        found.append(float(loss))
    return found, jax.device_get(state.params)


def own_step(loss_fn):
    def train_step(state, batch):
        (loss, _), grads = sk.value_and_grad(loss_fn)(state.params, batch, state.key)
        return state.apply_gradients(grads), {"loss": loss}

    return train_step


@pytest.fixture(scope="module", params=[False, True], ids=["all rows", "masked"])
def fp8(request):
    where = (lambda batch: batch["keep"]) if request.param else (lambda batch: None)
    plain = flax_run(lambda p, b: jnp.mean(losses(p, b), where=where(b)), optax.adamw(1e-2))
    return lambda p, b, key: sk.mean(losses(p, b), where=where(b)), plain


@pytest.mark.forms(1)
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("own", [False, True], ids=["loss_fn", "train_step"])
def test_flax_fp8_layers_equal_flax(fp8, mesh, microbatches, own):
    loss_fn, (expected, params) = fp8
    more = {"train_step": own_step(loss_fn)} if own else {}
    task = sk.Task(init, loss_fn, optax.adamw(1e-2), train_data=DATA, overwritten=[PATTERN], **more)
    program = program_of(task, MESHES[mesh], microbatches=microbatches)
    state, found = program.init(), []
    for _, batch in program.batches():
        state, metrics = program.step(state, batch)
        found.append(float(metrics["loss"]))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    errors = leaf_errors(jax.device_get(state.params), params)
    assert max(errors.values()) <= 1e-5, errors
    assert not any("_overwrite" in p.path for p in program.layout if p.path.startswith("opt_state"))


def test_a_leaf_that_is_overwritten_is_declared():
    task = sk.Task(init, lambda p, b, key: sk.mean(losses(p, b)), optax.sgd(0.1), train_data=DATA)
    with pytest.raises(ConfigError, match=r"_overwrite_with_gradient/.* is overwritten by its gradient.*overwritten="):
        program_of(task)


def test_bad_patterns_are_refused():
    make = lambda **roles: program_of(sk.Task(init, lambda p, b, k: sk.mean(losses(p, b)), train_data=DATA, **roles))
    for roles, match in [
        ({"frozen": ["encoder/.*"]}, "'encoder/.*' matches no parameter"),
        ({"frozen": ".*"}, "is a list of patterns"),
        ({"overwritten": ["("]}, "no regular expression"),
        ({"frozen": [".*"], "overwritten": [PATTERN]}, "frozen by Task.frozen and overwritten by Task.overwritten"),
        ({"frozen": ["params/.*"], "overwritten": [PATTERN]}, "match all"),
    ]:
        with pytest.raises(ConfigError, match=match):
            make(optimizer=optax.sgd(0.1), **roles)


# ---- frozen

LARGE = 96


def lora_init(key):
    return {"first": normal(0, 16, LARGE) / 4, "last": normal(1, LARGE) / 4, "base": normal(2, LARGE, LARGE) / 10}


def lora_losses(params, base, batch):
    return (jnp.tanh(batch["x"] @ params["first"]) @ base @ params["last"] - batch["y"]) ** 2


def lora_loss(params, batch, key):
    return sk.mean(lora_losses(params, params["base"], batch), where=batch["keep"])


def partitioned():
    return optax.partition({"train": optax.adam(1e-2), "stop": optax.set_to_zero()}, by_name)


def by_name(params):
    return {name: "stop" if name == "base" else "train" for name in params}


def bytes_sent(task, **settings):
    program = program_of(task, {"data": 4}, **settings)
    return sum(line.bytes for line in read_bill(parse(program.compiled.as_text()), program.sizes).collectives)


TRAINED, BASE = 4 * (16 * LARGE + LARGE), 4 * LARGE**2


def lora_task(how, **more):
    if how == "state":
        init = lambda key: sk.Variables(
            {k: x for k, x in lora_init(key).items() if k != "base"}, {"base": lora_init(key)["base"]}
        )
        loss = lambda p, s, b, k: (sk.mean(lora_losses(p, s["base"], b), where=b["keep"]), {}, s)
        return sk.Task(init, loss, optax.adam(1e-2), train_data=DATA)
    if how == "declared":
        return sk.Task(lora_init, lora_loss, optax.adam(1e-2), train_data=DATA, frozen=["base"], **more)
    optimizer = optax.adam(1e-2) if how == "trained" else partitioned()
    return sk.Task(lora_init, lora_loss, optimizer, train_data=DATA, **more)


@functools.cache
def lora_by_hand():
    plain = lambda p, b: (jnp.mean(lora_losses(p, p["base"], b), where=b["keep"]), {})
    return by_hand(plain, jax.jit(lora_init)(jax.random.key(0)), DATA, partitioned())


@pytest.mark.forms(3)
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("how", ["detected", "declared", "state"])
def test_a_frozen_leaf_changes_no_other(how, mesh, microbatches):
    program, expected = program_of(lora_task(how), MESHES[mesh], microbatches=microbatches), lora_by_hand()
    state, found = program.init(), []
    for _, batch in program.batches():
        state, metrics = program.step(state, batch)
        found.append(float(metrics["loss"]))
    np.testing.assert_allclose(found, expected.losses, rtol=1e-5)
    base = {"base": state.model_state["base"]} if how == "state" else {}
    errors = leaf_errors(jax.device_get(state.params | base), expected.params)
    assert max(errors.values()) <= 1e-5, errors


@pytest.mark.parametrize("settings", [{}, {"microbatches": 2, "on_nonfinite": "skip"}, {"reducer": "ordered"}])
def test_a_frozen_leaf_is_not_sent(settings):
    """An all-reduce over four devices sends 2 x 3/4 of its operand: the trained leaves, the loss and the count."""
    sent = [bytes_sent(lora_task(how), **settings) for how in ("detected", "declared", "state")]
    if settings.get("reducer"):
        assert sent[0] == sent[1] == sent[2] < bytes_sent(lora_task("trained"), **settings) / 2
        return
    joined = 2 * 3 * ("on_nonfinite" in settings)  # the code of the guard
    assert sent == [2 * 3 * (TRAINED + 8) // 4 + joined] * 3
    assert bytes_sent(lora_task("trained"), **settings) == sent[0] + 2 * 3 * BASE // 4


def test_a_frozen_leaf_is_not_differentiated():
    flops = {
        how: count(program_of(lora_task(how)).traced.jaxpr).products for how in ("detected", "declared", "trained")
    }
    assert flops["detected"] == flops["declared"]
    assert flops["trained"] - flops["declared"] >= 2 * BATCH * LARGE**2  # the product that is the gradient of the base
    assert "base (36.0 KiB): not differentiated" in program_of(lora_task("detected")).explain()


def test_a_leaf_that_another_result_reads_is_not_frozen():
    """The clipped norm is that of all gradients, as in optax."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), partitioned())
    task = sk.Task(lora_init, lora_loss, keep_gradient(optimizer), train_data=DATA)
    program, run = train(task, MESHES["data 4"])
    plain = lambda p, b: (jnp.mean(lora_losses(p, p["base"], b), where=b["keep"]), {})
    assert_same_run(run, by_hand(plain, jax.jit(lora_init)(jax.random.key(0)), DATA, optimizer))
    assert "frozen" not in program.explain()


def test_a_step_of_the_user_freezes_declared_leaves_only():
    def train_step(state, batch):
        (loss, _), grads = sk.value_and_grad(lora_loss)(state.params, batch, state.key)
        return state.apply_gradients(grads), {"loss": loss, "norm": optax.tree.norm(grads["base"])}

    def norm(how, **view):
        program = program_of(lora_task(how, train_step=train_step, **view), MESHES["data 4"])
        return float(program.step(program.init(), next(program.batches())[1])[1]["norm"])

    assert norm("declared") == norm("declared", view="replica") == 0 < norm("detected")


def test_an_optimizer_that_trains_nothing_runs():
    nothing = optax.masked(optax.set_to_zero(), lambda params: jax.tree.map(lambda _: True, params))
    program = program_of(sk.Task(lora_init, lora_loss, nothing, train_data=DATA), MESHES["data 4"])
    losses = [float(program.step(program.init(), batch)[1]["loss"]) for _, batch in program.batches()]
    assert np.isfinite(losses).all()


@pytest.mark.parametrize(
    "sync", [{"local_sgd": {"every": 2}}, {"diloco": {"every": 2}}, {"diloco": {"every": 2, "fragments": 2}}]
)
def test_groups_do_not_send_a_frozen_leaf(sync):
    def sent(how):
        program = program_of(lora_task(how), {"data": 4}, sync=sync)
        bills = [read_bill(parse(phase.compiled.as_text()), program.sizes) for phase in program.phases]
        return program, sum(line.bytes for bill in bills for line in bill.collectives)

    for how in ("detected", "declared", "state"):
        program, found = sent(how)
        assert found == 2 * 3 * TRAINED // 4, how
        assert not any("base" in leaf.path for leaf in program.layout if leaf.path.startswith("sync"))


@pytest.mark.parametrize("options", [{}, {"optimizer": {"name": "sgd", "learning_rate": 1.0}}])
def test_groups_train_the_same_with_a_frozen_leaf(options):
    sync, runs = {"diloco" if options else "local_sgd": {"every": 1} | options}, []
    for how in ("declared", "state"):
        program = program_of(lora_task(how), {"data": 4}, sync=sync)
        state = program.init()
        for _, batch in program.batches():
            state, _ = program.step(state, batch)
        runs.append(jax.tree.map(lambda x: x[0], jax.device_get(state.params | (state.model_state or {}))))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *runs)
