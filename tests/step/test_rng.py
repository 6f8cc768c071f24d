"""Every key of a run is another one; `init` gets the seed's own; what is drawn per example does not depend on the
mesh."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.step import gradient, rng, trace_context
from tests.support.core_runs import program_of

IMPLS = ["threefry2x32", "rbg", "unsafe_rbg"]
X = np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32)
PLAIN = {"data": {"shuffle": False}, "batch_size": 16, "steps": 4}


@pytest.fixture(autouse=True)
def fresh_traces():
    """Keys of one implementation are no keys of another, and JAX keeps traces."""
    yield
    jax.clear_caches()


def data_of(key):
    return jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key


# ---- init


@pytest.mark.forms(1)
@pytest.mark.parametrize("impl", IMPLS)
def test_init_is_given_the_key_of_the_seed(impl):
    with jax.default_prng_impl(impl):
        task = sk.Task(
            lambda key: jax.random.normal(key, (6,)), lambda w, b, key: sk.mean(b @ w), optax.sgd(0.1), train_data=X
        )
        found = program_of(task, seed=7, **PLAIN).init().params
        np.testing.assert_array_equal(found, jax.jit(lambda: jax.random.normal(jax.random.key(7), (6,)))())


# ---- no two keys are equal


def splits(key, *counts):
    """Returns the data of all keys of three levels of splits."""
    if not counts:
        return [data_of(key)]
    below = [splits(k, *counts[1:]) for k in jax.random.split(key, counts[0])]
    return [data_of(key), *itertools.chain(*below)]


def keys_of_a_run(seed):
    """Returns the data of all keys of a run: of init, 300 steps, 8 replicas, 4 microbatches, examples, evaluation
    batches. unsafe_rbg folds by an exclusive or: folds of step and replica would cancel."""
    root = rng.root_data(seed)
    found = {"init": jnp.stack(splits(jax.random.key(seed), 8, 6, 4))}
    steps = jnp.arange(300)
    step_keys = jax.vmap(lambda s: data_of(rng.step_key(root, s)))(steps)
    found["steps"] = step_keys
    wrap = jax.random.wrap_key_data

    def of_losses(key_data, replicas, micros):
        one = lambda d, r, m: data_of(gradient._loss_key(wrap(d), r, m))
        over_micro = jax.vmap(one, (None, None, 0))
        over_replicas = jax.vmap(over_micro, (None, 0, None))
        return jax.vmap(over_replicas, (0, None, None))(key_data, jnp.arange(replicas), jnp.arange(micros))

    found["losses"] = of_losses(step_keys, 8, 4)
    evaluation = rng.evaluation_key(seed)
    batches = jax.vmap(lambda n: data_of(rng.batch_key(evaluation, n)))(jnp.arange(50))
    found["evaluation"], found["evaluation batches"] = data_of(evaluation), batches
    found["evaluation replicas"] = of_losses(batches, 8, 1)
    found = {name: x.reshape(-1, x.shape[-1]) for name, x in found.items()}

    def of_examples(key_data):
        with trace_context.with_examples(trace_context.Examples(32, None, jnp.arange(32), wrap(key_data))):
            return data_of(sk.example_keys(0)), data_of(sk.example_keys(1))

    few = jnp.concatenate([step_keys[:30], data_of(evaluation)[None]])
    per_example = jnp.stack(jax.vmap(of_examples)(few)).reshape(-1, 2)
    return found, per_example


@pytest.mark.parametrize("impl", ["unsafe_rbg", *(pytest.param(impl, marks=pytest.mark.slow) for impl in IMPLS[:2])])
def test_no_two_keys_of_a_run_are_equal(impl):
    with jax.default_prng_impl(impl):
        found, per_example = jax.device_get(jax.jit(keys_of_a_run, static_argnums=0)(7))
    width = 2 if impl == "threefry2x32" else 4
    assert all(x.shape[1] == width for x in found.values()) and per_example.shape[1] == 2
    groups = [*found.values(), *([per_example] if width == 2 else [])]
    everything = np.concatenate(groups)
    assert len(everything) > 10_000
    assert len(np.unique(everything, axis=0)) == len(everything)
    assert len(np.unique(per_example, axis=0)) == len(per_example)
    # Nor may the words that threefry takes be equal: a user makes smaller keys of larger ones.
    assert len(np.unique(everything[:, :2], axis=0)) == len(everything)


def test_raw_and_foreign_keys_keep_their_form():
    raw = gradient._loss_key(jax.random.PRNGKey(0), 1, 0)
    assert raw.dtype == jnp.uint32 and raw.shape == (2,)
    rbg = gradient._loss_key(jax.random.key(0, impl="rbg"), 1, 0)
    assert str(jax.random.key_impl(rbg)) == "rbg"
    assert gradient._loss_key(None, 1, 0) is None


# ---- on meshes


def noisy_loss(w, batch, key):
    noise = jax.vmap(lambda k: jax.random.normal(k, (6,)))(sk.example_keys(1))
    return sk.mean(((batch + noise) @ w) ** 2)


@pytest.mark.parametrize("impl", ["rbg", *(pytest.param(impl, marks=pytest.mark.slow) for impl in IMPLS[::2])])
def test_example_keys_do_not_depend_on_the_mesh(impl):
    """under vmap, rbg draws a whole batch from its first key."""
    losses, evaluations = [], []
    with jax.default_prng_impl(impl):
        task = sk.Task(lambda key: jnp.ones(6), noisy_loss, optax.sgd(0.01), train_data=X, eval_data=X[:11])
        for setting in ({"mesh": {}}, {"mesh": {"data": 2, "fsdp": 4}, "microbatches": 2}):
            program = program_of(task, eval={"batch_size": 8 if setting["mesh"] else 4}, **PLAIN, **setting)
            evaluations.append(program.eval(program.init())["loss"])
            _, metrics = program.step(program.init(), program.put(X))
            losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5)
    np.testing.assert_allclose(evaluations, evaluations[0], rtol=1e-5)


def test_evaluation_draws_differ_by_batch_and_replica():
    """and every batch and replica drew the same."""

    def loss(w, batch, key):
        place = batch[:, 0].astype(jnp.int32)
        drawn = jax.random.uniform(jax.random.split(key)[0], ())
        by_example = jax.vmap(lambda k: jax.random.uniform(k, ()))(sk.example_keys())
        metrics = {f"plain{i}": sk.mean(jnp.where(place // 2 == i, drawn, 0)) for i in range(8)}
        metrics |= {f"example{i}": sk.mean(jnp.where(place == i, by_example, 0)) for i in range(16)}
        return sk.mean(batch @ w), metrics

    rows = np.zeros((16, 6), np.float32)
    rows[:, 0] = np.arange(16)
    task = sk.Task(lambda key: jnp.ones(6), loss, optax.sgd(0.1), train_data=rows, eval_data=rows)
    # Four batches of four rows on two replicas: every pair of rows is another (batch, replica).
    program = program_of(task, eval={"batch_size": 4}, mesh={"data": 2}, **PLAIN)
    state = program.init()
    found = program.eval(state)
    plain = [found[f"plain{i}"] * 8 for i in range(8)]
    assert len({round(x, 6) for x in plain}) == 8
    assert len({round(found[f"example{i}"], 6) for i in range(16)}) == 16
    assert program.eval(state) == found
    first = [float(jax.random.uniform(k, ())) for k in jax.random.split(jax.random.key(0))]
    assert min(abs(x - y) for x in plain for y in first) > 1e-6
