"""What a user reads when something goes wrong, and the code that goes with it."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from spmdkit.errors import CheckpointError, ConfigError, Preempted, RendezvousError, UserCodeError
from spmdkit.faults import exit_handler
from spmdkit.faults.exit_handler import describe

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("m"), 78), (CheckpointError("m"), 79), (RendezvousError("m"), 75), (Preempted("m"), 42)],
)
def test_our_own_errors_are_their_message_and_their_code(error, code):
    assert describe(error) == (code, "m")


def wrapped(function):
    try:
        try:
            function()
        except Exception as error:
            raise UserCodeError("loss_fn raised at step 5.") from error
    except UserCodeError as error:
        return error


def user_loss(x):
    raise ValueError("x must be odd")


def test_a_users_error_shows_only_the_users_frames():
    code, text = describe(wrapped(lambda: jax.jit(user_loss)(jnp.ones(2))))
    assert code == 70
    lines = text.splitlines()
    assert lines[0] == "loss_fn raised at step 5."
    assert lines[-1] == "ValueError: x must be odd"
    assert "in user_loss" in text
    assert not any(part in text for part in ("site-packages", "JAX has removed", "lib/python3"))


def test_frames_of_python_itself_are_left_out():
    text = describe(wrapped(lambda: json.loads("{")))[1]
    assert "json/decoder.py" not in text
    assert "json.loads" in text


def test_a_users_notes_are_kept():
    def noted():
        error = ValueError("no")
        error.add_note("the user's note")
        raise error

    assert describe(wrapped(noted))[1].splitlines()[-2:] == ["ValueError: no", "the user's note"]


def test_an_error_without_a_frame_of_the_user_still_shows_where():
    assert "json" in describe(wrapped(lambda: None) or wrapped_without_frames())[1]


def wrapped_without_frames():
    try:
        json.loads("{")
    except ValueError as cause:
        while cause.__traceback__ and "json" not in cause.__traceback__.tb_frame.f_code.co_filename:
            cause.__traceback__ = cause.__traceback__.tb_next
        error = UserCodeError("data raised.")
        error.__cause__ = cause
        return error


def test_anything_else_is_our_bug_with_its_whole_traceback():
    try:
        {}["missing"]
    except KeyError as error:
        code, text = describe(error)
    assert code == 70
    assert text.startswith("Traceback")
    assert "this is a bug in spmdkit" in text


def test_a_keyboard_interrupt_is_one_line():
    assert describe(KeyboardInterrupt()) == (130, "interrupted")


GLOO = "UNKNOWN: Gloo all-reduce failed: [external/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:1234"


def test_a_lost_peer_is_75_among_many_and_a_bug_alone(monkeypatch):
    error = wrapped(lambda: (_ for _ in ()).throw(ValueError(GLOO)))
    assert describe(error.__cause__)[0] == 70
    monkeypatch.setattr(exit_handler, "_one_of_many", lambda: True)
    for each in (error, error.__cause__):
        code, text = describe(each)
        assert code == 75
        assert text.startswith(f"lost contact with another process: {GLOO}")
    assert describe(ValueError("plain"))[0] == 70
    assert describe(RendezvousError("barrier: coordination service"))[1] == "barrier: coordination service"


def run(body, **env):
    code = "import os, sys, atexit, time\nfrom spmdkit.faults import run_process\n"
    code += "from spmdkit.errors import *\natexit.register(lambda: print('atexit ran'))\n" + textwrap.dedent(body)
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.processes
def test_success_returns_and_failure_leaves_at_once_with_everything_printed(tmp_path):
    good = run("sys.exit(run_process(lambda: print('done')))")
    assert (good.returncode, good.stdout, good.stderr) == (0, "done\natexit ran\n", "")
    path = tmp_path / "error.json"
    bad = run(
        """
        def main():
            sys.stdout.write('half a line')
            raise ConfigError('fix it')
        sys.exit(run_process(main))
        """,
        SPMDKIT_ERROR_FILE=str(path),
        SPMDKIT_PROCESS_ID="3",
    )
    assert (bad.returncode, bad.stdout, bad.stderr) == (78, "half a line", "fix it\n")
    record = json.loads(path.read_text())
    assert {k: record[k] for k in ("process", "exit_code", "message")} == {
        "process": 3,
        "exit_code": 78,
        "message": "fix it",
    }
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.processes
@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("sys.exit(run_process(lambda: 42))", 42),
        ("sys.exit(run_process(lambda: sys.exit(5)))", 5),
        ("sys.exit(run_process(lambda: sys.exit()))", 0),
        ("def main(): raise KeyboardInterrupt\nrun_process(main)", 130),
    ],
)
def test_every_way_to_end_has_its_code(body, code):
    assert run(body).returncode == code


@pytest.mark.processes
def test_a_closed_output_does_not_hide_the_code():
    assert run("os.close(1); os.close(2)\ndef main(): raise ConfigError('x')\nrun_process(main)").returncode == 78
