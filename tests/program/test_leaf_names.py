"""Names of leaves are checked before the first step: in the parameters, the model state and the data."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.errors import ConfigError

COLLIDING = {
    "one path": ({"a/b": 1, "a": {"b": 2}}, "two leaves have the path"),
    "slash and dot": ({"a.b": 1, "a": {"b": 2}}, "have the same name in a checkpoint"),
    "leaf and folder": ({"a": 1, "a/b": 2}, "is also the folder of"),
    "empty": ({"": 1}, "has an empty part"),
    "empty inside": ({"a": {"": 1}}, "has an empty part"),
    "two slashes": ({"a//b": 1}, "has an empty part"),
}
ALLOWED = [1, {"a.b": 1, "c": {"d.e": 2}}, {"a b/ü": 1}, {0: 1, 1: 2}]


def build(params=1, model_state=1, data=1):
    params, model_state = (jax.tree.map(lambda _: jnp.ones(3), tree) for tree in (params, model_state))
    total = lambda tree: sum(leaf.sum(-1) for leaf in jax.tree.leaves(tree))
    task = sk.Task(
        lambda key: sk.Variables(params, model_state),
        lambda params, state, batch, key: (sk.mean(total(batch) * total(params)), {}, state),
        optax.adam(0.1),
        train_data=jax.tree.map(lambda _: np.ones((8, 3), np.float32), data),
    )
    return sk.build(sk.Config(task="t.py:t", batch_size=8, steps=1, ema=0.9), task, devices=jax.devices()[:1])


@pytest.mark.parametrize("where", ["params", "model_state", "data"])
@pytest.mark.parametrize("name", COLLIDING)
def test_names_that_collide_are_rejected(name, where):
    tree, message = COLLIDING[name]
    with pytest.raises(ConfigError, match=message) as caught:
        build(**{where: tree})
    assert str(caught.value).startswith("train_data: " if where == "data" else "the state: ")


@pytest.mark.parametrize("tree", ALLOWED, ids=map(str, ALLOWED))
def test_other_names_are_accepted(tree):
    build(tree, tree, tree)
