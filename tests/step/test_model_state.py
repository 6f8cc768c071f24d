"""How replicas agree on batch statistics: one, one each, or one a group; each against a reference in numpy."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmdkit as sk
from spmdkit.errors import ConfigError
from tests.support.core_models import BATCH, kept_gradient, regression
from tests.support.core_runs import MESHES, TOLERANCE, assert_close, program_of

REPLICAS = ("replica", "data")
MOMENTUM = 0.9


def norm_task(axis_name=None):
    """Returns a task that normalises its 16 features and fits 8 targets; its state holds statistics and a counter."""
    norm = nn.BatchNorm(momentum=MOMENTUM, axis_name=axis_name)

    def init(key):
        variables = norm.init(key, jnp.zeros((1, 16)), use_running_average=False)
        params = {"norm": variables["params"], "w": jnp.full((16, 8), 0.1)}
        return sk.Variables(params, {"stats": variables["batch_stats"], "seen": jnp.int32(0)})

    def predict(params, stats, x, train):
        variables = {"params": params["norm"], "batch_stats": stats}
        h, new = norm.apply(variables, x, use_running_average=not train, mutable=["batch_stats"])
        return h @ params["w"], new["batch_stats"]

    def loss_fn(params, state, batch, key):
        predicted, stats = predict(params, state["stats"], batch["x"], True)
        new_state = {"stats": stats, "seen": state["seen"] + 1}
        return sk.mean(((predicted - batch["y"]) ** 2).sum(-1)), {}, new_state

    def eval_fn(params, state, batch):
        predicted, _ = predict(params, state["stats"], batch["x"], False)
        return {"loss": sk.mean(((predicted - batch["y"]) ** 2).sum(-1))}

    return dataclasses.replace(regression(), init=init, loss_fn=loss_fn, eval_fn=eval_fn, rules=())


def rows_of(step, num_replicas, microbatches):
    """Returns float[replicas, microbatches, rows, 16], the examples of step 1, 2, ... without shuffling."""
    x = regression().train_data["x"][(step - 1) * BATCH : step * BATCH]
    return x.reshape(microbatches, num_replicas, -1, 16).swapaxes(0, 1)


def by_replica(num_replicas, microbatches, group):
    """Returns (mean, var), each [groups, 16]: replicas go on by themselves within a step, then a group takes its
    mean."""
    mean, var = np.zeros((num_replicas, 16)), np.ones((num_replicas, 16))
    for step in (1, 2, 3):
        rows = rows_of(step, num_replicas, microbatches)
        for micro in range(microbatches):
            mean = MOMENTUM * mean + (1 - MOMENTUM) * rows[:, micro].mean(1)
            var = MOMENTUM * var + (1 - MOMENTUM) * rows[:, micro].var(1)
        together = lambda x: np.repeat(x.reshape(-1, group, 16).mean(1), group, axis=0)
        mean, var = together(mean), together(var)
    return mean[::group], var[::group]


def train_three_steps(task, **settings):
    program = program_of(task, data={"shuffle": False}, **settings)
    state = program.init()
    for _, batch in program.batches(stop=3):
        state, _ = program.step(state, batch)
    return program, state


def assert_statistics(state, mean, var):
    stats = jax.device_get(state.model_state)["stats"]
    assert_close((stats["mean"], stats["var"]), (mean, var))


NUM_REPLICAS = {"data 8": 8, "replica 2 x data 4": 8, "data 2 x fsdp 4": 2, "fsdp 8 zero 3": 1, "fsdp 8 zero 2": 8}


@pytest.mark.forms(2)
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("mesh", ["replica 2 x data 4", "data 2 x fsdp 4"])
def test_axis_name_gives_statistics_of_whole_batch(mesh, microbatches):
    _, state = train_three_steps(norm_task(axis_name=REPLICAS), microbatches=microbatches, **MESHES[mesh])
    assert_statistics(state, *(x[0] for x in by_replica(1, microbatches, 1)))
    assert jax.device_get(state.model_state)["seen"] == 3 * microbatches


@pytest.mark.forms(2)
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("mesh", NUM_REPLICAS)
def test_global_state_without_axis_name_is_replica_mean(mesh, microbatches):
    _, state = train_three_steps(norm_task(), microbatches=microbatches, **MESHES[mesh])
    num = NUM_REPLICAS[mesh]
    assert_statistics(state, *(x[0] for x in by_replica(num, microbatches, num)))
    assert jax.device_get(state.model_state)["seen"] == 3 * microbatches


@pytest.mark.forms(2)
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("mesh", NUM_REPLICAS)
def test_replica_keeps_one_state_for_each_replica(mesh, microbatches):
    settings = {"model_state": "replica", "microbatches": microbatches}
    program, state = train_three_steps(norm_task(), **settings, **MESHES[mesh])
    mean, var = by_replica(NUM_REPLICAS[mesh], microbatches, 1)
    assert_statistics(state, mean, var)
    assert jax.device_get(state.model_state)["seen"].tolist() == [3 * microbatches] * NUM_REPLICAS[mesh]
    assert_evaluated_with(program, state, mean.mean(0), var.mean(0))


@pytest.mark.forms(1)
@pytest.mark.parametrize(("mesh", "group"), [("data 8", 2), ("replica 2 x data 4", 4), ("data 2 x fsdp 4", 2)])
def test_group_of_neighbors_averages_after_each_step(mesh, group):
    settings = {"model_state": {"group": group}, "microbatches": 2}
    program, state = train_three_steps(norm_task(), **settings, **MESHES[mesh])
    mean, var = by_replica(NUM_REPLICAS[mesh], 2, group)
    assert mean.shape == (NUM_REPLICAS[mesh] // group, 16)
    assert_statistics(state, mean, var)
    assert_evaluated_with(program, state, mean.mean(0), var.mean(0))


def assert_evaluated_with(program, state, mean, var):
    data, params = regression().eval_data, jax.device_get(state.params)
    h = (data["x"] - mean) / np.sqrt(var + 1e-5) * params["norm"]["scale"] + params["norm"]["bias"]
    loss = ((h @ params["w"] - data["y"]) ** 2).sum(-1).mean()
    np.testing.assert_allclose(program.eval(state)["loss"], loss, rtol=TOLERANCE)


@pytest.mark.forms(1)
@pytest.mark.parametrize("policy", [{"group": 2}, "global"], ids=str)
@pytest.mark.parametrize("mesh", ["data 8", "data 2 x fsdp 4"])
def test_policy_changes_state_but_not_gradient(mesh, policy):
    """Without an axis name each replica normalises by its own rows, whatever becomes of the statistics."""
    task = norm_task()
    program = program_of(task, data={"shuffle": False}, model_state=policy, **MESHES[mesh])
    state = program.init()
    rows = jnp.asarray(rows_of(1, NUM_REPLICAS[mesh], 1)[:, 0])
    targets = task.train_data["y"][:BATCH].reshape(*rows.shape[:2], 8)

    def loss(params):
        h = (rows - rows.mean(1, keepdims=True)) * jax.lax.rsqrt(rows.var(1, keepdims=True) + 1e-5)
        h = h * params["norm"]["scale"] + params["norm"]["bias"]
        return ((h @ params["w"] - targets) ** 2).sum(-1).mean()

    value, gradient = jax.jit(jax.value_and_grad(loss))(jax.device_get(state.params))
    for _, batch in program.batches(stop=1):
        state, metrics = program.step(state, batch)
    np.testing.assert_allclose(float(metrics["loss"]), value, rtol=TOLERANCE)
    assert_close(kept_gradient(state), jax.device_get(gradient))


def test_policies_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match=r"model_state: replica has no effect.*sk\.Variables\(params, state\)"):
        program_of(regression(), model_state="replica", **MESHES["data 8"])
    with pytest.raises(ConfigError, match=r"model_state\.group is 3, the mesh has 8 replicas.*divide 8"):
        program_of(norm_task(), model_state={"group": 3}, **MESHES["data 8"])

    def train_step(state, batch):
        raise AssertionError("not reached")

    task = dataclasses.replace(norm_task(), train_step=train_step, view="replica")
    with pytest.raises(ConfigError, match=r"needs the global view.*view='replica'"):
        program_of(task, model_state="replica", **MESHES["data 8"])


@pytest.mark.forms(1)
@pytest.mark.parametrize("view", ["global", "replica"])
def test_custom_step_passes_new_model_state_on(view):
    task = norm_task(axis_name=REPLICAS)

    def train_step(state, batch):
        value_and_grad = sk.value_and_grad(task.loss_fn)
        (loss, _, new), grads = value_and_grad(state.params, state.model_state, batch, state.key)
        return state.apply_gradients(grads, model_state=new), {"loss": loss}

    own = dataclasses.replace(task, train_step=train_step, view=view)
    _, state = train_three_steps(own, microbatches=2, **MESHES["data 8"])
    assert_statistics(state, *(x[0] for x in by_replica(1, 2, 1)))


def test_unreduced_statistics_of_one_replica_are_rejected():
    task = norm_task()

    def train_step(state, batch):
        grads = sk.pmean(jax.grad(lambda p: task.loss_fn(p, state.model_state, batch, None)[0].value)(state.params))
        _, _, new = task.loss_fn(state.params, state.model_state, batch, None)
        return state.apply_gradients(grads, model_state=new), {}

    own = dataclasses.replace(task, train_step=train_step, view="replica")
    with pytest.raises(ConfigError, match=r"state leaf 'model_state/stats/mean' differs between the replicas"):
        program_of(own, **MESHES["data 8"])
