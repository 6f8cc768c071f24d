"""The process that holds the coordination service: its port cannot be taken, and it lives as long as somebody needs
it."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from spmdkit.cluster import ClusterSpec
from spmdkit.cluster.detection import detect_cluster
from spmdkit.cluster.rendezvous import _listen
from spmdkit.cluster.service import ServiceProcess, reserve_port
from spmdkit.errors import ConfigError, RendezvousError
from tests.launch.test_local import wait_until_dead

REPOSITORY = Path(__file__).resolve().parents[3]


def test_reserved_port_is_shared_with_process_0():
    holder, port = reserve_port()
    with holder:
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", port))
        with pytest.raises(RendezvousError, match="cannot listen"):
            _listen(ClusterSpec(f"127.0.0.1:{port}", 2, 0))
        listener, bound = _listen(ClusterSpec(f"127.0.0.1:{port}", 2, 0, service="127.0.0.1:1"))
        with listener, socket.create_connection(("127.0.0.1", port), timeout=5):
            assert bound == f"127.0.0.1:{port}"
    socket.create_server(("127.0.0.1", port)).close()


def test_service_is_read_with_its_coordinator():
    place = {"SPMDKIT_NUM_PROCESSES": "2", "SPMDKIT_PROCESS_ID": "1", "SPMDKIT_SERVICE": "127.0.0.1:99"}
    assert detect_cluster({**place, "SPMDKIT_COORDINATOR": "127.0.0.1:98"}).service == "127.0.0.1:99"
    slurm = {"SLURM_JOB_ID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "a"}
    assert detect_cluster({**slurm, "SPMDKIT_SERVICE": "127.0.0.1:99"}).service is None
    with pytest.raises(ConfigError, match="SPMDKIT_SERVICE='here' is not an address"):
        detect_cluster({**place, "SPMDKIT_COORDINATOR": "127.0.0.1:98", "SPMDKIT_SERVICE": "here"})


@pytest.mark.processes
def test_service_stays_for_connected_processes():
    holder, port = reserve_port()
    address = f"127.0.0.1:{port}"
    service_process = ServiceProcess(2, -1)
    try:
        service_process.listen(address)
        service_process.wait_until_up(address)
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):  # Slurm signals all of a job
                service_process._popen.send_signal(number)
            service_process.shutdown()
            with pytest.raises(subprocess.TimeoutExpired):
                service_process._popen.wait(0.4)
        assert service_process._popen.wait(5) == 0
    finally:
        service_process.kill()
        holder.close()


@pytest.mark.processes
def test_service_that_cannot_listen_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        service_process = ServiceProcess(2, 0)
        service_process.listen(address)
        with pytest.raises(RendezvousError, match=f"could not listen at {address}.*needs a free port"):
            service_process.wait_until_up(address)


@pytest.mark.processes
def test_service_ends_with_a_dead_process(tmp_path):
    script = (
        "import sys, time; from spmdkit.cluster.service import ServiceProcess; k = ServiceProcess(2, 0); "
        "print(k._popen.pid, flush=True); time.sleep(60)"
    )
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    popen = subprocess.Popen([sys.executable, "-c", script], env=env, cwd=tmp_path, stdout=subprocess.PIPE)
    service_process = int(popen.stdout.readline())
    popen.send_signal(signal.SIGKILL)
    popen.communicate(timeout=10)
    wait_until_dead([service_process], 10)
