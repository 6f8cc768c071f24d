"""events.jsonl: one history from every process, that survives kills and full disks."""

import json
import os

import pytest

from spmdkit.metrics import EventLog, read_lines
from spmdkit.metrics.events import parse_time, utc_time


def test_an_event_carries_utc_time_and_process(tmp_path):
    log = EventLog(tmp_path / "e", 3, clock=lambda: 1738324800.1239)
    log.write("saved", step=120, seconds=float("nan"), path=tmp_path)
    log.close()
    log.close()
    assert json.loads((tmp_path / "e").read_text()) == {
        "event": "saved",
        "time": "2025-01-31T12:00:00.123Z",
        "process": 3,
        "step": 120,
        "seconds": "NaN",
        "path": str(tmp_path),
    }


def test_processes_append_to_one_history(tmp_path):
    logs = [EventLog(tmp_path / "e", p, clock=lambda: 0.0) for p in range(3)]
    for i in range(20):
        for log in logs:
            log.write("saved", step=i)
    EventLog(tmp_path / "e", 0, clock=lambda: 0.0).write("restored", step=19)
    found = [(r["process"], r.get("step")) for r in read_lines(tmp_path / "e")]
    assert found == [(p, i) for i in range(20) for p in range(3)] + [(0, 19)]


def test_a_torn_line_keeps_the_next_event(tmp_path):
    (tmp_path / "e").write_text('{"event": "started"}\n{"event": "sav')
    EventLog(tmp_path / "e", 0).write("restored")
    assert [r["event"] for r in read_lines(tmp_path / "e")] == ["started", "restored"]


def test_a_full_disk_moves_events_to_stderr(tmp_path, monkeypatch, capsys):
    log = EventLog(tmp_path / "e", 0)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    log.write("fault", step=7)
    assert '"event": "fault"' in capsys.readouterr().err


def test_an_event_after_close_goes_to_standard_error(tmp_path, capsys):
    log = EventLog(tmp_path / "e", 0)
    log.close()
    log.write("stopped", code=0)
    assert '"event": "stopped"' in capsys.readouterr().err


@pytest.mark.parametrize("text", [None, 5, "yesterday", "2025-01-31T12:00:00"])
def test_a_time_without_zone_is_none(text):
    assert parse_time(text) is None


def test_times_round_trip():
    assert parse_time(utc_time(1738324800.125)) == 1738324800.125
