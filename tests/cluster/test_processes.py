"""Real processes without a launcher: one that does not come, and what the coordination service promises."""

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

REPOSITORY = Path(__file__).resolve().parents[2]
BEGIN = """
import os, sys
from spmdkit import compat
from spmdkit.cluster import detect_cluster, join
from spmdkit.faults import run_process
def run(body):
    def main():
        cluster = join(detect_cluster(os.environ), "cpu:3")
        body(cluster)
        cluster.shutdown()
    sys.exit(run_process(main))
"""


def start(script, processes, count, timeout_s=60.0):
    """Runs `script` as each of `processes` out of `count`; returns [(code, stdout, stderr)]."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        coordinator = f"127.0.0.1:{server.getsockname()[1]}"
    running = []
    for process in processes:
        env = {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "SPMDKIT_COORDINATOR": coordinator,
            "SPMDKIT_NUM_PROCESSES": str(count),
            "SPMDKIT_PROCESS_ID": str(process),
            "SPMDKIT_RENDEZVOUS_TIMEOUT_S": str(timeout_s),
        }
        command = [sys.executable, "-c", textwrap.dedent(BEGIN) + textwrap.dedent(script)]
        running.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        outputs = [popen.communicate(timeout=60) for popen in running]
        return [(popen.returncode, *output) for popen, output in zip(running, outputs, strict=True)]
    finally:
        for popen in running:
            popen.kill()
            popen.wait()


def test_a_process_that_does_not_come_ends_the_others_with_75_and_its_name():
    results = start("run(lambda cluster: None)", processes=[0, 2], count=3, timeout_s=4)
    for code, _, err in results:
        assert code == 75
        assert "2 connected within 4 s; missing: process 1" in err
        assert "Traceback" not in err


def test_the_coordination_service_behaves_as_the_store_expects():
    """Pins jaxlib: 0.10.2 and 0.11.2 behave so."""
    script = """
    from spmdkit.cluster.store import CoordinationStore
    def body(cluster):
        store, me = CoordinationStore(compat.coordination_client()), cluster.process_index
        assert store.try_get("absent") is None
        assert store.entries("absent") == {}
        store.put(f"f/{me}", "", overwrite=False)
        try:
            store.put(f"f/{me}", "again")
        except AssertionError:
            pass
        else:
            raise ValueError("set twice")
        store.put(f"f/{me}", f"x{me}", overwrite=True)
        assert store.try_get(f"f/{me}") == f"x{me}"
        try:
            store.get("absent", 0.05)
        except TimeoutError:
            pass
        else:
            raise ValueError("no timeout")
        store.barrier("one", 20)
        assert store.entries("f") == {str(p): f"x{p}" for p in range(3)}, store.entries("f")
        assert store.entries("f/1") == {}
        store.put(f"big/{me}", "y" * 1_000_000)
        assert len(store.get("big/0", 20)) == 1_000_000
        if me != 1:
            try:
                cluster.barrier("two", 0.5)
            except Exception as error:
                print(error)
            cluster.put(f"done/{me}", "")
        else:
            cluster.get("done/0", 20), cluster.get("done/2", 20)
            try:
                cluster.barrier("two", 0.5)
            except Exception as error:
                print("late:", error)
    run(body)
    """
    results = start(script, processes=[0, 1, 2], count=3)
    assert [code for code, _, _ in results] == [0, 0, 0], results
    for process in (0, 2):
        assert "waited 0.5 s for 3 processes, process 1 did not come" in results[process][1]
    assert "the last one was too late" in results[1][1]
