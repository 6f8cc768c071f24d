"""A derivative that a part takes itself: right where it is by something of the shard's own, and refused where types
would add it up."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.errors import ConfigError
from spmdkit.ops.collectives import all_reduce
from tests.support.core_models import keep_gradient
from tests.support.core_runs import assert_same_run, program_of, train
from tests.support.fixed_numbers import normal

B, D = 16, 6


def by_constant(w, x):
    return jax.vmap(lambda row: jax.grad(lambda t: jnp.tanh(row * (1 + t) @ w))(0.0) ** 2)(x)


def by_zeros(w, x):
    d = jax.grad(lambda d: jnp.tanh((x + d) @ w).sum())(jnp.zeros(x.shape))
    return jnp.tanh((x + 0.1 * d) @ w) ** 2


def by_own(w, x):
    return jax.vmap(lambda row: jax.grad(lambda t: jnp.tanh(row * (1 + t) @ w))(row[0] * 0) ** 2)(x)


def by_own_with_sums(w, x):
    """Its own sums over devices, also inside the derivative, are no fault."""
    total = lambda t: all_reduce(jnp.tanh(x * (1 + t[:, None]) @ w).sum(), "batch")
    return jax.grad(total)(x[:, 0] * 0) + all_reduce(x.sum(), "batch") / B


def task(fn):
    part = sk.manual(fn, in_dims=[(None,), ("batch", None)], out_dims=("batch",))
    init = lambda key: {"w": normal(0, D)}
    loss_fn = lambda params, batch, key: sk.mean(part(params["w"], batch))
    x = np.random.default_rng(0).normal(size=(B, D)).astype(np.float32)
    return sk.Task(init, loss_fn, keep_gradient(optax.sgd(0.1)), train_data=x)


SETTINGS = {"batch_size": B, "data": {"shuffle": False}}
MESHES = [{"fsdp": 8}, {"data": 2, "fsdp": 2}]


@pytest.mark.forms(2)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("fn", [by_constant, by_zeros])
def test_derivative_by_constant_is_rejected_with_line(fn, mesh):
    line = rf"test_inner_derivative.py:{fn.__code__.co_firstlineno + 1}"
    message = rf"sk.manual: {fn.__name__} takes a derivative .* the same along \['fsdp'\], at .*{line}.*`x \* 0`"
    with pytest.raises(ConfigError, match=message):
        program_of(task(fn), mesh=mesh, **SETTINGS)


@pytest.mark.forms(2)
@pytest.mark.parametrize(
    "fn, mesh",
    [
        (fn, mesh)
        for fn in (by_own, by_own_with_sums)
        for mesh in MESHES
        if not (fn is by_own_with_sums and "data" in mesh)  # its sums are over the examples of one replica
    ],
)
def test_derivative_by_shard_value_equals_one_device(fn, mesh):
    found = train(program_of(task(fn), mesh=mesh, **SETTINGS), evaluate=False, steps=2)
    assert_same_run(found, train(program_of(task(fn), **SETTINGS), evaluate=False, steps=2))


def by_constant_beside_tensor(w, x):
    """Nothing in the derivative differs along tensor; the examples do along data."""
    slope = jax.vmap(lambda row: jax.grad(lambda t: jnp.tanh(row * (1 + t)).sum())(0.0))(x)
    return slope * all_reduce(w.sum(), "mlp")


def by_weight_beside_tensor(w, x):
    """By one value for all examples, which belongs to the shard: a weight is every replica's own."""
    slope = jax.vmap(lambda row: jax.grad(lambda t: jnp.tanh(row[: w.shape[0]] * (1 + t) @ w))(w[0] * 0))(x)
    return all_reduce(slope, "mlp") if w.shape[0] < D else slope


def tensor_task(fn):
    part = sk.manual(fn, in_dims=[("mlp",), ("batch", None)], out_dims=("batch",))
    one = task(fn)
    loss_fn = lambda params, batch, key: sk.mean(part(params["w"], batch))
    return sk.Task(one.init, loss_fn, one.optimizer, train_data=one.train_data, rules=[("w", ["mlp"])])


def test_enclosing_replica_vmap_is_checked_too():
    program_of(tensor_task(by_constant_beside_tensor), mesh={"tensor": 2}, **SETTINGS)
    with pytest.raises(ConfigError, match=r"by_constant_beside_tensor takes a derivative .* the same along \['data'\]"):
        program_of(tensor_task(by_constant_beside_tensor), mesh={"data": 2, "tensor": 2}, **SETTINGS)


@pytest.mark.slow
def test_derivative_by_a_weights_shard_is_exact():
    of = lambda mesh: train(program_of(tensor_task(by_weight_beside_tensor), mesh=mesh, **SETTINGS), False, 1)
    assert_same_run(of({"data": 2, "tensor": 2}), of({"tensor": 2}))


def test_an_expert_that_takes_one_is_refused():
    def init(key):
        r, w = jax.random.split(key)
        return {"r": jax.random.normal(r, (D, 4)), "w": jax.random.normal(w, (4, D, D))}

    def expert(w, x):
        d = jax.grad(lambda d: jnp.tanh((x + d) @ w).sum())(jnp.zeros(x.shape))
        return jnp.tanh((x + d) @ w)

    def loss_fn(p, b, key):
        y, _ = sk.moe(b, p["r"], p["w"], top_k=2, capacity=1.25, expert=expert, dims=("expert", None, None))
        return sk.mean((y**2).sum((1, 2)))

    x = np.random.default_rng(0).normal(size=(B, 4, D)).astype(np.float32)
    with pytest.raises(ConfigError, match=rf"test_inner_derivative.py:{expert.__code__.co_firstlineno + 1}"):
        program_of(sk.Task(init, loss_fn, optax.sgd(0.1), train_data=x), mesh={"expert": 2, "fsdp": 2}, batch_size=B)
