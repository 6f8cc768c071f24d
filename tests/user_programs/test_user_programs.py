"""A parallel program as people have it, under spmdkit with at most five changed lines, has the numbers of plain JAX."""

import re

import jax
import numpy as np
import pytest

from spmdkit.checkpoint import Checkpoints
from spmdkit.foundation.formatting import name_axes
from tests.support.core_runs import TOLERANCE, assert_close
from tests.support.user_programs import (
    FOLDER,
    MOST_LINES,
    PAGE,
    PROGRAMS,
    QUICK_MESHES,
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


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_a_program_equals_plain_jax(name, mesh):
    program = program_of(name, mesh)
    state, losses = run(program, program.init())
    right, params = expected(name, mesh)
    np.testing.assert_allclose(losses, right, rtol=TOLERANCE)
    assert_close(jax.device_get(state.params), params)


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
    reductions = re.findall(r" all-reduce\(.*", program_of(name, "data 4").compiled.as_text())
    assert len([line for line in reductions if "replica_groups={{0},{1}" not in line]) == PROGRAMS[name].reductions


@pytest.mark.parametrize("name", PROGRAMS)
def test_few_lines_change(name):
    assert len(changed_lines(name)) <= MOST_LINES


def test_every_program_is_on_the_page():
    assert sorted(PROGRAMS) == sorted(path.name for path in FOLDER.iterdir() if (path / "before.py").exists())
    assert PAGE.read_text() == page()
    assert all(f"<!-- {name} -->" in page() for name in PROGRAMS)
