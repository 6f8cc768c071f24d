"""`data.workers`: the rows and positions of worker processes, their errors and their end."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from spmdkit.errors import ConfigError, UserCodeError
from spmdkit.foundation.user_code import find
from tests.support.environment import environment_of_a_user
from tests.support.jobs import REPOSITORY
from tests.support.streams import KINDS, Job, example, stream, uneven

pytestmark = pytest.mark.processes


def read(job, num):
    """Returns (the batches, the position after them)."""
    found = [job.step() for _ in range(num)]
    at = job.position(found[-1][0])
    job.close()
    return found, at


@pytest.mark.forms(2)
@pytest.mark.parametrize("kind", KINDS)
def test_workers_read_what_a_thread_reads(kind):
    data, batched = KINDS[kind]
    wanted, _ = read(Job(data, batched), 9)
    first, at = read(Job(data, batched), 2)
    second, at = read(Job(data, batched, start=2, at=at, workers=2, skipped=[(5, 5)]), 3)
    third, _ = read(Job(data, batched, start=6, at=at | {"batch": 6}), 3)
    for (_, ids, _), (_, found, _) in zip([*wanted[:4], wanted[5]], [*first, *second], strict=True):
        np.testing.assert_array_equal(ids, found)
    np.testing.assert_array_equal([ids for _, ids, _ in wanted[6:]], [ids for _, ids, _ in third])


def test_workers_read_a_stream_to_its_end():
    wanted, at = read(Job(uneven, repeat=False), 4)
    found, at_end = read(Job(uneven, repeat=False, workers=2), 4)
    assert at == at_end
    for (_, ids, mask), (_, found_ids, found_mask) in zip(wanted, found, strict=True):
        np.testing.assert_array_equal(ids, found_ids)
        np.testing.assert_array_equal(mask, found_mask)


def fails_at_20(fail):
    def rows(shard, num_shards, seed):
        for i in range(1000):
            if shard == 5 and i == 20:
                fail(os.getpid())
            yield example(i)

    return stream(rows)


def children():
    """Returns the ids of the child processes."""
    tasks = Path("/proc/self/task").iterdir()
    return {int(pid) for task in tasks for pid in (task / "children").read_text().split()}


def divide(_):
    return 1 / 0


def kill(pid):
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("fail", "words"),
    [
        (
            divide,
            r"shard 5 of train_data raised ZeroDivisionError: division by zero.*\n.*test_stream_workers.py:\d+: r",
        ),
        (kill, r"worker process of train_data \(shards 4 to 7\) ended by SIGKILL.*lower data\.workers"),
    ],
    ids=["raises", "killed"],
)
def test_a_worker_that_fails(fail, words):
    job, before = Job(fails_at_20(fail), workers=2), children()
    job.step()
    assert len(children()) == len(before) + 2
    with pytest.raises(UserCodeError, match=words):
        read(job, 10)
    assert children() == before


def test_a_stream_that_cannot_be_sent():
    lock = __import__("threading").Lock()
    with pytest.raises(ConfigError, match=r"cannot be sent to a worker process: TypeError.*lock.*data\.workers: 0"):
        read(Job(stream(lambda *_: (example(i) for i in range(99) if lock)), workers=1), 1)


TASK = """
import grain, optax
import numpy as np
import spmdkit as sk

SCALE = 2

@sk.task
def task():
    rows = grain.MapDataset.range(64).map(lambda i: {"id": np.int32(i * SCALE), "x": np.full(3, i * SCALE, "f")})
    data = rows.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    return sk.Task(lambda key: {"w": 0.0}, lambda *_: 0.0, optax.sgd(1), train_data=data)
"""


def test_functions_of_a_task_file_are_sent(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    data = find("task.py:task", "task", tmp_path)().train_data
    found, _ = read(Job(data, workers=1), 2)
    assert sorted(np.concatenate([ids for _, ids, _ in found])) == list(range(0, 128, 2))


ORPHAN = """
import os, subprocess, sys
from tests.support.streams import Job, example, stream

def rows(shard, num_shards, seed):
    if os.getpid() != {parent} and shard == 0:
        child = subprocess.Popen(["sleep", "1000"])
        print(os.getpid(), child.pid, flush=True)
    for i in range(1 << 40):
        yield example(i % 1000)

job = Job(stream(rows), workers=2)
job.step()
sys.stdin.read()
"""


def test_workers_end_when_their_parent_is_killed(tmp_path):
    text = ORPHAN.replace("{parent}", "parent").replace("import os,", "import os; parent = os.getpid(); import")
    command = [sys.executable, "-c", text]
    env = environment_of_a_user() | {"PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        process.kill()
    assert len(pids) == 2
    deadline = time.monotonic() + 60
    while any(map(runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(runs, pids))


def runs(pid):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"
    return False
