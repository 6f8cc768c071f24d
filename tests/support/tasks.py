"""Natural programs of people who have their own models, each next to the plain JAX script of one device that it equals.

A file of tests/tasks has three parts with headings: what both share (model and data), the plain script, the task of
spmdkit. It may have a fourth, `checks`. The names that the runner (tests/tasks/test_tasks.py) reads:

    task, plain()               the task, and (losses, parameters, optimizer state, ...) of the plain script
    SETTINGS                    settings of the config
    run(mesh)                   trains the task, where it has a loop of its own
    check(trained, *more)       further assertions; `more` is what `plain` returns beyond the first three
    VARIANTS                    name -> (task, plain), where a file has several tasks

`python -m tests.support.tasks --write` counts the lines of the second and third part and writes docs/tasks.md.
"""

import ast
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import spmdkit as sk
from spmdkit.plan.compiled_step import read_program
from spmdkit.plan.findings import Finding
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


def train_plain(
    init: Callable[..., Any],
    loss_of: Callable[..., jax.Array],
    optimizer: optax.GradientTransformation,
    data: Any,
    keys_of: Callable[[int], Any] | None = None,
) -> tuple[list[Any], Any, Any]:
    """Returns (losses, parameters, optimizer state) of the plain JAX training loop on one device.

    Args:
        loss_of: `loss_of(params, batch)`, and the keys of the step where `keys_of` is set.
    """
    optimizer = optax.with_extra_args_support(optimizer)

    @jax.jit
    def step(params: Any, opt_state: Any, *batch: Any) -> tuple[Any, Any, Any]:
        loss_fn = lambda params: loss_of(params, *batch)
        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss, grad=grads, value_fn=loss_fn)
        return optax.apply_updates(params, updates), opt_state, loss

    params, losses = init(jax.random.key(0)), []
    opt_state = optimizer.init(params)
    for number, batch in enumerate(batches(data)):
        keys = () if keys_of is None else (keys_of(number),)
        params, opt_state, loss = step(params, opt_state, batch, *keys)
        losses.append(loss)
    return losses, params, opt_state


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


class NaturalTask(NamedTuple):
    """A task, its plain script, how it is trained on a mesh, and what else is checked."""

    task: sk.Task
    plain: Callable[[], tuple[Any, ...]]
    run: Callable[[str], Trained]
    check: Callable[..., None]
    settings: Mapping[str, Any]


def natural_task(name: str) -> NaturalTask:
    """Returns a task by the name of its file, with the variant after a space where the file has several."""
    file, _, variant = name.partition(" ")
    module = importlib.import_module(f"tests.tasks.{file}")
    if variant:
        task, plain = module.VARIANTS[variant]
    else:
        task, plain = module.task, module.plain
    settings = getattr(module, "SETTINGS", {})
    run = getattr(module, "run", lambda mesh: train(task, mesh, **settings))
    return NaturalTask(task, plain, run, getattr(module, "check", lambda trained: None), settings)


def task_names() -> Iterator[str]:
    """Yields the name of every task, with the variants of a file that has several."""
    for counted in all_counted():
        variants = getattr(importlib.import_module(f"tests.tasks.{counted.name}"), "VARIANTS", None)
        yield from [counted.name] if variants is None else (f"{counted.name} {variant}" for variant in variants)


def check_evaluation(trained: Trained, expected: Mapping[str, Any]) -> None:
    """Asserts that the evaluation of the last state has the expected metrics."""
    found = trained.program.eval(jax.device_put(trained.state, trained.program.state_sharding))
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)


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


# ---- lines -----------------------------------------------------------------------------------------------------------

HEADINGS = ("shared", "plain JAX, one device", "spmdkit")


class Counted(NamedTuple):
    """A file of tests/tasks: its first line, and the lines of code of the plain script and of the task."""

    name: str
    title: str
    plain: int
    task: int


def counted(path: Path) -> Counted:
    """Returns the lines of code of a file's parts. The loop of `train_plain` counts as lines of the plain script."""
    text = path.read_text()
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("# ---- ")]
    names = tuple(lines[i].removeprefix("# ---- ").rstrip("- ") for i in starts)
    assert names[:3] == HEADINGS, f"{path.name} has the headings {names}, not {HEADINGS}"
    code = _code_lines(text)
    of_part = [sum(a < i < b for i in code) for a, b in zip(starts, [*starts[1:], len(lines)], strict=True)]
    loop = len(_code_lines(inspect.getsource(train_plain))) - _SIGNATURE if "train_plain(" in text else 0
    title = (ast.get_docstring(ast.parse(text)) or "").splitlines()[0]
    return Counted(path.stem, title, of_part[1] + loop, of_part[2])


_SIGNATURE = 7
"""Lines of the signature of `train_plain`, which a script does not have."""


def _code_lines(text: str) -> list[int]:
    """Returns the numbers of the lines with code, without empty ones, comments and docstrings."""
    prose = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            prose.update(range(node.lineno - 1, node.end_lineno or node.lineno))
    lines = enumerate(text.splitlines())
    return [i for i, line in lines if line.strip() and not line.strip().startswith("#") and i not in prose]


def all_counted() -> list[Counted]:
    """Returns every task file of tests/tasks."""
    paths = sorted(path for path in FOLDER.glob("*.py") if "# ---- spmdkit" in path.read_text())
    return [counted(path) for path in paths]


def page() -> str:
    """Returns docs/tasks.md."""
    rows = "\n".join(
        f"| [{c.name.replace('_', ' ')}](../tests/tasks/{c.name}.py) | {c.title.rstrip('.')} | {c.plain} | {c.task} |"
        for c in all_counted()
    )
    return f"""# Tasks

Forty programs of published kinds. Each file of [tests/tasks](../tests/tasks) has the model, the plain JAX script for one
device, and the same program as a task of spmdkit. Losses, parameters and optimizer state equal those of the plain script
to {TOLERANCE:.0e} (relative, float32) on one device, {{data: 4}}, {{data: 2, fsdp: 2}} and {{data: 2, tensor: 2}}.

The table counts lines of code without the shared part. The training loop that several scripts share counts for each. A
task is at most ten lines longer than its script. The page is written by `python -m tests.support.tasks --write`.

`verify` reports {{data: 4}}, {{data: 2, fsdp: 2}}, {{data: 2, tensor: 2}} and two microbatches on {{data: 4}} as equal to
one device for every task (all eighteen optimizers, both phases of `two phases`): three steps of 16 rows, float32,
without mutants ([tests/verify/test_verify_tasks.py](../tests/verify/test_verify_tasks.py)).

| task | description | plain JAX | spmdkit |
| --- | --- | --- | --- |
{rows}
"""  # noqa: E501


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page())
    for c in all_counted():
        print(f"{c.name:24} {c.plain:4} {c.task:4}")
