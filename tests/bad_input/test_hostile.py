"""What used to end in a traceback, in a wrong code or after a minute: each is one message with its code, and nothing of
the inside."""

import json
import os
import subprocess
import sys
import unicodedata

import pytest

from spmdkit.cluster.join import num_threads
from tests.support.messages import Parts

DEEP = "[" * 100_000
CALLBACK = """
import sys, jax
def told(step):
    if step >= 2: {}
def train_step(state, batch):
    jax.debug.callback(told, state.step)
    (loss, metrics), grads = sk.value_and_grad(loss_fn)(state.params, batch, state.key)
    return state.apply_gradients(grads, value=loss), {{"loss": loss}}
"""


@pytest.mark.parametrize("raised", ["raise ValueError('mine')", "sys.exit(0)"])
def test_an_error_of_a_callback_is_the_users(folder, raised):
    one = {"steps": "8", "devices": "cpu:1", "mesh": None}  # of several: tests/system/test_callbacks.py
    folder.write(CALLBACK.format(raised), {"train_step": "train_step"}, one)
    assert_parts = Parts(("a callback in the step raised at ", "task.py:", ", in told: ", "the newest checkpoint"))
    told = folder.fails(70, assert_parts, may_train=True)
    assert any(name in told for name in ("ValueError: mine", "SystemExit: 0"))


@pytest.mark.parametrize("content", [DEEP, "null", '{"schema": 2, "step": 2, "time": 1e400}'])
def test_a_record_of_other_types(folder, content):
    folder.write()
    (folder.path / "run/checkpoints/2/record.json").write_text(content)
    assert folder.leaves("checkpoint", "ls", "run") == 0
    folder.fails(79, Parts(("record.json",)), command=("checkpoint", "inspect", "run", "--step", "2"))


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: DEEP,
        lambda plan: {**plan, "collectives": [3]},
        lambda plan: {**plan, "layout": {"a": 1}, "findings": "none", "mesh": [1]},
    ],
)
def test_a_plan_of_other_types(folder, change, capfd):
    changed = change(json.loads((folder.path / "run/plan.json").read_text()))
    (folder.path / "plan.json").write_text(changed if isinstance(changed, str) else json.dumps(changed))
    (folder.path / "run/plan.json").write_bytes((folder.path / "plan.json").read_bytes())
    folder.fails(78, Parts(("plan.json",)), command=("plan", "plan.json"))
    assert folder.leaves("report", "run") == 0
    assert (folder.path / "run/report.html").exists()


def test_a_name_that_is_too_long(folder):
    folder.write()
    folder.fails(74, Parts(("File name too long",)), command=("checkpoint", "export", "run", "a" * 300))
    folder.fails(78, Parts("at most 255 bytes in each part"), command=("train", "run.yaml", f"run_dir={'a' * 300}"))
    folder.fails(78, Parts(("File name too long",)), command=("train", "a" * 300 + ".yaml"))


def test_an_argument_of_100_kB_is_not_echoed(folder):
    big = "x" * 100_000
    folder.write()
    (folder.path / "big.yaml").write_text(f"task: task.py:task\ntask_args: {{text: {big}}}\n")
    folder.fails(78, Parts(("task_args",)), command=("train", "big.yaml"))
    (folder.path / "big.yaml").write_text(f"task: task.py:make\ntask_args: {{text: {big}}}\n")
    folder.write("@sk.task\ndef make(width): return task\n")
    folder.fails(78, Parts(("task_args", "do not fit")), command=("train", "big.yaml"))
    folder.write("@sk.task\ndef make(text): raise ValueError(text)\n")
    folder.fails(78, Parts(("raised ValueError",)), command=("train", "big.yaml"))


def test_an_unreadable_folder_is_no_bug(folder, monkeypatch):
    folder.write()
    real = os.listdir

    def listdir(path="."):
        if str(path).endswith("checkpoints"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "listdir", listdir)
    folder.fails(78, Parts(("checkpoints", "Permission denied")), command=("checkpoint", "ls", "run"))


def test_thousands_of_fake_devices_are_there_in_seconds():
    """16,000 threads took 39 s to make, in a config that was refused afterwards."""
    assert num_threads(4096) < 5000
    assert num_threads(8) >= 2 * 8


@pytest.mark.processes
def test_standard_output_on_a_full_disk():
    command = [sys.executable, "-m", "spmdkit", "--version"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 74 and "Traceback" not in done.stderr and "Exception" not in done.stderr, done.stderr


ESCAPES = "\x1b[2J\x1b]0;mine\x07\r\u202e\udcff"


def test_names_reach_the_terminal_escaped(folder, capfd):
    folder.write(
        f"def loss_fn(params, batch, key):\n    error = batch['x'] @ params['w'] + params['b'] - batch['y']\n"
        f"    return sk.mean(error**2), {{{ESCAPES[:-1]!r}: sk.mean(error)}}"
    )
    (folder.path / "run/checkpoints" / f"odd{ESCAPES}").mkdir()
    plan = json.loads((folder.path / "run/plan.json").read_text())
    plan["target"] = plan["layout"][0]["path"] = plan["notes"] = [ESCAPES[:-1]]
    plan["target"] = ESCAPES[:-1]
    (folder.path / "odd.json").write_text(json.dumps(plan))
    capfd.readouterr()
    commands = (("train", "run.yaml", "steps=3"), ("checkpoint", "ls", "run"), ("plan", "odd.json"))
    for command in (*commands, ("train", f"no{ESCAPES[:-1]}.yaml")):
        folder.leaves(*command)
        output, error = capfd.readouterr()
        obeyed = {c for c in output + error if unicodedata.category(c) in ("Cc", "Cf", "Cs")} - {"\n", "\t"}
        assert not obeyed, (command, obeyed, output + error)
        assert "\\x1b[2J" in output + error, (command, output + error)


def test_the_umask_is_not_widened(folder):
    before = os.umask(0o022)
    try:
        folder.write()
        folder.leaves("config", "check", "run.yaml")
        assert os.umask(0o077) == 0o027
    finally:
        os.umask(before)


def test_checkpoints_that_are_deleted_while_one_is_written(empty):
    """The writer meets it in its own threads, and raised it once more when it was closed, over the message."""
    empty.write(
        """
        import pathlib, shutil, threading, time
        RUN = pathlib.Path("run").resolve()
        def delete():
            while not (RUN / "stop").exists():  # against a writer that goes on making folders in it
                shutil.rmtree(RUN / "checkpoints", ignore_errors=True)
                time.sleep(0.0005)
        def after_save(run, step):
            threading.Thread(target=delete, daemon=True).start()
        HOOKS = [sk.Hook("deletes", after_save=after_save)]
        """,
        {"hooks": "HOOKS"},
        {"steps": "4", "checkpoint": "{every_steps: 2}"},
    )
    try:
        empty.fails(74, Parts(("saving step", "checkpoints")), may_train=True)
    finally:
        (empty.path / "run" / "stop").touch()
