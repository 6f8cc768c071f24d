"""The process that holds the coordination service: its port cannot be taken, and it lives as long as somebody needs
it."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spmdkit.cluster import ClusterSpec
from spmdkit.cluster.detection import detect_cluster
from spmdkit.cluster.rendezvous import _listen
from spmdkit.cluster.service import ServiceProcess, reserve_port
from spmdkit.errors import ConfigError, RendezvousError

REPOSITORY = Path(__file__).resolve().parents[3]


def test_a_reserved_port_is_given_to_nobody_else_and_process_0_can_listen_there():
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


def test_the_service_of_a_launcher_is_read_with_the_address_that_belongs_to_it():
    place = {"SPMDKIT_NUM_PROCESSES": "2", "SPMDKIT_PROCESS_ID": "1", "SPMDKIT_SERVICE": "127.0.0.1:99"}
    assert detect_cluster({**place, "SPMDKIT_COORDINATOR": "127.0.0.1:98"}).service == "127.0.0.1:99"
    slurm = {"SLURM_JOB_ID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "a"}
    slurm |= {"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NUM_NODES": "1"}
    assert detect_cluster({**slurm, "SPMDKIT_SERVICE": "127.0.0.1:99"}).service is None
    with pytest.raises(ConfigError, match="SPMDKIT_SERVICE='here' is not an address"):
        detect_cluster({**place, "SPMDKIT_COORDINATOR": "127.0.0.1:98", "SPMDKIT_SERVICE": "here"})


@pytest.mark.processes
def test_a_keeper_listens_where_it_is_told_stays_for_who_is_connected_and_ends():
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
def test_a_keeper_that_cannot_listen_says_where_and_what_to_do():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        service_process = ServiceProcess(2, 0)
        service_process.listen(address)
        with pytest.raises(RendezvousError, match=f"could not listen at {address}.*needs a free port"):
            service_process.wait_until_up(address)


@pytest.mark.processes
def test_a_keeper_ends_with_a_process_that_dies_before_anybody_came(tmp_path):
    script = (
        "import sys, time; from spmdkit.cluster.service import ServiceProcess; k = ServiceProcess(2, 0); "
        "print(k._popen.pid, flush=True); time.sleep(60)"
    )
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    popen = subprocess.Popen([sys.executable, "-c", script], env=env, cwd=tmp_path, stdout=subprocess.PIPE)
    service_process = int(popen.stdout.readline())
    popen.send_signal(signal.SIGKILL)
    popen.communicate(timeout=10)
    deadline = time.monotonic() + 10
    while (
        Path(f"/proc/{service_process}").exists()
        and "Z" not in Path(f"/proc/{service_process}/stat").read_text().split()[2]
    ):
        assert time.monotonic() < deadline, "it is still there"
        time.sleep(0.02)
