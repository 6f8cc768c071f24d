"""Convolutions of every kind, with one row per shard, as on one device."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import spmdkit as sk
from spmdkit.compat.convolutions import as_products
from tests.support.fixed_numbers import normal
from tests.support.forms import slow_except
from tests.support.natural_runs import assert_same_run, keep_gradient, train

ROWS = 8
DATA = np.random.default_rng(0).normal(size=(ROWS, 8, 8, 4)).astype(np.float32)
SHAPES = {
    "in": (3, 3, 4, 8),
    "bottleneck": (1, 1, 8, 8),
    "grouped": (1, 1, 2, 8),
    "depthwise": (3, 3, 1, 8),
    "strided": (3, 3, 8, 8),
    "whole": (4, 4, 8, 4),
    "last": (1, 1, 8, 3),
}
MESHES = {
    "data 2 x fsdp 4": {"data": 2, "fsdp": 4},
    "data 4 x fsdp 2": {"data": 4, "fsdp": 2},
    "fsdp 8": {"fsdp": 8},
    "data 8": {"data": 8},
    "data 2 x tensor 4": {"data": 2, "tensor": 4},
    "fsdp 2 x tensor 2": {"fsdp": 2, "tensor": 2},
}


def init(key):
    scaled = lambda seed, shape: normal(seed, *shape) / np.float32(np.sqrt(np.prod(shape[:3])))
    return {name: scaled(seed, shape) for seed, (name, shape) in enumerate(SHAPES.items())}


def loss_fn(params, rows, key):
    def layer(x, name, stride=1, groups=1, padding="SAME"):
        names = ("NHWC", "HWIO", "NHWC")
        w = params[name]
        return jnp.tanh(
            lax.conv_general_dilated(x, w, (stride,) * 2, padding, dimension_numbers=names, feature_group_count=groups)
        )

    x = layer(rows, "in")
    x = x + layer(x, "bottleneck") + layer(x, "grouped", groups=4) + layer(x, "depthwise", groups=8)
    x = layer(x, "strided", stride=2)
    whole, last = layer(x, "whole", padding="VALID"), layer(x, "last")
    return sk.mean((whole**2).sum((1, 2, 3)) + (last**2).sum((1, 2, 3)))


def penalty_of_gradients(params, rows, key):
    """A loss of gradients per example, so that the kernel gradient is mapped over the rows."""
    weights = {name: params[name] for name in ("in", "last")}

    def loss_of_one(weights, row):
        hidden, names = row[None], ("NHWC", "HWIO", "NHWC")
        for name in weights:
            hidden = jnp.tanh(lax.conv_general_dilated(hidden, weights[name], (1, 1), "SAME", dimension_numbers=names))
        return (hidden**2).sum()

    grads = jax.vmap(jax.grad(loss_of_one), (None, 0))(weights, rows)
    return sk.mean(sum((grad**2).reshape(len(rows), -1).sum(1) for grad in grads.values()))


@functools.cache
def run_on(mesh, loss_fn=loss_fn):
    wide = [(name, [None, None, None, "mlp"]) for name in SHAPES if name != "last"]
    rules = wide if "tensor" in mesh else []
    task = sk.Task(init, loss_fn, keep_gradient(optax.sgd(0.1)), train_data=DATA, rules=rules)
    program, run = train(task, MESHES.get(mesh, {}), batch_size=ROWS, steps=1)
    return run, program.compiled.as_text()


@pytest.mark.parametrize("mesh", slow_except(["data 2 x fsdp 4", "fsdp 2 x tensor 2"], MESHES))
def test_every_convolution_equals_one_device(mesh):
    assert_same_run(run_on(mesh)[0], run_on("one device")[0])


def test_gradients_per_example_equal_one_device():
    assert_same_run(run_on("fsdp 8", penalty_of_gradients)[0], run_on("one device", penalty_of_gradients)[0])


def test_no_device_gathers_the_rows_of_others():
    gathers = [line for line in run_on("data 2 x fsdp 4")[1].splitlines() if " all-gather(" in line]
    assert gathers
    images, strided = f"f32[{ROWS},8,8,4]", f"f32[{ROWS},4,4,8]"
    assert not [line for line in gathers if images in line or strided in line]


LAYOUTS = [("NCHW", "OIHW", "NCHW"), ("NHWC", "HWIO", "NHWC"), ("CHWN", "IHWO", "HWNC"), ("NHWC", "HWOI", "CNHW")]
GEOMETRIES = [
    {"window_strides": (1, 1), "padding": [(0, 0), (0, 0)], "lhs_dilation": (1, 1), "rhs_dilation": (1, 1)},
    {"window_strides": (2, 3), "padding": [(1, 2), (-1, 1)], "lhs_dilation": (2, 1), "rhs_dilation": (1, 2)},
]


@pytest.mark.forms(2)
@pytest.mark.parametrize("names", LAYOUTS)
def test_products_equal_the_convolution(names):
    rng, forms, operands = np.random.default_rng(0), [], []
    for geometry, (features, rows), kernel in itertools.product(
        GEOMETRIES, [(1, 1), (2, 1), (1, 3)], [(1, 1), (3, 2), (6, 4)]
    ):
        sizes = {"N": 6, "C": 4, "O": 6, "I": 4 // features}
        lhs = rng.normal(size=[2, *((sizes | {"H": 7, "W": 9})[x] for x in names[0])]).astype(np.float32)
        rhs = rng.normal(size=[2, *((sizes | dict(zip("HW", kernel, strict=True)))[x] for x in names[1])])
        numbers = lax.conv_dimension_numbers(lhs.shape[1:], rhs.shape[1:], names)
        params = geometry | {
            "dimension_numbers": numbers, "feature_group_count": features, "batch_group_count": rows,
            "precision": None, "preferred_element_type": None,
        }  # fmt: skip
        forms.append([functools.partial(f, **params) for f in (as_products, lax.conv_general_dilated)])
        operands.append((lhs, rhs.astype(np.float32)))

    @jax.jit
    def both(operands):
        return [(f(*x), jax.vmap(convolve)(*x)) for (f, convolve), x in zip(forms, operands, strict=True)]

    for products, convolved in both(operands):
        np.testing.assert_allclose(products, convolved, atol=2e-5)
