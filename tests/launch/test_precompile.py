"""What compiles ahead for other numbers of processes: which, one after the other, and gone with the job."""

import time

import pytest

from spmdkit.elastic.sizes import Elastic
from spmdkit.errors import ConfigError
from spmdkit.launch.precompile import Precompile

CONFIG = (
    "task: task.py:task\nrun_dir: run\nsteps: 40\nbatch_size: 24\ndevices: cpu:4\nmesh: {data: -1}\n"
    "elastic: {in_process: true, precompile: [3, 2]}\n"
)


@pytest.fixture
def train(tmp_path):
    (tmp_path / "run.yaml").write_text(CONFIG)
    return ["train", str(tmp_path / "run.yaml")]


def test_sizes_are_compiled_with_their_microbatches(train):
    assert Elastic(train, "2:4", 4).sizes_to_precompile() == {3: ["microbatches=2"], 2: ["microbatches=2"]}
    with pytest.raises(ConfigError, match=r"elastic.precompile: 2 processes are none .* 3:4"):
        Elastic(train, "3:4", 4).sizes_to_precompile()


def test_command_differs_in_the_number_of_processes(train):
    words = Precompile({3: ["microbatches=2"]}, [*train, "seed=4"], 1).command(3, ["microbatches=2"])
    assert words[words.index("launch") :] == [
        "launch", "-n", "3", "--devices-per-process", "1", "--", *train, "seed=4", "microbatches=2"
    ]  # fmt: skip


def test_sizes_compile_in_turn_until_the_job_ends(monkeypatch, train):
    asked = []

    def command(self, size, more):
        asked.append(size)
        return ["sleep", "0.2" if len(asked) == 1 else "60"]

    monkeypatch.setattr(Precompile, "command", command)
    ahead = Precompile({3: [], 2: []}, train, None)
    ahead.poll()
    ahead.poll()
    assert asked == [2]
    deadline = time.monotonic() + 20
    while len(asked) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
        ahead.poll()
    assert asked == [2, 3]
    running = ahead._running
    ahead.end()
    assert running.returncode == -9
    ahead.end()
