"""What padding rows hold must not change a step or an evaluation; where it does, that is refused with its name."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import spmdkit as sk
from spmdkit.errors import ConfigError
from spmdkit.program import padding_check
from spmdkit.step.step import Batch
from tests.support.core_runs import program_of

pytestmark = pytest.mark.promotes("losses as users write them: masks of bools times numbers")

REPLICAS = ("replica", "data")
ROWS = np.random.default_rng(0).normal(size=(24, 6)).astype(np.float32) + 3
TOKENS = np.random.default_rng(1).integers(0, 5, size=(24, 4)).astype(np.int32)
SHORT = {"batch_size": 16, "data": {"drop_remainder": False, "shuffle": False}, "eval": {"batch_size": 16}}


def init(key):
    return jnp.linspace(-1.0, 1.0, 6)


def normalised(w, x):
    """The loss of each example after a batch norm that knows nothing of padding."""
    h = x @ w
    return ((h - h.mean()) / jnp.sqrt(h.var() + 1e-5) - x[:, 0]) ** 2


def along_time(w, x):
    """Values [T, B], T as many as the rows of a replica."""
    return (x @ w)[None] * jnp.ones((x.shape[0], 1)) / (1 + jnp.arange(x.shape[0]))[:, None]


def masked(w, x):
    """A batch norm over all replicas that leaves padding out."""
    h, mask = x @ w, sk.example_mask()
    sums = lax.psum((mask.sum(dtype=jnp.float32), (h * mask).sum(), (h**2 * mask).sum()), REPLICAS)
    mean, square = (s / jnp.maximum(sums[0], 1) for s in sums[1:])
    return ((h - mean) / jnp.sqrt(square - mean**2 + 1e-5) - x[:, 0]) ** 2


def by_products(w, x):
    """A loss of positive numbers that leaves padding out by a product: no number of it may be infinite."""
    loss = jnp.log1p(-x / 100) @ w  # not a number above 100, which is 8 times the data
    mask = sk.example_mask()
    count, total = lax.psum((mask.sum(dtype=jnp.float32), loss @ mask.astype(loss.dtype)), REPLICAS)
    return loss - total / jnp.maximum(count, 1)


def task(per_example, rows=ROWS, **more):
    loss = lambda w, b, key: (sk.mean(per_example(w, b)), {"first": sk.mean(b[:, 0])})
    return sk.Task(init, loss, optax.sgd(0.1), train_data=rows, eval_data=rows, **more)


def first_step(program):
    state = program.init()
    (_, batch), *_ = program.batches(stop=1)
    return program.step(state, batch)


# ---- training


@pytest.mark.parametrize(
    ("per_example", "mesh", "microbatches"),
    [
        (normalised, {"fsdp": 8}, 2),  # one row on each shard
        (along_time, {"data": 4}, 1),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_losses_that_mix_padding_are_rejected_first(per_example, mesh, microbatches):
    program = program_of(task(per_example), mesh=mesh, microbatches=microbatches, **SHORT)
    state = program.init()
    before = jax.device_get(state.params)
    (_, batch), *_ = program.batches(stop=1)
    with pytest.raises(ConfigError) as raised:
        program.step(state, batch)
    text = str(raised.value)
    assert "data.drop_remainder is false" in text and "metric 'loss' is" in text and "'first'" not in text
    assert "sk.example_mask()" in text and "data.drop_remainder: true" in text
    first, second = (float(x) for x in re.search(r"is (\S+) with one filling of them and (\S+) with", text).groups())
    assert abs(first - second) > 1e-3 * abs(first)
    np.testing.assert_array_equal(jax.device_get(state.params), before)  # nothing was donated


@pytest.mark.parametrize(
    ("per_example", "mesh", "microbatches"),
    [
        (masked, {"data": 2, "fsdp": 2}, 2),
        (by_products, {"data": 8}, 2),  # one row on each shard
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_losses_that_exclude_padding_are_accepted(per_example, mesh, microbatches):
    rows = np.abs(ROWS) + 20 if per_example is by_products else ROWS
    program = program_of(task(per_example, rows), mesh=mesh, microbatches=microbatches, **SHORT)
    assert np.isfinite(float(first_step(program)[1]["loss"]))
    assert np.isfinite(program.eval(program.init())["loss"])


def test_mixing_shows_with_zero_parameters():
    """A head that begins at zero gives the same loss for every input."""
    zero = sk.Task(
        lambda key: {"w": init(key), "head": jnp.zeros(())},
        lambda p, b, key: sk.mean(p["head"] * normalised(p["w"], b)),
        optax.sgd(0.1),
        train_data=ROWS,
    )
    with pytest.raises(ConfigError, match="metric 'loss' is"):
        first_step(program_of(zero, mesh={}, **SHORT))


def test_mixing_shows_in_batches_of_integers():
    def loss(params, tokens, key):
        h = params[tokens]
        return sk.mean(h.sum(-1)), {"mixed": sk.mean((h - h.mean(0)).sum(-1) ** 2)}

    mixing = sk.Task(init, loss, optax.sgd(0.1), train_data=TOKENS)
    with pytest.raises(ConfigError, match="metric 'mixed'"):
        first_step(program_of(mixing, mesh={"data": 4}, **SHORT))


def test_running_statistics_with_padding_are_rejected():
    def loss(params, state, batch, key):
        new = {"mean": 0.9 * state["mean"] + 0.1 * lax.pmean(batch[:, 0].mean(), REPLICAS), "steps": state["steps"] + 1}
        return sk.mean(batch @ params), {}, new

    make = lambda key: sk.Variables(init(key), {"mean": jnp.zeros(()), "steps": jnp.int32(0)})
    program = program_of(sk.Task(make, loss, optax.sgd(0.1), train_data=ROWS), mesh={"data": 4}, **SHORT)
    with pytest.raises(ConfigError, match="model state 'mean' is"):
        first_step(program)


@pytest.mark.parametrize("view", ["global", "replica"])
def test_user_steps_are_checked_for_padding(view):
    def train_step(state, batch):
        if view == "global":
            mask = sk.example_mask()
            grad = jax.grad(lambda w: jnp.where(mask, normalised(w, batch), 0).sum() / mask.sum())
            return state.apply_gradients(grad(state.params)), {}  # no metric: its parameters are looked at
        (loss, metrics), grads = sk.value_and_grad(lambda w, b, key: (sk.mean(normalised(w, b)), {}))(
            state.params, batch, state.key
        )
        return state.apply_gradients(grads), {"own": loss, **metrics}

    wrong = sk.Task(init, train_step=train_step, optimizer=optax.sgd(0.1), train_data=ROWS, view=view)
    host = {"offload": ["params"]} if view == "global" else {}
    name = "parameter ''" if view == "global" else "metric 'own'"
    with pytest.raises(ConfigError, match=f"in train_step padding rows count: {name}"):
        first_step(program_of(wrong, mesh={"data": 4}, **SHORT, **host))


def test_a_step_is_probed_once(monkeypatch):
    calls = []
    real = padding_check.changes
    monkeypatch.setattr(padding_check, "changes", lambda *args: calls.append(1) or real(*args))
    program = program_of(task(masked), mesh={"data": 4}, **SHORT)
    state = program.init()
    for _, batch in program.batches(stop=2):
        state, _ = program.step(state, batch)
    assert len(calls) == 1
    program.eval(state), program.eval(state)
    assert len(calls) == 2


# ---- evaluation


def test_evaluation_that_mixes_padding_is_rejected():
    settings = SHORT | {"data": {"drop_remainder": True}}
    given = lambda w, batch: {"plain": sk.mean(batch[:, 0]), "mixed": sk.mean(normalised(w, batch))}
    program = program_of(task(masked, eval_fn=given), mesh={"data": 2, "fsdp": 2}, **settings)
    with pytest.raises(ConfigError) as raised:
        program.eval(program.init())
    text = str(raised.value)
    assert "eval_data has 24 examples, in batches of 16" in text and "the sum of metric 'mixed' is" in text
    assert "sk.example_mask()" in text and "eval.batch_size that divides 24" in text and "in eval_fn" in text


# ---- the short batch


@pytest.mark.parametrize("grid", [(4, 2, 3), (1, 4, 1)], ids=str)
def test_padding_is_filled_from_other_real_rows(grid):
    num = int(np.prod(grid))
    fill = jax.jit(lambda batch, factor: padding_check._filled(batch, factor, grid))
    x, n = np.arange(1, num + 1, dtype=np.float32), np.arange(num, dtype=np.int32)
    for factor, mask in ((0, np.ones(num, bool)), (8, np.ones(num, bool)), (1, n < num - 1), (8, n == 0)):
        batch = jax.device_get(fill(Batch({"x": x, "n": n}, mask), np.float32(factor)))
        real = np.asarray(batch.mask)
        assert real.any() and not (real & ~np.asarray(mask)).any()
        assert not real.all()
        np.testing.assert_array_equal(batch.examples["n"][real], n[real])
        if factor == 0:
            np.testing.assert_array_equal(batch.examples["n"], n)
        elif mask.all():
            filled = np.asarray(batch.examples["n"])[~real]
            assert set(filled) <= set(np.flatnonzero(real))
            np.testing.assert_array_equal(np.asarray(batch.examples["x"])[~real], factor * (filled + 1))
    by_shard = np.asarray(fill(Batch(x, jnp.ones(num, bool)), jnp.float32(0)).mask).reshape(grid)
    if grid[2] > 1:  # the last rows of each, as in a short batch
        assert by_shard[..., 0].all() and not by_shard[..., -1].any()


# ---- values whose first dim has the length of the rows by chance


def test_first_dims_of_accidental_length_are_rejected():
    """No filling shows this one: padding is out of the values, and then time steps are taken for padding too."""

    def loss(w, x, key):
        each_TB = jnp.stack([x @ w * t for t in range(8)])
        mask = sk.example_mask()
        return sk.mean((each_TB * mask).sum(-1) / jnp.maximum(mask.sum(), 1)), {"right": sk.mean(x @ w)}

    by_time = sk.Task(init, loss, optax.sgd(0.1), train_data=ROWS)
    first_step(program_of(by_time, mesh={}, **SHORT))  # 16 rows: the first dim of 8 is trusted
    with pytest.raises(ConfigError) as raised:
        program_of(by_time, mesh={"data": 2}, **SHORT)
    assert "with twice as many rows" in str(raised.value) and "first dim" in str(raised.value)
    program_of(by_time, mesh={"data": 2}, batch_size=16)  # no short batches
