"""A notice to one of two processes: both save at one step and leave with 42, and the run goes on from there."""

import json
import socket
import time

import pytest

from tests.support.forks import Process
from tests.watchers.test_watchers import cloud  # noqa: F401  the fixture

pytestmark = pytest.mark.processes


def test_a_notice_of_the_cloud_to_one_process_saves_and_leaves_with_42_and_names_it(drills, forks, cloud):  # noqa: F811
    overrides = ["steps=100000", "preemption=[{gce: {every_s: 0.2}}]", "checkpoint.every_steps=null"]
    host = f"127.0.0.1:{cloud.server_port}"

    with socket.create_server(("127.0.0.1", 0)) as server:
        coordinator = f"127.0.0.1:{server.getsockname()[1]}"
    place = {"SPMDKIT_COORDINATOR": coordinator, "SPMDKIT_NUM_PROCESSES": "2"}
    started = [
        forks.start(
            Process(
                ["train", "run.yaml", *overrides],
                drills.path,
                place | {"SPMDKIT_PROCESS_ID": str(i), "GCE_METADATA_HOST": host if i == 1 else "127.0.0.1:9"},
            )
        )
        for i in range(2)
    ]
    metrics = drills.path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while not (metrics.is_file() and len(metrics.read_text().splitlines()) > 2):
        assert time.monotonic() < deadline and all(child.poll() is None for child in started), [
            c.text() for c in started
        ]
        time.sleep(0.02)
    cloud.state["preempted"] = "TRUE"
    noticed = time.monotonic()
    assert [child.wait(60) for child in started] == [42, 42], [c.text() for c in started]
    assert time.monotonic() - noticed < 20
    events = [json.loads(line) for line in (drills.path / "run" / "events.jsonl").read_text().splitlines()]
    last = events[-1]
    assert {event["process"] for event in events if event["event"] == "notice"} == {1}
    assert {event["process"] for event in events if event["event"] == "preemption watcher"} == {0}, (
        "nobody answers there, which ends nothing"
    )
    assert (last["event"], last["signal"]) == ("preempted", "Google Cloud preempts this machine")
    assert sorted(int(p.name) for p in (drills.path / "run" / "checkpoints").iterdir() if p.name.isdigit()) == [
        last["step"]
    ]
    assert "by Google Cloud preempts this machine; saved" in started[0].text()
