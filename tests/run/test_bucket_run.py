"""A run whose checkpoints are in a bucket, here one in memory: it goes on from an empty disk, is evaluated there, and
only one run at a time writes to it."""

import json

import pytest

import spmdkit as sk
from spmdkit.checkpoint import Lease, location, object_store
from spmdkit.cluster import ClusterSpec, detect_cluster, join
from spmdkit.errors import CheckpointError, ConfigError
from spmdkit.foundation.run_status import newest_saved
from spmdkit.launch.local import _newest
from spmdkit.run.evaluator import evaluate_each
from spmdkit.run.loop import evaluate
from spmdkit.run.recovery import skipped_batches
from spmdkit.run.startup import bucket as startup_bucket
from tests.support.buckets import InMemory
from tests.support.clusters import on_all
from tests.support.small_runs import config_of, events, line_task, lines, steps, train

URL = "s3://bucket-one/run"
SAVED = {"every_steps": 5, "keep": 2, "directory": URL}


@pytest.fixture
def client(monkeypatch):
    client = InMemory()
    monkeypatch.setattr(object_store, "_client", lambda scheme: client)
    return client


def test_run_continues_on_an_empty_disk(client, tmp_path):
    whole = train(tmp_path / "whole", log={"every_steps": 1, "progress": "off"})
    every = {"log": {"every_steps": 1, "progress": "plain"}, "checkpoint": SAVED}
    train(tmp_path / "first", steps=12, **every)
    assert steps(tmp_path / "first") == list(range(1, 13))
    assert not (tmp_path / "first/run/checkpoints").exists()
    moved = train(tmp_path / "second", **every)
    assert steps(tmp_path / "second") == list(range(1, 21)) == steps(tmp_path / "whole")
    assert float(moved.state.params["w"][0, 0]) == float(whole.state.params["w"][0, 0])
    assert events(tmp_path / "second", "restored")[0]["step"] == 12
    assert newest_saved(tmp_path / "second/run") == _newest(tmp_path / "second/run/logs/attempt_1") == 20
    names = {name.removeprefix("bucket-one/run/").split("/")[0] for name in client.objects}
    assert names == {"run", "15", "20"} and not any("alive-" in name for name in client.objects)
    assert train(tmp_path / "third", **every).already_finished


@pytest.mark.slow
def test_eval_and_an_evaluator_read_the_bucket(client, tmp_path):
    train(tmp_path, checkpoint=SAVED)
    config = config_of(tmp_path / "elsewhere", checkpoint=SAVED)
    step, values = evaluate(config, join(detect_cluster({}), config.devices), line_task())
    assert step == 20 and values["loss"] < 1
    (tmp_path / "elsewhere/run").mkdir(parents=True)
    assert evaluate_each(config, ClusterSpec(), line_task(), print_line=lambda line: None) == [15, 20]


@pytest.mark.slow
def test_older_local_records_are_kept(client, tmp_path):
    every = {"log": {"every_steps": 1, "progress": "plain"}, "checkpoint": SAVED}
    train(tmp_path / "a", steps=5, **every)
    train(tmp_path / "b", steps=10, **every)
    train(tmp_path / "a", steps=15, **every)
    assert steps(tmp_path / "a") == list(range(1, 16))
    assert len((tmp_path / "a/run/metrics.before-5.jsonl").read_text().splitlines()) == 6


def test_skipped_batches_are_known_on_other_disks(client, tmp_path):
    back = iter([sk.Rollback(to_step=0, skip_batches=2)])
    hook = sk.Hook("back", after_step=lambda run, step, state, metrics: next(back, None) if step == 3 else None)
    task = line_task()
    task = sk.Task(task.init, task.loss_fn, task.optimizer, train_data=task.train_data, hooks=[hook])
    train(tmp_path / "a", task, steps=4, checkpoint={"every_steps": None, "directory": URL})
    assert skipped_batches.read(tmp_path / "a/run") == ((1, 2),)
    (tmp_path / "b/run").mkdir(parents=True)
    startup_bucket.download_skipped(
        config_of(tmp_path / "b", checkpoint=SAVED), join(detect_cluster({})), tmp_path / "b/run"
    )
    (tmp_path / "c").mkdir()
    folder = lambda cluster: tmp_path / ("b/run" if cluster.is_main else "c")
    assert on_all(2, lambda cluster: skipped_batches.read_for_all(folder(cluster), cluster)) == [((1, 2),), ((1, 2),)]


def test_leased_or_emptied_bucket_is_refused(client, tmp_path, monkeypatch):
    from spmdkit.checkpoint import lease

    train(tmp_path / "a", checkpoint=SAVED)
    monkeypatch.setattr(lease, "LEASE_POLL_S", 0.05)
    monkeypatch.setattr(lease, "LEASE_RENEW_S", 0.02)
    with Lease(location.resolve(URL), "other"), pytest.raises(ConfigError, match="is in use by process"):
        train(tmp_path / "b", checkpoint=SAVED, steps=30)
    client.objects = {name: x for name, x in client.objects.items() if "/run/run/" in name}
    with pytest.raises(CheckpointError, match=r"s3://bucket-one/run holds no checkpoint.*never silently restarts"):
        train(tmp_path / "a", checkpoint=SAVED, steps=30)


@pytest.mark.parametrize("text", ["s3://b/run", "gs://bucket-one", "/local/path", "gs:/bucket-one/run", "gs://bucket-one/a b", "file://bucket/x"])  # fmt: skip  # noqa: E501
def test_config_refuses_other_urls(tmp_path, text):
    with pytest.raises(Exception, match="a folder in an object store"):
        config_of(tmp_path, checkpoint={"directory": text})


@pytest.mark.slow
def test_commands_find_the_bucket_by_run_directory(client, tmp_path, capsys):
    from spmdkit.cli.checkpoint import checkpoint_ls, checkpoint_rm

    train(tmp_path, checkpoint=SAVED)
    capsys.readouterr()
    for name in (str(tmp_path / "run"), URL):
        checkpoint_ls(name, json_=True)
        found = json.loads(capsys.readouterr().out)
        assert [row["step"] for row in found["checkpoints"]] == [15, 20] and found["ignored"] == []
    checkpoint_rm(URL, [15])
    checkpoint_ls(URL, json_=True)
    assert [row["step"] for row in json.loads(capsys.readouterr().out.splitlines()[-1])["checkpoints"]] == [20]
    assert lines(tmp_path, "metrics.jsonl")


def test_each_process_has_its_own_stage(tmp_path):
    for name in ("p000", "p001", "p002", "notes"):
        (tmp_path / "staging" / name).mkdir(parents=True)
    stages = on_all(2, lambda cluster: startup_bucket.options(tmp_path, cluster)["stage"])
    assert stages == [tmp_path / "staging/p000", tmp_path / "staging/p001"]
    assert sorted(path.name for path in (tmp_path / "staging").iterdir()) == ["notes", "p000", "p001"]
