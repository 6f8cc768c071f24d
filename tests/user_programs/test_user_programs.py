"""A parallel program as people have it, under spmdkit with at most five changed lines, has the numbers of plain JAX."""

import re

import jax
import numpy as np
import pytest

from spmdkit.checkpoint import Checkpoints
from spmdkit.foundation.formatting import name_axes
from tests.support.core_runs import TOLERANCE, assert_close
from tests.support.user_programs import (
    CASES,
    FOLDER,
    MOST_LINES,
    PAGE,
    PROGRAMS,
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


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_a_program_equals_plain_jax(name, mesh):
    program = program_of(name, mesh)
    state, losses = run(program, program.init())
    right, params = expected(name, mesh)
    np.testing.assert_allclose(losses, right, rtol=TOLERANCE)
    assert_close(jax.device_get(state.params), params)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_checkpoint_is_restored_on_another_mesh(name, tmp_path):
    first, second = program_of(name, "data 2 x fsdp 2"), program_of(name, "data 2 x tensor 2")
    state, _ = run(first, first.init(), stop=3)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, state, {})
    checkpoints.wait()
    state, _ = checkpoints.restore(3, second.abstract_state)
    checkpoints.close()
    state, _ = run(second, state, start=4)
    assert_close(jax.device_get(state.params), expected(name, "data 2 x tensor 2")[1])


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
