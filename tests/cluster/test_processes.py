"""What the coordination service promises, with real processes and without a launcher."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

REPOSITORY = Path(__file__).resolve().parents[2]
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


def test_coordination_service_behaves_as_the_store_expects():
    """Pins jaxlib: 0.10.2 and 0.11.2 behave so."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        coordinator = f"127.0.0.1:{server.getsockname()[1]}"
    place = {"PYTHONPATH": str(REPOSITORY), "SPMDKIT_COORDINATOR": coordinator, "SPMDKIT_NUM_PROCESSES": "2"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = []
    for process in ("0", "1"):
        env = {**os.environ, **place, "SPMDKIT_PROCESS_ID": process}
        running.append(subprocess.Popen([sys.executable, "-c", SCRIPT], env=env, **pipes))
    try:
        outputs = [popen.communicate(timeout=60) for popen in running]
    finally:
        for popen in running:
            popen.kill()
            popen.wait()
    assert [popen.returncode for popen in running] == [0, 0], outputs
    assert "waited 0.5 s for 2 processes, process 1 did not reach it" in outputs[0][0]
    assert "the last one was too late" in outputs[1][0]
