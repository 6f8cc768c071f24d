"""The state in the memory of the processes: cut, put together again on another mesh, and who sends what to whom."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmdkit.cluster import Cluster
from spmdkit.cluster.store import MemoryStore
from spmdkit.elastic import peer_memory, redistribute
from spmdkit.elastic.peer_memory import Copier, HostMemory, Parts, Snapshot, SnapshotReader, location_of
from spmdkit.elastic.redistribute import SnapshotInfo, newest_whole
from spmdkit.errors import ConfigError


def mesh(data, fsdp):
    return Mesh(np.array(jax.devices()[: data * fsdp]).reshape(data, fsdp), ("data", "fsdp"))


def state(on):
    put = lambda x, *spec: jax.device_put(x, NamedSharding(on, PartitionSpec(*spec)))
    return {
        "w": put(np.arange(96, dtype=np.float32).reshape(12, 8), "fsdp"),
        "half": put(np.arange(24).astype(jnp.bfloat16), "fsdp"),
        "step": put(np.int32(7)),
    }


def test_state_returns_bitwise_on_another_mesh():
    before = state(mesh(2, 4))
    snapshot = Copier(mesh(2, 4)).take(7, before, {"seed": 1})
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(mesh(1, 3)))
    after, record = SnapshotReader(snapshot).restore(7, abstract)
    assert record == {"seed": 1}
    for name, leaf in before.items():
        assert np.asarray(after[name]).tobytes() == np.asarray(leaf).tobytes() and after[name].dtype == leaf.dtype
        assert after[name].sharding == abstract[name].sharding
    assert SnapshotReader(snapshot).read_tree(7)["half"] == ((24,), "bfloat16")


def test_two_newest_snapshots_are_kept_as_copies():
    memory, copier = HostMemory(), Copier(mesh(2, 2))
    current = state(mesh(2, 2))
    for step in (1, 2, 3):
        memory.put(copier.take(step, current, {}))
        current = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(current)
    assert [each.step for each in memory.snapshots] == [2, 3]
    assert [int(each.leaves["step"].parts[()]) for each in memory.snapshots] == [8, 9]


def test_devices_send_to_another_process():
    of = [0, 0, 2, 2, 1, 1]
    pairs = peer_memory._copied_to([types.SimpleNamespace(process_index=p) for p in of])
    assert sorted(pairs) == [(0, 4), (1, 5), (2, 0), (3, 1), (4, 2), (5, 3)]
    pairs = peer_memory._copied_to([types.SimpleNamespace(process_index=p) for p in range(5)])
    assert pairs == [(0, 2), (1, 3), (2, 4), (3, 0), (4, 1)]


def test_shards_of_one_process_are_sent(monkeypatch):
    """Eight devices play four processes: what arrives is read under the place that it has on the device that sent
    it."""
    four = {device: i // 2 for i, device in enumerate(jax.devices())}
    on = mesh(1, 8)
    copier = Copier(on)
    copier._to = [(i, (i + 2) % 8) for i in range(8)]
    copier._from = {jax.devices()[(i + 2) % 8]: jax.devices()[i] for i in range(8)}
    put = jax.device_put(np.arange(16.0, dtype=np.float32), NamedSharding(on, PartitionSpec("fsdp")))
    copy_shards = peer_memory._copy_shards

    def of_one(leaf):
        whole = copy_shards(leaf)
        mine = [location_of(s.index, leaf.shape) for s in leaf.addressable_shards if four[s.device] == 1]
        return Parts(whole.shape, whole.dtype, {location: whole.parts[location] for location in mine})

    monkeypatch.setattr(peer_memory, "_copy_shards", of_one)
    parts = copier.take(1, {"w": put}, {}).leaves["w"].parts
    assert {location: list(part) for location, part in parts.items()} == {
        ((2 * i, 2 * i + 2),): [2.0 * i, 2.0 * i + 1] for i in range(8)
    }


def test_typed_keys_are_refused_with_the_repair():
    with pytest.raises(ConfigError, match=r"'key' holds typed keys.*key_data"):
        Copier(mesh(2, 2)).take(1, {"key": jax.random.key(0)}, {})


def parse_info(step, **holdings):
    return SnapshotInfo(step, {"w": ((4,), "float32"), "b": ((), "float32")}, {"w": holdings["w"], "b": [()]})


def test_newest_complete_step_is_taken():
    halves = ((0, 2),), ((2, 4),)
    first, second = parse_info(5, w=[halves[0]]), parse_info(5, w=[halves[1]])
    assert newest_whole([[first], [second], []]) == 5
    assert newest_whole([[first, parse_info(10, w=[halves[0]])], [second]]) == 5, (
        "10 has been copied on one of two only"
    )
    assert newest_whole([[first], [first]]) is None and newest_whole([[], []]) is None


def test_missing_shards_come_from_the_first_holder():
    halves = ((0, 2),), ((2, 4),)
    holders = [parse_info(5, w=[halves[0], halves[1]]), parse_info(5, w=[halves[1]]), None]
    needed = [{"w": [((0, 4),)], "b": [()]} for _ in holders]
    leaves = holders[0].leaves
    assert list(redistribute._missing_shards(holders, needed, leaves)) == [
        ("w", halves[0], 0, frozenset({1, 2})),
        ("w", halves[1], 0, frozenset({2})),
        ("b", (), 0, frozenset({2})),
    ]


def test_a_stream_in_pieces_brings_the_bits(monkeypatch):
    """One process plays the receiver and the sender: what is lacking comes through the sum, in pieces that cut shards
    in two."""
    monkeypatch.setattr(redistribute, "PIECE_BYTES", 64)
    cluster = Cluster(process_index=0, num_processes=1, devices=jax.devices()[:4], store=MemoryStore())
    rng = np.random.default_rng(0)
    whole = {
        "w": rng.normal(size=(5, 7)).astype(np.float32),
        "odd": rng.integers(0, 255, 13).astype(np.uint8),
        "n": np.float32(-0.0),
    }
    locations = {path: tuple((0, size) for size in x.shape) for path, x in whole.items()}
    mine = Snapshot(
        1, "{}", {path: Parts(x.shape, x.dtype, {locations[path]: np.asarray(x)}) for path, x in whole.items()}
    )
    stream = [(path, location, 0, frozenset({0})) for path, location in locations.items()]
    got = redistribute._receive(cluster, mine, stream)
    for path, x in whole.items():
        assert got[path, locations[path]].tobytes() == x.tobytes() and got[path, locations[path]].shape == x.shape
