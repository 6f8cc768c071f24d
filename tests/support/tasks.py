"""Natural programs of people who have their own models, each beside the plain JAX of one device that it has to equal.

A file of tests/tasks has four parts, told apart by their headings: what both share (model and data), the plain script,
the task of spmdkit, the test. `python -m tests.support.tasks --write` counts the lines of the second and third part and
writes docs/tasks.md.
"""

import ast
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import spmdkit as sk
from spmdkit.plan.compiled_step import read_program
from spmdkit.plan.finding import Finding
from spmdkit.program.program import Program
from tests.support.natural_runs import leaf_errors

FOLDER = Path(__file__).parents[1] / "tasks"
PAGE = Path(__file__).parents[2] / "docs" / "tasks.md"

MESHES: dict[str, dict[str, int]] = {
    "one device": {},
    "data 4": {"data": 4},
    "data 2 x fsdp 2": {"data": 2, "fsdp": 2},
    "data 2 x tensor 2": {"data": 2, "tensor": 2},
}
QUICK = [name if name.startswith("data 2 x fsdp") else pytest.param(name, marks=pytest.mark.slow) for name in MESHES]
"""Every mesh; in the quick suite the one that runs the mapped form, with cut parameters."""

BATCH, STEPS, TOLERANCE = 16, 4, 1e-5


class Trained(NamedTuple):
    """A run: losses of the steps, what there is afterwards, and the program."""

    losses: list[Any]
    params: Any
    state: Any
    program: Program


def batches(data: Any, steps: int = STEPS, size: int = BATCH) -> list[Any]:
    """Returns the batches of a plain script: rows in their order."""
    return [jax.tree.map(lambda x: x[i * size : (i + 1) * size], data) for i in range(steps)]  # noqa: B023 - used at once


def step_key(step: int) -> jax.Array:
    """Returns the key that the guide promises for a step (counted from 0) of seed 0, made without spmdkit."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 0x73746570), step)


def example_keys(step: int, num: int = BATCH, salt: int = 0) -> jax.Array:
    """Returns the keys of the examples of a step, made without spmdkit."""
    base = jax.random.fold_in(jax.random.fold_in(step_key(step), 0x65786D70), salt)
    return jax.vmap(lambda place: jax.random.fold_in(base, place))(jax.numpy.arange(num))


def program_of(task: sk.Task, mesh: str, **settings: Any) -> Program:
    """Returns the program of a task on one of MESHES; small leaves are cut too, rows come in their order."""
    axes = MESHES[mesh]
    settings = {"batch_size": BATCH, "steps": STEPS, "data": {"shuffle": False}} | settings
    if "fsdp" in axes:
        settings = {"layout": {"min_shard_bytes": 1}} | settings
    num = int(np.prod([1, *axes.values()]))
    return Program(sk.Config(task="t.py:t", mesh=axes, **settings), task, jax.devices()[:num])


def train(task: sk.Task, mesh: str, loss: str = "loss", **settings: Any) -> Trained:
    """Returns the run of a task on one of MESHES, with the metric `loss` of each step."""
    program = program_of(task, mesh, **settings)
    state, losses = program.init(), []
    for _, batch in program.batches():
        state, metrics = program.step(state, batch)
        losses.append(float(metrics[loss]))
    return Trained(losses, jax.device_get(state.params), jax.device_get(state), program)


def assert_same(found: Trained, expected: tuple[Any, Any, Any], tolerance: float = TOLERANCE) -> None:
    """Asserts that a run has the losses, parameters and optimizer's state of a plain script, leaf by leaf in the
    relative 2-norm.

    The state tells of the gradients where the parameters do not: Adam's update is the same for any multiple of them,
    its moments are not.
    """
    losses, params, opt_state = expected
    np.testing.assert_allclose(found.losses, np.asarray(losses, np.float64), rtol=tolerance, atol=tolerance * 1e-2)
    errors = leaf_errors(found.params, jax.device_get(params))
    errors |= state_errors(found.state.opt_state, opt_state, params)
    wrong = {path: float(error) for path, error in errors.items() if not error <= tolerance}
    assert not wrong, f"relative errors above {tolerance}: {wrong}"


def state_errors(found: Any, expected: Any, params: Any) -> dict[str, float]:
    """Returns path -> relative 2-norm of an optimizer's state: its trees that are like the parameters, and its other
    leaves, each alone."""
    like = jax.tree.structure(params)
    found, expected = (
        jax.tree.leaves_with_path(jax.tree.map(_numbers, tree), is_leaf=lambda x: jax.tree.structure(x) == like)
        for tree in (found, expected)
    )
    assert [path for path, _ in found] == [path for path, _ in expected]
    return {
        f"opt_state{jax.tree_util.keystr(path)} {leaf}": error
        for (path, mine), (_, right) in zip(found, expected, strict=True)
        for leaf, error in leaf_errors(mine, right).items()
    }


def _numbers(x: Any) -> Any:
    """Returns an array as numbers: those of a key, where it is one."""
    return jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def repeated_work(task: sk.Task, mesh: str) -> list[Finding]:
    """Returns what a plan finds in a task on one of MESHES that every replica computes."""
    return [found for found in read_program(program_of(task, mesh)).findings if found.code == "repeated-work"]


def line_of(source: str) -> str:
    """Returns the text of a line, `file.py:23`."""
    path, _, number = source.rpartition(":")
    return Path(path).read_text().splitlines()[int(number) - 1].strip()


# ---- lines ------------------------------------------------------------------------------------------------------------

HEADINGS = ("shared", "plain JAX, one device", "spmdkit", "test")


class Counted(NamedTuple):
    """A file of tests/tasks: its first line, and the lines of code of the plain script and of the task."""

    name: str
    title: str
    plain: int
    task: int


def counted(path: Path) -> Counted:
    """Returns the lines of code of a file's parts, without empty ones, comments and docstrings."""
    text = path.read_text()
    tree, lines = ast.parse(text), text.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("# ---- ")]
    names = tuple(lines[i].removeprefix("# ---- ").rstrip("- ") for i in starts)
    assert names == HEADINGS, f"{path.name} has the headings {names}, not {HEADINGS}"
    prose = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            prose.update(range(node.lineno - 1, node.end_lineno or node.lineno))
    code = [i for i, line in enumerate(lines) if line.strip() and not line.strip().startswith("#") and i not in prose]
    of_part = [sum(a < i < b for i in code) for a, b in zip(starts, [*starts[1:], len(lines)], strict=True)]
    title = (ast.get_docstring(tree) or "").splitlines()[0]
    return Counted(path.stem.removeprefix("test_"), title, of_part[1], of_part[2])


def all_counted() -> list[Counted]:
    """Returns every file of tests/tasks that has the four parts."""
    return [counted(path) for path in sorted(FOLDER.glob("test_*.py")) if path.name != "test_lines.py"]


def page() -> str:
    """Returns docs/tasks.md."""
    rows = "\n".join(
        f"| [{c.name.replace('_', ' ')}](../tests/tasks/test_{c.name}.py) | {c.title.rstrip('.')} | {c.plain} | {c.task} |"
        for c in all_counted()
    )
    return f"""# Tasks

Programs as people write them, each in one file: the model, the plain JAX script of one device, and the same as a task of spmdkit. Losses, parameters and the optimizer's state are those of the plain script
to {TOLERANCE:.0e} (relative, float32; where a file says so in another way, with its reason) on one device, {{data: 4}}, {{data: 2, fsdp: 2}} and {{data: 2, tensor: 2}}. Lines are those of code, without what
both share; a task is at most ten longer than the script. Written by `python -m tests.support.tasks --write`.

`verify` says of each (all eighteen optimizers, both phases of `two phases`) that {{data: 4}}, {{data: 2, fsdp: 2}}, {{data: 2, tensor: 2}} and two microbatches on {{data: 4}} are equal to one device: no false
alarm, in three steps of 16 rows, float32, without mutants ([tests/verify/test_verify_tasks.py](../tests/verify/test_verify_tasks.py)); and the same of the models of equinox's, flax's and optax's own examples, small
([tests/verify/test_verify_libraries.py](../tests/verify/test_verify_libraries.py)).

| task | what it is | plain JAX | spmdkit |
| --- | --- | --- | --- |
{rows}
"""


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page())
    for c in all_counted():
        print(f"{c.name:24} {c.plain:4} {c.task:4}")
