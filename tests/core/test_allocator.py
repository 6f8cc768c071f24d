"""A run on CPU devices keeps the memory of a step; nothing else touches the allocator, and the environment can forbid
it."""

import os
import subprocess
import sys

import pytest

from spmdkit.program import allocator
from tests.support.command_line import Folder
from tests.support.messages import raises

needs_glibc = pytest.mark.skipif(allocator.glibc() is None, reason="another C library")


@pytest.fixture
def calls(monkeypatch):
    """What mallopt is told, which would hold for this whole process."""
    found = []
    monkeypatch.setattr(allocator, "_set", lambda *args: found.append(args) or True)
    return found


@needs_glibc
@pytest.mark.parametrize(
    ("devices", "environ", "is_set"),
    [
        ("cpu:1", {}, True),
        ("auto", {"JAX_PLATFORMS": "cpu"}, True),
        ("auto", {"JAX_PLATFORMS": "cuda,cpu"}, False),
        ("cpu:8", {"SPMDKIT_ALLOCATOR": "system"}, False),
        ("cpu:8", {"MALLOC_ARENA_MAX": "4"}, False),
        ("cpu:8", {"MALLOC_TOP_PAD_": "4"}, False),
        ("cpu:8", {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}, False),
        ("cpu:1", {"MALLOC_ARENA_MAX": "4", "SPMDKIT_ALLOCATOR": "keep"}, True),
    ],
)
def test_arenas_are_limited_for_cpu_devices(calls, devices, environ, is_set):
    assert allocator.limit_arenas(devices, environ) == is_set
    assert bool(calls) == is_set
    assert ("unchanged" in allocator.describe(environ)) == ("cpu" in devices and not is_set)


@needs_glibc
@pytest.mark.parametrize(("num_processes", "arenas"), [(1, 8), (2, 4), (4, 1)])
def test_arenas_of_a_process(calls, num_processes, arenas):
    assert allocator.limit_arenas("cpu:4", {}, num_processes)
    assert calls == [(-8, arenas)]


def test_another_c_library_is_unchanged(calls, monkeypatch):
    def none(_name):
        raise ValueError("unrecognized configuration name")  # as on musl

    monkeypatch.setattr(os, "confstr", none)
    assert not allocator.limit_arenas("cpu:8", {}) and not calls
    assert allocator.describe({}) == "not glibc: unchanged"


def test_an_unknown_choice_names_those_that_there_are():
    with raises("SPMDKIT_ALLOCATOR", found="'sytem'", rule="one of keep, system", repair="'system'?"):
        allocator.limit_arenas("cpu:8", {"SPMDKIT_ALLOCATOR": "sytem"})
    with raises("SPMDKIT_ALLOCATOR", found="'sytem'", repair="'system'?"):
        allocator.describe({"SPMDKIT_ALLOCATOR": "sytem"})


SETTINGS = [(-8, 16), (-4, 0), (-1, -1)]


@needs_glibc
@pytest.mark.parametrize(
    ("command", "choice"),
    [(("train", "run.yaml"), "keep"), (("bench", "communication", "run.yaml", "--steps", "4"), "system")],
)
def test_commands_that_train_set_the_allocator(command, choice, calls, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv(allocator.SWITCH, choice)
    folder = Folder(tmp_path, monkeypatch, capfd)
    folder.write(config={"devices": "cpu:8", "checkpoint": "null"})
    assert folder.leaves(*command) == 0, capfd.readouterr().err
    assert calls == (SETTINGS if choice == "keep" else [])
    if command[0] == "train":
        assert folder.leaves("doctor") == 0
        shown = next(line for line in capfd.readouterr().out.splitlines() if line.startswith("allocator"))
        assert "reuses a step's memory" in shown and calls == SETTINGS, "doctor sets nothing"


RUN = """
import resource
import jax.numpy as jnp, numpy as np, optax
import spmdkit as sk

def loss(params, batch, key):
    hidden_BH = jnp.tanh(batch @ params["up"])  # 64 x 200,000 float32: 49 MiB
    return sk.mean(jnp.sum(hidden_BH * hidden_BH[:, ::-1], -1))

init = lambda key: {"up": jnp.full((8, 200_000), 1e-3)}
task = sk.Task(init=init, loss_fn=loss, optimizer=optax.sgd, train_data=np.ones((640, 8), np.float32))
sk.train(CONFIG, task=task)
print("faults", resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""


@needs_glibc
@pytest.mark.slow
@pytest.mark.processes
def test_a_run_keeps_the_pages_of_its_temporaries(tmp_path):
    (tmp_path / "run.yaml").write_text(
        "task: none:none\nsteps: 20\nbatch_size: 64\ndevices: cpu:1\ncheckpoint: null\nlearning_rate: 1e-3\n"
        "log: {progress: 'off'}\n"
    )
    script = tmp_path / "script.py"
    script.write_text(RUN.replace("CONFIG", repr(str(tmp_path / "run.yaml"))))
    found = {}
    for choice in allocator.CHOICES:
        env = {**os.environ, allocator.SWITCH: choice, "PYTHONPATH": str(allocator.Path(allocator.__file__).parents[2])}
        done = subprocess.run(
            [sys.executable, script], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr[-2000:]
        found[choice] = int(done.stdout.split("faults")[1])
    per_step = (found["system"] - found["keep"]) / 20
    assert per_step > 8_000, found  # some 17,000 without
