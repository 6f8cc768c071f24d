"""Servers and workers on Ray: one command, kills, and what is left afterwards. `make extras`; the long forms in `make
thorough`."""

import random
import re
import signal
import socket
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from spmdkit.checkpoint import read_state
from spmdkit.config import load_config
from spmdkit.errors import ConfigError, RendezvousError
from spmdkit.parameter_server.actors import Actors, RayEndpoint
from spmdkit.parameter_server.transport import Unavailable
from tests.support.command_line import Folder
from tests.support.command_line import alone as alone
from tests.support.counted_batches import NUM_EXAMPLES
from tests.support.ray_runs import DIGITS, LINE, ROOT, Cluster, Driver, kill, pid_of, wait_for
from tests.support.sockets import listening

pytestmark = [pytest.mark.ray, pytest.mark.processes]


@pytest.fixture
def start(tmp_path):
    """Starts drivers, which are ended with the test."""
    drivers = []

    def started(*overrides, **options):
        drivers.append(Driver(tmp_path, *overrides, **options))
        return drivers[-1]

    yield started
    for driver in drivers:
        driver.kill()


@pytest.fixture
def cluster(tmp_path):
    made = Cluster(tmp_path)
    yield made
    made.end()


def working(driver):
    """Returns the newest event of each worker's life in a process."""
    return {event["worker"]: event for event in driver.events("worker_running") if event["where"]}


def assert_trained(driver):
    assert driver.ends() == 0, driver.said()
    line = driver.metrics()[-1]
    assert line["split"] == "eval" and line["loss"] < 0.012, line


def processes_of(driver):
    """Returns the processes of servers and workers, once both workers run."""
    driver.wait_for(lambda: len(working(driver)) == 2)
    return {pid_of(event) for event in (*driver.events("server_running"), *working(driver).values())}


def test_line_example_trains_with_three_processes(start, monkeypatch):
    """Ray kills each process that does not connect to it within a time, here immediately, and then waits forever for
    those that it starts before the first call. A run sets another time, and starts none before."""
    monkeypatch.setenv("RAY_worker_register_timeout_seconds", "0")
    driver = start("steps=1000")
    processes_of(driver)
    token = driver.run / "ray.token"
    assert token.stat().st_mode & 0o777 == 0o600
    commands = driver.started()
    assert sum("ray::ServerActor" in text or "ray::WorkerActor" in text for text in commands.values()) >= 3, commands
    (logs,) = {Path(found[1]) for text in commands.values() if (found := re.search(r"--log_dir=(/tmp/ray-\S+)", text))}
    jobs = {path.name.split("-")[2] for path in logs.glob("worker-*.out")}
    assert jobs and "f" * 8 not in jobs, "a process was started before the job"
    addresses = {address for address, _ in listening(commands)}
    assert addresses and all(address.is_loopback for address in addresses), addresses
    assert_trained(driver)
    wait_for(lambda: not driver.started(), 20)
    assert not token.exists()


def test_digits_example_trains_with_two_workers(start):
    """A worker whose process had one device would refuse its mesh."""
    driver = start("steps=24", "eval.every_steps=24", "log.every_steps=8", "task_args={width: 8}", config=DIGITS)
    assert driver.ends() == 0, driver.said()
    (roles,) = driver.events("roles")
    assert (roles["servers"], roles["workers"], roles["worker_mesh"]) == (2, 2, {"data": 2})
    places = processes_of(driver)
    assert len(places) == 4 and driver.pid not in places
    trained = [line for line in driver.metrics() if line.get("split") != "eval"][-1]
    assert trained["worker_0_pushes"] + trained["worker_1_pushes"] == 24
    assert driver.metrics()[-1]["split"] == "eval" and driver.metrics()[-1]["accuracy"] > 0.3


COUNTED = """
task: {root}/tests/support/counted_batches.py:task
task_args: {{pace: {pace}}}
steps: {steps}
batch_size: 1
devices: cpu:1
sync: {{parameter_server: {{servers: 2, workers: 2}}}}
checkpoint: {{every_steps: 20}}
log: {{every_steps: 5}}
"""


@pytest.mark.parametrize(
    "workers, servers", [(1, 1), pytest.param(20, 5, marks=pytest.mark.slow)], ids=["one each", "twenty and five"]
)
def test_kills_apply_every_batch_once_and_training_ends(start, tmp_path, workers, servers):
    """Parameters count how often the batch of each example was applied (tests/support/counted_batches.py).

    A worker is killed at a random moment after its life has had an effect: three that have none end a run.
    """
    pace, config = tmp_path / "pace", tmp_path / "config.yaml"
    steps = 400 if workers == 1 else 3000
    pace.write_text("0.1" if workers == 1 else "0.2")
    config.write_text(COUNTED.format(root=ROOT, pace=pace, steps=steps))
    driver = start(config=config)
    dice, kinds = random.Random(workers), ["worker"] * workers + ["server"] * servers
    dice.shuffle(kinds)
    driver.wait_for(lambda: driver.events("saved"))
    pushes = lambda worker: (driver.metrics() or [{}])[-1].get(f"worker_{worker}_pushes", 0)
    for done, kind in enumerate(kinds):
        time.sleep(dice.random())
        kills = kinds[: done + 1].count(kind)
        if kind == "worker":
            victim = dice.choice(list(working(driver).values()))
            before = pushes(victim["worker"])
            driver.wait_for(lambda: pushes(victim["worker"]) > before)  # noqa: B023
            kill(pid_of(victim))
            driver.wait_for(lambda: len(driver.events("worker_lost")) >= kills)  # noqa: B023
            driver.wait_for(lambda: working(driver)[victim["worker"]] != victim)  # noqa: B023
        else:
            saved = max(event["step"] for event in driver.events("saved"))
            kill(pid_of(dice.choice(list({e["server"]: e for e in driver.events("server_running")}.values()))))
            driver.wait_for(lambda: len(driver.events("servers_restored")) >= kills)  # noqa: B023
            assert driver.events("servers_restored")[-1]["step"] >= saved  # nothing lost beyond the last checkpoint
    now = max(event["step"] for event in driver.events("saved"))
    driver.wait_for(lambda: max(event["step"] for event in driver.events("saved")) > now)
    pace.write_text("0")
    assert driver.ends(600) == 0, driver.said()
    assert len(driver.events("worker_lost")) == workers and len(driver.events("servers_restored")) == servers
    state = read_state(driver.run / "checkpoints")
    for leaf in ("params/a", "params/b"):
        counts = state[leaf]
        assert counts.shape == (NUM_EXAMPLES,) and set(np.unique(counts)) <= {0.0, 1.0}, np.unique(counts)
        assert counts.sum() == steps


def test_server_that_ray_cannot_start_ends_the_run(monkeypatch):
    ray = pytest.importorskip("ray")
    text = "worker startup repeatedly failed.\nFailed to startup worker after retrying 5 times."
    monkeypatch.setattr(ray, "get", Mock(side_effect=ray.exceptions.ActorUnschedulableError(text)))
    with pytest.raises(RendezvousError, match=r"run a parameter server \(The actor is not schedulable: .* 5 times"):
        RayEndpoint(Mock()).call_async("status")()
    monkeypatch.setattr(ray, "get", Mock(side_effect=ray.exceptions.OutOfMemoryError("killed")))
    with pytest.raises(Unavailable):
        RayEndpoint(Mock()).call_async("status")()


@pytest.mark.slow
def test_killed_driver_leaves_no_process_or_port(start):
    driver = start("steps=1000000")
    driver.wait_for(lambda: driver.metrics())
    pids = driver.started()
    ports = {port for _, port in listening(pids)}
    assert len(pids) >= 5 and ports
    driver.kill()
    token = driver.run / "ray.token"
    in_use = lambda: {port for _, port in listening(int(path.name) for path in Path("/proc").glob("[0-9]*"))}
    wait_for(lambda: not driver.started() and not ports & in_use() and not token.exists(), 90)


def test_stopped_run_saves_and_resumes(start, tmp_path, monkeypatch, capfd, alone):
    driver = start("steps=1000000", "checkpoint.every_steps=1000000")
    driver.wait_for(lambda: driver.metrics())
    driver.send(signal.SIGTERM)
    assert driver.ends() == 42, driver.said()
    saved = driver.events("saved")[-1]["step"]
    assert saved > 1
    again = "train", str(LINE), f"run_dir={driver.run}", f"steps={saved + 20}", "sync=every_step"
    Folder(tmp_path, monkeypatch, capfd).does(*again)
    assert driver.events("restored")[-1]["step"] == saved and driver.metrics()[-1]["step"] == saved + 20


def test_existing_ray_cluster_is_used_by_address(start, cluster):
    driver = start(f"sync={{parameter_server: {{workers: 2, address: '{cluster.address}'}}}}", cluster=cluster)
    places = processes_of(driver)
    assert len(places) == 3 and places <= cluster.processes().keys()
    assert_trained(driver)
    wait_for(lambda: not places & cluster.processes().keys(), 30)
    assert cluster.runs() and not (driver.run / "ray.token").exists()


def test_unreachable_ray_address_is_refused_immediately(monkeypatch, tmp_path):
    """Ray itself tries for minutes, so it is not asked."""
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "init", init := Mock())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"  # bound, and no process listens
        with pytest.raises(ConfigError, match=f"address is {address}, where no Ray cluster responds"):
            Actors(load_config(LINE), tmp_path, address, 3, 0)
    assert not init.called
