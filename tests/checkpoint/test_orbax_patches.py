"""What `orbax_backend.patch_orbax` changes in orbax and tensorstore, one test each."""

import asyncio
import errno
import gc
import time
import warnings

import jax.numpy as jnp
import pytest
import tensorstore as ts
from orbax.checkpoint._src.asyncio_utils import run_sync
from orbax.checkpoint._src.serialization import tensorstore_utils

from spmdkit.checkpoint import Checkpoints, orbax_backend
from spmdkit.config.retention import Retention

SAVES = 10


@pytest.mark.parametrize("shift_s", [86400, -86400])
def test_clock_changes_do_not_end_a_save(directory, monkeypatch, shift_s):
    checkpoints, real, calls = Checkpoints(directory, timeout_s=60), time.time, []

    def set_clock():
        calls.append(None)
        return real() + shift_s * len(calls)

    monkeypatch.setattr(time, "time", set_clock)
    checkpoints.save(1, {"w": jnp.arange(4.0)}, {})
    checkpoints.wait()
    monkeypatch.undo()
    assert len(calls) > 3, "the clock was not set during the save"
    assert checkpoints.latest() == 1
    checkpoints.close()


def test_no_metric_of_tensorstore_stays_after_saves(directory):
    """Counts tensorstore's lists of `{"value": ...}`, which it never frees. Older objects are in generation 2."""
    gc.collect(1)
    gc.disable()
    try:
        checkpoints = Checkpoints(directory, retention=Retention(keep=1))
        for step in range(1, SAVES + 1):
            checkpoints.save(step, {"w": jnp.ones(4)}, {})
            checkpoints.wait()
        checkpoints.close()
        gc.collect(0)
        lists = (x for x in gc.get_objects(generation=1) if type(x) is list and len(x) == 1 and type(x[0]) is dict)
        assert sum(x[0].keys() == {"value"} for x in lists) < SAVES
    finally:
        gc.enable()


def test_folder_spec_is_built_without_tensorstore(directory, monkeypatch):
    orbax_backend.patch_orbax()
    orbax_backend.patch_orbax()
    folder, given = {"driver": "file", "path": f"{directory}/a b/ü/"}, []
    spec = tensorstore_utils.ts.KvStore.Spec
    assert spec(folder).to_json() == ts.KvStore.Spec(folder).to_json()
    assert spec({"driver": "memory", "path": "a/"}).to_json() == {"driver": "memory", "path": "a/"}
    tensorstore_utils.ts.KvStore.open(spec(folder)).result().write("a", b"1").result()
    assert ts.KvStore.open(folder).result().read("a").result().value == b"1"
    monkeypatch.setattr(tensorstore_utils.ts.KvStore, "Spec", lambda one: given.append(one) or spec(one))
    checkpoints = Checkpoints(directory)
    checkpoints.save(1, {"w": jnp.ones(4), "v": jnp.ones(4)}, {})
    checkpoints.close()
    folders = [one for one in given if one["driver"] == "file"]
    assert len(folders) >= 2 and all(isinstance(spec(one), dict) for one in folders), given


def test_indexes_of_arrays_are_not_compressed(directory):
    checkpoints = Checkpoints(directory)
    checkpoints.save(1, {"w": jnp.ones(4)}, {})
    checkpoints.close()
    index = {"driver": "ocdbt", "base": f"file://{directory}/1/state/"}
    assert ts.KvStore.open(index | {"config": {"compression": None}}).result().list().result()
    with pytest.raises(ValueError, match="compression"):
        ts.KvStore.open(index | {"config": {"compression": {"id": "zstd"}}}).result().list().result()


def test_failed_save_cancels_parts_not_yet_begun(caplog):
    orbax_backend.patch_orbax()

    async def begins_another():  # so that there is one that has not begun, whenever it ends
        await asyncio.gather(begins_another())

    async def fails():
        for _ in range(5):
            await asyncio.sleep(0)
        raise OSError(errno.ENOSPC, "No space left on device")

    async def fails_later():
        try:
            await asyncio.sleep(60)
        finally:
            raise OSError(errno.ENOSPC, "the second part")

    async def both():
        await asyncio.gather(begins_another(), fails_later(), fails())

    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        with pytest.raises(OSError, match="No space"):
            run_sync(both())
        gc.collect()
    assert not [each for each in raised if "never awaited" in str(each.message)]
    assert not caplog.records, "a further failure is logged"
