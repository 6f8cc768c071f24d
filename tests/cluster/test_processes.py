"""What the coordination service promises, with real processes and without a launcher."""

import pytest

from tests.support.forks import Process

pytestmark = pytest.mark.processes

SCRIPT = """
import os, sys
from spmdkit import compat
from spmdkit.cluster import detect_cluster, join
from spmdkit.cluster.store import CoordinationStore
from spmdkit.faults import run_process

def raised(act):
    try:
        act()
    except Exception as error:
        return error

def main():
    cluster = join(detect_cluster(os.environ), "cpu:2")
    store, me = CoordinationStore(compat.coordination_client()), cluster.process_index
    assert store.try_get("absent") is None and store.entries("absent") == {}
    store.put(f"f/{me}", "")
    assert isinstance(raised(lambda: store.put(f"f/{me}", "again")), AssertionError)
    store.put(f"f/{me}", f"x{me}", overwrite=True)
    assert store.try_get(f"f/{me}") == f"x{me}"
    assert isinstance(raised(lambda: store.get("absent", 0.05)), TimeoutError)
    store.barrier("one", 20)
    assert store.entries("f") == {"0": "x0", "1": "x1"}, store.entries("f")
    assert store.entries("f/1") == {}
    store.put(f"big/{me}", "y" * 1_000_000)
    assert len(store.get("big/0", 20)) == 1_000_000
    if me == 1:
        cluster.get("done", 20)
    print(raised(lambda: cluster.barrier("two", 0.5)))
    if me == 0:
        cluster.put("done", "")
    cluster.shutdown()

sys.exit(run_process(main))
"""


def test_coordination_service_behaves_as_the_store_expects(tmp_path, forks):
    """Pins jaxlib: 0.10.2 and 0.11.2 behave so."""
    (tmp_path / "script.py").write_text(SCRIPT)
    first, second = forks.together([Process(["script.py"], tmp_path)] * 2)
    assert (first.code, second.code) == (0, 0), (first, second)
    assert "waited 0.5 s for 2 processes, process 1 did not reach it" in first.output
    assert "the last one was too late" in second.output
