"""A parallel program as people have it, under spmdkit with at most five changed lines, has the numbers of plain JAX."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest

from spmdkit.checkpoint import Checkpoints
from spmdkit.foundation.formatting import name_axes
from tests.support.core_hlo import collectives, over
from tests.support.core_runs import TOLERANCE, assert_close
from tests.support.environment import environment_of_a_user
from tests.support.user_programs import (
    FOLDER,
    MOST_LINES,
    PAGE,
    PROGRAMS,
    QUICK_MESHES,
    ROOT,
    changed_lines,
    expected,
    page,
    program_of,
)

pytestmark = pytest.mark.promotes("programs of people")
STEPS = 5


@pytest.fixture(autouse=True, scope="module")
def spmdkit_names():
    yield
    name_axes({})


def run(program, state, start=1, stop=STEPS):
    """Returns the state and the losses after some steps."""
    losses = []
    for _, batch in program.batches(start=start, stop=stop):
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


CASES = [
    pytest.param(name, mesh, marks=[] if mesh in QUICK_MESHES else pytest.mark.slow)
    for name, of_user in PROGRAMS.items()
    for mesh in of_user.meshes
]


@pytest.mark.forms(6)
@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_a_program_equals_plain_jax(name, mesh):
    program = program_of(name, mesh)
    state, losses = run(program, program.init())
    right, params = expected(name, mesh)
    np.testing.assert_allclose(losses, right, rtol=TOLERANCE)
    assert_close(jax.device_get(state.params), params)


@pytest.mark.forms(3)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_checkpoint_is_restored_on_another_mesh(name, tmp_path):
    first, second = (program_of(name, mesh) for mesh in QUICK_MESHES[::-1])
    state, _ = run(first, first.init(), stop=3)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, state, {})
    checkpoints.wait()
    restored, _ = checkpoints.restore(3, second.abstract_state)
    checkpoints.close()
    assert_close(jax.device_get(restored.params), jax.device_get(state.params), 0)
    state, losses = run(second, restored, start=4)
    if not PROGRAMS[name].by_replica:  # the other mesh has another number of replicas
        assert_close(jax.device_get(state.params), expected(name, QUICK_MESHES[0])[1])
    assert np.isfinite(losses).all()


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_step_reduces_once(name):
    program = program_of(name, "data 4")
    found = collectives(program.compiled.as_text(), program.sizes)
    assert len(over(found, "data")) == PROGRAMS[name].reductions


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name", ["imagenet_pmap", "explicit_sharding", "shard_map_dp_tp"])
def test_two_processes_equal_one(name, tmp_path):
    """Losses of each step and the evaluation are those of one process with two devices."""
    two = ("launch", "-n", "2", "--devices-per-process", "1", "--", "train")
    records = []
    for run_dir, command in ((tmp_path / "one", ("train",)), (tmp_path / "two", two)):
        devices = [] if run_dir.name == "two" else ["devices=cpu:2"]
        train = [
            sys.executable,
            "-m",
            "spmdkit",
            *command,
            f"tests/user_programs/{name}/run.yaml",
            f"run_dir={run_dir}",
        ]
        options = {"env": environment_of_a_user(), "capture_output": True, "text": True, "timeout": 240}
        ended = subprocess.run([*train, "log.every_steps=1", *devices], cwd=ROOT, **options)
        assert ended.returncode == 0, ended.stderr
        lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
        records.append(
            [{k: x for k, x in line.items() if k in ("step", "split", "loss", "accuracy")} for line in lines]
        )
    one, several = records
    assert len(one) >= STEPS and [line["step"] for line in one] == [line["step"] for line in several]
    assert_close([line["loss"] for line in several], [line["loss"] for line in one], TOLERANCE)


@pytest.mark.parametrize("name", PROGRAMS)
def test_few_lines_change(name):
    assert len(changed_lines(name)) <= MOST_LINES


def test_every_program_is_on_the_page():
    assert sorted(PROGRAMS) == sorted(path.name for path in FOLDER.iterdir() if (path / "before.py").exists())
    assert PAGE.read_text() == page()
    assert all(f"<!-- {name} -->" in page() for name in PROGRAMS)
