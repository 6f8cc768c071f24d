"""A signal or a notice to one of several processes: all save at one step and exit with 42."""

import json
import signal
import socket
import time

import pytest

from tests.faults.preemption_sources.test_preemption_sources import cloud  # noqa: F401  the fixture
from tests.support.forks import Process

pytestmark = pytest.mark.processes


def start(forks, folder, num, *overrides, variables=lambda process: {}):
    """Returns processes that train together, once they do."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        coordinator = f"127.0.0.1:{server.getsockname()[1]}"
    place = {"SPMDKIT_COORDINATOR": coordinator, "SPMDKIT_NUM_PROCESSES": str(num)}
    command = ["train", "run.yaml", "steps=100000", "checkpoint.every_steps=null", *overrides]
    started = [
        forks.start(Process(command, folder, place | {"SPMDKIT_PROCESS_ID": str(i)} | variables(i))) for i in range(num)
    ]
    metrics = folder / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while not (metrics.is_file() and len(metrics.read_text().splitlines()) > 2):
        assert time.monotonic() < deadline and all(child.poll() is None for child in started), [
            child.text() for child in started
        ]
        time.sleep(0.02)
    return started


def events_after_exit(started, folder):
    """Returns the events of a run; all its processes must exit with 42 and save the last step only."""
    assert [child.wait(60) for child in started] == [42] * len(started), [child.text() for child in started]
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    saved = [int(p.name) for p in (folder / "run" / "checkpoints").iterdir() if p.name.isdigit()]
    assert events[-1]["event"] == "preempted" and saved == [events[-1]["step"]]
    return events


@pytest.mark.slow
@pytest.mark.parametrize(("number", "process"), [(signal.SIGUSR1, 1), (signal.SIGTERM, 0)])
def test_signal_to_one_process_saves_on_all(drills, forks, number, process):
    """There is one checkpoint, so all processes agreed on its step."""
    started = start(forks, drills.path, 2)
    started[process].send_signal(number)
    events = events_after_exit(started, drills.path)
    signals = {event["process"]: event["signal"] for event in events if event["event"] == "preempted"}
    assert signals == {process: number.name, 1 - process: "a signal to another process"}


def test_cloud_notice_to_one_process_saves_on_all(drills, forks, cloud):  # noqa: F811
    host = f"127.0.0.1:{cloud.server_port}"
    variables = lambda process: {"GCE_METADATA_HOST": host if process == 1 else "127.0.0.1:9"}
    started = start(forks, drills.path, 2, "preemption=[{gce: {every_s: 0.2}}]", variables=variables)
    cloud.state["preempted"] = "TRUE"
    events = events_after_exit(started, drills.path)
    assert {event["process"] for event in events if event["event"] == "preemption_notice"} == {1}
    assert {event["process"] for event in events if event["event"] == "preemption_source_failed"} == {0}, (
        "an unreachable server does not end the run"
    )
    assert events[-1]["signal"] == "Google Cloud preempts this machine"
    assert "by Google Cloud preempts this machine; saved" in started[0].text()
