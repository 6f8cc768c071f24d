"""`sk.example_keys`: salts, the number of a pipeline's layer, and calls that draw the same numbers twice."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import spmdkit as sk
from spmdkit.errors import ConfigError
from tests.support.messages import assert_parts

ROWS = {"x": np.ones((16, 6), np.float32)}


def build(loss, **changes):
    init = lambda key: {"w": jnp.ones((4, 6)), "s": jnp.ones(6)}
    config = sk.Config(task="t.py:t", batch_size=8, steps=1, **changes)
    return sk.build(config, sk.Task(init, loss, optax.sgd(0.0), train_data=ROWS), devices=jax.devices()[:1])


def drop(z, keys):
    return jnp.where(jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, z.shape[1:]))(keys), z, 0.0)


def folded(keys, i):
    return jax.vmap(jax.random.fold_in, (0, None))(keys, i)


def in_turn(layer):
    """Returns a loss of four layers in a loop of Python."""

    def loss(params, batch, key):
        z = batch["x"]
        for i in range(4):
            z = layer(i, z, params["w"][i])
        return sk.mean(z)

    return loss


def scanned(layer):
    step = lambda z, numbered: (layer(numbered[0], z, numbered[1]), None)
    return lambda params, batch, key: sk.mean(lax.scan(step, batch["x"], (jnp.arange(4), params["w"]))[0])


def fori(layer):
    return lambda params, batch, key: sk.mean(lax.fori_loop(0, 4, lambda i, z: layer(i, z, params["w"][i]), batch["x"]))


def same_keys(params, batch, key):
    keys = sk.example_keys()
    z = lax.scan(lambda z, w: (drop(z * w, keys), None), batch["x"], params["w"])[0]
    return sk.mean(drop(z, keys))


def two_branches(params, batch, key):
    one, other = (lambda factor=factor: drop(batch["x"] * factor, sk.example_keys()) for factor in (1.0, 2.0))
    return sk.mean(lax.cond(params["s"].sum() > 3, one, other) * params["s"])


def inner_gradient(params, batch, key):
    inner = jax.checkpoint(lambda x: jnp.sin(drop(x * params["s"], sk.example_keys("inner"))))
    return sk.mean(jax.grad(lambda x: drop(inner(x), sk.example_keys()).sum())(batch["x"]) * params["s"])


RIGHT = {
    "salts": in_turn(lambda i, z, w: drop(z * w, sk.example_keys(f"layer {i}" if i % 2 else i))),
    "folded later": in_turn(lambda i, z, w: drop(z * w, folded(sk.example_keys(), i))),
    "recomputed": lambda p, b, key: sk.mean(sk.remat(lambda z, w: drop(z * w, sk.example_keys()))(b["x"], p["s"])),
    "iteration as salt": scanned(lambda i, z, w: drop(z * w, sk.example_keys(i))),
    "iteration folded later": scanned(lambda i, z, w: drop(z * w, folded(sk.example_keys("drop"), i))),
    "fori": fori(lambda i, z, w: drop(z * w, sk.example_keys(i))),
    "one call, several layers": same_keys,
    "two branches": two_branches,
    "gradient in the loss": inner_gradient,
}

plain = lambda i, z, w: drop(z * w, sk.example_keys("drop"))
recomputed, jitted = jax.checkpoint(plain), jax.jit(plain)
WRONG = {
    "loop of Python": in_turn(plain),
    "recomputed": in_turn(lambda i, z, w: recomputed(0, z, w)),
    "jitted": in_turn(lambda i, z, w: jitted(0, z, w)),
    "other draws": lambda p, b, key: sk.mean(
        drop(b["x"], sk.example_keys(1)) + jax.vmap(lambda k: jax.random.normal(k, (6,)))(sk.example_keys(1)) * p["s"]
    ),
    "second branch": lambda p, b, key: sk.mean(
        drop(lax.cond(p["s"].sum() > 3, lambda: b["x"], lambda: drop(b["x"], sk.example_keys())), sk.example_keys())
        * p["s"]
    ),
    "scan": scanned(plain),
    "fori": fori(plain),
}


@pytest.mark.parametrize("name", RIGHT)
def test_keys_that_differ_or_are_passed_on_are_accepted(name):
    build(RIGHT[name])


@pytest.mark.parametrize("name", WRONG)
def test_same_numbers_by_a_second_call_are_rejected(name):
    with pytest.raises(ConfigError) as caught:
        build(WRONG[name])
    loop = name in ("scan", "fori")
    parts = ("in the loop of", "sk.example_keys(i)") if loop else ("with the same salt", "its own salt")
    assert str(caught.value).count("test_example_keys.py:") == 2
    assert_parts(caught.value, "sk.example_keys()", found=parts[0], repair=parts[1])


@pytest.mark.parametrize("salt", [1.5, -1, 2**32, np.zeros(2, np.int32), None])
def test_salt_is_a_string_or_an_integer(salt):
    with sk.examples(4, key=jax.random.key(0)):
        with pytest.raises(ConfigError, match=r"string, or an integer"):
            sk.example_keys(salt)
        data = [jax.random.key_data(sk.example_keys(s)) for s in ("a", "b", 0, np.int64(1), jnp.int32(2))]
    assert len(np.unique(np.concatenate(data), axis=0)) == 20


def test_layers_of_a_pipeline_draw_different_numbers():
    def loss(params, batch, key):
        embed = lambda scale, rows: rows["x"] * scale
        layer = lambda z, w, rows: drop(z * w, sk.example_keys())
        return sk.pipeline(embed, layer, lambda z, params, rows: sk.mean(z))(params["s"], params["w"], (), batch)

    program = build(loss)
    _, batch = next(program.batches())
    assert float(program.step(program.init(), batch)[1]["loss"]) == pytest.approx(1 / 16, abs=0.1)
