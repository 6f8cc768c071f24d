"""`sk.mean` is a pair that adds; keys of examples are the same on every mesh; the plain key differs where it should."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmdkit as sk
from spmdkit.errors import ConfigError
from tests.support.core_models import regression
from tests.support.core_runs import program_of

VALUES = np.arange(12, dtype=np.float32).reshape(4, 3)


def pair(mean):
    return float(mean.sum), float(mean.count)


def test_a_mean_is_its_sum_and_its_count():
    assert pair(sk.mean(VALUES)) == (66, 12)
    assert float(sk.mean(VALUES).value) == 5.5
    assert pair(sk.mean(7.0)) == (7, 1)
    half = sk.mean(np.full(4096, 1.0, jnp.bfloat16))  # summed in float32
    assert half.sum.dtype == jnp.float32 and pair(half) == (4096, 4096)
    assert float(sk.mean(np.array([1.0, np.nan]), where=np.array([True, False])).value) == 1
    assert pair(sk.mean(VALUES[:1]).merge(sk.mean(VALUES[1:]))) == (66, 12)
    for empty in (sk.mean(VALUES, where=np.zeros(4, bool)), sk.mean(np.zeros((0,), np.float32))):
        assert float(empty.value) == 0


def test_where_and_weights_broadcast_from_the_left():
    rows = np.array([True, False, True, False])
    assert pair(sk.mean(VALUES, where=rows)) == (0 + 1 + 2 + 6 + 7 + 8, 6)
    assert pair(sk.mean(VALUES, where=VALUES > 9)) == (21, 2)
    assert pair(sk.mean(VALUES, weights=np.array([0, 0, 0, 2.0]))) == (2 * (9 + 10 + 11), 6)
    assert pair(sk.mean(VALUES, where=rows, weights=np.array([1.0, 5, 2, 5]))) == (0 + 1 + 2 + 2 * (6 + 7 + 8), 9)


def test_mean_scales_and_adds_scalars():
    mean = sk.mean(VALUES)
    for found, value in [
        (mean * 2, 11),
        (2 * mean, 11),
        (jnp.float32(2) * mean, 11),
        (mean / 2, 2.75),
        (-mean, -5.5),
        (mean + 1, 6.5),
        (1 + mean, 6.5),
        (jnp.ones(()) + mean, 6.5),
        (mean - 1, 4.5),
        (sk.mean(np.ones(2)) * 3 + 1, 4),
    ]:
        assert float(found.value) == value
        assert isinstance(found, sk.Mean)


def test_a_mean_combines_with_scalars_and_means_alone():
    with pytest.raises(TypeError, match=r"scalars only, found .* of shape \(3,\)"):
        sk.mean(VALUES) * np.ones(3)
    with pytest.raises(TypeError, match="scalars only, found another metric"):
        sk.mean(VALUES) * sk.mean(VALUES)


def test_padding_rows_do_not_count():
    with sk.examples(4, mask=jnp.array([True, True, False, False])):
        assert pair(sk.mean(VALUES)) == (0 + 1 + 2 + 3 + 4 + 5, 6)
        assert pair(sk.mean(VALUES, where=np.array([True, False, True, False]))) == (3, 3)
        assert pair(sk.mean(VALUES, where=VALUES > 4)) == (5, 1)
        assert pair(sk.mean(VALUES[:, 0], weights=np.full(4, 0.5))) == (1.5, 1)


def test_values_without_example_dim_are_rejected_with_padding():
    with sk.examples(4, mask=jnp.ones(4, bool)):
        with pytest.raises(ConfigError, match=r"shape \(\) while some of the 4 examples are padding.*example_mask"):
            sk.mean(1.0)
        with pytest.raises(ConfigError, match=r"shape \(3, 4\)"):
            sk.mean(VALUES.T)


def test_regularization_is_added_once():
    def loss_fn(params, batch, key):
        return sk.mean(0.0 * batch["x"][:, 0]) + (params["w"] ** 2).sum()

    for mesh, microbatches in [({"data": 8}, 4), ({"data": 2, "fsdp": 4}, 1)]:
        program = program_of(dataclasses.replace(regression(), loss_fn=loss_fn), mesh=mesh, microbatches=microbatches)
        state = program.init()
        w = np.asarray(state.params["w"])
        for _, batch in program.batches(stop=1):
            state, metrics = program.step(state, batch)
        np.testing.assert_allclose(float(metrics["loss"]), (w**2).sum(), rtol=1e-5)
        np.testing.assert_allclose(np.asarray(state.opt_state[0]["w"]), 2 * w, rtol=1e-5)


# ---- randomness


def draws_task(draw):
    """Returns a task whose gradient is what each example has drawn: params `[examples]`, one step after another."""

    def loss_fn(params, batch, key):
        one_hot = jax.nn.one_hot(batch["id"], 64)
        return sk.mean((one_hot @ params["draws"]) * draw(batch, key)) * 32

    return dataclasses.replace(
        regression(),
        init=lambda key: {"draws": jnp.zeros(64)},
        loss_fn=loss_fn,
        train_data={"id": np.arange(64, dtype=np.int32)},
        eval_data=None,
        rules=[("draws", [None])],
    )


def draws(draw, steps=2, **settings):
    """Returns float[steps, 64], the draw of each example at each step; zero where it was not in the batch."""
    program = program_of(draws_task(draw), **settings)
    state, found = program.init(), []
    for _, batch in program.batches(stop=steps):
        state, _ = program.step(state, batch)
        found.append(np.asarray(state.opt_state[0]["draws"]))
    return np.stack(found)


def by_example(batch, key):
    return jax.vmap(jax.random.uniform)(sk.example_keys())


def by_plain_key(batch, key):
    return jax.random.uniform(key, batch["id"].shape)


@pytest.mark.forms(1)
@pytest.mark.parametrize("microbatches", [4, 1])
@pytest.mark.parametrize("mesh", [{"data": 2, "fsdp": 4}, {"replica": 2, "data": 4}], ids=str)
def test_example_keys_draw_the_same_on_every_mesh(mesh, microbatches):
    reference = draws(by_example, mesh={})
    assert np.count_nonzero(reference) == 64 and np.unique(reference[reference > 0]).size == 64
    np.testing.assert_allclose(draws(by_example, mesh=mesh, microbatches=microbatches), reference, rtol=1e-6)


def test_example_keys_differ_by_step_seed_and_salt():
    same = {"data": {"shuffle": False}, "mesh": {"data": 8}}
    both = draws(by_example, **same)
    first, second = (x[x > 0] for x in both)
    assert not np.intersect1d(first, second).size
    assert not np.intersect1d(draws(by_example, seed=1, **same), both).any()
    salted = draws(lambda batch, key: jax.vmap(jax.random.uniform)(sk.example_keys(salt=1)), **same)
    assert not np.intersect1d(salted, both).any()


def test_plain_key_differs_by_step_replica_and_microbatch():
    found = draws(by_plain_key, mesh={"data": 2, "fsdp": 2}, microbatches=2, data={"shuffle": False})
    drawn = found[found > 0]
    assert drawn.size == 64 and np.unique(drawn).size == 64


def test_example_keys_and_masks_need_a_loss():
    for call in (sk.example_keys, sk.example_mask):
        with pytest.raises(RuntimeError, match=r"outside of a loss that spmdkit runs.*with sk\.examples"):
            call()
    with sk.examples(3), pytest.raises(RuntimeError, match="there is no randomness"):
        sk.example_keys()
    with sk.examples(3, key=jax.random.key(0)):
        assert sk.example_keys().shape == (3,)
        assert sk.example_mask().tolist() == [True] * 3
