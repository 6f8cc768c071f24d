"""What every tracker keeps to; a new one is tested because its file exists. And what a slow, dead or wrong one costs: a
warning."""

import importlib
import inspect
import json
import struct
import threading
import types

import pytest

from spmdkit.errors import ConfigError
from spmdkit.foundation import plugins
from spmdkit.metrics import trackers
from spmdkit.metrics.trackers.base import KINDS, Tracker
from spmdkit.metrics.trackers.queue import Trackers
from tests.support.messages import assert_parts, raises
from tests.support.services import SERVICES

NAMES = plugins.names("trackers")


def opened(name, folder, last_step=0):
    run = types.SimpleNamespace(directory=folder, config=None)
    return importlib.import_module(f"spmdkit.metrics.trackers.{name}").open(run, last_step)


def lines_of(folder):
    """Returns (split/name, step, value) of all that metrics.jsonl holds."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        step, split = record.pop("step"), record.pop("split", "train")
        yield from ((f"{split}/{name}", step, value) for name, value in record.items())


def events_of(folder):
    """Returns the same as TensorBoard shows it: file by file, and a session that starts at a step hides that and what
    comes after it."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    shown = []
    for file in sorted((folder / "tensorboard").iterdir()):
        content, step_position = file.read_bytes(), 0
        while step_position < len(content):  # length, its crc, an event, its crc
            (length,) = struct.unpack_from("<Q", content, step_position)
            event = event_pb2.Event.FromString(content[step_position + 12 : step_position + 12 + length])
            step_position += 16 + length
            if event.session_log.status == event_pb2.SessionLog.START:
                shown = [row for row in shown if row[1] < event.step]
            scalars = [value for value in event.summary.value if value.HasField("simple_value")]
            shown += [(value.tag, event.step, value.simple_value) for value in scalars]
    return shown


READERS = {"jsonl": lines_of, "tensorboard": events_of}
"""Tracker -> what its reader sees below a run's directory: (split/name, step, value)."""


def test_trackers_are_found_by_their_files():
    assert {"jsonl", "tensorboard"} <= set(NAMES)
    assert {*READERS, *SERVICES} == set(NAMES), "a tracker has a row: how its reader sees what it wrote"


def check_contract(open, read, folder, keeps_first=False):
    """Fails unless `open(last_step)` keeps what base.py says of a tracker that writes below `folder`.

    keeps_first: a service that cannot delete points; a reader sees the first value of each step.
    """

    def write(tracker, *steps, value):
        for step in steps:
            tracker.write("scalars", {"step": step, "loss": value, "accuracy": 0.5})
            tracker.write("scalars", {"step": step, "split": "eval", "loss": value})

    def seen(**values):
        """Fails unless a reader sees these values of steps, each once."""
        expected = {int(step.lstrip("s")): value for step, value in values.items()}
        if keeps_first:
            expected = dict.fromkeys(range(1, 6), 1.0)
        for tag in ("train/loss", "eval/loss"):
            found = [(step, value) for name, step, value in read(folder) if name == tag]
            assert found == list(expected.items()), f"{tag}: a reader sees {found}, and not {expected}"
        assert {name for name, *_ in read(folder)} == {"train/loss", "train/accuracy", "eval/loss"}

    tracker = open(0)
    assert isinstance(tracker, Tracker) and "scalars" in tracker.accepts and set(tracker.accepts) <= set(KINDS)
    write(tracker, 1, 2, 3, 4, 5, value=1.0)
    tracker.flush()
    assert keeps_first or any(b"accuracy" in path.read_bytes() for path in folder.rglob("*") if path.is_file()), (
        "flush writes it out"
    )
    tracker.rewind(3)
    write(tracker, 4, value=2.0)
    tracker.rewind(3)  # a second time, at once
    write(tracker, 4, 5, value=3.0)
    tracker.close()
    tracker.close()
    seen(s1=1.0, s2=1.0, s3=1.0, s4=3.0, s5=3.0)
    tracker = open(2)  # as after a restart from step 2
    write(tracker, 3, value=4.0)
    tracker.close()
    seen(s1=1.0, s2=1.0, s3=4.0)
    tracker = open(0)  # as after a restart from the beginning
    write(tracker, 1, 2, value=5.0)
    tracker.rewind(0)
    write(tracker, 1, value=6.0)
    tracker.close()
    seen(s1=6.0)


@pytest.mark.parametrize("name", READERS)  # services: test_services.py
def test_a_tracker_keeps_the_contract(name, tmp_path):
    module = importlib.import_module(f"spmdkit.metrics.trackers.{name}")
    assert inspect.getdoc(module) and list(inspect.signature(module.open).parameters)[:2] == ["run", "last_step"]
    check_contract(lambda last_step: opened(name, tmp_path, last_step), READERS[name], tmp_path)


# ---- one thread behind a queue
# -----------------------------------------------------------------------------------------


class Injected:
    """A tracker that waits at a gate, or raises, and what it was given."""

    def __init__(self, raises=None, waits=False):
        self.gate, self.raises, self.seen, self.closed = threading.Event(), raises, [], False
        if not waits:
            self.gate.set()

    def open(self):
        def write(kind, record):
            assert threading.current_thread().name == "spmdkit-trackers"
            self.gate.wait()
            if self.raises is not None:
                raise self.raises
            self.seen.append((kind, record["step"]))

        return Tracker(write, frozenset({"scalars", "text"}), rewind=self.back, close=self.close)

    def back(self, step):
        self.seen.append(("back", step))

    def close(self):
        self.closed = True


def test_accepted_records_arrive_in_order():
    said, injected = [], Injected()
    pipe = Trackers(said.append)
    pipe.add("mine", injected.open)
    for step in (1, 2):
        pipe.write({"step": step})
    pipe.write({"step": 3, "it": "text"}, "text")
    for step in (4, 5):
        pipe.write({"step": step, "x": [[1]]}, "image")
    pipe.rewind(2)
    pipe.close()
    assert injected.seen == [("scalars", 1), ("scalars", 2), ("text", 3), ("back", 2)]
    assert injected.closed and said == [
        "tracker mine does not show records of the kind image: x. tensorboard, wandb, mlflow and comet show more kinds."
    ]


def test_a_tracker_that_raises_costs_one_warning():
    said, dead, alive = [], Injected(raises=OSError("no route to host")), Injected()
    pipe = Trackers(said.append)
    pipe.add("dead", dead.open)
    pipe.add("alive", alive.open)
    for step in range(5):
        pipe.write({"step": step})
    pipe.close()
    assert len(said) == 1
    assert_parts(said[0], "tracker dead", found="OSError: no route to host", rule="training continues")
    assert [step for _, step in alive.seen] == [0, 1, 2, 3, 4]


def test_a_tracker_that_hangs_delays_no_step():
    said, slow = [], Injected(waits=True)
    pipe = Trackers(said.append, most_waiting=3, patience_s=0.05)
    pipe.add("slow", slow.open)
    for step in range(100):
        pipe.write({"step": step})  # returns at once, though nothing is taken
    pipe.close()
    assert_parts(said[0], "trackers: slow", found="slower than the steps", rule=("dropped", "training continues"))
    assert "slow did not take its last records within 0.05 s" in said[1]
    assert "records were dropped" in said[2] and len(said) == 3
    slow.gate.set()


def test_a_full_queue_rewinds_before_the_next_record():
    seen, begun, gate, emptied = [], threading.Event(), threading.Event(), threading.Event()

    def write(kind, record):
        begun.set()
        gate.wait()
        seen.append(record["step"])
        if record["step"] == 3:
            emptied.set()

    pipe = Trackers(lambda _: None, most_waiting=2)
    pipe.add("slow", lambda: Tracker(write, rewind=lambda step: seen.append(f"back to {step}")))
    pipe.write({"step": 1})
    begun.wait()
    for step in (2, 3, 4):  # the last one finds no room, nor do these
        pipe.write({"step": step})
    pipe.rewind(2)
    pipe.rewind(3)
    gate.set()
    emptied.wait()
    pipe.write({"step": 3})
    pipe.close()
    assert seen == [1, 2, 3, "back to 2", 3]


def test_a_missing_service_costs_a_warning():
    said = []
    pipe = Trackers(said.append)

    def raises():
        raise ConnectionError("refused")

    def wrong():
        raise ConfigError("no such project")

    pipe.add("service", raises)
    assert len(said) == 1
    assert_parts(said[0], "tracker service", found="ConnectionError: refused", rule="training continues")
    with pytest.raises(ConfigError, match="no such project"):
        pipe.add("service", wrong)
    with pytest.raises(ConfigError, match=r"tracker mine: open returned int\. .* Return sk\.Tracker"):
        pipe.add("mine", lambda: 3)


MINE = """
import spmdkit as sk

seen = []

@sk.tracker
def open(run, last_step, project):
    seen.append((project, last_step))
    return sk.Tracker(lambda kind, record: seen.append((kind, record["step"])))
"""


def test_a_users_tracker_needs_one_file(tmp_path, monkeypatch):
    import sys

    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "my_tracker.py").write_text(MINE)
    own, mine = trackers.chosen([{"my_tracker.py:open": {"project": "x"}}], tmp_path)
    assert own.name == "jsonl"
    pipe = Trackers(print)
    pipe.add(mine.name, lambda: mine.open(None, 3))
    pipe.write({"step": 4})
    pipe.close()
    assert sys.modules["spmdkit_task_my_tracker"].seen == [("x", 3), ("scalars", 4)]
    with raises("log.trackers", found="'tensorbord'", rule=("jsonl", "tensorboard"), repair="'tensorboard'?"):
        trackers.chosen(["tensorbord"], tmp_path)
    with pytest.raises(ConfigError, match="tensorboard is named twice"):
        trackers.chosen(["tensorboard", "tensorboard"], tmp_path)
    with pytest.raises(ConfigError, match=r"has no option 'projct'. Did you mean 'project'"):
        trackers.chosen([{"my_tracker.py:open": {"projct": "x"}}], tmp_path)
    with pytest.raises(ConfigError, match=r"open needs project\. Write"):
        trackers.chosen(["my_tracker.py:open"], tmp_path)
    with pytest.raises(ConfigError, match="tensorboard takes no options"):
        trackers.chosen([{"tensorboard": {"folder": "x"}}], tmp_path)
    with pytest.raises(ConfigError, match=r"log\.trackers: os:open is a function of"):
        trackers.chosen(["os:open"], tmp_path)
