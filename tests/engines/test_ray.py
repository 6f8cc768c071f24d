"""The rendered driver in a Ray: the numbers of a local run, started again after a death, 42 after TERM; and two hosts
that are network namespaces."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from spmdkit.parameter_server.ray_local import MARK
from tests.engines import jobs
from tests.support import two_hosts
from tests.support.sockets import listening

pytestmark = [pytest.mark.ray, pytest.mark.processes]


def words(num, address="local", restarts=0, train=()):
    return jobs.launch("ray", num, f"python={sys.executable}", f"address={address}", restarts=restarts, train=train)


def launched(folder, *args, **options):
    """Starts `launch --on ray` in a project; its output goes to a file there."""
    with open(folder / "output.txt", "w") as output:
        own = {"stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
        return subprocess.Popen(words(*args, **options), cwd=folder, env=jobs.on_path(), **own)


def ended(process, folder, timeout=240):
    """Returns (code, output); a process that takes longer is killed, and what it has started goes with it."""
    try:
        process.wait(timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode, (folder / "output.txt").read_text()


def of_this_ray(folder: Path) -> list[int]:
    """Returns the processes whose Ray has its token in a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"RAY_AUTH_TOKEN_PATH={folder / 'launch_run/ray.token'}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def test_local_ray_has_numbers_of_a_local_run(tmp_path):
    expected = jobs.local(tmp_path / "local", 3, *jobs.THREE)
    folder = jobs.project(tmp_path / "project", jobs.SLOWLY.replace("0.2", "0.05"))
    process = launched(folder, 3, train=jobs.THREE)
    seen, rights = set(), 0
    while process.poll() is None and not (folder / "run/metrics.jsonl").is_file():
        time.sleep(0.2)
    if process.poll() is None:
        seen, rights = listening(of_this_ray(folder)), (folder / "launch_run/ray.token").stat().st_mode & 0o777
    code, output = ended(process, folder)
    assert code == 0, output
    assert jobs.losses(folder) == expected
    assert seen and all(address.is_loopback for address, _ in seen) and rights == 0o600
    assert "3 processes: spmdkit (SPMDKIT_NUM_PROCESSES=3, SPMDKIT_PROCESS_ID=0)" in output
    assert output.index("STRATEGY = 'PACK'") < output.index("3 processes: spmdkit"), "printed before it runs"
    assert not (folder / "launch_run/ray.token").exists() and of_this_ray(folder) == [] and MARK not in os.environ


@pytest.mark.slow
def test_restart_after_a_death_has_the_same_numbers(tmp_path):
    expected = jobs.local(tmp_path / "local", 3, *jobs.THREE)
    folder = jobs.project(tmp_path / "project", jobs.DIES)
    code, output = ended(launched(folder, 3, restarts=1, train=jobs.THREE), folder, 240)
    assert code == 0, output
    assert jobs.losses(folder) == expected and (folder / "died").exists()
    assert "process 1 ended with 137" in output and "restart 1 of 1" in output and "continuing at step" in output


@pytest.mark.slow
def test_stopped_driver_saves_everywhere_and_returns_42(tmp_path):
    folder = jobs.project(tmp_path / "project", jobs.SLOWLY)
    process = launched(folder, 2, train=("steps=800",))
    jobs.wait_for_steps(folder, lambda: process.poll() is None)
    process.terminate()  # hands it on to the driver
    code, output = ended(process, folder, 60)
    assert code == 42, output
    jobs.assert_all_saved(folder)
    assert of_this_ray(folder) == []


@pytest.mark.slow
@pytest.mark.engines
@pytest.mark.skipif(bool(two_hosts.missing()), reason=two_hosts.missing())
def test_two_hosts_have_numbers_of_a_local_run(tmp_path, expected):
    """A head and a second node in network namespaces, a token that both know; actors are one a host; one dies."""
    folder, token = jobs.project(tmp_path / "project", jobs.DIES), tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"}
    options = "start --block --num-cpus=1 --object-store-memory=100000000"
    start = [os.path.dirname(sys.executable) + "/ray", *options.split()]
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as short, two_hosts.hosts() as machines:
        nodes = {
            "host0": [*start, "--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={short}"],
            # The folder of sockets and logs is the head's by name: each host has its own.
            "host1": ["sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', short, *start, "--address=10.77.0.1:6379"],
        }
        for name, node in nodes.items():
            with open(tmp_path / f"{name}.txt", "w") as log:
                node = [*node, f"--node-ip-address={machines.address[name]}"]
                machines.start(name, node, env=jobs.on_path(**own), stdout=log)
            time.sleep(5)
        driver = words(2, "10.77.0.1:6379", restarts=1)
        process = machines.start("host0", driver, cwd=folder, env=jobs.on_path(**own))
        output = process.communicate(timeout=240)[0]
    assert process.returncode == 0, output
    assert jobs.losses(folder) == expected and (folder / "died").exists()
    assert "ip=10.77.0.2" in output and "restart 1 of 1" in output and "continuing at step 21" in output


def test_unreachable_cluster_is_an_error_immediately(tmp_path):
    folder = jobs.project(tmp_path / "project")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"  # bound, and nobody listens
        code, output = ended(launched(folder, 2, address), folder, timeout=60)
    assert code == 75 and f"no Ray cluster responds at address {address}" in output, output
