"""Processes of one run that would not compute the same are refused before the first step: 78 on each of them, with
whose and what."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.support.environment import QUICK_XLA
from tests.support.forks import REPOSITORY, Process

pytestmark = pytest.mark.processes

TASK = '''
import os
import time
import jax
import jax.numpy as jnp
import numpy as np
import optax
import spmdkit as sk
from models.net import predict
from spmdkit.program.program import Program

def given(name, default):
    return float(os.environ.get(name, default))

def flip_a_bit():
    """What a defect of a device would do to the parameters that it makes."""
    make = Program.init

    def init(program):
        state = make(program)
        w = state.params["w"]
        bits = [np.array(s.data) for s in w.addressable_shards]
        for x in bits:
            x.view(np.uint32)[2] ^= 1
        parts = [jax.device_put(x, s.device) for x, s in zip(bits, w.addressable_shards)]
        return state.replace(params={"w": jax.make_array_from_single_device_arrays(w.shape, w.sharding, parts)})

    Program.init = init

if "FLIP" in os.environ:
    flip_a_bit()

def note_when_data_agree():
    """Writes down how long it takes until text, versions and data were compared: what this process has worked since it began, and what a clock says since it has joined."""
    from spmdkit.foundation import phase
    from spmdkit.run.startup import consistency
    compare, joined = consistency.same_program, phase.current_phase().since - sum(phase.seconds_by_phase.values())

    def after_the_data(cluster, make):
        with open(f"agreed-{cluster.process_index}", "w") as file:
            file.write(f"{time.process_time()} {time.monotonic() - joined}")
        return compare(cluster, make)

    consistency.same_program = after_the_data

if "TIMES" in os.environ:
    note_when_data_agree()

@sk.task
def task():
    x = np.random.default_rng(0).normal(size=(int(given("ROWS", 64)), 4)).astype(np.float32)
    x[40] *= given("FACTOR_OF_ROW_40", 1)

    def init(key):
        return {"w": jax.random.normal(key, (4,)) * given("INIT", 1)}

    def loss_fn(params, batch, key):
        return sk.mean((predict(params, batch["x"]) - given("CONSTANT", 1)) ** 2)

    return sk.Task(init, loss_fn, optax.sgd(given("RATE", 0.05)), train_data={"x": x})
'''  # noqa: E501

CONFIG = """
task: task.py:task
steps: 4
batch_size: 16
devices: cpu:2
mesh: {data: -1}
checkpoint: null
"""


@pytest.fixture
def hosts(tmp_path):
    """Two hosts' copies of one project."""
    for name in ("a", "b"):
        (tmp_path / name / "models").mkdir(parents=True)
        (tmp_path / name / "task.py").write_text(TASK)
        (tmp_path / name / "run.yaml").write_text(CONFIG)
        (tmp_path / name / "models" / "__init__.py").touch()
        (tmp_path / name / "models" / "net.py").write_text("def predict(params, x):\n    return x @ params['w']\n")
    return tmp_path


def train(forks, hosts, variables=None, overrides=(), fresh=False):
    """Returns how the processes of two hosts ended; the second has variables and overrides of its own."""
    shared = ["train", "run.yaml", f"run_dir={hosts / 'run'}"]
    first = Process(shared, hosts / "a")
    second = Process([*shared, *overrides], hosts / "b", variables or {}, fresh)
    return forks.together([first, second])


def refused(ended, *says):
    """Both ended with 78, name process 1, say the same, and trained nothing."""
    assert [process.code for process in ended] == [78, 78], ended
    for process in ended:
        for said in ("process 1", *says):
            assert said in process.output, (said, process.output)
        assert "Traceback" not in process.output


def other_package(hosts: Path) -> dict[str, str]:
    """A spmdkit that divides a mean by something else."""
    shutil.copytree(REPOSITORY / "spmdkit", hosts / "other" / "spmdkit", ignore=shutil.ignore_patterns("__pycache__"))
    with (hosts / "other" / "spmdkit" / "step" / "metrics" / "mean.py").open("a") as file:
        file.write("\n# another line\n")
    return {"PYTHONPATH": str(hosts / "other")}


def other_version(hosts: Path) -> dict[str, str]:
    (hosts / "other").mkdir()
    patch = (
        "import importlib.metadata as m\nold = m.version\nm.version = lambda name: '0.0.9' if name == 'optax' "
        "else old(name)\n"
    )
    (hosts / "other" / "sitecustomize.py").write_text(patch)
    return {"PYTHONPATH": f"{hosts / 'other'}:{REPOSITORY}"}


DIFFERENCES = {
    "other rows": ({"FACTOR_OF_ROW_40": "2"}, ["train_data", "row 40"]),
    "more rows": ({"ROWS": "65"}, ["train_data", "65", "64"]),
    "another constant": ({"CONSTANT": "2"}, ["program", "2.0"]),
    "another learning rate": ({"RATE": "0.5"}, ["program"]),
    "another init": ({"INIT": "3"}, ["init", "3.0"]),
    "a bit of what init gives": ({"FLIP": "1"}, ["params/w"]),
    "a flag that changes numbers": ({"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}, ["XLA_FLAGS", "fast_math"]),
}


@pytest.mark.parametrize(("variables", "says"), DIFFERENCES.values(), ids=DIFFERENCES.keys())
def test_a_difference_in_what_a_process_computes_is_refused(forks, hosts, variables, says):
    refused(train(forks, hosts, variables), *says)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [("models/net.py", "x @", "2 * x @"), ("task.py", "astype(np.float32)", "astype(np.float16)")],
    ids=["a module that the task imports", "a dtype in the task"],
)
def test_a_difference_in_the_text_of_the_project_is_refused_with_its_line(forks, hosts, file, old, new):
    path = hosts / "b" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    refused(train(forks, hosts), file, "line", new)


@pytest.mark.parametrize(
    ("make", "says"), [(other_package, "step/metrics/mean.py"), (other_version, "optax")], ids=["spmdkit", "optax"]
)
def test_a_difference_in_the_packages_is_refused(forks, hosts, make, says):
    refused(train(forks, hosts, make(hosts), fresh=True), says)


def test_a_difference_in_the_config_is_refused_on_both(forks, hosts):
    refused(train(forks, hosts, overrides=["seed=3"]), "seed: 3")


def test_other_folders_dumps_and_host_names_pass(forks, hosts):
    dumps = {
        "XLA_FLAGS": f"{QUICK_XLA} --xla_dump_to={hosts / 'dump'} --xla_dump_hlo_as_text",
        "HOSTNAME": "other",
        "JAX_LOGGING_LEVEL": "ERROR",
        "TIMES": "1",
    }
    ended = train(forks, hosts, dumps)
    assert [process.code for process in ended] == [0, 0], ended
    assert os.listdir(hosts / "dump"), "the flag was not seen"
    worked_s, waited_s = map(float, (hosts / "b" / "agreed-1").read_text().split())
    print(f"text, versions and data agreed {waited_s:.2f} s after all had joined")
    assert worked_s > 0 and waited_s > 0


@pytest.mark.parametrize("who", [0, 1])
def test_a_process_that_fails_before_the_first_step_ends_the_others_at_once_with_its_reason(forks, hosts, who):
    for name in ("a", "b"):
        path = hosts / name / "task.py"
        fails = (
            f"def task():\n    if os.environ['SPMDKIT_PROCESS_ID'] == '{who}':\n        raise ValueError('no such "
            "disk')\n"
        )
        path.write_text(path.read_text().replace("def task():\n", fails))
    ended = train(forks, hosts)
    assert (ended[who].code, ended[1 - who].code) == (78, 75), ended
    assert f"process {who} failed" in ended[1 - who].output or f"process {who} has left" in ended[1 - who].output
    assert all("no such disk" in process.output for process in ended), ended
