"""A gradient written by hand with a forward mode beside it: the program of a custom_vjp in reverse mode, plain
derivatives in every other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmdkit as sk
from spmdkit.ops import vocab
from spmdkit.ops.both_modes import both_modes
from tests.support.core_runs import assert_close


def plain(x, w, count):
    """A loop whose turns have something in common, which JAX's partial evaluation would take out of it."""
    turn = lambda x, row: (jnp.tanh(x @ w) + jnp.where(jnp.arange(4) < 2, row, 0.5), None)
    return jax.lax.scan(turn, x, jnp.sin(w))[0] * jnp.asarray(count, x.dtype)


def forward(x, w, count):
    return plain(x, w, count), (x, w, count)


def tangent(kept, tangents):
    x, w, count = kept
    assert tangents[2] is None
    return jax.jvp(lambda x, w: plain(x, w, count), (x, w), tangents[:2])[1]


def backward(kept, cotangent):
    x, w, count = kept
    return (*jax.vjp(lambda x, w: plain(x, w, count), x, w)[1](cotangent), None)


by_hand = jax.custom_vjp(plain)
by_hand.defvjp(forward, backward)
in_both = both_modes(forward, tangent, backward)


def arguments():
    rng = np.random.default_rng(0)
    return rng.normal(size=(3, 4)).astype(np.float32), rng.normal(size=(4, 4)).astype(np.float32), np.int32(3)


def stacked(fn):
    """Mapped over examples, in a loop of layers, with rematerialisation."""
    layer = jax.checkpoint(lambda x, w: jax.vmap(fn, (0, None, None))(x[:, None], w, 3)[:, 0])
    return lambda x, w, _: jax.lax.scan(lambda x, w: (layer(x, w), None), x, jnp.stack([w, 2 * w]))[0]


@pytest.mark.parametrize("around", [lambda fn: fn, stacked], ids=["alone", "mapped, looped, computed again"])
def test_reverse_mode_equals_a_custom_vjp_program(around):
    lowered = lambda fn: jax.jit(jax.grad(lambda *args: around(fn)(*args).sum(), (0, 1))).lower(*arguments()).as_text()
    assert lowered(in_both) == lowered(by_hand)


@pytest.mark.parametrize("around", [lambda fn: fn, stacked], ids=["alone", "mapped, looped, computed again"])
def test_every_mode_is_that_of_the_plain_function(around):
    x, w, count = arguments()
    x, w = x.astype(np.float64), w.astype(np.float64)

    def derivatives(fn):
        loss = lambda x, w: (around(fn)(x, w, count) ** 2).sum()
        by_x = lambda x: loss(x, w)
        line = lambda t: loss(x, t * w)
        return lambda x, w: {
            "gradient of one": jax.grad(by_x)(x),
            "jvp of one": jax.jvp(by_x, (x,), (jnp.cos(x),)),
            "jacfwd": jax.jacfwd(loss, (0, 1))(x, w),
            "linearize": jax.linearize(loss, x, w)[1](x, w),
            "transpose": jax.linear_transpose(lambda dx: jax.jvp(by_x, (x,), (dx,))[1], x)(1.0),
            "third": jax.jvp(jax.jacfwd(jax.grad(line)), (0.5,), (1.0,)),
            "hessian": jax.hessian(line)(0.5),
            "rev rev": jax.grad(jax.grad(line))(0.5),
        }

    with jax.enable_x64(True):  # in float32, "rev rev" rounds by more than the tolerance on some processors
        assert_close(jax.jit(derivatives(in_both))(x, w), jax.jit(derivatives(plain))(x, w))
        if around is not stacked:
            assert_close(derivatives(in_both)(x, w)["jacfwd"], jax.jit(derivatives(plain))(x, w)["jacfwd"])


def as_custom_vjp(forward, tangent, backward, alone=None):
    """Returns what `both_modes` would be without a forward mode."""

    @jax.custom_vjp
    def run(*args):
        return forward(*args)[0]

    run.defvjp(forward, backward)
    return run


def test_chunked_vocabulary_loss_equals_a_custom_vjp_program(monkeypatch):
    """Its loop of known values is not taken apart: without `compat.where_values_are_known` this is another program."""
    x, w, targets = jnp.ones((2, 8, 4)), jnp.ones((4, 32)), jnp.zeros((2, 8), jnp.int32)

    def lowered():
        loss = lambda x, w: sk.cross_entropy(x, w, targets, chunk=8).sum()
        return jax.jit(jax.value_and_grad(loss, (0, 1))).lower(x, w).as_text()

    found = lowered()
    monkeypatch.setattr(vocab, "both_modes", as_custom_vjp)
    assert found == lowered()


def test_a_vmap_that_maps_nothing_maps_no_result():
    """As `sk.pipeline` puts around the functions of its user: only the name of an axis is new."""
    x, w, count = arguments()
    loss = lambda fn: (
        lambda x, w: jax.vmap(lambda x, w: fn(x, w, count).sum(), None, None, axis_size=1, axis_name="a")(x, w)
    )
    found, right = (jax.jit(jax.grad(loss(fn), (0, 1)))(x, w) for fn in (in_both, by_hand))
    assert_close(found, right)
