"""What processes see of each other: threads play them, with one store; and `doctor` as people start it."""

import json
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from spmdkit.errors import ConfigError
from spmdkit.run.startup.health_checks import hosts as module
from spmdkit.run.startup.health_checks import judge_hosts, probe_hosts, same_versions, write_test
from spmdkit.tools.doctor import seconds_of
from tests.support.clusters import on_all
from tests.support.environment import environment_of_a_user

ROOT = Path(__file__).parents[4]


def test_reachable_processes_know_hosts_addresses_and_clocks():
    for met in on_all(3, lambda cluster: probe_hosts(cluster, "127.0.0.1")):
        assert [one["unreached"] for one in met] == [{}, {}, {}]
        assert all(one["host"] == socket.gethostname() and abs(one["clock_s"]) < 0.5 for one in met)
        assert judge_hosts(met).wrong == []


def test_unreachable_process_is_named_by_all_others():
    address = lambda cluster: "192.0.2.1" if cluster.process_index == 1 else "127.0.0.1"
    (met, *_) = on_all(3, lambda cluster: probe_hosts(cluster, address(cluster)))
    assert [sorted(one["unreached"]) for one in met] == [["1"], [], ["1"]]
    wrong = judge_hosts(met).wrong
    assert len(wrong) == 2 and re.search(r"process 0 on \S+ does not reach process 1 on \S+ at 192\.0\.2\.1", wrong[0])


def test_clock_offset_and_loopback_address_are_problems():
    one = {"host": "a", "address": "10.0.0.1", "unreached": {}, "clock_s": 0.0}
    met = [one, one | {"host": "b", "address": "127.0.1.1", "clock_s": -7.5}]
    wrong = judge_hosts(met).wrong
    assert any("the clock of process 1 on b is -7.5 s off that of process 0" in line for line in wrong)
    assert any("would advertise 127.0.1.1 to Gloo" in line for line in wrong)
    assert judge_hosts([one | {"address": "127.0.1.1"}]).wrong == []


def test_clock_of_another_process_is_measured(monkeypatch):
    import time

    real, ahead = time.time, threading.local()
    monkeypatch.setattr(module.time, "time", lambda: real() + getattr(ahead, "s", 0.0))

    def run(cluster):
        ahead.s = 100.0 if cluster.process_index else 0.0  # the thread that answers has the clock of process 0
        return probe_hosts(cluster, "127.0.0.1")

    met = on_all(2, run)[0]
    assert met[0]["clock_s"] == 0.0 and abs(met[1]["clock_s"] - 100) < 1


def test_other_versions_are_named(monkeypatch):
    versions = threading.local()
    monkeypatch.setattr(module, "package_versions", lambda: {"jax": versions.jax})

    def run(cluster):
        versions.jax = f"0.1{cluster.process_index}.0"
        return same_versions(cluster)[1]

    assert on_all(2, run)[0] == ["process 1 has jax 0.11.0, process 0 0.10.0"]


def test_run_directory_must_be_shared_and_writable(tmp_path):
    said, wrong = on_all(2, lambda c: write_test(c, tmp_path / "run", tmp_path / "run/checkpoints"))[1]
    assert said == f"written by all: {tmp_path / 'run'}" and wrong == []
    assert list((tmp_path / "run").iterdir()) == []
    own = lambda c: tmp_path / str(c.process_index)
    _, (said,) = on_all(2, lambda c: write_test(c, own(c), own(c)))[0]
    assert "is not one folder for all processes" in said and "checkpoint.directory" in said
    (tmp_path / "file").write_text("")
    folder = lambda c: tmp_path / "run" if c.is_main else tmp_path / "file"
    _, (said, *_) = on_all(2, lambda c: write_test(c, folder(c), folder(c)))[0]
    assert "process 1 cannot write" in said


@pytest.mark.parametrize(("text", "seconds"), [("30s", 30), ("0.5s", 0.5), ("5m", 300), ("1h", 3600), ("7", 7)])
def test_times_are_read(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "0s", "s", "-1s", "1d", "99h", "1e3s", "nan"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(ConfigError, match="Try --burn-in 30s"):
        seconds_of(text)


@pytest.mark.slow
@pytest.mark.processes
def test_doctor_of_two_launched_processes_finds_them_well(tmp_path):
    """Started by the launcher: what it must be right about is what the environment and the join make of it."""
    (tmp_path / "run.yaml").write_text(
        "task: t.py:task\nrun_dir: run\nsteps: 1\nbatch_size: 4\ndevices: cpu:4\nmesh: {data: 2, fsdp: 2}\n"
    )
    doctor = ["doctor", "run.yaml", "--json", "--burn-in", "0.1s"]
    command = [sys.executable, "-m", "spmdkit", "launch", "-n", "2", "--", *doctor]
    env = environment_of_a_user() | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    [told] = done.stdout.splitlines()  # what Gloo says is on standard error
    found = json.loads(told.removeprefix("[0] "))
    assert found["problems"] == [] and found["reduction"] == "right" and "same bits" in found["burn_in"]
    assert found["devices"] == "4 x cpu (cpu) in 2 processes"
    for process, told in enumerate(found["hosts"].split("; ")):
        clock = r"clock [+-]0\.\d{3} s"
        assert re.fullmatch(rf"process {process} on \S+, Gloo advertises 127\.0\.0\.1, {clock}", told), told
    assert re.fullmatch(r"data [\d.]+ GB/s, fsdp [\d.]+ GB/s", found["bandwidth"])
    assert found["versions"]["jax"] and found["compile cache"]
    assert found["run directory"] == f"written by all: {tmp_path / 'run'}"
