"""Servers and workers on Ray: one command, kills, and what is left afterwards. `make extras`."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.processes]

ROOT = Path(__file__).parents[2]
MARK = "SPMDKIT_PARAMETER_SERVER"


def start(folder: Path, *overrides: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "spmdkit", "train", str(ROOT / "configs" / "parameter_server.yaml")]
    options = [f"run_dir={folder / 'run'}", "log.progress=plain", *overrides]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    STARTED.append(
        subprocess.Popen(
            [*command, *options], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    )
    return STARTED[-1]


def marked(driver: int) -> dict[int, str]:
    """Returns pid -> command of what the run of a driver has started: all that carries its mark, the same for all."""
    found: dict[str, dict[int, str]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        for entry in environment:
            if entry.startswith(f"{MARK}=".encode()):
                found.setdefault(entry.decode(), {})[int(folder.name)] = command
    own = [pids for mark, pids in found.items() if mark not in BEFORE]
    return own[0] if own else {}


BEFORE: set[str] = set()
"""Marks of runs of others."""
STARTED: list[subprocess.Popen] = []


@pytest.fixture(autouse=True)
def marks_of_others():
    BEFORE.clear()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            entries = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        BEFORE.update(entry.decode() for entry in entries if entry.startswith(f"{MARK}=".encode()))
    yield
    while STARTED:
        process = STARTED.pop()
        process.kill()
        process.wait()


def listening(pids: dict[int, str]) -> set[str]:
    """Returns the addresses on which processes listen, as in /proc/net/tcp."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                if match := re.match(r"socket:\[(\d+)\]", os.readlink(link)):
                    inodes.add(match[1])
            except OSError:
                continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].rpartition(":")[0])
    return found


def events(folder: Path, name: str) -> list[dict]:
    path = folder / "run" / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == name]


def wait_for(what, process=None, limit_s: float = 240):
    end = time.monotonic() + limit_s
    while not (found := what()):
        assert process is None or process.poll() is None, process.stdout.read()
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.1)
    return found


def killed(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def workers(folder: Path) -> list[dict]:
    return [event for event in events(folder, "worker runs") if event["where"]]


def pid_of(event: dict) -> int:
    return int(event["where"].split()[1])


def test_one_command_trains_the_line_by_three_processes_and_leaves_nothing(tmp_path):
    process = start(tmp_path, "steps=1000")
    wait_for(lambda: len(workers(tmp_path)) == 2, process)
    token = tmp_path / "run" / "ray.token"
    assert token.stat().st_mode & 0o777 == 0o600
    pids = marked(process.pid)
    assert sum("ray::ServerActor" in command or "ray::WorkerActor" in command for command in pids.values()) >= 3, pids
    addresses = listening(pids)
    assert addresses and addresses <= {"0100007F", "0000000000000000FFFF00000100007F"}, addresses
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 0, out
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["split"] == "eval" and line["loss"] < 0.012, line
    record = json.loads(next((tmp_path / "run" / "checkpoints").glob("1000/record.json")).read_text())
    assert record["record"]["parameter_server"]["servers"][0]["applied"] == 1000
    wait_for(lambda: not marked(process.pid), limit_s=20)
    assert not token.exists()


def test_workers_and_servers_that_are_killed_come_back_and_a_killed_driver_leaves_nothing(tmp_path):
    process = start(tmp_path, "steps=1000000", "checkpoint.every_steps=200")
    wait_for(lambda: events(tmp_path, "saved"), process)
    first = wait_for(lambda: workers(tmp_path), process)[-1]
    killed(pid_of(first))
    again = wait_for(
        lambda: [
            e for e in workers(tmp_path) if e["worker"] == first["worker"] and e["incarnation"] > first["incarnation"]
        ]
    )
    assert pid_of(again[0]) != pid_of(first)
    server = wait_for(lambda: events(tmp_path, "server runs"), process)[-1]
    killed(pid_of(server))
    restored = wait_for(lambda: events(tmp_path, "servers restored"), process)
    assert restored[0]["step"] >= 200
    newer = wait_for(
        lambda: [event for event in events(tmp_path, "saved") if event["step"] > restored[0]["step"]], process
    )
    assert newer
    pids = marked(process.pid)
    killed(process.pid)
    process.wait()
    begin = time.monotonic()
    wait_for(lambda: not marked(process.pid) and not listening(pids), limit_s=60)
    assert time.monotonic() - begin < 60


def test_a_run_that_is_asked_to_stop_saves_and_goes_on_from_there(tmp_path):
    process = start(tmp_path, "steps=1000000", "checkpoint.every_steps=1000000")
    wait_for(
        lambda: (tmp_path / "run" / "metrics.jsonl").exists() and (tmp_path / "run" / "metrics.jsonl").read_text(),
        process,
    )
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 42, out
    saved = events(tmp_path, "saved")[-1]["step"]
    assert saved > 1
    done = start(tmp_path, f"steps={saved + 20}", "sync=every_step")
    out, _ = done.communicate(timeout=120)
    assert done.returncode == 0 and events(tmp_path, "restored")[-1]["step"] == saved, out
