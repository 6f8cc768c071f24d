"""Launcher, rendezvous, signals and exceptions together, with JAX in every process."""

import signal

import pytest

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


def test_three_processes_agree_under_random_delays(start):
    script = (
        BEGIN
        + """
def main(cluster, signals):
    me, rng, got = cluster.process_index, random.Random(cluster.process_index), []
    asked = {0: {40}, 1: {15, 90}, 2: {15, 150}}[me]
    for step in range(1, 401):
        time.sleep(rng.choice([0, 0, 0, 0.002, 0.01]))
        if cluster.agree("stop", step, step in asked, lag=2):
            got.append(step)
    print("got", got)
    cluster.same_everywhere("answers", str(got))
    cluster.shutdown()
    return 0
run(main)
"""
    )
    result = start(script, 3).wait(timeout_s=90)
    assert result.code == 0, result.err
    answers = {line.split("got")[1] for line in result.out.splitlines() if "got" in line}
    assert len(answers) == 1
    assert 1 <= len(eval(answers.pop())) <= 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_stops_all_at_one_step(start, number):
    """SIGTERM too, which `jax.distributed.initialize` takes away."""
    script = (
        BEGIN
        + """
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
    )
    launched = start(script, 2)
    launched.read_until("running", count=2)
    launched.popen.send_signal(number)
    result = launched.wait(timeout_s=30)
    assert result.code == 42, result.err
    stops = [line.split("] ")[1] for line in result.out.splitlines() if "stopped" in line]
    assert len(stops) == 2
    assert len(set(stops)) == 1
    assert result.err.count("stopping after this step and saving; press Ctrl-C again to exit immediately") == 1


FAILING = (
    BEGIN
    + """
def loss_fn(x):
    return 1 / 0
def main(cluster, signals):
    for step in range(1, 1000):
        total(step)
        if step == 5 and cluster.process_index == 1:
            FAILURE
run(main)
"""
)


def test_an_error_in_a_user_function_is_shown_last(start):
    user = """
            try:
                loss_fn(1)
            except ZeroDivisionError as error:
                raise UserCodeError("loss_fn raised at step 5.") from error"""
    result = start(FAILING.replace("FAILURE", user), 2).wait(timeout_s=60)
    assert result.code == 70
    last = result.err.split("process 1 failed first with exit code 70, ")[1].splitlines()[1:]
    assert last[0] == "loss_fn raised at step 5."
    assert "in loss_fn" in result.err and "return 1 / 0" in result.err
    assert last[-1] == "ZeroDivisionError: division by zero"
    assert "site-packages" not in "".join(last)


def test_a_killed_process_is_the_cause_and_its_peer_says_that_it_lost_contact(start):
    result = start(FAILING.replace("FAILURE", "os.kill(os.getpid(), 9)"), 2).wait(timeout_s=60)
    assert result.code == 137
    assert result.err.splitlines()[-1] == "process 1 failed first: ended by SIGKILL (exit code 137)"
    assert "bug in spmdkit" not in result.err


def test_different_configs_are_refused_by_all(start):
    script = (
        BEGIN
        + """
def main(cluster, signals):
    cluster.same_everywhere("config", "steps: %d" % (10 + cluster.process_index // 2))
run(main)
"""
    )
    result = start(script, 3).wait()
    assert result.code == 78
    assert (
        "process 2 differs from process 0: line 1 is 'steps: 11' instead of 'steps: 10'" in result.err.splitlines()[-1]
    )
