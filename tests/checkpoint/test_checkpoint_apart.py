"""Several real processes save one checkpoint into a bucket that orbax does not write to: each has a folder of its own,
and nothing but the bucket is common to them."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from spmdkit.checkpoint import Checkpoints, ignored_entries, inspect, location, object_store, verify
from spmdkit.checkpoint.staging import Staging
from spmdkit.errors import CheckpointWriteError
from tests.checkpoint.checkpoint_worker import global_state, value_of
from tests.checkpoint.test_checkpoint_processes import run_processes
from tests.support.buckets import shared_client

pytestmark = pytest.mark.processes

BUCKET = "s3://bucket-one"
URL = f"{BUCKET}/run"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The bucket, with what two processes saved in URL; then a part of theirs could not be written."""
    folder = tmp_path_factory.mktemp("bucket")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BUCKET_FOLDER", str(folder))
        for output in run_processes(BUCKET, 2, "save:run,lose_one:lost"):
            for words in (
                "saving step 2",
                "No space left on device",
                "saving step 3",
                "saving step 4",
                "intact are 1, 2, 3",
            ):
                assert words in output, (words, output)
        yield folder


@pytest.fixture
def client(folder, monkeypatch):
    client = shared_client(folder)
    monkeypatch.setattr(object_store, "_client", lambda scheme: client)
    return client


def test_step_saved_apart_restores_bitwise_on_any_mesh(client):
    checkpoints = Checkpoints(URL, is_main=False)
    assert checkpoints.steps() == [2, 3, 4] and ignored_entries(checkpoints.directory) == []
    assert inspect(URL)["num_processes"] == 2
    assert [(row["step"], row["good"], row["found"]) for row in verify(URL)] == [(s, True, None) for s in (2, 3, 4)]
    assert any("/ocdbt.process_1/d/" in name for name in client.objects), "process 1 has written nothing"
    want = global_state(4)
    state, _ = checkpoints.restore(4, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), want))  # fmt: skip  # noqa: E501
    assert np.array_equal(state["split"], value_of(4, 24)) and np.array_equal(state["whole"], value_of(4)[:3])
    checkpoints.close()


def test_orbax_opens_copy_and_detects_flipped_bits(client, tmp_path):
    with location.fetched(location.resolve(URL), 4, tmp_path) as here:
        shape = jax.ShapeDtypeStruct(
            (24, 4096), np.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])
        )
        whole = jax.ShapeDtypeStruct((3, 4096), np.float32, sharding=shape.sharding)
        found = ocp.StandardCheckpointer().restore(here / "4" / "state", {"split": shape, "whole": whole})
    assert np.array_equal(found["split"], value_of(4, 24)) and np.array_equal(found["whole"], value_of(4)[:3])
    for process in (0, 1):
        data = [name for name in client.objects if f"run/3/state/ocdbt.process_{process}/d/" in name]
        name = max(data, key=lambda name: len(client.objects[name]))
        kept = client.objects[name]
        client.objects[name] = bytes([*kept[:-2000], kept[-2000] ^ 1, *kept[-1999:]])
        assert [row["good"] for row in verify(URL)] == [True, False, True]
        client.objects[name] = kept


@pytest.mark.slow
@pytest.mark.parametrize(
    "victim, at",
    [
        (0, f"/2/{location.MARKER}"),
        (1, "/2/state/ocdbt.process_1/manifest.ocdbt"),
    ],
    ids=["marker", "upload"],
)
def test_kill_before_the_marker_leaves_no_step(monkeypatch, tmp_path, victim, at):
    client = shared_client(tmp_path)
    monkeypatch.setattr(object_store, "_client", lambda scheme: client)
    for name, value in {"BUCKET_FOLDER": tmp_path, "VICTIM": victim, "DIES_AT": at}.items():
        monkeypatch.setenv(name, str(value))
    run_processes(URL, 2, "killed", 60, victim)
    assert any("/2/state/array_metadatas/process_1" in name for name in client.objects), "nothing was uploaded"
    assert Checkpoints(URL, is_main=False).steps() == [1] and ignored_entries(location.resolve(URL)) == ["2"]
    again = Checkpoints(URL)
    assert ignored_entries(again.directory) == [] and [row["good"] for row in verify(URL)] == [True]
    again.save(2, {"split": jnp.asarray(value_of(2, 24))}, {})
    assert again.close() == [2]


def test_files_of_another_run_are_not_committed(client, tmp_path):
    staging = Staging(location.resolve("s3://bucket-one/other"), tmp_path / "stage")
    (staging.written / "1").mkdir()
    with pytest.raises(CheckpointWriteError, match="process 1 in s3://bucket-one/other/1 are not those that it has"):
        client.objects["bucket-one/other/1/state/ocdbt.process_1/d/of-another"] = b"bytes"
        staging._fetch_indexes(1, ["what process 1 has told"])
