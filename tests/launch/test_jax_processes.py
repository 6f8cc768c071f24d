"""Launcher, rendezvous, signals and exceptions together, with JAX in every process."""

import signal
import sys

import pytest

from tests.support.forks import Process
from tests.support.sockets import listening, own_address, with_its_children
from tests.support.two_hosts import INSIDE, missing

pytestmark = pytest.mark.processes

BEGIN = """
import os, random, sys, time
from spmdkit.cluster import detect_cluster, join
from spmdkit.errors import UserCodeError
from spmdkit.faults import StopSignals, run_process
import jax, jax.numpy as jnp
from jax.experimental import multihost_utils
def total(x):
    return float(multihost_utils.process_allgather(jnp.float32(x)).sum())
def run(main):
    def body():
        cluster = join(detect_cluster(os.environ), "cpu:%d" % int(os.environ["SPMDKIT_NUM_PROCESSES"]))
        with StopSignals(announce=cluster.is_main) as signals:
            return main(cluster, signals)
    sys.exit(run_process(body))
"""


@pytest.fixture
def forked(tmp_path, forks):
    """Returns a function that launches a script in forked processes, and returns how the launcher ended."""

    def run(script, num_processes=2):
        (tmp_path / "script.py").write_text(BEGIN + script)
        command = ["launch", "-n", str(num_processes), "--", "script.py"]
        (ended,) = forks.run([Process(command, tmp_path, {"JAX_PLATFORMS": "cpu"}, forks=True)])
        return ended

    return run


def test_three_processes_agree_and_reject_different_configs(forked):
    script = """
def main(cluster, signals):
    me, rng, got = cluster.process_index, random.Random(cluster.process_index), []
    requests = {0: {40}, 1: {15, 60}, 2: {15, 70}}[me]
    for step in range(1, 101):
        time.sleep(rng.choice([0, 0, 0, 0.002, 0.01]))
        if cluster.agree("stop", step, step in requests, lag=2):
            got.append(step)
    print("got", got)
    cluster.same_everywhere("agreements", str(got))
    cluster.same_everywhere("config", "steps: %d" % (10 + me // 2))
run(main)
"""
    result = forked(script, 3)
    assert result.code == 78, result.output
    got = {line.split("got")[1] for line in result.output.splitlines() if "] got" in line}
    assert len(got) == 1 and 1 <= len(eval(got.pop())) <= 4
    difference = "process 2 differs from process 0: line 1 is 'steps: 11' instead of 'steps: 10'"
    assert difference in result.output.splitlines()[-1]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_sigterm_stops_all_at_one_step(start, tmp_path):
    """Though `jax.distributed.initialize` takes the signal away. Until then all listen on loopback only: also Gloo,
    which by itself listens on the address of the host's name."""
    under, own = [], own_address()
    if own and not missing():
        (tmp_path / "hosts").write_text(f"127.0.0.1 localhost\n{own} elsewhere\n")
        under = ["unshare", "-u", "-m", "--propagation", "private", "sh", "-c", INSIDE]
        under += [str(tmp_path / "hosts"), "elsewhere"]
    script = """
def main(cluster, signals):
    for step in range(1, 100000):
        total(step)
        if step == 3:
            print("running")
        if cluster.agree("stop", step, signals.requested is not None, lag=1):
            print("stopped at", step)
            cluster.shutdown()
            return 42
run(main)
"""
    launched = start(BEGIN + script, 2, under=under)
    launched.read_until("running", count=2)
    found = listening(with_its_children(launched.popen.pid))
    assert len(found) >= 4, f"two of Gloo, one of process 0, one of the service: {found}"
    assert all(address.is_loopback for address, _ in found), found
    launched.popen.send_signal(signal.SIGTERM)
    result = launched.wait(timeout_s=30)
    assert result.code == 42, result.err
    stops = [line.split("] ")[1] for line in result.out.splitlines() if "stopped" in line]
    assert len(stops) == 2 and len(set(stops)) == 1
    assert result.err.count("stopping after this step and saving; press Ctrl-C again to exit immediately") == 1


def test_error_in_a_user_function_is_shown_last(forked):
    script = """
def loss_fn(x):
    return 1 / 0
def main(cluster, signals):
    for step in range(1, 1000):
        total(step)
        if step == 5 and cluster.process_index == 1:
            try:
                loss_fn(1)
            except ZeroDivisionError as error:
                raise UserCodeError("loss_fn raised at step 5.") from error
run(main)
"""
    result = forked(script)
    assert result.code == 70
    last = result.output.split("process 1 failed first with exit code 70, ")[1].splitlines()[1:]
    assert last[0] == "loss_fn raised at step 5."
    assert "in loss_fn" in result.output and "return 1 / 0" in result.output
    assert last[-1] == "ZeroDivisionError: division by zero"
    assert "site-packages" not in "".join(last)
