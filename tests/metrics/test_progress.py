"""Progress: the very lines, the bar on a terminal, the time left, and streams that go away."""

import io
import os
import re
import subprocess
import sys

import pytest

from spmdkit.foundation.formatting import format_duration, format_rate, format_value
from spmdkit.metrics import Progress

RECORD = {"step": 120, "loss": 2.3411, "examples_per_s": 12345.2, "step_time_s": 0.05, "input_wait_s": 0.001}


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


def progress(stream, clock=None, total=2000, **options):
    return Progress(total, stream=stream, clock=clock or Clock(), **options)


def test_plain_lines_are_these():
    stream, clock = io.StringIO(), Clock()
    shown = progress(stream, clock)
    shown.start()
    assert stream.getvalue() == "training steps 1 to 2000\n"
    with shown.compiling():
        assert stream.getvalue().endswith("compiling the step ...")
        clock.now += 3.2
    clock.now += 12
    shown.advance(119)
    shown.write(RECORD)
    shown.write({"step": 120, "split": "eval", "loss": 2.40, "accuracy": 0.91})
    shown.message("saved checkpoint 120")
    shown.close()
    shown.close()
    assert stream.getvalue().splitlines() == [
        "training steps 1 to 2000",
        "compiling the step ...  3.2 s",
        "step  120/2000  loss 2.3411  12345 examples/s  left 3m08s  input wait 2%",
        "step  120 eval  loss 2.4000  accuracy 0.9100",
        "saved checkpoint 120",
    ]


def test_resumed_and_finished_runs_are_announced():
    stream = io.StringIO()
    progress(stream, start_step=121).start()
    progress(stream, start_step=2001).start()
    assert stream.getvalue().splitlines() == [
        "continuing at step 121 of 2000",
        "nothing to train: all 2000 steps are done",
    ]


def test_time_left_follows_recent_steps():
    stream, clock = io.StringIO(), Clock()
    shown = progress(stream, clock, total=1000)
    shown.start()
    with shown.compiling():
        clock.now += 500
    for step in range(10, 410, 10):
        clock.now += 10 if step <= 200 else 20  # the pace halves
        shown.write({"step": step, "loss": 1.0})
    lines = stream.getvalue().splitlines()
    assert "left 16m30s" in lines[2]  # 990 steps of 1 s, no trace of the 500 s
    assert "left 20m00s" in lines[-1]  # 600 steps of 2 s, no trace of the fast ones
    clock.now += 20
    shown.write({"step": 1000, "loss": 1.0})
    assert stream.getvalue().endswith("loss 1.0000  done\n")


@pytest.mark.parametrize("columns", [None, 60, 100])
def test_lines_are_wrapped_and_lose_nothing(columns):
    stream, clock = io.StringIO(), Clock()
    shown = progress(stream, clock, total=10_000_000, examples_unit="images", columns=columns)
    shown.start()
    clock.now += 1e5
    many = {f"metric_number_{i}": 123456.789 for i in range(30)}
    ours = {"epoch": 1.5, "learning_rate": 1e-3, "gradient_norm": 0.5, "mfu": 0.4, "tokens_per_s": 5e6}
    ours |= {"peak_memory_bytes": 2**30, "goodput": 0.97}
    shown.write({**RECORD, **many, **ours, "step": 9_000_000, "loss": 1.23e-12, "examples_per_s": 9.9e12})
    shown.write({"step": 9_000_000, "split": "eval", "loss": 2.0, **many})
    lines = stream.getvalue().splitlines()[1:]
    starts = [i for i, line in enumerate(lines) if line.startswith("step ")]
    assert starts[0] == 0 and len(starts) == 2 and all(line.startswith("    ") for line in lines[1 : starts[1]])
    assert max(map(len, lines)) <= (columns or 160) and max(map(len, lines)) > (columns or 160) - 30
    train, evaluation = (" ".join(lines[a:b]) for a, b in ((0, starts[1]), (starts[1], None)))
    assert all(f"{name} 1.235e+05" in text for name in many for text in (train, evaluation))
    words = ["loss 1.230e-12", "metric_number_9", "epoch 1.5", "lr 0.0010", "grad norm 0.5", "9.90e+12 images/s"]
    words += ["5000000 tokens/s", "left 3h05m", "input wait 2%", "MFU 40.0%", "memory 1.0 GiB", "goodput 97%"]
    assert [train.index(word) for word in words] == sorted(train.index(word) for word in words)


def test_off_shows_nothing():
    stream = io.StringIO()
    shown = progress(stream, mode="off")
    shown.start()
    with shown.compiling():
        shown.write(RECORD)
    shown.message("x")
    shown.close()
    assert stream.getvalue() == ""


def test_a_failed_compilation_ends_its_line():
    stream = io.StringIO()
    with pytest.raises(KeyError), progress(stream).compiling():
        raise KeyError
    assert stream.getvalue() == "compiling the step ...  failed\n"


def test_a_message_while_compiling_gets_its_own_line():
    stream = io.StringIO()
    shown = progress(stream)
    with shown.compiling():
        shown.message("a warning")
    assert stream.getvalue().splitlines()[:2] == ["compiling the step ...", "a warning"]


def test_a_closed_stream_does_not_end_runs():
    closed, gone = io.StringIO(), io.StringIO()
    closed.close()
    gone.write = lambda text: (_ for _ in ()).throw(BrokenPipeError(32, "Broken pipe"))
    for stream in (gone, closed):
        shown = progress(stream)
        shown.start()
        shown.write(RECORD)
        shown.close()


def test_text_that_the_stream_cannot_encode_is_replaced():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    progress(stream).message("run directory läufe")
    assert raw.getvalue() == b"run directory l?ufe\n"


def bare(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def terminal_output(width, **extra):
    stream, clock = io.StringIO(), Clock()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TERM", "xterm-256color")
        environment.setenv("COLUMNS", str(width))
        shown = progress(stream, clock, mode="rich")
        shown.start()
    with shown.compiling():
        clock.now += 3.2
    clock.now += 12
    shown.write({**RECORD, **extra})
    shown.write({"step": 120, "split": "eval", "loss": 2.4, "accuracy": 0.91})
    shown.message("saved [bold]/runs/" + "x" * 120)
    shown.close()
    return stream.getvalue()


@pytest.mark.parametrize("width", [100, 60])
def test_the_bar_shows_everything_and_never_wraps(width):
    text = terminal_output(width)
    assert "\x1b[?25h" in text  # the cursor is given back
    last = bare(text[text.rindex("saved") :]).replace("\r", "\n")
    for word in ("step  120/2000", "━", "loss 2.3411", "12345 examples/s", "left 3m08s", "input wait 2%"):
        assert word in last
    rows = [row for row in bare(text).replace("\r", "\n").split("\n") if "saved" not in row]
    assert max(map(len, rows)) < width


def test_the_bar_wraps_the_metrics_below_it():
    text = bare(terminal_output(60, **{f"metric_{i}": 1.0 for i in range(9)}))
    assert all(f"metric_{i} 1.0000" in text for i in range(9))


def test_a_spinner_is_shown_while_compiling():
    rows = bare(terminal_output(80)).replace("\r", "\n").split("\n")
    assert any(re.fullmatch(r"\S compiling the step ... \d:\d\d:\d\d", row) for row in rows)
    assert not any("compiling" in row and "━" in row for row in rows)


def test_lines_scroll_past_the_bar():
    text = bare(terminal_output(80))
    assert "training steps 1 to 2000" in text and "compiling the step ...  3.2 s" in text
    assert "step  120 eval  loss 2.4000  accuracy 0.9100" in text
    assert "saved [bold]/runs/" + "x" * 120 in text


def test_no_color_is_respected(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    shown = progress(stream, mode="auto")
    shown.start()
    shown.write(RECORD)
    shown.close()
    assert "━" in stream.getvalue() and not re.search(r"\x1b\[[0-9;]*3\dm", stream.getvalue())


def test_auto_chooses_bar_or_lines(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    smart, dumb, pipe = Terminal(), Terminal(), io.StringIO()
    for stream, term in ((smart, "xterm-256color"), (dumb, "dumb"), (pipe, "xterm-256color")):
        monkeypatch.setenv("TERM", term)
        shown = progress(stream)
        shown.start()
        shown.close()
    assert "\x1b[" in smart.getvalue()
    assert dumb.getvalue() == pipe.getvalue() == "training steps 1 to 2000\n"


def test_numbers_read_well():
    durations = [format_duration(s) for s in (0.4, 59.6, 80, 3599.7, 7500, 187200)]
    assert durations == ["0s", "1m00s", "1m20s", "1h00m", "2h05m", "2d04h"]
    assert [format_rate(r) for r in (12345.4, 98.66, 0.0341, 0)] == ["12345", "98.7", "0.034", "0.0"]
    values = [format_value(v) for v in (2.34111, 0.0, 1.2e-5, 12345.67, 1e9, 7, -0.5, float("nan"))]
    assert values == ["2.3411", "0.0000", "1.200e-05", "12345.7", "1.000e+09", "7", "-0.5000", "nan"]


MPIRUN = """
import os, subprocess, sys
reader, writer = os.openpty()
command = [sys.executable, "-c", sys.argv[1]]
if sys.argv[2] == "wrapped":
    command = ["sh", "-c", '"$@"; exit', "sh", *command]
env = {**os.environ, "OMPI_COMM_WORLD_RANK": "0", "TERM": "xterm"}
child = subprocess.Popen(command, stdout=writer, env=env)
os.close(writer)
sys.exit(child.wait())
"""
CHILD = """
import sys
from spmdkit.metrics import Progress
sys.exit(3 if Progress(10)._bar else 4)
"""


@pytest.mark.parametrize("wrapped", ["plain", "wrapped"])
@pytest.mark.parametrize("to", ["file", "terminal"])
def test_bar_behind_mpirun_needs_a_terminal_of_mpirun(tmp_path, wrapped, to):
    reader, writer = os.openpty()
    with open(tmp_path / "log", "wb") as log:
        out = log if to == "file" else writer
        code = subprocess.run([sys.executable, "-c", MPIRUN, CHILD, wrapped], stdout=out, timeout=60).returncode
    os.close(reader)
    os.close(writer)
    assert code == (4 if to == "file" else 3)
