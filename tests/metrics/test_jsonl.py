"""metrics.jsonl: exact numbers, key order, strict JSON, and the cut back to the restored step."""

import json
import math
import os
import signal
import subprocess
import sys
import textwrap

import jax.numpy as jnp
import numpy as np
import pytest

from spmdkit.errors import CheckpointWriteError, UserCodeError
from spmdkit.metrics import JsonlTracker, read_lines
from spmdkit.metrics.jsonl import record_line


def written(path, *records, keep=0):
    tracker = JsonlTracker(path, keep)
    for record in records:
        tracker.write(record)
    tracker.close()
    return path.read_text()


def strict(text):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_every_float32_bit_pattern_comes_back_exactly():
    bits = np.random.default_rng(0).integers(0, 2**32, 5000, dtype=np.uint32)
    values = bits.view(np.float32)
    for value in values[np.isfinite(values)]:
        loss = strict(record_line({"step": 1, "loss": value}))["loss"]
        assert np.float32(loss).tobytes() == value.tobytes() and loss == float(value)


@pytest.mark.parametrize(
    "value", [jnp.bfloat16(1.0078125), np.float16(0.1), np.float64(0.1), jnp.float32(2.3), 7, True]
)
def test_scalars_of_every_library_keep_their_value(value):
    found = strict(record_line({"step": np.int32(3), "loss": value}))
    assert found["loss"] == float(value) and found["step"] == 3


def test_nonfinite_numbers_are_strings_in_json(tmp_path):
    text = written(tmp_path / "m", {"step": 1, "loss": np.float32("nan"), "a": math.inf, "b": -math.inf})
    assert text == '{"step": 1, "loss": "NaN", "a": "Infinity", "b": "-Infinity"}\n'
    strict(text)
    (record,) = read_lines(tmp_path / "m")
    assert math.isnan(record["loss"]) and record["a"] == math.inf and record["b"] == -math.inf


def test_keys_have_one_order():
    keys = ["step", "split", "loss", "accuracy", "zeta", "examples_per_s", "step_time_s", "input_wait_s"]
    record = {key: "eval" if key == "split" else 3 for key in sorted(keys, reverse=True)}
    assert list(json.loads(record_line(record))) == keys


def test_a_killed_process_loses_no_line(tmp_path):
    program = """
    import os, signal, sys
    from spmdkit.metrics import JsonlTracker
    tracker = JsonlTracker(sys.argv[1], 0)
    for step in range(1, 51):
        tracker.write({"step": step, "loss": 1 / step})
    os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "m")]
    done = subprocess.run(command, timeout=60, env={**os.environ, "PYTHONPATH": os.getcwd()})
    assert done.returncode == -signal.SIGKILL
    assert [r["step"] for r in read_lines(tmp_path / "m")] == list(range(1, 51))


def test_resume_drops_later_steps_and_torn_lines(tmp_path):
    path = tmp_path / "m"
    kept = '{"step":10,  "loss": 1.50}\n{"step": 20, "split": "eval", "loss": 3}\n{"step": 20, "loss": 1}\n'
    path.write_text(kept + '{"step": 30, "loss": 1}\n{"step": 30, "split": "eval", "loss": 2}\n{"step": 4, "lo')
    tracker = JsonlTracker(path, 20)
    assert path.read_text() == kept
    tracker.write({"step": 21, "loss": 2.0})
    tracker.close()
    assert path.read_text() == kept + '{"step": 21, "loss": 2.0}\n'
    assert sorted(os.listdir(tmp_path)) == ["m"]


@pytest.mark.parametrize("tail", [b"\x00" * 64, b"\xff\xfe{", b"[" * 100_000, b"17", b'{"loss": 1}', b'{"step": "5"}'])
def test_garbage_at_the_end_is_dropped(tmp_path, tail):
    (tmp_path / "m").write_bytes(b'{"step": 1, "loss": 1}\n' + tail)
    tracker = JsonlTracker(tmp_path / "m", 9)
    tracker.close()
    assert (tmp_path / "m").read_bytes() == b'{"step": 1, "loss": 1}\n'


def test_a_last_line_without_newline_stays(tmp_path):
    (tmp_path / "m").write_bytes(b'{"step": 1, "loss": 1}')
    assert written(tmp_path / "m", {"step": 2, "loss": 2}, keep=1).splitlines() == [
        '{"step": 1, "loss": 1}',
        '{"step": 2, "loss": 2}',
    ]


def test_a_new_run_starts_empty(tmp_path):
    written(tmp_path / "m", {"step": 1, "loss": 1.0})
    assert len(written(tmp_path / "m", {"step": 2, "loss": 1.0}, keep=None).splitlines()) == 2
    assert written(tmp_path / "m", keep=0) == ""


def test_a_kill_while_cutting_leaves_the_file(tmp_path, monkeypatch):
    old = written(tmp_path / "m", {"step": 1, "loss": 1.0}, {"step": 2, "loss": 1.0})

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        JsonlTracker(tmp_path / "m", 1)
    assert (tmp_path / "m").read_text() == old and os.listdir(tmp_path) == ["m"]


def test_a_full_disk_leaves_whole_lines(tmp_path, monkeypatch):
    tracker = JsonlTracker(tmp_path / "m", 0)
    tracker.write({"step": 1, "loss": 1.0})
    real, calls = os.write, []

    def full(descriptor, data):
        calls.append(data)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return real(descriptor, data[:7])

    monkeypatch.setattr(os, "write", full)
    match = r"m: cannot be written: No space left on device \(error 28\).*Free space"
    with pytest.raises(CheckpointWriteError, match=match) as raised:
        tracker.write({"step": 2, "loss": 1.0})
    assert raised.value.exit_code == 74
    assert (tmp_path / "m").read_text() == '{"step": 1, "loss": 1.0}\n'


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"step": 1, "acc": np.zeros(3)}, r"metric 'acc' is an array of shape \(3,\).*sk.mean"),
        ({"step": 1, "acc": "high"}, "metric 'acc' is a str"),
        ({"step": 1, "acc": np.complex64(1)}, "metric 'acc' has dtype complex64"),
        ({"step": 1.5, "loss": 1.0}, "step is 1.5. A record belongs to one step"),
    ],
)
def test_what_is_not_one_number_is_refused(record, message):
    with pytest.raises(UserCodeError, match=message):
        record_line(record)
