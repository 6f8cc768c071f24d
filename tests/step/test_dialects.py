"""A loss, a global step, a per-replica step and the user's own loop give the same numbers; the known traps are
errors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmdkit as sk
from spmdkit.errors import ConfigError
from spmdkit.step import trace_context
from tests.support.core_models import BATCH, kept_gradient, regression, regression_by_hand, regression_loss
from tests.support.core_runs import MESHES, TOLERANCE, assert_close, assert_same_run, one_device, program_of, train

REPLICAS = ("replica", "data")


def global_step(state, batch):
    (loss, metrics), grads = sk.value_and_grad(regression_loss)(state.params, batch, state.key)
    return state.apply_gradients(grads), {"loss": loss, **metrics}


def own_psum_step(psum):
    """Returns a per-replica step without `sk.mean`: this replica's share of the loss, then a sum over the replicas."""

    def train_step(state, batch):
        count = psum(batch["weight"].sum())
        num_replicas = lax.psum(1, REPLICAS)

        def share(params):
            error = batch["x"] @ params["w"] + params["b"] - batch["y"]
            loss = (batch["weight"] * (error**2).sum(-1)).sum() / count
            return loss + 0.01 * (params["w"] ** 2).sum() / num_replicas, jnp.abs(error).max(-1).sum() / BATCH

        (loss, worst), grads = psum(jax.value_and_grad(share, has_aux=True)(state.params))
        return state.apply_gradients(grads), {"loss": loss, "worst": worst}

    return train_step


def pmean_step(state, batch):
    """The idiom of Horovod and pmap: a local mean, then the mean of all; means pooled by `sk.pmean` keep their
    counts."""

    def loss(params):
        error = batch["x"] @ params["w"] + params["b"] - batch["y"]
        return ((error**2).sum(-1)).mean()

    loss, grads = sk.pmean(jax.value_and_grad(loss)(state.params))
    return state.apply_gradients(grads), {"loss": loss}


def unweighted_by_hand(params, batch):
    ones = {**batch, "weight": np.ones_like(batch["weight"])}
    loss, gradient = regression_by_hand(params, ones)
    w = np.asarray(params["w"], np.float64)
    return loss - 0.01 * (w**2).sum(), {"w": gradient["w"] - 0.02 * w, "b": gradient["b"]}


def with_step(train_step, view="replica", **changes):
    return dataclasses.replace(regression(), train_step=train_step, view=view, **changes)


PER_REPLICA = {
    "sk.value_and_grad": global_step,
    "sk.psum": own_psum_step(sk.psum),
    "lax.psum": own_psum_step(lambda tree: lax.psum(tree, REPLICAS)),
}


@pytest.mark.forms(1)
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("mesh", ["data 8", "data 2 x fsdp 2 x tensor 2"])
def test_a_whole_global_step_is_the_default_step(mesh, microbatches):
    task = with_step(global_step, view="global", loss_fn=None, eval_data=None)
    run = train(program_of(task, microbatches=microbatches, **MESHES[mesh]), evaluate=False)
    assert_same_run(run, one_device("regression"))


@pytest.mark.parametrize(
    ("step", "mesh"),
    [("sk.value_and_grad", "replica 2 x data 4"), ("sk.psum", "data 8"), ("lax.psum", "replica 2 x data 4")],
)
def test_a_per_replica_step_is_the_default_step(step, mesh):
    settings = MESHES[mesh] | {"microbatches": 4 if step == "sk.value_and_grad" else 1}
    assert_same_run(train(program_of(with_step(PER_REPLICA[step]), **settings)), one_device("regression"))


def test_per_replica_step_runs_on_one_device():
    assert_same_run(train(program_of(with_step(PER_REPLICA["sk.psum"]))), one_device("regression"))


def test_custom_loop_over_own_arrays_gives_same_numbers():
    task = with_step(global_step, "global")
    program = program_of(task, **MESHES["data 8"])
    state, losses = program.init(), []
    for step_number in range(1, 6):
        indices, _ = program.schedule.batch(step_number)
        state, metrics = program.step(state, {name: x[indices] for name, x in task.train_data.items()})
        losses.append(float(metrics["loss"]))
    reference = one_device("regression")
    np.testing.assert_allclose(losses, reference.losses, rtol=TOLERANCE)
    assert_close(jax.device_get(state.params), reference.params)
    assert program.eval(state)["loss"] == pytest.approx(reference.eval["loss"], rel=TOLERANCE)


def test_lax_pmean_over_data_suffices_without_replica_axis():
    def train_step(state, batch):
        loss = lambda p: ((batch["x"] @ p["w"] + p["b"] - batch["y"]) ** 2).sum(-1).mean()
        value, grads = lax.pmean(jax.value_and_grad(loss)(state.params), "data")
        return state.apply_gradients(grads), {"loss": value}

    check_one_step(with_step(train_step), "data 8")


def test_per_replica_counts_are_summed_over_both_axes():
    def train_step(state, batch):
        num = lax.psum(1, REPLICAS)  # a constant: the number of replicas
        rows = sk.psum(jnp.sum(batch["weight"] > 0))  # varies over data alone where replica has size one
        also = lax.psum(jnp.sum(batch["weight"] > 0), REPLICAS)
        state, metrics = pmean_step(state, batch)
        return state, metrics | {"replicas": num, "rows": rows, "also": also}

    for mesh in ("data 8", "replica 2 x data 4"):
        metrics = check_one_step(with_step(train_step), mesh)
        assert (int(metrics["replicas"]), int(metrics["rows"]), int(metrics["also"])) == (8, BATCH, BATCH)


def check_one_step(task, mesh):
    """Asserts loss and gradient of the first step of an unweighted regression; returns the metrics."""
    program = program_of(task, data={"shuffle": False}, **MESHES[mesh])
    state = program.init()
    batch = {name: x[:BATCH] for name, x in task.train_data.items()}
    loss, gradient = unweighted_by_hand(jax.device_get(state.params), batch)
    state, metrics = program.step(state, batch)
    np.testing.assert_allclose(float(metrics["loss"]), loss, rtol=TOLERANCE)
    assert_close(kept_gradient(state), gradient)
    return metrics


@pytest.mark.parametrize("view", ["global", "replica"])
def test_custom_step_sees_padding_through_sk_mean(view):
    """The gradient of `sk.mean`'s sums, by plain `jax.grad`: on a short batch only real rows count."""

    def train_step(state, batch):
        def loss_sum(params):
            error = batch["x"] @ params["w"] + params["b"] - batch["y"]
            mean = sk.mean((error**2).sum(-1))
            return mean.sum, mean

        (_, mean), grads = jax.value_and_grad(loss_sum, has_aux=True)(state.params)
        mean, grads = sk.psum((mean, grads)) if view == "replica" else (mean, grads)
        return state.apply_gradients(jax.tree.map(lambda g: g / mean.count, grads)), {"loss": mean}

    task = dataclasses.replace(regression(num_examples=37), train_step=train_step, view=view)
    program = program_of(task, data={"shuffle": False, "drop_remainder": False}, **MESHES["data 8"])
    state = program.init()
    for step, batch in program.batches(stop=2):
        rows = {name: x[(step - 1) * BATCH : step * BATCH] for name, x in task.train_data.items()}
        loss, gradient = unweighted_by_hand(jax.device_get(state.params), rows)
        state, metrics = program.step(state, batch)
        np.testing.assert_allclose(float(metrics["loss"]), loss, rtol=TOLERANCE)
        assert_close(kept_gradient(state), gradient)


# ---- traps


def refused(train_step, match, mesh="replica 2 x data 4", **settings):
    with pytest.raises(ConfigError, match=match):
        program_of(with_step(train_step), **settings, **MESHES[mesh])


def local_loss(params, batch):
    return ((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2).mean()


OUTS = {
    "gradient not reduced": (
        lambda state, loss, grads: (state.apply_gradients(grads), {"loss": sk.pmean(loss)}),
        r"gradient '[wb]' differs between the replicas of axes \['data', 'replica'\].*missing.*sk\.pmean\(grads\)",
    ),
    "gradient reduced over one axis": (
        lambda state, loss, grads: (state.apply_gradients(lax.pmean(grads, "data")), {}),
        r"axes \['replica'\]",
    ),
    "second sum over both axes": (
        lambda state, loss, grads: (state.apply_gradients(sk.psum(lax.pmean(grads, "data"))), {}),
        r"sk\.psum: leaf '[wb]' is already the same.*reduced twice",
    ),
    "metric not reduced": (
        lambda state, loss, grads: (state.apply_gradients(sk.pmean(grads)), {"loss": loss}),
        r"metric 'loss' differs between the replicas of axes \['data', 'replica'\].*Apply sk\.pmean to it",
    ),
}


@pytest.mark.parametrize("name", OUTS)
def test_missing_and_doubled_reductions_are_rejected(name):
    out, match = OUTS[name]
    refused(lambda state, batch: out(state, *jax.value_and_grad(local_loss)(state.params, batch)), match)


@pytest.mark.parametrize("how", ["sk.psum", "lax.psum"])
@pytest.mark.parametrize("first", ["sk.value_and_grad", "sk.pmean"])
def test_a_gradient_reduced_twice_is_refused(first, how):
    reduce = {"sk.psum": sk.psum, "lax.psum": lambda tree: lax.psum(tree, REPLICAS)}[how]

    def train_step(state, batch):
        if first == "sk.pmean":
            loss, grads = sk.pmean(jax.value_and_grad(local_loss)(state.params, batch))
        else:
            (loss, _), grads = sk.value_and_grad(regression_loss)(state.params, batch, state.key)
        return state.apply_gradients(reduce(grads)), {"loss": loss}

    what = r"lax\.psum: the operand at .*test_dialects\.py:\d+" if how.startswith("lax") else how
    refused(train_step, what + ".*reduced twice.*Remove one of the two reductions", mesh="data 8")


@pytest.mark.forms(2)
@pytest.mark.parametrize("inside", ["cond", "scan", "jit"])
def test_second_sum_inside_control_flow_is_rejected(inside):
    def train_step(state, batch):
        grads = sk.pmean(jax.grad(local_loss)(state.params, batch))
        again = lambda tree: lax.psum(tree, "data")
        if inside == "cond":
            grads = lax.cond(state.step > 2, again, lambda tree: tree, grads)
        elif inside == "scan":
            grads = lax.scan(lambda carry, _: (again(carry), None), grads, length=2)[0]
        else:
            grads = jax.jit(again)(grads)
        return state.apply_gradients(grads), {}

    refused(train_step, "reduced twice")


def the_update_in_a_jit(state, batch):
    (loss, metrics), grads = sk.value_and_grad(regression_loss)(state.params, batch, state.key)
    return jax.jit(lambda state, grads: state.apply_gradients(grads))(state, grads), {"loss": loss, **metrics}


def old_or_new(state, batch):
    new, metrics = global_step(state, batch)
    return jax.tree.map(lambda old, new: jnp.where(jnp.isnan(metrics["loss"]), old, new), state, new), metrics


@pytest.mark.parametrize("step", [the_update_in_a_jit, old_or_new])
def test_originals_follow_copies_through_jit_and_tree_map(step):
    run = train(program_of(with_step(step), **MESHES["replica 2 x data 4"]), evaluate=False)
    assert_same_run(run, one_device("regression"))


def test_partly_replaced_parameters_restore_originals():
    def train_step(state, batch):
        new, metrics = global_step(state, batch)
        return new.replace(params={"w": new.params["w"] * 1.0, "b": state.params["b"]}), metrics

    program = program_of(with_step(train_step), **MESHES["data 8"])
    state = program.init()
    before = jax.device_get(state.params)
    state, _ = program.step(state, next(iter(program.batches()))[1])
    assert np.array_equal(state.params["b"], before["b"]) and not np.array_equal(state.params["w"], before["w"])


@pytest.mark.forms(2)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["open", "in a jit"])
@pytest.mark.parametrize("replace", [dataclasses.replace, sk.TrainState.replace], ids=["dataclasses", "of the state"])
def test_diverging_parameters_are_rejected_in_any_state(replace, wrap):
    @wrap
    def train_step(state, batch):
        grads = jax.grad(local_loss)(state.params, batch)
        return replace(state, params=jax.tree.map(lambda p, g: p - g, state.params, grads)), {}

    refused(train_step, r"state leaf 'params/[wb]' differs.*update through state\.apply_gradients")


@pytest.mark.parametrize(
    ("out", "match"),
    [
        (lambda s, g: s.apply_gradients(g), r"returned TrainState\. It must return \(state, metrics\)"),
        (lambda s, g: (s.apply_gradients(g), {}, 1), "returned 3 values"),
        (lambda s, g: (s.apply_gradients({**g, "b": g["w"]}), {}), r"gradient b is float32\[16,8\], the parameter"),
    ],
    ids=["no tuple", "three values", "another shape"],
)
def test_what_a_step_returns_is_checked(out, match):
    def train_step(state, batch):
        _, grads = sk.value_and_grad(regression_loss)(state.params, batch, state.key)
        return out(state, grads)

    with pytest.raises(ConfigError, match=match):
        program_of(with_step(train_step, view="global"), **MESHES["data 8"])


# ---- every form


def test_scan_from_constant_works_in_manual_form():
    def per_example_loss(params, batch, key):
        """A scan per example over its features, whose first carry is a constant."""
        step = lambda total, xw: (total + xw[0][:, None] * xw[1], None)
        start = jnp.zeros((batch["x"].shape[0], 8))
        predicted, _ = lax.scan(step, start, (batch["x"].T, params["w"]))
        error = predicted + params["b"] - batch["y"]
        loss = sk.mean((error**2).sum(-1), weights=batch["weight"]) + 0.01 * (params["w"] ** 2).sum()
        return loss, {"worst": sk.mean(jnp.abs(error).max(-1))}

    task = dataclasses.replace(regression(), loss_fn=per_example_loss)
    program = program_of(task, microbatches=4, **MESHES["replica 2 x data 4"])
    assert program.form == "manual"
    assert_same_run(train(program), one_device("regression"))


def test_mapped_form_is_tried_after_manual_form():
    def loss_fn(params, batch, key):
        if trace_context.current().sharding.form == "manual":
            raise AssertionError("not here")
        return regression_loss(params, batch, key)

    program = program_of(dataclasses.replace(regression(), loss_fn=loss_fn), **MESHES["data 8"])
    assert program.form == "mapped" and "; not manual: loss_fn raised AssertionError" in program.explain()
