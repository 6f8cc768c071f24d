"""Processes that would not compute the same are rejected before the first step: 78 on each of them, with the process
and the difference. Each kind of difference: tests/run/startup/test_consistency.py."""

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
import jax
import jax.numpy as jnp
import numpy as np
import optax
import spmdkit as sk
from models.net import predict
from spmdkit.program.program import Program

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

@sk.task
def task():
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)

    def init(key):
        return {"w": jax.random.normal(key, (4,))}

    def loss_fn(params, batch, key):
        return sk.mean((predict(params, batch["x"]) - float(os.environ.get("CONSTANT", 1))) ** 2)

    return sk.Task(init, loss_fn, optax.sgd(0.05), train_data={"x": x})
'''

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
    """Returns how the processes of two hosts ended; the second has other variables and overrides."""
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
    """An spmdkit that divides a mean by something else."""
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


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"FLIP": "1"}, ["params/w"]),
        pytest.param({"CONSTANT": "2"}, ["program", "2.0"], marks=pytest.mark.slow),
        pytest.param({"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}, ["XLA_FLAGS"], marks=pytest.mark.slow),
    ],
    ids=["bit of the state", "program", "variable"],
)
def test_difference_in_computation_is_refused(forks, hosts, variables, says):
    refused(train(forks, hosts, variables), *says)


def test_difference_in_text_and_config_is_refused(forks, hosts):
    path = hosts / "b" / "models/net.py"
    path.write_text(path.read_text().replace("x @", "2 * x @"))
    refused(train(forks, hosts, overrides=["seed=3"]), "models/net.py", "line", "2 * x @", "seed: 3")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "says"),
    [(other_package, "step/metrics/mean.py"), (other_version, "optax")],
    ids=["spmdkit", "optax"],
)
def test_difference_in_packages_is_refused(forks, hosts, make, says):
    refused(train(forks, hosts, make(hosts), fresh=True), says)


@pytest.mark.slow
def test_other_folders_dumps_and_host_names_pass(forks, hosts):
    dumps = {
        "XLA_FLAGS": f"{QUICK_XLA} --xla_dump_to={hosts / 'dump'} --xla_dump_hlo_as_text",
        "HOSTNAME": "other",
        "JAX_LOGGING_LEVEL": "ERROR",
    }
    ended = train(forks, hosts, dumps)
    assert [process.code for process in ended] == [0, 0], ended
    assert os.listdir(hosts / "dump"), "the flag was not seen"


def test_devices_that_differ_are_reported_to_all(forks, hosts):
    """Process 1 exits with 78 after it has joined, and process 0 reports why."""
    first, second = train(forks, hosts, overrides=["devices=cpu:4"])
    assert (first.code, second.code) == (75, 78), (first, second)
    assert "process 1 failed in its check of devices (ConfigError: devices: cpu:4 needs 2 in process 0" in first.output
    assert first.seconds < 30, "it waited for a timeout"


@pytest.mark.parametrize("who", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_failure_before_first_step_ends_all_processes(forks, hosts, who):
    for name in ("a", "b"):
        path = hosts / name / "task.py"
        fails = f"    if os.environ['SPMDKIT_PROCESS_ID'] == '{who}':\n        raise ValueError('no such disk')\n"
        path.write_text(path.read_text().replace("def task():\n", f"def task():\n{fails}"))
    ended = train(forks, hosts)
    assert (ended[who].code, ended[1 - who].code) == (78, 75), ended
    assert f"process {who} failed" in ended[1 - who].output or f"process {who} has left" in ended[1 - who].output
    assert all("no such disk" in process.output for process in ended), ended
