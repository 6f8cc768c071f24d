"""Several real processes save one checkpoint into a bucket that orbax does not write to: each has a folder of its own, and nothing but the bucket is common to them."""

import jax
import numpy as np
import pytest

from spmdkit.checkpoint import Checkpoints, bucket, inspect, place, verify
from tests.checkpoint.checkpoint_worker import global_state, value_of
from tests.checkpoint.test_checkpoint_processes import run_processes
from tests.support.buckets import shared_client

pytestmark = pytest.mark.processes

URL = "s3://bucket-one/run"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The bucket, with what two processes saved."""
    folder = tmp_path_factory.mktemp("bucket")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BUCKET_FOLDER", str(folder))
        run_processes(URL, 2, "save")
        yield folder


@pytest.fixture
def client(folder, monkeypatch):
    client = shared_client(folder)
    monkeypatch.setattr(bucket, "_client", lambda scheme: client)
    return client


def test_what_two_saved_apart_is_whole_and_any_number_restores_it_bit_for_bit(client):
    checkpoints = Checkpoints(URL, is_main=False)
    assert checkpoints.steps() == [2, 3, 4] and checkpoints.ignored() == []
    assert inspect(URL)["num_processes"] == 2
    assert [(row["step"], row["good"], row["found"]) for row in verify(URL)] == [(s, True, None) for s in (2, 3, 4)]
    assert any("/ocdbt.process_1/d/" in name for name in client.objects), "process 1 has written nothing"
    want = global_state(4)
    state, _ = checkpoints.restore(4, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), want))  # fmt: skip
    assert np.array_equal(state["split"], value_of(4, 24)) and np.array_equal(state["whole"], value_of(4)[:3])
    checkpoints.close()
    run_processes(URL, 3, "restore")
