"""`sk.manual`: written-out collectives give the numbers of one device on every mesh; its errors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.errors import ConfigError
from spmdkit.mesh.mesh import resolve
from spmdkit.ops.collectives import all_gather, all_reduce, axes, reduce_scatter
from spmdkit.step import trace_context
from tests.support.core_hlo import collectives
from tests.support.core_models import keep_gradient
from tests.support.core_runs import assert_same_run, program_of, train
from tests.support.fixed_numbers import normal
from tests.support.forms import slow_except

D, F, T, LAYERS, CLASSES = 16, 32, 8, 2, 4


def column_row(x_BTD, up_DF, down_FD):
    x_BTD = all_gather(x_BTD, "mlp", dim=1)
    up_DF, down_FD = all_gather(up_DF, "embed", dim=0), all_gather(down_FD, "embed", dim=1)
    return reduce_scatter(jax.nn.gelu(x_BTD @ up_DF) @ down_FD, "mlp", dim=1)


ROWS = ("batch", "norm_sequence", None)
IN_DIMS = [ROWS, ("embed", "mlp"), ("mlp", "embed")]


def task(op=None, remat=False):
    op = op or sk.manual(column_row, IN_DIMS, ROWS)

    def init(key):
        return {
            "up": normal(0, LAYERS, D, F) / 4,
            "down": normal(1, LAYERS, F, D) / 6,
            "head": normal(2, D, CLASSES),
        }

    def block(x_BTD, w):
        return sk.shard(x_BTD + op(x_BTD, w["up"], w["down"]), *ROWS)

    def loss_fn(params, batch, key):
        layers = {name: params[name] for name in ("up", "down")}
        one = jax.checkpoint(block) if remat else block
        x_BTD, _ = jax.lax.scan(lambda x, w: (one(x, w), None), sk.shard(batch["x"], *ROWS), layers)
        losses_B = optax.softmax_cross_entropy_with_integer_labels(x_BTD.mean(1) @ params["head"], batch["y"])
        return sk.mean(losses_B)

    rng = np.random.default_rng(0)
    data = {
        "x": rng.normal(size=(64, T, D)).astype(np.float32),
        "y": rng.integers(0, CLASSES, 64).astype(np.int32),
    }
    rules = [("up", [None, "embed", "mlp"]), ("down", [None, "mlp", "embed"])]
    return sk.Task(init, loss_fn, keep_gradient(optax.sgd(0.1)), train_data=data, rules=rules)


MESHES = {
    "data 8": {"mesh": {"data": 8}},
    "fsdp 4 x tensor 2": {"mesh": {"fsdp": 4, "tensor": 2}},
    "replica 2 x data 2 x tensor 2": {"mesh": {"replica": 2, "data": 2, "tensor": 2}},
    "data 2 x fsdp 2 x tensor 2": {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}},
    "fsdp 2 x context 2 x tensor 2": {"mesh": {"fsdp": 2, "context": 2, "tensor": 2}},
    "fsdp 4 zero 2 x tensor 2": {"mesh": {"fsdp": 4, "tensor": 2}, "layout": {"zero": 2}},
}


@pytest.fixture(scope="module")
def one_device():
    return train(program_of(task()), evaluate=False, steps=2)


@pytest.mark.parametrize(
    ("mesh", "microbatches"),
    slow_except([("fsdp 2 x context 2 x tensor 2", 2)], [(mesh, num) for mesh in MESHES for num in (1, 2)]),
)
def test_manual_layer_equals_one_device(mesh, microbatches, one_device):
    program = program_of(task(remat=microbatches == 2), microbatches=microbatches, **MESHES[mesh])
    assert_same_run(train(program, evaluate=False, steps=2), one_device)


def test_communication_is_that_of_the_layer():
    sizes = MESHES["data 2 x fsdp 2 x tensor 2"]["mesh"]
    found = collectives(program_of(task(), mesh=sizes).compiled.as_text(), resolve(sizes, 8))
    kinds = [c.kind for c in found if c.in_loop]
    # Forward: x, up, down in; y out. Backward: x, up, down again and y's cotangent in; three gradients out.
    assert kinds.count("all-gather") == 3 + 4
    assert kinds.count("reduce-scatter") == 1 + 3
    assert not set(kinds) - {"all-gather", "reduce-scatter"}


@pytest.mark.slow
def test_user_vmap_around_a_part_changes_nothing():
    twice = lambda x, up, down: jax.vmap(sk.manual(column_row, IN_DIMS, ROWS), (0, None, None))(
        jnp.stack([x, 0.3 * x]), up, down
    ).sum(0)
    settings = MESHES["data 2 x fsdp 2 x tensor 2"]
    assert_same_run(
        train(program_of(task(twice), **settings), evaluate=False), train(program_of(task(twice)), evaluate=False)
    )


def without_reduction(x_BTD, up_DF, down_FD):
    x_BTD = all_gather(x_BTD, "mlp", dim=1)
    return jax.nn.gelu(x_BTD @ all_gather(up_DF, "embed", dim=0)) @ all_gather(down_FD, "embed", dim=1)


def reduced_twice(x_BTD, up_DF, down_FD):
    return all_reduce(all_reduce(without_reduction(x_BTD, up_DF, down_FD), "mlp"), "mlp")


@pytest.mark.parametrize(
    "fn, out, message",
    [
        (without_reduction, ("batch",), r"differs along \['tensor'\]"),
        (reduced_twice, ("batch",), "2 times too large"),
    ],
)
def test_a_missing_or_doubled_reduction_is_refused(fn, out, message):
    with pytest.raises(ConfigError, match=message):
        program_of(task(sk.manual(fn, IN_DIMS, out)), mesh={"fsdp": 4, "tensor": 2})


def test_a_dim_that_does_not_divide_is_refused():
    with pytest.raises(ConfigError, match=r"column_row: argument 0 .* dim 1 is sharded over context = 3"):
        program_of(task(), mesh={"context": 3}, batch_size=32)


def test_closure_over_traced_array_is_rejected():
    def op(x, up, down):
        scale = x.mean()
        return sk.manual(lambda x, up, down: column_row(x * scale, up, down), IN_DIMS, ROWS)(x, up, down)

    with pytest.raises(ConfigError, match="closes over a traced array"):
        program_of(task(op), mesh={"fsdp": 4, "tensor": 2})


@jax.custom_vjp
def column_row_by_hand(x_BTD, up_DF, down_FD):
    return column_row(x_BTD, up_DF, down_FD)


def _by_hand(x_BTD, up_DF, down_FD):
    return column_row(x_BTD, up_DF, down_FD), (x_BTD, up_DF, down_FD)


def _gradient_by_hand(kept, dout):
    assert trace_context.current().in_manual and axes("mlp") == ("tensor",)
    return jax.vjp(column_row, *kept)[1](dout)


column_row_by_hand.defvjp(_by_hand, _gradient_by_hand)


def test_custom_gradient_in_a_part_knows_its_axes(one_device):
    op = sk.manual(column_row_by_hand, IN_DIMS, ROWS)
    found = train(program_of(task(op), mesh={"fsdp": 2, "tensor": 2}), evaluate=False, steps=2)
    assert_same_run(found, one_device)
