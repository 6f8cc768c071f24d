"""A run may save ten thousand times: what orbax asks tensorstore does not stay behind (benchmarks/save_growth.py has
the KiB)."""

import gc
import sys

import jax.numpy as jnp
import pytest

from spmdkit.checkpoint import Checkpoints, location, orbax_backend, record
from spmdkit.config.retention import Retention
from spmdkit.foundation import files

SAVES = 10


def metrics_of_tensorstore():
    """Returns how many values of tensorstore's metrics are new and stay: the lists of `{"value": ...}` that it never
    frees."""
    gc.collect(0)  # what stays of the youngest is in generation 1 now
    lists = (x for x in gc.get_objects(generation=1) if type(x) is list and len(x) == 1 and type(x[0]) is dict)
    return sum(x[0].keys() == {"value"} for x in lists)


@pytest.fixture
def only_the_new():
    """What there is already is in generation 2, and nothing else gets there: all objects of a whole suite need not be
    walked."""
    gc.collect(1)
    gc.disable()
    yield
    gc.enable()


def test_no_metric_of_tensorstore_stays_behind_a_save(directory, only_the_new):
    checkpoints = Checkpoints(directory, retention=Retention(keep=1))
    for step in range(1, SAVES + 1):
        checkpoints.save(step, {"w": jnp.ones(4)}, {})
        checkpoints.wait()
    checkpoints.close()
    assert metrics_of_tensorstore() < SAVES


def test_folder_spec_is_built_without_tensorstore(directory, monkeypatch):
    import tensorstore as ts
    from orbax.checkpoint._src.serialization import tensorstore_utils

    folder = {"driver": "file", "path": f"{directory}/a b/ü/"}
    asked, real = [], ts.KvStore.Spec(folder).to_json()
    orbax_backend.avoid_tensorstore_leaks()
    orbax_backend.avoid_tensorstore_leaks()
    spec = tensorstore_utils.ts.KvStore.Spec
    monkeypatch.setattr(tensorstore_utils.ts.KvStore, "Spec", lambda given: asked.append(given) or spec(given))
    assert spec(folder).to_json() == real == folder
    assert spec({"driver": "memory", "path": "a/"}).to_json() == {"driver": "memory", "path": "a/"}
    store = tensorstore_utils.ts.KvStore.open(spec(folder)).result()
    store.write("a", b"1").result()
    assert ts.KvStore.open(folder).result().read("a").result().value == b"1"
    assert tensorstore_utils.ts.Spec is ts.Spec
    checkpoints = Checkpoints(directory, retention=Retention(keep=1))
    checkpoints.save(1, {"w": jnp.ones(4), "v": jnp.ones(4)}, {})
    checkpoints.close()
    folders = [given for given in asked if given["driver"] == "file"]
    assert len(folders) >= 2 and all(isinstance(spec(given), dict) for given in folders), asked


def test_indexes_of_arrays_are_not_compressed(directory):
    import tensorstore as ts

    checkpoints = Checkpoints(directory, retention=Retention(keep=1))
    checkpoints.save(1, {"w": jnp.ones(4)}, {})
    checkpoints.close()
    index = {"driver": "ocdbt", "base": f"file://{directory}/1/state/"}
    assert ts.KvStore.open(index | {"config": {"compression": None}}).result().list().result()
    with pytest.raises(ValueError, match="compression"):
        ts.KvStore.open(index | {"config": {"compression": {"id": "zstd"}}}).result().list().result()


def test_file_names_do_not_grow_the_interned_table(tmp_path, monkeypatch):
    interned, real = [], sys.intern
    monkeypatch.setattr(sys, "intern", lambda text: interned.append(text) or real(text))
    (tmp_path / "state/d").mkdir(parents=True)
    (tmp_path / "state/d/00ffab").write_bytes(b"1")
    assert any("00ffab" in text for text in interned), "`Path` asks for it by another way"
    interned.clear()
    sizes = record.list_files(tmp_path)
    assert sizes == location.sizes(tmp_path) == {"state/d/00ffab": 1}
    assert record.digest_files(tmp_path, sizes).keys() == sizes.keys()
    files.tighten(tmp_path)
    assert not [text for text in interned if "00ffab" in text]


def test_names_used_by_every_save_stay_interned(directory):
    checkpoints = Checkpoints(directory, retention=Retention(keep=1))
    checkpoints.save(1, {"layer": {"kernel": jnp.ones(4)}}, {})
    checkpoints.close()
    del checkpoints
    gc.collect()  # what a save holds while it lasts
    for between, *parts in (
        ("_", "recheck", "cached"),
        ("_", "repeatable", "read"),
        ("_", "ocdbt.process", "0"),
        (".", "layer", "kernel"),
    ):
        text = between.join(parts)  # as a whole in a line of code, it would be held by that
        assert sys.intern(text) is not text
