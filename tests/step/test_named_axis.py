"""The body of somebody's `pmap(axis_name="batch")` is one device's step on every mesh."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import spmdkit as sk
from spmdkit.errors import ConfigError
from tests.step.test_annotations import DATA, MESHES, RULES, as_loss, expected, plain_init, squares
from tests.support.core_runs import TOLERANCE, assert_close, program_of, train


def program(train_step, mesh, name="batch", **changes):
    data = {"train_data": DATA, "rules": RULES, "optimizer": optax.sgd(0.1)}
    task = sk.Task(plain_init, train_step=train_step, view="replica", axis_name=name, **data, **changes)
    return program_of(task, mesh=mesh, batch_size=16, steps=4)


def gradient(state, batch):
    return jax.value_and_grad(lambda params: squares(params, batch).mean())(state.params)


def step(state, batch, name="batch", reduce=lax.pmean):
    value, grads = gradient(state, batch)
    return state.apply_gradients(reduce(grads, name)), {"loss": lax.pmean(value, axis_name=name)}


def twice(grads, name):
    return lax.pmean(lax.pmean(grads, name), name)


@pytest.mark.forms(4)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["batch", "i", "data"])
def test_a_pmap_body_is_one_device(name, mesh):
    body = functools.partial(step, name=name, reduce=twice if name == "i" else lax.pmean)
    run = train(program(body, MESHES[mesh], name), evaluate=False, steps=4)
    assert_close(run.losses, expected().losses, TOLERANCE)
    assert_close(run.params, expected().params, TOLERANCE)


def test_the_name_is_bound_in_init():
    """As in a pmap of `init`, for a batch normalization over the replicas that computes its statistics there."""
    data = {"train_data": DATA, "optimizer": optax.sgd(0.1)}
    init = lambda key: lax.pmean(plain_init(key), "batch")
    task = sk.Task(init, train_step=step, view="replica", axis_name="batch", **data)
    made = program_of(task, mesh=MESHES["data 4"], batch_size=16)
    assert_close(jax.device_get(made.init().params), jax.device_get(plain_init(None)), 0)


def test_a_pmap_body_reduces_once_like_a_loss():
    reductions = lambda p: p.compiled.as_text().count(" all-reduce(")
    data = {"train_data": DATA, "rules": RULES, "optimizer": optax.sgd(0.1)}
    for mesh in ("data 4", "data 2 x tensor 2"):
        of_loss = program_of(sk.Task(plain_init, **as_loss(squares), **data), mesh=MESHES[mesh], batch_size=16)
        assert reductions(program(step, MESHES[mesh])) == reductions(of_loss)


@pytest.mark.parametrize("mesh", ["one", "data 4", "data 2 x fsdp 2"])
def test_collectives_work_over_the_name(mesh):
    def collectives(state, batch):
        num, index = lax.axis_size("batch"), lax.axis_index("batch")
        x = batch["x"].mean()
        gathered = lax.all_gather(x, "batch")
        shifted = lax.ppermute(x, "batch", [(i, (i + 1) % num) for i in range(num)])
        scattered = lax.psum_scatter(jnp.full(16, x), "batch", tiled=True)
        noise = jax.random.normal(jax.random.fold_in(state.key, index), ())
        metrics = {
            "gathered": gathered.mean(),
            "own": lax.pmean(gathered[index] - x, "batch"),
            "before": lax.pmean(shifted - gathered[(index - 1) % num], "batch"),
            "scattered": lax.pmean(scattered.sum() - 16 / num * gathered.sum(), "batch"),
            "distinct": lax.pmax(noise, "batch") - lax.pmin(noise, "batch"),
            "size": num,
        }
        return step(state, batch)[0], metrics | {"loss": lax.pmean(x, "batch")}

    run = train(program(collectives, MESHES[mesh]), evaluate=False, steps=1)
    num = MESHES[mesh].get("data", 1)
    assert run.metrics["size"] == num and (run.metrics["distinct"] > 0.01) == (num > 1)
    assert_close(run.metrics["gathered"], run.metrics["loss"], TOLERANCE)
    assert max(abs(run.metrics[name]) for name in ("own", "before", "scattered")) < 1e-5


@pytest.mark.parametrize("mesh", ["one", "data 4", "data 2 x tensor 2"])
def test_a_missing_pmean_is_refused_with_its_line(mesh):
    def forgotten(state, batch):
        value, grads = gradient(state, batch)
        return state.apply_gradients(grads), {"loss": lax.pmean(value, "batch")}

    def local_metric(state, batch):
        return step(state, batch)[0], {"loss": gradient(state, batch)[0]}

    with pytest.raises(ConfigError, match=r"state leaf 'params/down' differs .* 'batch' \(.*py:\d+\): a reduction is"):
        program(forgotten, MESHES[mesh])
    with pytest.raises(ConfigError, match=r"metric 'loss' differs between the replicas of axis 'batch'"):
        program(local_metric, MESHES[mesh])


@pytest.mark.parametrize("mesh", ["one", "data 4"])
def test_a_doubled_sum_is_refused_with_its_line(mesh):
    doubled = functools.partial(step, reduce=lambda grads, name: lax.psum(lax.pmean(grads, name), name))
    with pytest.raises(ConfigError, match=r"lax.psum: the operand at .*test_named_axis.py:\d+ is already the same"):
        program(doubled, MESHES[mesh])


def test_a_shard_map_in_a_pmap_body_is_refused_with_its_line():
    def mapped(state, batch):
        total = jax.shard_map(lambda x: lax.psum(x.sum(), "data"), in_specs=P("data"), out_specs=P())(batch["x"])
        return step(state, batch)[0], {"loss": lax.pmean(total, "batch")}

    with pytest.raises(ConfigError, match=r"calls jax.shard_map \(.*test_named_axis.py:\d+\) in a per-replica step"):
        program(mapped, MESHES["data 2 x tensor 2"])


def test_a_function_of_pmap_is_refused():
    with pytest.raises(ConfigError, match=r"Remove jax.pmap, .* view='replica' and the axis_name"):
        program(jax.pmap(step, axis_name="batch"), {})


def test_a_name_without_the_replica_view_is_refused():
    with pytest.raises(ConfigError, match="axis_name is 'batch', and view is 'global'"):
        sk.Task(plain_init, train_step=step, axis_name="batch")
