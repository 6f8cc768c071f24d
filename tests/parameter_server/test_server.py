"""One server, called by hand: answers, staleness, snapshots; and which leaf lives where."""

import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spmdkit.errors import ConfigError
from spmdkit.parameter_server.completed_batches import redistribute
from spmdkit.parameter_server.coordinator import Coordinator, parts_of
from spmdkit.parameter_server.messages import Push, Rules
from spmdkit.parameter_server.partition import check_separable, owners, shard, to_arrays
from spmdkit.parameter_server.server import Server
from spmdkit.parameter_server.transport import WorkerExit, call
from spmdkit.step import state as states
from tests.support.parameter_servers import FailingThreads, abstract

W = {"w": jnp.zeros(2)}


def server_of(rules, optimizer=None, params=W, members=None):
    optimizer = optax.with_extra_args_support(optimizer or optax.sgd(1.0))
    made = Server(optimizer, abstract(params), rules, donate=False)
    state = states.create(params, None, optimizer, 0, rules.ema)
    arrays = parts_of(state, optimizer, dict.fromkeys(to_arrays(params), 0), 0)
    made.install(1, arrays, {"applied": 0}, dict.fromkeys(range(3), 0) if members is None else members)
    return made


def push(number, version, worker=0, gradient=(1.0, 0.0), **more):
    values = {"incarnation": 0, "generation": 1, "batch": 3 * number + worker + 1, **more}
    return Push(worker, number=number, version=version, gradient={"w": np.float32(gradient)}, **values)


def value(server):
    return server.pull().params["w"].tolist()


def test_repeated_push_is_acknowledged_and_not_applied():
    server = server_of(Rules(10))
    first = server.push(push(0, 0))
    assert first == server.push(push(0, 0)) == ("applied", 1, 0)
    assert value(server) == [-1, 0] and server.applied == 1


def test_staleness_is_the_updates_since_the_pull():
    server = server_of(Rules(10, max_staleness=1, scale_by_staleness=True))
    for number in range(3):
        server.push(push(number, number))
    assert server.push(push(0, 2, worker=1)) == ("applied", 4, 1)
    assert server.push(push(1, 2, worker=1)) == ("stale", 4, 2)
    assert value(server) == [-4, 0]
    server = server_of(Rules(10, scale_by_staleness=True))
    for number in range(4):
        server.push(push(number, number))
    server.push(push(0, 0, worker=1))
    assert value(server) == [-4.25, 0]  # four, and a quarter at staleness four
    assert server.status(0)["histogram"] == {0: 4, 4: 1} and server.status(0)["progress"] == {0: 4, 1: 1}


def test_mean_weighs_by_counts_and_drops_late_pushes():
    server = server_of(Rules(10, aggregate=2))
    assert server.push(push(0, 0, weight=3.0)).outcome == "pending"
    assert server.pull((1, 0)) is None and value(server) == [0, 0]
    assert server.push(push(0, 0, worker=1, gradient=(0.0, 4.0), weight=1.0)) == ("applied", 1, 0)
    assert value(server) == [-0.75, -1]
    assert server.push(push(0, 0, worker=2)).outcome == "late"
    assert server.push(push(0, 0)).outcome == "applied" and server.applied == 1  # sent again


def test_dead_workers_are_not_awaited():
    server = server_of(Rules(10, aggregate=2), members={0: 0, 1: 0})
    assert server.push(push(0, 0)).outcome == "pending"
    assert server.take_batch(1, 0, 0) == 1
    server.admit(1, incarnation=1, members=1)
    assert server.applied == 1
    assert server.push(push(0, 1, worker=1)).outcome == "fenced"
    assert server.take_batch(1, 0, 1) is None
    assert server.take_batch(1, 1, 0) == 1  # the batch that the dead had
    assert server.take_batch(0, 0, 1) == server.take_batch(0, 0, 1) == 2


def test_snapshot_excludes_a_held_gradient():
    server = server_of(Rules(10, aggregate=2), optax.adam(0.1))
    for worker in (0, 1):
        server.take_batch(worker, 0, 0)
        server.push(push(0, 0, worker=worker))
    server.take_batch(2, 0, 0)
    server.push(push(0, 1, worker=2, batch=3))
    generation, arrays, table = server.snapshot()
    assert generation == 1 and table["applied"] == 1 and table["again"] == [3] and table["next_batch"] == 4
    back = server_of(Rules(10, aggregate=2), optax.adam(0.1))
    back.install(2, arrays, table, {0: 0, 1: 0, 2: 0})
    assert value(back) == value(server) and back.applied == 1
    assert back.push(push(0, 0)).outcome == "generation"  # of what was lost
    assert back.push(push(0, 1, generation=2)).outcome == "applied"  # already: the answer, and nothing else
    assert back.applied == 1
    assert back.push(push(0, 1, worker=2, generation=2)).outcome == "pending"  # it was not applied
    assert back.take_batch(2, 0, 1) == 3


def test_after_the_last_update_nothing_is_applied():
    server = server_of(Rules(1))
    assert server.push(push(0, 0)).outcome == "applied" and server.push(push(1, 1)).outcome == "done"
    assert server.push(push(0, 1, worker=1, batch=1)).outcome == "again"  # which no later run has to give out
    assert server.pull().done and value(server) == [-1, 0]


# ---- what one server has and another has not -------------------------------------------------------------------------


class Still:
    """A worker that does nothing until it dies."""

    where, dead = "", False

    def ended(self):
        return WorkerExit("lost") if self.dead else None


class ByHand(FailingThreads):
    """Servers whose workers are the test."""

    def worker(self, number, incarnation, endpoints):
        self.workers.append(Still())
        return self.workers[-1]

    def close(self):
        pass


def by_hand(owned, workers, zeros=2, optimizer=None, saved=None):
    """Returns (coordinator, transport, what is saved, the last of which servers go back to): of leaves of `zeros`
    numbers."""
    optimizer = optax.with_extra_args_support(optimizer or optax.sgd(1.0))
    params = {path: jnp.zeros(zeros) for path in owned}
    saved = saved or [(states.create(params, None, optimizer, 0, None), None)]
    make = lambda number: Server(optimizer, shard(abstract(params), owned, number), Rules(10), donate=False)
    transport = ByHand(make, None)
    coordinator = Coordinator(transport, optimizer, owned, len(set(owned.values())), workers, lambda: saved[-1])
    coordinator.install()
    coordinator.start()
    return coordinator, transport, saved


@pytest.mark.parametrize("loss", ["servers go back", "the worker dies"])
@pytest.mark.parametrize("reached", [0, 1])
def test_push_to_one_server_is_applied_once_everywhere(reached, loss):
    coordinator, transport, saved = by_hand({"v": 0, "w": 1}, workers=2)

    def pushed(server, worker, batch, generation):
        gradient = {"vw"[server]: np.float32([1, 0])}
        sent = Push(worker, 0, 0, generation, 0, batch, gradient)
        return call(coordinator.endpoints[server], "push", sent).outcome

    assert call(coordinator.endpoints[0], "take_batch", 0, 0, 0) == 1
    assert pushed(reached, 0, 1, generation=1) == "applied"
    if loss == "servers go back":
        saved.append(coordinator.snapshot())
        coordinator.install()
    else:
        transport.workers[0].dead = True
        assert [event for event, _ in coordinator.watch().events] == ["worker_lost", "worker_started"]
    generation = len(saved)
    assert call(coordinator.endpoints[0], "take_batch", 1, 0, 0) == 1  # whoever asks next has it
    assert [pushed(server, 1, 1, generation) == "again" for server in (0, 1)] == [reached == 0, reached == 1]
    assert call(coordinator.endpoints[0], "take_batch", 1, 0, 1) == 2
    state, _ = coordinator.snapshot()
    assert state.params["v"].tolist() == state.params["w"].tolist() == [-1, 0]


def test_push_to_some_leaves_survives_a_new_partition():
    """Leaf v has taken the batches 1, 2, 4, w and x have taken 1, 3, 5: a leaf counts the times that it takes each."""
    found = {}
    one_of = lambda batch: np.eye(8, dtype=np.float32)[batch]
    before = {"v": 0, "w": 1, "x": 1}
    for after in ({"v": 0, "w": 0, "x": 0}, {"v": 1, "w": 0, "x": 1}, {"v": 1, "w": 0, "x": 2}):
        coordinator, _, _ = by_hand(before, workers=1, zeros=8, optimizer=optax.sgd(1.0, momentum=0.5))
        for number in range(5):
            assert call(coordinator.endpoints[0], "take_batch", 0, 0, number) == number + 1
        for server, batches in enumerate([(1, 2, 4), (1, 3, 5)]):
            for batch in batches:
                gradient = {path: one_of(batch) for path, owner in before.items() if owner == server}
                sent = Push(0, 0, batch - 1, 1, 0, batch, gradient)
                assert call(coordinator.endpoints[server], "push", sent).outcome == "applied"
        state, tables = coordinator.snapshot()
        saved = [(state, json.loads(json.dumps(tables)))]
        coordinator, _, _ = by_hand(after, 1, zeros=8, optimizer=optax.sgd(1.0, momentum=0.5), saved=saved)
        assert {endpoint.call_async("status", 0)()["applied"] for endpoint in coordinator.endpoints} == {3}
        given = [call(coordinator.endpoints[0], "take_batch", 0, 1, number) for number in range(5)]
        assert given == [2, 3, 4, 5, 6]
        for number, batch in enumerate(given):
            for server, endpoint in enumerate(coordinator.endpoints):
                own = {path: one_of(batch) for path, owner in after.items() if owner == server}
                call(endpoint, "push", Push(0, 1, number, 1, 3, batch, own))
        assert {endpoint.call_async("status", 0)()["applied"] for endpoint in coordinator.endpoints} == {6}
        end, tables = coordinator.snapshot()
        assert [len(table["parts"]) for table in tables] == [1] * len(tables)  # all have taken the same again
        found[str(after)] = {path: np.asarray(leaf).tolist() for path, leaf in end.params.items()}
        momentum = lambda batches: sum(one_of(batch) * 0.5 ** (5 - i) for i, batch in enumerate(batches))
        trace = {path.rpartition("/")[2]: leaf for path, leaf in to_arrays(end.opt_state).items()}
        np.testing.assert_array_equal(trace["v"], momentum((1, 2, 4, 3, 5, 6)))
        np.testing.assert_array_equal(trace["w"], momentum((1, 3, 5, 2, 4, 6)))
        np.testing.assert_array_equal(trace["x"], trace["w"])
    one, *others = found.values()
    assert all(other == one for other in others)


def test_leaf_with_enough_updates_waits_for_others():
    sgd = optax.with_extra_args_support(optax.sgd(1.0))
    server = Server(sgd, abstract({"a": 0.0, "b": 0.0}), Rules(3), donate=True)
    parts = [(["a"], (3, [4]), 3), (["b"], (2, []), 1)]
    arrays = {"params": {"a": np.float32(0), "b": np.float32(0)}}
    server.install(1, arrays, {"applied": 1, "parts": parts, "next_batch": 5, "again": [2, 3, 4]}, {0: 0})
    assert [server.take_batch(0, 0, number) for number in range(2, 7)] == [2, 3, 4, 5, 6]
    sent = lambda number: Push(0, 0, number, 1, 1, number, {"a": np.float32(1), "b": np.float32(1)})
    assert [server.push(sent(batch)).outcome for batch in (2, 5, 6)] == ["applied", "applied", "done"]
    assert {path: float(x) for path, x in server.pull().params.items()} == {"a": 0, "b": -2} and server.applied == 3
    table = server.snapshot()[2]
    assert table["parts"] == [(["a"], (3, [4]), 3), (["b"], (3, [5]), 3)]
    assert redistribute([table], {"a": 0, "b": 0}, 1)[0]["again"] == [3, 4, 5, 6]


def test_progress_lost_with_a_server_is_no_failure():
    coordinator, transport, _ = by_hand({"w": 0}, workers=1)
    for life in range(4):
        sent = Push(0, life, 0, life + 1, 0, 1, {"w": np.float32([1, 0])})
        assert call(coordinator.endpoints[0], "push", sent).outcome == "applied"
        assert coordinator.watch().applied == 1
        transport.servers[0].kill()
        coordinator.watch()
        assert coordinator.watch().restored_updates == 0
        transport.workers[-1].dead = True
        assert [event for event, _ in coordinator.watch().events] == ["worker_lost", "worker_started"]


# ---- which leaf lives where -----------------------------------------------------------------------------------------

TREE = {"a": jnp.zeros(10), "b": jnp.zeros(6), "c": [jnp.zeros(5), jnp.zeros(1)]}


@pytest.mark.parametrize(
    "partition, expected",
    [("greedy", [0, 1, 1, 0]), ("round_robin", [0, 1, 0, 1]), ([("c/.*", 1), ("a", 1)], [1, 0, 1, 1])],
    ids=["greedy", "round_robin", "rules"],
)
def test_leaves_go_to_servers(partition, expected):
    assert list(owners(TREE, 2, partition).values()) == expected


@pytest.mark.parametrize(
    "partition, servers, words",
    [
        ([("d", 0)], 2, "matches none"),
        ([(".*", 0)], 2, "gives server 1 of 2 no leaf"),
        ("greedy", 5, "Try servers: 4"),
    ],
)
def test_impossible_partitions_are_refused(partition, servers, words):
    with pytest.raises(ConfigError, match=words):
        owners(TREE, servers, partition)


def test_whole_tree_optimizer_is_refused_on_several_servers():
    clipped = optax.with_extra_args_support(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)))
    check_separable(clipped, TREE, owners(TREE, 1, "greedy"))
    with pytest.raises(ConfigError, match=r"the update of a leaf of server 0 uses '.*', which server 1 holds"):
        check_separable(clipped, TREE, {"a": 0, "b": 1, "c/0": 1, "c/1": 1})
    with pytest.raises(ConfigError, match="cannot evaluate the loss again"):
        check_separable(optax.with_extra_args_support(optax.lbfgs()), TREE, owners(TREE, 1, "greedy"))
    for separable in (optax.adamw(0.1), optax.adafactor(0.1), optax.lamb(0.1), optax.sgd(0.1, momentum=0.9)):
        check_separable(optax.with_extra_args_support(separable), TREE, owners(TREE, 2, "greedy"))
