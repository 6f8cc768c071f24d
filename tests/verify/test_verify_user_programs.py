"""`verify` on parallel programs of users: the body of a pmap, explicit sharding, their names and states."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import spmdkit as sk
from spmdkit.verify.mutants import MUTANTS
from spmdkit.verify.runner import CaseRunner
from spmdkit.verify.task_runner import TaskRunner
from tests.step.test_annotations import DATA, DOWN, RULES, UP, plain_init
from tests.support.user_programs import MESHES, PROGRAMS, config_of, machine_with, module_of

pytestmark = pytest.mark.promotes("programs of people")
MOMENTUM = optax.sgd(0.1, momentum=0.9)


def of_statistics(state, batch):
    """A step with statistics of each replica: its numbers depend on the number of replicas."""

    def loss(params):
        hidden = batch["x"] @ params["up"]
        hidden = jax.nn.gelu((hidden - hidden.mean(0)) / (1 + hidden.std(0)))
        return ((hidden @ params["down"] - batch["y"]) ** 2).mean()

    value, grads = lax.pmean(jax.value_and_grad(loss)(state.params), "batch")
    return state.apply_gradients(grads), {"loss": value}


def explicit_init(key):
    params = {"up": jax.reshard(jnp.asarray(UP), P(None, "model")), "down": jnp.asarray(DOWN)}
    return {"params": params, "moments": MOMENTUM.init(params)}


def explicit(state, batch):
    def loss(params):
        hidden = jnp.einsum("bd,df->bf", batch["x"], params["up"], out_sharding=P("dp", "model"))
        out = jnp.einsum("bf,fk->bk", jax.nn.gelu(hidden), params["down"], out_sharding=P("dp", None))
        return ((out - batch["y"]) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(state["params"])
    updates, moments = MOMENTUM.update(grads, state["moments"])
    return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, {"loss": value}


def case_runner(kind):
    data = {"train_data": DATA, "rules": RULES}
    if kind == "pmap":
        body = {"train_step": of_statistics, "view": "replica", "axis_name": "batch", "optimizer": optax.sgd(0.1)}
        task, roles = sk.Task(plain_init, **body, **data), {}
    else:
        view = sk.StateView("params", "moments")
        task, roles = sk.Task(explicit_init, train_step=explicit, state=view, **data), {"dp": "data", "model": "tensor"}
    config = sk.Config(task="t.py:t", batch_size=16, steps=2, data={"shuffle": False}, roles=roles)
    return CaseRunner(TaskRunner(config, task, 16, 2))


@pytest.mark.parametrize("kind", ["pmap", "explicit"])
def test_a_step_of_a_user_is_verified(kind):
    runner = case_runner(kind)
    assert "own train_step" in runner.compare_with_plain_jax()["not_applicable"]
    assert runner.case({"data": 2, "tensor": 2}, 1, whole=True)["passed"]
    assert runner.mutant("rows_of_first_replica", 2)["by"].startswith("gradient")


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_verified_with_all_mutants(name):
    with machine_with(4):
        task, config = module_of(name, "after").task, config_of(name, "one")
        runner = CaseRunner(TaskRunner(config, task, config.batch_size, 3))
        assert runner.compare_with_plain_jax().get("passed", True)
        for mesh in PROGRAMS[name].meshes[1:]:
            assert runner.case(MESHES[mesh], 1, whole=True)["passed"], mesh
        found = {mutant.name: runner.mutant(mutant.name, 4) for mutant in MUTANTS}
    assert not [name for name, outcome in found.items() if outcome.get("caught") is False]
    assert found["rows_of_first_replica"]["caught"] and found["checkpoint_loses_leaf"]["caught"]
