"""`sk.verify_step(make, meshes=[...])`: steps that use nothing of spmdkit, right ones and wrong ones."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import spmdkit as sk

pytestmark = pytest.mark.promotes("steps as strangers write them")

ADAM = optax.adam(1e-2)
MESHES = [{"data": 2, "tensor": 2}]


def arguments(rows=8):
    random = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(random.normal(size=shape) / np.sqrt(shape[0]), jnp.float32)
    params = {"up": normal(6, 8), "down": normal(8, 3)}
    state = {"params": params, "opt": ADAM.init(params)}
    return state, {"x": normal(rows, 6), "y": normal(rows, 3)}


# ---- a step by hand


def by_hand(devices, fault=None):
    """Data parallel by pmean, tensor parallel by psum, in one shard_map."""
    mesh = Mesh(devices, ("data", "tensor"))
    specs = {"params": {"up": P(None, "tensor"), "down": P("tensor", None)}}

    def loss_fn(params, batch):
        hidden = jnp.tanh(batch["x"] @ params["up"])
        out = hidden @ params["down"]
        if fault != "partial product":
            out = lax.psum(out, "tensor")
        return jnp.mean((out - batch["y"]) ** 2)

    def of_shard(params, batch):
        local = jax.tree.map(lambda p: lax.pcast(p, "data", to="varying"), params)
        loss, grads = jax.value_and_grad(loss_fn)(local, batch)
        reduce = {"summed": lax.psum, None: lax.pmean}.get(fault, lax.pmean)
        grads = reduce(grads, "data")
        if fault == "one axis":
            grads = jax.tree.map(lambda g: g * lax.axis_size("tensor"), grads)
        loss = lax.pmean(loss, ("data", "tensor") if fault == "partial product" else "data")
        return loss, grads

    batch_spec = {"x": P("data"), "y": P("data")}
    run = jax.shard_map(of_shard, mesh=mesh, in_specs=(specs["params"], batch_spec), out_specs=(P(), specs["params"]))

    def train_step(state, batch):
        loss, grads = run(state["params"], batch)
        updates, opt = ADAM.update(grads, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss, grads

    state, batch = arguments()
    place = lambda tree, spec: jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), tree, spec)
    placed = {
        "params": place(state["params"], specs["params"]),
        "opt": jax.device_put(state["opt"], NamedSharding(mesh, P())),
    }
    return jax.jit(train_step, donate_argnums=0), (placed, place(batch, batch_spec))


def test_step_by_hand_equals_one_device():
    report = sk.verify_step(by_hand, meshes=MESHES, steps=3)
    assert report["passed"], str(report)
    for case in report["cases"]:
        assert 0 <= case["loss_error"] < 1e-6 and 0 <= case["gradient_error"] < 1e-5 and 0 <= case["state_error"] < 1e-4


WRONG = {
    "summed": "grads = reduce(grads",
    "one axis": 'lax.axis_size("tensor"), grads)',
    "partial product": "out = hidden @",
}
"""Where each begins: the line that is wrong, or the one that makes the part which is used as if it were whole."""


@pytest.mark.parametrize(
    ("fault", "mesh", "kind", "says"),
    [
        ("summed", {"data": 4, "tensor": 1}, "reduced twice", "4 times the value on one device: the size of data"),
        ("one axis", {"data": 2, "tensor": 2}, "reduced twice", "2 times"),
        ("partial product", {"data": 1, "tensor": 2}, "other", "differs by"),
    ],
)
def test_a_fault_by_hand_is_seen_and_told(fault, mesh, kind, says):
    report = sk.verify_step(functools.partial(by_hand, fault=fault), meshes=[mesh], steps=1)
    assert not report["passed"]
    diagnosis = report["cases"][0]["diagnosis"]
    assert diagnosis["kind"] == kind and says in diagnosis["found"], diagnosis
    located = report["cases"][0]["located"]
    lines, first = inspect.getsourcelines(by_hand)
    assert located is not None, "not located"
    assert WRONG[fault] in lines[int(located["line"].partition(" ")[0].rpartition(":")[2]) - first], located
    assert located["text"] in str(report)


def test_factor_is_found_in_the_moments_of_adam():
    def make(devices):
        step, given = by_hand(devices, "summed")
        return lambda *args: step(*args)[0], given

    report = sk.verify_step(make, meshes=[{"data": 4, "tensor": 1}], steps=1)
    assert not report["passed"] and "mu" in report["cases"][0]["worst_leaf"]


# ---- a step that is given directly


def plain_step(state, batch):
    """A step that names axes alone."""

    def loss_fn(params):
        hidden = jnp.tanh(batch["x"] @ params["up"])
        hidden = lax.with_sharding_constraint(hidden, P("data", None))
        return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    updates, opt = ADAM.update(grads, state["opt"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}


def test_step_without_devices_takes_arguments_and_specs():
    report = sk.verify_step(plain_step, meshes=MESHES, arguments=arguments(), specs=(P(), P("data")))
    assert report["passed"], str(report)
    assert report["cases"][0]["state_error"] is not None


@pytest.mark.parametrize("kind", ["constraint", "shard_map"])
def test_step_with_a_mesh_is_rejected(kind):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def step(state, batch):
        if kind == "constraint":
            x = lax.with_sharding_constraint(batch["x"], NamedSharding(mesh, P("data")))
        else:
            x = jax.shard_map(lambda x: x, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(batch["x"])
        return state, jnp.mean(x)

    with pytest.raises(sk.SpmdkitError, match=r"mesh of 4 devices, used at .*test_verify_handmade.py:\d+") as raised:
        sk.verify_step(step, meshes=[{"data": 4}], arguments=arguments())
    assert "make(devices) -> (step, arguments)" in str(raised.value)


def test_make_that_ignores_its_devices_is_rejected():
    with pytest.raises(sk.SpmdkitError, match="make received 1 devices"):
        sk.verify_step(lambda devices: by_hand(np.array(jax.devices()[:4]).reshape(4, 1)), meshes=[{"data": 4}])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"meshes": []}, "Try meshes="),
        ({"meshes": [(4,)]}, "Try meshes="),
        ({"meshes": [{"data": 0}]}, "at least 1"),
        ({"meshes": [{"data": 2}], "steps": 0}, "at least 1"),
        ({"meshes": [{"data": 2}], "specs": (P(),)}, "specs and no arguments"),
        ({"meshes": [{"data": 2}], "arguments": (1.0, 2.0), "specs": (P(),)}, "2 arguments and 1 specs"),
        ({"meshes": [{"data": 2}]}, "return step, (state, batch)"),
    ],
)
def test_what_does_not_fit_together_is_told(given, says):
    with pytest.raises(sk.SpmdkitError) as raised:
        sk.verify_step(lambda *args: 1.0, **given)
    assert says in str(raised.value)


def test_error_of_the_step_is_reported():
    def make(devices):
        return lambda x: x["nothing"], ({"x": jnp.ones(2)},)

    with pytest.raises(sk.SpmdkitError, match="KeyError"):
        sk.verify_step(make, meshes=[{"data": 2}])


def test_step_of_noise_is_not_equal():
    """One ulp in the input decides: nothing can be compared."""

    def make(devices):
        return jax.jit(lambda x: {"chaos": jnp.sin(x * 1e9)}), (
            jax.device_put(jnp.linspace(1.0, 2.0, 8), devices.ravel()[0]),
        )

    report = sk.verify_step(make, meshes=[{"data": 2}])
    assert not report["passed"] and report["below_noise"] and "nothing could be compared" in str(report)
