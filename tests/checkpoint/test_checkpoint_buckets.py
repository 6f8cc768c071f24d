"""Checkpoints in a bucket, here one in memory: committed by the last object, cut off at every operation, leased to one
run."""

import errno
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.checkpoint import (
    Checkpoints,
    Lease,
    best_step,
    export,
    ignored_entries,
    inspect,
    location,
    ls,
    object_store,
    quarantine,
    remove,
    verify,
)
from spmdkit.config.retention import Best, Retention
from spmdkit.errors import FINAL, CheckpointError, CheckpointWriteError, ConfigError, UnreachableError
from tests.support.buckets import CutOff, InMemory
from tests.support.core_runs import program_of

URL = "s3://bucket-one/runs/first"
ABSTRACT = {"params": {"w": jax.ShapeDtypeStruct((64, 16), jnp.float32)}, "step": jax.ShapeDtypeStruct((), jnp.int32)}


@pytest.fixture
def client(monkeypatch):
    client = InMemory()
    monkeypatch.setattr(object_store, "_client", lambda scheme: client)
    return client


def state_of(step):
    w = np.random.default_rng(step).standard_normal((64, 16)).astype(np.float32)
    return {"params": {"w": jnp.asarray(w)}, "step": jnp.int32(step)}


def opened(folder, **options):
    return Checkpoints(URL, stage=folder / "stage", **options)


def save(checkpoints, *steps):
    for step in steps:
        checkpoints.save(step, state_of(step), {"step": step}, {"loss": 1 / step})
        checkpoints.wait()


def check_restores(checkpoints, step):
    state, record = checkpoints.restore(step, ABSTRACT)
    assert record == {"step": step} and state["step"] == step
    assert checkpoints.last_committed() is not None
    assert np.array_equal(state["params"]["w"], state_of(step)["params"]["w"])


def test_bucket_steps_are_listed_verified_exported_and_restored(client, tmp_path):
    checkpoints = opened(tmp_path, retention=Retention(keep=2, best=Best(metric="loss", mode="max")))
    save(checkpoints, 1, 2, 3, 4)
    assert checkpoints.steps() == [1, 3, 4] and best_step(checkpoints.directory) == 1
    for step in (1, 4):
        check_restores(checkpoints, step)
    assert [(row["step"], row["complete"], row["best"]) for row in ls(URL)] == [(1, True, True), (3, True, False), (4, True, False)]  # fmt: skip  # noqa: E501
    assert inspect(URL)["leaves"]["params/w"] == {"shape": [64, 16], "dtype": "float32"}
    assert all(row["good"] for row in verify(URL))
    assert export(URL, 3, tmp_path / "w.safetensors") == 3
    remove(location.resolve(URL), [3])
    assert checkpoints.steps() == [1, 4] and ignored_entries(checkpoints.directory) == []
    assert list((tmp_path / "stage").rglob("*")) == [tmp_path / "stage" / "written"], "a step stays where it was staged"
    del client.objects[f"bucket-one/runs/first/4/{location.MARKER}"]
    assert checkpoints.steps() == [1] and ignored_entries(checkpoints.directory) == ["4"]
    checkpoints.close()


@pytest.mark.parametrize(("name", "step"), [("best", 1), ("2", 2)])
def test_a_run_starts_from_the_weights_of_a_bucket(client, tmp_path, name, step):
    checkpoints = opened(tmp_path, retention=Retention(keep=2, best=Best(metric="loss", mode="max")))
    save(checkpoints, 1, 2, 3)
    checkpoints.close()
    loss_fn = lambda params, batch, key: sk.mean((batch @ params["w"]).sum(-1))
    task = sk.Task(lambda key: {"w": jnp.zeros((64, 16))}, loss_fn, optax.sgd(0.1), np.ones((32, 64), np.float32))
    program = program_of(task, mesh={"fsdp": 4}, init_from=f"{URL}@{name}")
    state = program.init()
    assert np.array_equal(state.params["w"], state_of(step)["params"]["w"]) and state.step == 0
    assert state.params["w"].sharding == program.state_sharding.params["w"]


def test_interrupted_save_or_deletion_loses_no_committed_step(client, tmp_path):
    checkpoints = opened(tmp_path, retention=Retention(keep=2))
    save(checkpoints, 1, 2)
    checkpoints.close()
    before = dict(client.objects)
    for done in range(100):  # the number of changes varies: orbax groups small writes by their time
        client.objects, client.left = dict(before), None
        checkpoints = opened(tmp_path, retention=Retention(keep=2))
        client.left = done
        checkpoints.save(3, state_of(3), {"step": 3})
        error = checkpoints._pending.exception()
        assert error is None or isinstance(error, CutOff)
        client.left = None
        again = opened(tmp_path, retention=Retention(keep=2))
        steps = again.steps()
        assert steps in ([1, 2], [1, 2, 3], [2, 3]), (done, steps)
        assert ignored_entries(again.directory) == [] and quarantine.newest_valid(again.directory, None, ()) == (
            steps[-1],
            {},
        )
        if done % 4 == 0:
            check_restores(again, steps[-1])
        again.close()
        if error is None:
            break
    assert 15 < done < 99 and steps == [2, 3]


def test_damaged_bucket_steps_are_quarantined_and_skipped(client, tmp_path):
    checkpoints = opened(tmp_path, retention=Retention(keep=5))
    save(checkpoints, 1, 2, 3)
    data = max((n for n in client.objects if "/3/state/" in n), key=lambda name: len(client.objects[name]))
    flipped = bytearray(client.objects[data])
    flipped[len(flipped) // 2] ^= 1
    client.objects[data] = bytes(flipped)
    manifest = next(n for n in client.objects if n.endswith("/2/state/_METADATA"))
    client.objects[manifest] = client.objects[manifest][:-1]
    client.objects["bucket-one/runs/first/9/notes.txt"] = b"of somebody"
    assert [row["good"] for row in verify(URL)] == [True, False, False]
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoints.restore(3, ABSTRACT)
    step, wrong = quarantine.newest_valid(checkpoints.directory, 2, ())
    assert step == 1 and "_METADATA has" in wrong[2]
    assert quarantine.quarantine(checkpoints.directory, "2") == "2.damaged"
    assert quarantine.quarantine(checkpoints.directory, "9") == "9.damaged"
    again = opened(tmp_path)
    assert again.steps() == [1, 3] and ignored_entries(again.directory) == ["2.damaged", "9.damaged"]
    assert client.objects["bucket-one/runs/first/9.damaged/notes.txt"] == b"of somebody"
    checkpoints.close()
    again.close()


def test_failed_save_is_retried_at_the_same_step(client, tmp_path, monkeypatch):
    checkpoints, right = opened(tmp_path), client.put_file

    def broken(path, key):
        if key.endswith("record.json"):
            raise OSError("the connection was reset")
        right(path, key)

    monkeypatch.setattr(client, "put_file", broken)
    checkpoints.save(5, state_of(5), {"step": 5})
    with pytest.raises(
        CheckpointWriteError,
        match=r"saving step 5 to s3://bucket-one/runs/first/5 failed .*connection was reset.*none yet",
    ):
        checkpoints.wait()
    assert checkpoints.steps() == [] and not any("/5/" in name for name in client.objects)
    monkeypatch.setattr(client, "put_file", right)
    client.objects["bucket-one/runs/first/5/state/late"] = b"written after all"
    save(checkpoints, 5)
    check_restores(checkpoints, 5)
    assert "bucket-one/runs/first/5/state/late" not in client.objects
    checkpoints.close()


def test_metrics_are_copied_before_a_step_is_committed(client, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1}\n{"st')
    checkpoints = opened(tmp_path, run_files=[metrics, tmp_path / "not there"])
    save(checkpoints, 1)
    assert client.objects["bucket-one/runs/first/run/metrics.jsonl"] == b'{"step": 1}\n'
    names = list(client.objects)
    assert names.index("bucket-one/runs/first/run/metrics.jsonl") < names.index("bucket-one/runs/first/1/commit_success.txt")  # fmt: skip  # noqa: E501
    checkpoints.close()


def test_run_without_its_lease_commits_nothing(client, tmp_path):
    lease = Lease(location.resolve(URL), "a", sleep=lambda s: None).acquire()
    checkpoints = opened(tmp_path, is_owner=lease.is_owner)
    save(checkpoints, 1)
    client.objects["bucket-one/runs/first/run/lease.json"] = json.dumps({"attempt": "b"}).encode()
    checkpoints.save(2, state_of(2), {"step": 2})
    with pytest.raises(Exception, match="belongs to another run now"):
        checkpoints.wait()
    assert checkpoints.steps() == [1]
    checkpoints.close()
    lease.release()


@pytest.mark.parametrize("how", ["lives", "was killed", "was killed elsewhere", "gave it back"])
def test_lease_is_refused_while_its_run_lives(client, monkeypatch, how):
    now = [0.0]
    beat = "bucket-one/runs/first/run/alive-a"

    def sleep(seconds):
        now[0] += seconds
        if how == "lives" and now[0] > 12:
            client.objects[beat] = b"1"

    first = Lease(location.resolve(URL), "a", sleep=sleep).acquire()
    first._ended.set()
    holder = json.loads(client.objects["bucket-one/runs/first/run/lease.json"])
    if how == "was killed":
        holder |= {"born": 1}
    if how in ("was killed elsewhere", "lives"):
        holder |= {"host": "another", "pid": 1}
    client.objects["bucket-one/runs/first/run/lease.json"] = json.dumps(holder).encode()
    if how == "gave it back":
        first.release()
    second = Lease(location.resolve(URL), "b", clock=lambda: now[0], sleep=sleep)
    if how == "lives":
        with pytest.raises(ConfigError, match=r"is in use by process 1 on another since .* Wait for that run"):
            second.acquire()
        return
    begun = now[0]
    with second:
        assert second.is_owner() and not first.is_owner()
        assert (now[0] - begun > 30) == (how == "was killed elsewhere")
        assert beat not in client.objects


def test_one_of_two_concurrent_claims_gets_the_lease(client):
    first = Lease(
        location.resolve(URL), "a", sleep=lambda s: Lease(location.resolve(URL), "b", sleep=lambda s: None)._claim()
    )
    with pytest.raises(ConfigError, match="is in use by"):
        first.acquire()


def test_unreachable_storage_error_is_no_damage_or_secret(client, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-of-a-secret")
    checkpoints = opened(tmp_path)
    save(checkpoints, 1)

    def refuse(*_, **__):
        raise RuntimeError("signed with canary-of-a-secret: 403")

    monkeypatch.setattr(client, "cat_file", refuse)
    for ask in (
        lambda: quarantine.newest_valid(checkpoints.directory, None, ()),
        lambda: verify(URL),
        lambda: inspect(URL),
    ):
        with pytest.raises(UnreachableError, match=r"could not be read: RuntimeError: signed with \*\*\*: 403") as told:
            ask()
        assert told.value.exit_code == 79 and "AWS_PROFILE" in str(told.value)
    checkpoints.close()


class Refused(Exception):
    """A response of gcsfs."""

    def __init__(self, code):
        super().__init__(f"{code}")
        self.code = code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConnectionRefusedError(), 75),
        (TimeoutError(), 75),
        (OSError(errno.EBUSY, "Slow down"), 75),
        (Refused(503), 75),
        (Refused(403), 79),
        (PermissionError("Access Denied"), 79),
        (FileExistsError("of another account"), 79),
    ],
    ids=repr,
)
def test_store_that_does_not_respond_is_restarted(client, monkeypatch, error, code):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(client, "find", fail)
    with pytest.raises(UnreachableError, match=f"^{URL} could not be listed") as raised:
        location.sizes(location.resolve(URL))
    assert raised.value.exit_code == code
    assert ("again when it does" in str(raised.value)) == (code not in FINAL)


def test_missing_client_package_names_the_extra(monkeypatch, tmp_path):
    import fsspec

    def missing(*_, **__):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "filesystem", missing)
    object_store._client.cache_clear()
    with pytest.raises(ConfigError, match=r"need the package s3fs.*pip install 'spmdkit\[storage\]'"):
        opened(tmp_path)
