"""Jobs of real processes that lose one and continue in the others: the same examples and numbers, bitwise where as many
continue."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import spmdkit as sk
from tests.support.environment import environment_of_a_user
from tests.support.forks import Process

pytestmark = [pytest.mark.processes, pytest.mark.promotes("a task as users write them: a mask of bools times numbers")]

REPOSITORY = Path(__file__).resolve().parents[2]

TASK = """
import os, signal, time
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np, optax
import spmdkit as sk

@sk.task
def task(victims=(), wait=0.0, inside=False):
    '''victims: (process, step) that dies there, once; inside: while the others are in the collectives of that step.'''
    x = np.random.default_rng(0).normal(size=(120, 8)).astype(np.float32)

    def loss_fn(params, batch, key):
        h = jnp.tanh(batch["x"] @ params["w"])
        if key is not None:
            h = h * jax.vmap(lambda k: jax.random.bernoulli(k, 0.9, (48,)))(sk.example_keys())
        return sk.mean((h @ params["v"] - batch["y"]) ** 2)

    def dies(run, step):
        time.sleep(wait)
        for process, at in victims:
            died = Path(f"died{at}")
            if step == at and process == run.cluster.process_index and not died.exists():
                died.touch()
                time.sleep(0.7 if inside else 0.0)
                os.kill(os.getpid(), signal.SIGKILL)

    def after(run, step, state, metrics):
        if inside:
            dies(run, step + 1)

    before = None if inside else (lambda run, step, state: dies(run, step))
    init = lambda key: {"w": jax.random.normal(key, (8, 48)) / 3, "v": jnp.zeros(48)}
    hooks = [sk.Hook("victim", before_step=before, after_step=after)]
    return sk.Task(init, loss_fn, optax.adam(1e-2), train_data={"x": x, "y": np.sin(x.sum(1))}, hooks=hooks)
"""
CONFIG = """
task: task.py:task
run_dir: run
steps: 40
batch_size: 60
devices: cpu:{num}
mesh: {{{axis}: -1}}
layout: {{{layout}}}
elastic: {{in_process: true, snapshot_every: 5}}
checkpoint: {{every_steps: 15}}
log: {{every_steps: 1, progress: plain}}
"""


@pytest.fixture
def job(tmp_path):
    (tmp_path / "task.py").write_text(TASK)

    def start(*settings, num=4, axis="data", elastic="4:4"):
        layout = "min_shard_bytes: 1" if axis == "fsdp" else ""
        (tmp_path / "run.yaml").write_text(CONFIG.format(num=num, axis=axis, layout=layout))
        launch = f"-m spmdkit launch -n {num} --max-restarts 1 --elastic {elastic} -- train run.yaml"
        env = environment_of_a_user() | {
            "PYTHONPATH": str(REPOSITORY),
            "SPMDKIT_COMPILE_CACHE": str(tmp_path / "cache"),
        }
        return subprocess.Popen(
            [sys.executable, *launch.split(), *settings],
            cwd=tmp_path,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    return start


def ended(popen, seconds=150):
    try:
        out = popen.communicate(timeout=seconds)[0]
    finally:
        popen.kill()
    assert popen.returncode == 0 and "starting all processes again" not in out, out
    return out


def numbers(folder):
    from spmdkit.checkpoint import read_state

    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}, read_state(folder / "checkpoints")


def same(one, other, exact):
    assert one[0].keys() == other[0].keys() == set(range(1, 41))
    for step, loss in one[0].items():
        assert loss == other[0][step] if exact else loss == pytest.approx(other[0][step], rel=1e-5), step
    for path, leaf in other[1].items():
        if exact:
            assert np.asarray(one[1][path]).tobytes() == np.asarray(leaf).tobytes(), path
        else:
            assert np.linalg.norm(one[1][path] - leaf) <= 1e-5 * max(np.linalg.norm(leaf), 1e-3), path


def events(folder, name):
    return [e for e in map(json.loads, (folder / "events.jsonl").read_text().splitlines()) if e["event"] == name]


def test_two_of_three_processes_continue_in_place(forks, tmp_path):
    """Process 0 dies. The others join the next membership and its coordination service without a restart, from the
    snapshot of step 2: there is no checkpoint."""
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "run.yaml").write_text(CONFIG.format(num=3, axis="data", layout=""))
    launch = "launch -n 3 --max-restarts 1 --elastic 2:3 -- train run.yaml task_args.victims=[[0,4]]"
    settings = ["steps=6", "batch_size=12", "checkpoint=null", "elastic.snapshot_every=2"]
    (ended,) = forks.run([Process([*launch.split(), *settings], tmp_path, forks=True)], 100)
    assert ended.code == 0, ended.output
    assert "as 2 processes (generation 2)" in ended.output and "starting all processes again" not in ended.output
    assert {e["step"] for e in events(tmp_path / "run", "restored")} == {2}
    program = sk.build(tmp_path / "run.yaml", overrides=settings)
    state, losses = program.init(), []
    for _, batch in program.batches():
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["data", "fsdp"])
def test_replaced_processes_give_the_same_bits(job, tmp_path, axis):
    """Process 2, then 0, which writes the records; cut over fsdp, each shard is on one process alone, and in the memory
    of another."""
    out = ended(job("task_args.victims=[[2,17],[0,28]]", axis=axis))
    assert out.count("as 4 processes") >= 2
    found = numbers(tmp_path / "run")
    assert [e["step"] for e in events(tmp_path / "run", "restored") if e["process"] == 1] == [15, 25]
    ended(job("run_dir=clean", axis=axis))
    same(found, numbers(tmp_path / "clean"), exact=True)
    assert not events(tmp_path / "run", "fault")


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["data", "fsdp"])
def test_fewer_go_on_with_the_same_examples(job, tmp_path, axis):
    out = ended(job("task_args.victims=[[2,17],[1,24]]", axis=axis, elastic="2:4"))
    assert "as 3 processes (generation 2)" in out and "as 2 processes (generation 3)" in out
    found = numbers(tmp_path / "run")
    ended(job("run_dir=clean", axis=axis))
    same(found, numbers(tmp_path / "clean"), exact=False)


@pytest.mark.slow
@pytest.mark.parametrize("num", [4, 5])
def test_death_inside_a_collective_keeps_the_bits(job, tmp_path, num):
    """Processes that are not neighbours of the dead one in Gloo's ring would wait indefinitely; one that sends to it
    sometimes does, and is killed and replaced too."""
    settings = "task_args={victims: [[1, 17]], inside: true}"
    out = ended(job(settings, num=num, elastic=f"{num}:{num}"))
    assert f"as {num} processes (generation 2)" in out
    left = events(tmp_path / "run", "membership_changed")
    assert len(left) >= num - 2 and any("Gloo" in e["why"] for e in left), left
    found = numbers(tmp_path / "run")
    ended(job("run_dir=clean", "task_args.inside=true", num=num, elastic=f"{num}:{num}"))
    same(found, numbers(tmp_path / "clean"), exact=True)


@pytest.mark.slow
def test_joining_processes_lose_no_step(job, tmp_path):
    popen = job("task_args.wait=0.15", num=2, elastic="2:4")

    def ask():
        while not (tmp_path / "run" / "metrics.jsonl").exists():
            time.sleep(0.1)
        (tmp_path / "run" / "processes").write_text("4")

    threading.Thread(target=ask, daemon=True).start()
    out = ended(popen)
    assert "mesh data 4, 4 processes" in out
    left, back = events(tmp_path / "run", "membership_changed"), events(tmp_path / "run", "restored")
    assert {e["step"] for e in left} == {e["step"] for e in back}, "all agreed on one step, and go on from it"
    found = numbers(tmp_path / "run")
    ended(job("run_dir=clean", num=2, elastic="2:4"))
    same(found, numbers(tmp_path / "clean"), exact=False)


@pytest.mark.slow
def test_death_during_a_change_begins_another(job, tmp_path):
    """Process 3 dies as soon as it is told that 1 has died."""
    popen = job("task_args.victims=[[1,17]]", elastic="2:4")
    threading.Thread(target=kill_one_when, args=(tmp_path / "died17", popen.pid), daemon=True).start()
    out = ended(popen)
    assert "as 3 processes (generation 2)" in out and "as 2 processes (generation 3)" in out, out


def kill_one_when(path, launcher):
    while not path.exists():
        time.sleep(0.01)
    time.sleep(0.3)
    for pid in map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if b"SPMDKIT_MEMBER=3" in Path(f"/proc/{pid}/environ").read_bytes():
                os.kill(pid, 9)


@pytest.mark.slow
def test_standbys_replace_dead_processes_bitwise(job, tmp_path):
    settings = ("task_args={victims: [[2, 17], [0, 28]], wait: 0.15}", "elastic.standby=2")
    out = ended(job(*settings))
    assert "a standby takes the place of process 2" in out and "a standby takes the place of process 0" in out, out
    found = numbers(tmp_path / "run")
    ended(job("run_dir=clean"))
    same(found, numbers(tmp_path / "clean"), exact=True)
    told = (tmp_path / "run" / "logs" / "attempt_1").iterdir()
    assert sorted(folder.name for folder in told) == ["p000", "p001", "p002", "p003"]


@pytest.mark.slow
def test_fewer_processes_find_their_step_compiled(job, tmp_path):
    """One is killed when the job that only compiles has ended."""
    settings = ("task_args.wait=0.1", "elastic.precompile=[3]", "compile_cache.min_s=0", "steps=100000")
    popen = job(*settings, elastic="2:4")

    def reached(found, seconds=120):
        deadline = time.monotonic() + seconds
        while not found() and time.monotonic() < deadline and popen.poll() is None:
            time.sleep(0.1)
        assert found(), "see the output of the job"

    try:
        reached(lambda: compiles_ahead(popen.pid))
        reached(lambda: not any(compiles_ahead(popen.pid) or time.sleep(0.1) for _ in range(10)))
        kill_one_when(tmp_path / "run" / "metrics.jsonl", popen.pid)
        reached(lambda: [e for e in events(tmp_path / "run", "compiled") if e["step"]])
        told = [e for e in events(tmp_path / "run", "compiled") if e["step"]]
        assert all("train_step" in e["from_cache"] for e in told), told
    finally:
        popen.terminate()
        out = popen.communicate(timeout=60)[0]
    assert "as 3 processes (generation 2)" in out and "compiling ahead for 3 processes has failed" not in out, out


def compiles_ahead(launcher):
    """Returns whether a launcher has a child that launches; one that has not begun its own program yet is still called
    as the launcher is."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    own, *others = (Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (launcher, *children))
    return any(b"\0launch\0" in words for words in others if words != own)
