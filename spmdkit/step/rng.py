"""Random keys: the derivation of every key of a run from its seed.

    key(seed)                                         passed to `init` unchanged, as in plain JAX
    |- fold STEPS - fold step                         `state.key`
    |     |- fold LOSS - fold replica - fold micro    the plain key of a loss
    |     |- fold EXAMPLES - fold salt (- fold layer) - fold position   `sk.example_keys(salt)`
    |     |- fold REDUCER                             of a reducer that draws random numbers
    |     `- fold ROUNDING - fold leaf               of an update that is rounded stochastically
    |- fold UPDATE - the same subtree                 after an update within a step: four updates have four keys
    `- fold EVALUATION - the same subtree             with the index of the batch as the step

With threefry, `split(key, n)[i]` is `fold_in(key, i)`. The branches use large tags, so that keys split off by user code
never collide with them.

All folding uses threefry, for any default implementation of JAX: unsafe_rbg folds by an exclusive or, so that its folds
commute and cancel, and under `vmap` rbg draws a full batch from its first key. User code receives a key of the default
implementation with threefry's bits. Example keys stay threefry keys.
"""

from __future__ import annotations

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmdkit.foundation.trees import is_key

VERSION = 2
"""Version of this tree, saved with every checkpoint. 1: no tags."""

STEPS, EVALUATION, LOSS, EXAMPLES, REDUCER = 0x73746570, 0x6576616C, 0x6C6F7373, 0x65786D70, 0x72656475
UPDATE, ROUNDING = 0x75706474, 0x726F756E
"""ASCII: step, eval, loss, exmp, redu, updt, roun."""

THREEFRY = "threefry2x32"


def identity() -> dict[str, Any]:
    """Returns all settings other than the seed that determine the random numbers of a run."""
    return {"version": VERSION, "impl": default_impl()}


def default_impl() -> str:
    """Returns the name of JAX's default implementation."""
    return str(jax.config.jax_default_prng_impl)  # type: ignore[attr-defined]


def abstract_key() -> jax.ShapeDtypeStruct:
    """Returns the shape of a root key: enough to trace `init`, and no program is compiled for it."""
    key: jax.ShapeDtypeStruct = jax.eval_shape(lambda: jax.random.key(0))
    return key


def root_data(seed: int) -> jax.Array:
    """Returns the data of the run's root key, which is passed to `init`."""
    return jax.random.key_data(jax.random.key(seed))


def step_key(root: jax.Array, step: Any) -> jax.Array:
    """Returns the key of a step, of the default implementation: a function of (seed, step)."""
    return _as_impl(_fold(_of_data(root), STEPS, step), default_impl())


def updated_root(root: jax.Array) -> jax.Array:
    """Returns the root of the keys after an update within the same step. No step has the same keys."""
    words = jax.random.key_data(_fold(_of_data(root), UPDATE))
    return jnp.concatenate([words, root.reshape(-1)[2:]]).reshape(root.shape)


def evaluation_key(seed: int) -> jax.Array:
    """Returns the key of every evaluation, of the default implementation."""
    return _as_impl(_fold(_of_data(root_data(seed)), EVALUATION), default_impl())


def batch_key(key: jax.Array, number: Any) -> jax.Array:
    """Returns the key of one batch of an evaluation."""
    return _like(_fold(_threefry(key), number), key)


def loss_key(key: jax.Array, replica: Any, micro: Any) -> jax.Array:
    """Returns the plain key of a loss, of the implementation of `key`, distinct for each replica and microbatch."""
    return _like(_fold(_threefry(key), LOSS, replica, micro), key)


def reducer_key(key: jax.Array) -> jax.Array:
    """Returns the threefry key of a step's reducer, the same on every replica."""
    return _fold(_threefry(key), REDUCER)


def rounding_key(key: jax.Array, number: int) -> jax.Array:
    """Returns the threefry key that rounds the parameter with this number, the same on every replica."""
    return _fold(_threefry(key), ROUNDING, number)


def example_keys(key: jax.Array, salt: Any, places: jax.Array, layer: jax.Array | None = None) -> jax.Array:
    """Returns one threefry key per position in the global batch. `layer`: number of the layer of a pipeline."""
    if isinstance(salt, str):
        salt = np.uint32(zlib.crc32(salt.encode()))
    base = _fold(_threefry(key), EXAMPLES, salt)
    base = base if layer is None else fold_layer(base, layer)
    return jax.vmap(lambda place: jax.random.fold_in(base, place))(places)


def fold_layer(key: jax.Array, layer: jax.Array) -> jax.Array:
    """Returns the key of a layer of a pipeline."""
    return _fold(key, layer)


def _fold(key: jax.Array, *data: Any) -> jax.Array:
    for x in data:
        key = jax.random.fold_in(key, x)
    return key


def _threefry(key: jax.Array) -> jax.Array:
    """Returns a threefry key that depends on every bit of `key`, typed or raw. Threefry keys are returned unchanged."""
    return _of_data(jax.random.key_data(key) if is_key(key) else key, whole=True)


def _of_data(data: jax.Array, whole: bool = False) -> jax.Array:
    """Returns a threefry key from another key's data: all words if `whole`, otherwise the first two."""
    words = data.reshape(-1)
    key = jax.random.wrap_key_data(words[:2], impl=THREEFRY)
    return _fold(key, *words[2:]) if whole else key


def _like(key: jax.Array, other: jax.Array) -> jax.Array:
    """Returns a threefry key converted to the implementation and form (typed or raw) of `other`."""
    if is_key(other):
        return _as_impl(key, str(jax.random.key_impl(other)))
    return jax.random.key_data(_as_impl(key, default_impl()))


def _as_impl(key: jax.Array, impl: str) -> jax.Array:
    if impl == THREEFRY:
        return key
    shape = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl))).shape
    return jax.random.wrap_key_data(jax.random.bits(key, shape, jnp.uint32), impl=impl)  # type: ignore[no-any-return]
