"""What is the same on every replica (made of `sk.psum`) in the loss of a per-replica step: one number, told and
differentiated once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.errors import ConfigError
from tests.support.tasks import batches, program_of

DATA = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
START = np.linspace(0.5, 1.5, 8).astype(np.float32)
total = lambda p, x: sk.psum(jnp.tanh(x @ p["w"]).sum())


def run(loss_fn, **settings):
    """Returns the first step's metrics, and the gradient, of a per-replica step on four devices."""

    def train_step(state, x):
        (loss, metrics), grads = sk.value_and_grad(loss_fn)(state.params, x, state.key)
        return state.apply_gradients(grads), {"loss": loss, **metrics}

    init = lambda key: {"w": jnp.asarray(START)}
    task = sk.Task(init, train_step=train_step, optimizer=optax.sgd(1.0), train_data=DATA, view="replica")
    program = program_of(task, "data 4", **settings)
    (_, batch), *_ = program.batches(stop=1)
    state, metrics = program.step(program.init(), batch)
    return jax.device_get(metrics), START - np.asarray(state.params["w"])


def expected(loss):
    """Returns (loss, gradient) of plain JAX over the whole batch."""
    return jax.value_and_grad(lambda w: loss(w, batches(DATA)[0]))(START)


square = lambda w, x: (x @ w) ** 2
WHOLE = np.tanh(batches(DATA)[0] @ START).sum()


METRICS = {
    "scalar": (lambda s, x: sk.scalar(s), WHOLE),
    "weighted": (lambda s, x: sk.mean(jnp.stack([s, 3 * s]), weights=jnp.stack([s, s])), 2 * WHOLE),
    "derived": (lambda s, x: sk.derived(jnp.exp, sk.scalar(s / 10)), np.exp(WHOLE / 10)),
    "sum": (lambda s, x: sk.scalar(s) + sk.mean(x[:, 0]), WHOLE + batches(DATA)[0][:, 0].mean()),
}


def test_identical_metric_is_reported_once():
    measured = lambda p, x: {name: metric(total(p, x), x) for name, (metric, _) in METRICS.items()}
    metrics, _ = run(lambda p, x, key: (sk.mean(square(p["w"], x)), measured(p, x)))
    for name, (_, value) in METRICS.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)


@pytest.mark.forms(2)
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a mean of examples"])
def test_identical_loss_has_its_gradient_once(beside, microbatches):
    if microbatches == 2:  # the sum is over one microbatch: only a linear function of it is that of all rows
        over = lambda p, x: sk.psum((x @ p["w"]).sum()) * 2
    else:
        over = lambda p, x: total(p, x) ** 2

    def loss_fn(p, x, key):
        alone = sk.scalar(over(p, x))
        return alone + sk.mean(square(p["w"], x), weights=jnp.abs(x[:, 0])) if beside else alone

    def plain(w, x):
        alone = (x @ w).sum() if microbatches == 2 else jnp.tanh(x @ w).sum() ** 2
        weights = jnp.abs(x[:, 0])
        return alone + (square(w, x) * weights).sum() / weights.sum() if beside else alone

    loss, gradient = expected(plain)
    metrics, found = run(loss_fn, microbatches=microbatches)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(found, gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "metric",
    [
        lambda p, x: sk.mean(sk.psum(square(p["w"], x))),
        lambda p, x: sk.sum(total(p, x)[None]),
        lambda p, x: sk.Mean(total(p, x), np.float32(len(x))),
    ],
    ids=["examples", "a sum", "by hand"],
)
def test_what_another_sum_makes_too_large_is_refused(metric):
    with pytest.raises(ConfigError, match=r"reduced twice.*is an sk\.scalar"):
        run(lambda p, x, key: (sk.mean(square(p["w"], x)), {"m": metric(p, x)}))


OVER_BOTH = lambda tree: jax.lax.pmean(tree, ("replica", "data"))
OVER_ONE_THEN_BOTH = lambda tree: sk.pmean(jax.lax.pmean(tree, "data"))


@pytest.mark.parametrize("pmean", [sk.pmean, OVER_BOTH, OVER_ONE_THEN_BOTH], ids=["sk", "lax", "by axis"])
def test_mean_of_identical_values_is_unchanged(pmean):
    """The flax ImageNet step with synchronized statistics averages statistics that are already the same."""

    def train_step(state, x):
        value, grads = jax.value_and_grad(lambda p: square(p["w"], x).mean())(state.params)
        statistics = pmean(pmean({"mean": x.mean(), "scale": state.step.astype(jnp.float32) + 2}))
        return state.apply_gradients(pmean(pmean(grads))), {"loss": pmean(value), **statistics}

    init = lambda key: {"w": jnp.asarray(START)}
    task = sk.Task(init, train_step=train_step, optimizer=optax.sgd(1.0), train_data=DATA, view="replica")
    program = program_of(task, "data 4")
    (_, batch), *_ = program.batches(stop=1)
    state, metrics = program.step(program.init(), batch)
    loss, gradient = expected(lambda w, x: square(w, x).mean())
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(START - np.asarray(state.params["w"]), gradient, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(metrics["mean"], batches(DATA)[0].mean(), rtol=1e-4)
    assert metrics["scale"] == 2


def _of_one_replica(choose, mean=sk.pmean):
    """Returns a train step of plain JAX; `choose(state, grads)` returns the next state and a metric."""

    def train_step(state, x):
        value, grads = mean(jax.value_and_grad(lambda p: square(p["w"], x).mean())(state.params))
        new, norm = choose(state, grads)
        return new, {"loss": value, "norm": norm}

    return train_step


def _where(state, grads):
    """The selection of flax's dynamic loss scale."""
    new = state.apply_gradients(grads)
    finite = jnp.isfinite(optax.tree.norm(grads))
    select = lambda new, old: jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)
    chosen = new.replace(params=select(new.params, state.params), opt_state=select(new.opt_state, state.opt_state))
    return chosen, optax.tree.norm(chosen.params)


def _cond(state, grads):
    finite = jnp.isfinite(optax.tree.norm(grads))
    new = jax.lax.cond(finite, lambda: state.apply_gradients(grads), lambda: state)
    return new, optax.tree.norm(state.params)


def _decayed(state, grads):
    """A gradient plus a multiple of the parameters, clipped by the norm of the parameters."""
    decayed = jax.tree.map(lambda g, p: g + 0.01 * p, grads, state.params)
    scale = jnp.minimum(1, 0.1 * optax.tree.norm(state.params) / optax.tree.norm(decayed))
    return state.apply_gradients(jax.tree.map(lambda g: scale * g, decayed)), scale


def _first_rows(state, grads):
    """Every second value of the parameters is updated."""
    new = state.apply_gradients(grads)
    merged = {"w": jax.lax.dynamic_update_slice(state.params["w"], new.params["w"][:4], (0,))}
    return new.replace(params=merged), jnp.float32(0)


def _scan(state, grads):
    """Three updates with one gradient."""
    new, norms = jax.lax.scan(lambda s, _: (s.apply_gradients(grads), s.params["w"].sum()), state, length=3)
    return new, norms.sum()


EQUAL = [_where, _cond, _decayed, _first_rows, _scan]


@pytest.mark.parametrize("choose", EQUAL)
def test_values_computed_from_equal_values_are_equal(choose):
    def trained(mesh, view):
        init = lambda key: {"w": jnp.asarray(START)}
        step = _of_one_replica(choose, *[lambda tree: tree] * (view == "global"))
        task = sk.Task(init, train_step=step, optimizer=optax.adam(0.1), train_data=DATA, view=view)
        program = program_of(task, mesh)
        state, told = program.init(), []
        for _, batch in program.batches(stop=2):
            state, metrics = program.step(state, batch)
            told.append(metrics)
        return jax.device_get((state.params, state.opt_state, told))

    one, four = trained("one device", "global"), trained("data 4", "replica")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), one, four)


@pytest.mark.parametrize(
    "choose",
    [
        lambda state, grads, x: (state.apply_gradients(grads), x.sum() * 0 + state.params["w"].sum()),
        lambda state, grads, x: (
            jax.lax.cond(x.sum() > 0, lambda: state.apply_gradients(grads), lambda: state),
            jnp.float32(0),
        ),
        lambda state, grads, x: (
            state.apply_gradients({"w": grads["w"] + state.params["w"] * sk.replica_index().astype(jnp.float32)}),
            jnp.float32(0),
        ),
    ],
    ids=["a metric", "a predicate", "a gradient"],
)
def test_a_value_that_depends_on_the_rows_of_a_replica_is_refused(choose):
    def train_step(state, x):
        _, grads = sk.pmean(jax.value_and_grad(lambda p: square(p["w"], x).mean())(state.params))
        new, metric = choose(state, grads, x)
        return new, {"metric": metric}

    init = lambda key: {"w": jnp.asarray(START)}
    task = sk.Task(init, train_step=train_step, optimizer=optax.sgd(0.1), train_data=DATA, view="replica")
    with pytest.raises(ConfigError, match=r"differs between the replicas of axes \['data'\].*reduction is missing"):
        program_of(task, "data 4")
