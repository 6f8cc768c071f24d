"""Several real processes save one checkpoint together, in a folder or in a bucket that orbax does not write to, where
each has a folder of its own and nothing but the bucket is common to them; another number of processes restores it."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from spmdkit.checkpoint import Checkpoints, ignored_entries, inspect, location, object_store, verify
from spmdkit.checkpoint.staging import Staging
from spmdkit.errors import CheckpointWriteError
from tests.checkpoint.checkpoint_worker import global_state, value_of
from tests.support.buckets import shared_client

WORKER = Path(__file__).parent / "checkpoint_worker.py"
URL = "s3://bucket-one/run"

pytestmark = pytest.mark.processes


def run_two_processes(directory: Path, commands: str, victim: int | None = None) -> list[str]:
    """Returns what each process printed; both must end with 0 in time, or the victim by SIGKILL. Their bucket is in
    `directory/bucket`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    workers = [
        subprocess.Popen(
            [sys.executable, WORKER, "process", directory, address, str(index), "2", commands],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    deadline = time.monotonic() + 120
    try:
        outputs = [worker.communicate(timeout=max(1, deadline - time.monotonic()))[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait(10)
    if victim is not None:
        assert workers[victim].returncode == -signal.SIGKILL, outputs
        return outputs
    for worker, output in zip(workers, outputs, strict=True):
        assert worker.returncode == 0 and "done" in output, output
    return outputs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What two processes saved, with a step saved by this process, refused by process 0, or not written by one."""
    folder = tmp_path_factory.mktemp("processes")
    checkpoints = Checkpoints(folder / "alone")
    for step in (3, 4):
        state = {"split": value_of(step, 24), "whole": value_of(step)[:3], "empty": np.zeros((0, 2), np.float32)}
        checkpoints.save(step, jax.tree.map(jnp.asarray, state), {"seed": step})
    checkpoints.close()
    on_disk = "save:saved,restore:saved,restore:alone,full_disk:full,lose_one:lost"
    for output in run_two_processes(folder, f"{on_disk},save:{URL},lose_one:s3://bucket-one/lost"):
        assert "CheckpointWriteError no room" in output, output
        for words in (
            "saving step 2",
            "No space left on device",
            "saving step 3",
            "saving step 4",
            "intact are 1, 2, 3",
        ):
            assert words in output, (words, output)
    return folder


@pytest.fixture
def client(folder, monkeypatch):
    client = shared_client(folder / "bucket")
    monkeypatch.setattr(object_store, "_client", lambda scheme: client)
    return client


@pytest.mark.parametrize("where", ["folder", "bucket"])
def test_step_of_two_processes_restores_on_any_mesh(folder, client, where):
    directory = URL if where == "bucket" else folder / "saved"
    checkpoints = Checkpoints(directory, is_main=False)
    assert checkpoints.steps() == [2, 3, 4] and ignored_entries(checkpoints.directory) == []
    assert inspect(directory)["num_processes"] == 2
    assert [(row["step"], row["good"], row["found"]) for row in verify(directory)] == [
        (s, True, None) for s in (2, 3, 4)
    ]
    assert where == "folder" or any("/ocdbt.process_1/d/" in name for name in client.objects), "process 1 wrote nothing"
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), global_state(4))
    state, _ = checkpoints.restore(4, abstract)  # on eight devices of one process
    assert np.array_equal(state["split"], value_of(4, 24)) and np.array_equal(state["whole"], value_of(4)[:3])
    checkpoints.close()


def test_orbax_opens_copy_and_detects_flipped_bits(client, tmp_path):
    with location.local_copy(location.resolve(URL), 4, tmp_path) as here:
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
    client = shared_client(tmp_path / "bucket")
    monkeypatch.setattr(object_store, "_client", lambda scheme: client)
    monkeypatch.setenv("VICTIM", str(victim))
    monkeypatch.setenv("DIES_AT", at)
    run_two_processes(tmp_path, f"killed:{URL}", victim)
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
