"""Copies of the state that a device has changed in silence: which one is odd, what is done about it, and what no copy
can show."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.errors import NonFiniteError
from spmdkit.program.replica_check import Copies
from tests.support import small_runs
from tests.support.core_models import regression
from tests.support.core_runs import program_of

X = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)


def flipped(leaf, device, bit=12):
    """Returns an array of which one device's copy has one other bit."""
    shards = []
    for shard in leaf.addressable_shards:
        data = np.array(shard.data)
        if shard.device.id == device:
            data.view(np.uint32).reshape(-1)[-1] ^= np.uint32(1 << bit)
        shards.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)


MESHES = {
    "data 4": ({"mesh": {"data": 4}, "ema": 0.9}, 0, 4),
    "replica 4 x fsdp 2": ({"mesh": {"replica": 4, "fsdp": 2}}, 5, 4),
    "data 2 x fsdp 2 x tensor 2": ({"mesh": {"data": 2, "fsdp": 2, "tensor": 2}}, 6, 2),
}


@pytest.mark.forms(2)
@pytest.mark.parametrize("mesh", MESHES)
def test_odd_copy_is_found_and_repaired(mesh):
    settings, device, num = MESHES[mesh]
    program = program_of(regression(), **settings)
    copies, state = Copies(program), program.init()
    assert copies.differences(copies.hashes(state)) == []
    leaf = state.params["w"]
    bad = state.replace(params=state.params | {"w": flipped(leaf, device)})
    (found,) = copies.differences(copies.hashes(bad))
    assert (found.path, found.num) == ("params/w", num)
    devices = {copies.device(place).id for place in found.outliers}
    if num == 2:  # nobody knows which: both are named, and nothing is mended
        assert found.source is None and device in devices and len(devices) == 2
        return
    assert devices == {device}
    good = copies.repaired(bad, [found])
    assert copies.differences(copies.hashes(good)) == []
    for ours, theirs in zip(jax.tree.leaves(good), jax.tree.leaves(program.init()), strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert ours.sharding == theirs.sharding


def shaky(loss_fn):
    """Returns a loss that device 1 computes a little otherwise each time."""
    calls = [0, 0]

    def more(rows, device):
        calls[int(device)] += 1
        return np.float32(calls[int(device)] * 1e-3 * (int(device) == 1))

    def shaken(params, batch, key):
        shape, rows = jax.ShapeDtypeStruct((), jnp.float32), jax.tree.leaves(batch)[0]
        error = jax.pure_callback(more, shape, rows, jax.lax.axis_index("data"))
        return sk.mean(loss_fn(params, batch) * (1 + jax.lax.stop_gradient(error)))

    return shaken


def test_audit_finds_the_inconsistent_device():
    loss_fn = shaky(lambda params, batch: ((batch["x"] @ params["w"]) ** 2).sum(-1))
    steady = regression()
    task = sk.Task(steady.init, loss_fn, optax.sgd(0.1), train_data=steady.train_data)
    program = program_of(task, mesh={"data": 2})
    copies, state = Copies(program), program.init()
    before = [np.array(x) for x in jax.tree.leaves(state)]
    ((_, batch),) = program.batches(1, 1)
    assert copies.audit(state, batch) == [1]
    for x, y in zip(jax.tree.leaves(state), before, strict=True):
        np.testing.assert_array_equal(x, y)
    steady_program = program_of(steady, mesh={"data": 2})
    assert Copies(steady_program).audit(steady_program.init(), next(iter(steady_program.batches(1, 1)))[1]) == []


def squares(params, batch):
    return (batch @ params["w"]) ** 2


def train(tmp_path, flip_at=None, device=2, loss_fn=lambda p, b, key: sk.mean(squares(p, b)), **changes):
    def corrupt(run, step, state, metrics):
        if step == flip_at and not fired:
            fired.append(step)
            return sk.ReplaceState(state.replace(params={"w": flipped(state.params["w"], device)}))

    fired = []
    four_devices = {
        "steps": 9,
        "batch_size": 8,
        "devices": "cpu:4",
        "mesh": {"data": 4},
        "log": {"every_steps": 3, "progress": "plain"},
        "checkpoint": {"every_steps": 3, "keep": 9},
        "replica_check": {"every_steps": 3},
    }
    hooks = [sk.Hook("corrupt", order=1, after_step=corrupt)] if flip_at else []
    task = sk.Task(lambda key: {"w": jnp.ones(4)}, loss_fn, optax.sgd(0.1), train_data=X, hooks=hooks)
    result = small_runs.train(tmp_path, task, **four_devices | changes)
    assert fired or flip_at is None, "the fault was not injected"
    return result


def test_a_run_stops_and_names_the_device(tmp_path):
    with pytest.raises(
        NonFiniteError, match=r"silent corruption at step 6: device 2 \(process 0\) holds other bits of 'params/w'"
    ) as caught:
        train(tmp_path, flip_at=5)
    assert "All were the same at step 3" in str(caught.value) and caught.value.exit_code == 77


@pytest.mark.slow
def test_a_run_mends_the_copy_and_goes_on(tmp_path, capfd):
    """One step was computed with the wrong bit, so that the run is near the undisturbed one, and not equal to it."""
    clean = train(tmp_path / "a")
    again = train(tmp_path / "b", flip_at=5, replica_check={"every_steps": 3, "action": "repair"})
    assert "It has the bits of the others again" in capfd.readouterr().out
    copies = Copies(again.program)
    assert copies.differences(copies.hashes(again.state)) == []
    np.testing.assert_allclose(again.state.params["w"], clean.state.params["w"], rtol=1e-3)


@pytest.mark.slow
def test_rollback_to_equal_copies_equals_undisturbed_run(tmp_path):
    clean = train(tmp_path / "a")
    again = train(tmp_path / "b", flip_at=5, replica_check={"every_steps": 3, "action": "rollback"})
    np.testing.assert_array_equal(again.state.params["w"], clean.state.params["w"])
    copies = Copies(again.program)
    assert copies.differences(copies.hashes(again.state)) == []


@pytest.mark.slow
def test_audited_device_of_two_is_repaired(tmp_path, capfd):
    two = {"devices": "cpu:2", "mesh": {"data": 2}, "replica_check": {"every_steps": 3, "action": "repair"}}
    result = train(tmp_path, flip_at=5, device=1, loss_fn=shaky(squares), **two)
    said = capfd.readouterr().out
    assert "an audit of step 6, the same inputs twice: device 1 (process 0) computed other bits the second time" in said
    assert "device 1 (process 0) holds other bits of 'params/w' than the other copy" in said
    copies = Copies(result.program)
    assert copies.differences(copies.hashes(result.state)) == [], "the copy of device 0 was not taken"


@pytest.mark.slow
def test_leaves_without_copies_are_reported(tmp_path, capfd):
    train(tmp_path, mesh={"fsdp": 4}, layout={"min_shard_bytes": 1})
    assert "replica_check sees nothing of 1 of 3 leaves of the state, 16 B of" in capfd.readouterr().out
