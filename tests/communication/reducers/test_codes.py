"""The bits that reducers send: float8 against the type of that name, int8 and signs by hand, and NaN."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import spmdkit as sk
from spmdkit.communication.reducers import coded, float8, int8, sign
from spmdkit.communication.reducers.base import PAD
from tests.support.messages import raises

E4M3 = ml_dtypes.float8_e4m3fn


def test_float8_bits_are_the_values_of_the_type():
    bits = np.array([b for b in range(256) if b & 0x7F != 0x7F], np.uint8)
    np.testing.assert_array_equal(jax.jit(float8.float8_values)(bits), bits.view(E4M3).astype(np.float32))


def test_values_become_the_nearest_float8_ties_to_even():
    random = np.random.default_rng(0)
    drawn = random.normal(size=20000) * 10.0 ** random.integers(-5, 2, 20000)
    grid = np.arange(127, dtype=np.uint8).view(E4M3).astype(np.float64)
    x = np.concatenate([drawn, grid, -grid, (grid[1:] + grid[:-1]) / 2]).clip(-448, 448).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(float8.float8_bits)(x), x.astype(E4M3).view(np.uint8))


CODES = {
    "int8": (coded.block_code("int8", 256, int8._encode, int8._decode), 1 / 254),
    "float8": (coded.block_code("float8", 256, float8._encode, float8._decode), 1 / 28),
}


@pytest.mark.parametrize("name", CODES)
def test_value_error_is_within_half_a_step(name):
    code, half_step = CODES[name]
    x = np.random.default_rng(0).normal(size=(3, 2048)).astype(np.float32) * np.float32([[1], [1e6], [1e-6]])
    x[0, 256:512] = 0
    sent = jax.jit(code.encode)(x)
    assert [(s.dtype, s.shape[1] % PAD, s.shape[1]) for s in sent] == [(jnp.uint8, 0, code.row_bytes(2048))]
    back = np.asarray(jax.jit(code.decode, static_argnums=1)(sent, 2048))
    largest = np.abs(x.reshape(3, 8, 256)).max(-1, keepdims=True)
    assert (np.abs(back - x).reshape(3, 8, 256) <= largest * half_step * 1.001).all()
    assert not back[0, 256:512].any()


def test_sign_decodes_to_mean_magnitude_of_block():
    code = coded.block_code("sign", 1024, sign._encode, sign._decode, bits=1)
    x = np.random.default_rng(0).normal(size=(2, 3072)).astype(np.float32)
    back = jax.jit(lambda x: code.decode(code.encode(x), 3072))(x)
    size = np.abs(x.reshape(2, 3, 1024)).mean(-1, keepdims=True)
    np.testing.assert_allclose(back, (np.where(x.reshape(2, 3, 1024) >= 0, 1, -1) * size).reshape(2, 3072), rtol=1e-6)


@pytest.mark.forms(1)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["int8", "float8", "sign"])
def test_non_finite_value_affects_only_its_block(name, bad):
    module = {"int8": int8, "float8": float8, "sign": sign}[name]
    code = coded.block_code(name, 256, module._encode, module._decode, bits=1 if name == "sign" else 8)
    x = np.ones((1, 1024), np.float32)
    x[0, 300] = bad
    finite = np.isfinite(jax.jit(lambda x: code.decode(code.encode(x), 1024))(x)).reshape(4, 256)
    assert not finite[1].any() and finite[[0, 2, 3]].all()


@pytest.mark.parametrize("block", [0, 1.5, True])
def test_a_block_that_is_none_is_refused(block):
    with raises(f"sign.block is {block!r}", "values that share a scale", "Write block: 256"):
        sk.Config(task="t.py:t", reducer={"sign": {"block": block}})
