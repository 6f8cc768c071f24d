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
def test_own_errors_are_message_and_code(error, code):
    assert describe(error) == (code, "m")
    assert describe(KeyboardInterrupt()) == (130, "interrupted")


def wrapped(function):
    try:
        try:
            function()
        except Exception as error:
            raise UserCodeError("loss_fn raised at step 5.") from error
    except UserCodeError as error:
        return error


def user_loss(x):
    error = ValueError("x must be odd")
    error.add_note("the user's note")
    raise error


def test_user_error_shows_only_user_frames():
    code, text = describe(wrapped(lambda: jax.jit(user_loss)(jnp.ones(2))))
    assert code == 70
    lines = text.splitlines()
    assert lines[0] == "loss_fn raised at step 5."
    assert lines[-2:] == ["ValueError: x must be odd", "the user's note"]
    assert "in user_loss" in text
    assert not any(part in text for part in ("site-packages", "JAX has removed", "lib/python3"))


def test_error_without_a_user_frame_shows_where():
    error = wrapped(lambda: json.loads("{"))
    text = describe(error)[1]
    assert "json.loads" in text and "json/decoder.py" not in text, "frames of Python are left out"
    while "json" not in error.__cause__.__traceback__.tb_frame.f_code.co_filename:
        error.__cause__.__traceback__ = error.__cause__.__traceback__.tb_next
    assert "json/decoder.py" in describe(error)[1]


def test_other_errors_are_bugs_with_a_traceback():
    try:
        {}["missing"]
    except KeyError as error:
        code, text = describe(error)
    assert code == 70
    assert text.startswith("Traceback")
    assert "this is a bug in spmdkit" in text


def test_deleted_working_directory_is_78(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(FileNotFoundError) as caught:
        os.path.abspath("config.yaml")
    code, text = describe(caught.value)
    assert code == 78 and text.startswith("the working directory does not exist") and text.endswith("cd ~.")
    monkeypatch.chdir(tmp_path)
    assert describe(caught.value)[0] == 70, "it exists: the error has another cause"


GLOO = "UNKNOWN: Gloo all-reduce failed: [external/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:1234"


def test_lost_peer_is_75_among_several(monkeypatch):
    error = wrapped(lambda: (_ for _ in ()).throw(ValueError(GLOO)))
    assert describe(error.__cause__)[0] == 70
    monkeypatch.setattr(exit_handler, "_has_peers", lambda: True)
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
def test_success_returns_and_failure_exits_immediately(tmp_path):
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
        ("sys.exit(run_process(lambda: sys.exit('a message')))", 1),
        ("os.close(1); os.close(2)\ndef main(): raise ConfigError('x')\nrun_process(main)", 78),
    ],
)
def test_every_end_has_its_code(body, code):
    assert run(body).returncode == code
