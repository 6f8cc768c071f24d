"""Settings of JAX that a user's file or environment makes are harmless, or are refused with one sentence."""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.config import Config
from spmdkit.errors import ConfigError, NonFiniteError

MESHES = {"one": {}, "data": {"data": 4}, "fsdp": {"data": 2, "fsdp": 2}}
X = np.linspace(-1, 1, 128, dtype=np.float32).reshape(32, 4)


def counts() -> optax.GradientTransformation:
    """As optax counts: an int32 times a float."""
    update = lambda grads, count, params=None: (
        jax.tree.map(lambda g: -0.1 * g * (1 - 0.9 ** (count + 1)), grads),
        count + 1,
    )
    return optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)


def loss_fn(params, batch, key):
    h = batch["x"] @ params["w"] + params["b"]
    return sk.mean((h.sum(-1) - batch["y"]) ** 2), {"mean": sk.mean(h.sum(-1))}


def train(tmp_path, mesh, x=X, **settings):
    data = {"x": X, "y": X.sum(1)}
    init = lambda key: {"w": jax.random.normal(key, (4, 8)), "b": jnp.zeros(8)}
    config = Config(
        task="mine.py:task",
        run_dir=str(tmp_path / "run"),
        steps=4,
        batch_size=8,
        devices=[0, 1, 2, 3],
        mesh=mesh,
        microbatches=2,
        layout={"min_shard_bytes": 1} if "fsdp" in mesh else {},
        checkpoint={"every_steps": 2},
        eval={"every_steps": 2},
        log={"every_steps": 2, "progress": "off"},
        **settings,
    )
    return sk.train(config, task=sk.Task(init, loss_fn, counts(), train_data={**data, "x": x}, eval_data=data))


@contextlib.contextmanager
def updated(name, value):
    """A setting of all threads, as `jax.config.update` in a task's file makes it."""
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, "allow" if before is None else before)


WORKING = {
    "strict": lambda: jax.numpy_dtype_promotion("strict"),
    "guard": lambda: updated("jax_transfer_guard", "disallow"),
    "leaks": jax.checking_leaks,
    "nans": lambda: updated("jax_debug_nans", True),
}


def _params(result):
    return jax.tree.map(np.asarray, result.state.params)


QUICK = {("strict", "fsdp"), ("guard", "data"), ("leaks", "fsdp"), ("nans", "one")}
CASES = [
    pytest.param(name, mesh, marks=[] if (name, mesh) in QUICK else [pytest.mark.slow])
    for name in WORKING
    for mesh in MESHES
]


@functools.cache
def expected(mesh, folder):
    with jax.numpy_dtype_promotion("standard"):
        return _params(train(folder, MESHES[mesh]))


@pytest.mark.forms(2)
@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_a_setting_changes_no_bit(name, mesh, tmp_path, tmp_path_factory):
    with WORKING[name]():
        state = train(tmp_path, MESHES[mesh])
    jax.tree.map(np.testing.assert_array_equal, _params(state), expected(mesh, tmp_path_factory.getbasetemp() / mesh))


def test_nan_is_reported_by_on_nonfinite(tmp_path):
    bad = X.copy()
    bad[20] = np.nan
    with updated("jax_debug_nans", True), pytest.raises(NonFiniteError, match="row 20 is not finite in the data"):
        train(tmp_path, {}, bad)


def test_disabled_jit_is_refused(tmp_path):
    with jax.disable_jit(), pytest.raises(ConfigError, match="jax_disable_jit is set"):
        train(tmp_path, {})
