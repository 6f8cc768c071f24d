"""Natural programs of users with existing models, each with an equivalent plain JAX script for one device.

A file of tests/tasks has several, each a function with the decorator `@natural` that returns a `NaturalTask`. Its
docstring is the description in docs/development/tasks.md, which `python -m tests.support.tasks` writes.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
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
PAGE = Path(__file__).parents[2] / "docs" / "development" / "tasks.md"

MESHES: dict[str, dict[str, int]] = {
    "one device": {},
    "data 4": {"data": 4},
    "data 2 x fsdp 2": {"data": 2, "fsdp": 2},
    "data 2 x tensor 2": {"data": 2, "tensor": 2},
}
BATCH, STEPS, TOLERANCE = 16, 4, 1e-5


class Trained(NamedTuple):
    """A run: losses of the steps, the final state, and the program."""

    losses: list[Any]
    params: Any
    state: Any
    program: Program


class NaturalTask(NamedTuple):
    """A task and its plain script.

    Attributes:
        plain: returns (losses, parameters, optimizer state, ...) of the plain script.
        settings: settings of the config.
        loop: `loop(program)` trains the task, if it has a custom loop.
        check: further assertions about the run; its other arguments are the results of `plain` after the first three.
        steps: number of steps in the config.
        params_of: selects the run's parameters that the script has.
        repeating: a `train_step` that repeats on every replica work that the task shards, and the lines with that work.
    """

    task: sk.Task
    plain: Callable[[], tuple[Any, ...]]
    settings: Mapping[str, Any] = {}
    loop: Callable[[Program], Trained] | None = None
    check: Callable[..., None] = lambda trained: None
    steps: int = STEPS
    params_of: Callable[[Any], Any] = lambda params: params
    repeating: tuple[Callable[..., Any], tuple[str, ...]] | None = None


_MADE_BY: dict[str, Callable[[], NaturalTask]] = {}


def natural(make: Callable[..., NaturalTask], *variants: str) -> Callable[..., NaturalTask]:
    """Registers a task by the name of its function; with variants, those of `make(variant)`."""
    make = functools.cache(make)
    for variant in variants:
        _MADE_BY[f"{make.__name__} {variant}"] = functools.partial(make, variant)
    if not variants:
        _MADE_BY[make.__name__] = make
    return make


def task_names() -> list[str]:
    """Returns the name of every task, with the variant after a space if it has several."""
    for path in sorted(FOLDER.glob("[!t]*.py")):
        importlib.import_module(f"tests.tasks.{path.stem}")
    return sorted(_MADE_BY, key=lambda name: name.partition(" ")[0])


def natural_task(name: str) -> NaturalTask:
    """Returns the task with a name."""
    assert name in task_names()
    return _MADE_BY[name]()


# ---- helpers for scripts ---------------------------------------------------------------------------------------------


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Returns normally distributed float32 numbers."""
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def ids(below: int, *shape: int) -> np.ndarray:
    """Returns random int32 integers from 0 to `below` - 1."""
    return np.random.default_rng([below, *shape]).integers(0, below, shape).astype(np.int32)


def weights(key: jax.Array, **shapes: tuple[int, ...]) -> dict[str, jax.Array]:
    """Returns normally distributed numbers for each name, divided by the square root of the first dim."""
    keys = jax.random.split(key, len(shapes))
    return {n: jax.random.normal(k, s) / s[0] ** 0.5 for k, (n, s) in zip(keys, shapes.items(), strict=True)}


def mlp_init(width: int, hidden: int, num_results: int) -> Callable[[jax.Array], dict[str, jax.Array]]:
    """Returns the `init` of the parameters of `mlp`."""
    return functools.partial(weights, up=(width, hidden), down=(hidden, num_results))


def mlp(params: Any, x: jax.Array) -> jax.Array:
    """Returns the two products of `up` and `down` with a tanh in between."""
    return jax.numpy.tanh(x @ params["up"]) @ params["down"]


def batches(data: Any, steps: int = STEPS, size: int = BATCH) -> list[Any]:
    """Returns the batches of a plain script, with rows in order."""
    return [jax.tree.map(lambda x: x[i * size : (i + 1) * size], data) for i in range(steps)]  # noqa: B023 - called here


def run_plain(step: Callable[..., Any], state: Iterable[Any], inputs: Iterable[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Returns (losses, *state) after `(*state, loss) = step(*state, *input)` for each input."""
    losses, step = [], jax.jit(step)
    for given in inputs:
        *state, loss = step(*state, *given)
        losses.append(loss)
    return losses, *state


def updated(optimizer: Any, grads: Any, params: Any, opt_state: Any, **extra: Any) -> tuple[Any, Any]:
    """Returns (parameters, optimizer state) after an update."""
    updates, opt_state = optimizer.update(grads, opt_state, params, **extra)
    return optax.apply_updates(params, updates), opt_state


def train_plain(
    init: Callable[..., Any],
    loss_of: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    data: Any,
    keys_of: Callable[[int], Any] | None = None,
    carried: Any = None,
    move: Callable[..., Any] = lambda carried, *_: carried,
) -> tuple[list[Any], Any, Any, Any]:
    """Returns (losses, parameters, optimizer state, carried) of the plain JAX training loop on one device.

    Args:
        loss_of: `loss_of(params, batch)`. With `keys_of` it also receives the keys of the step. With `carried` it
            receives that after the parameters, and returns (loss, more).
        carried: additional state of the loop, made from the initial parameters.
        move: `move(carried, params, new parameters, more)` after each update.
    """
    optimizer = optax.with_extra_args_support(optimizer)
    takes = inspect.signature(optimizer.update).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    params = init(jax.random.key(0))
    start = None if carried is None else carried(params)

    def step(params: Any, opt_state: Any, carried: Any, *batch: Any) -> tuple[Any, ...]:
        def loss_fn(params: Any) -> Any:
            return (loss_of(params, *batch), None) if start is None else loss_of(params, carried, *batch)

        (loss, more), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        of_search = {"value": loss, "grad": grads, "value_fn": lambda params: loss_fn(params)[0]}
        given = {name: x for name, x in of_search.items() if takes_any or name in takes}
        new, opt_state = updated(optimizer, grads, params, opt_state, **given)
        return new, opt_state, move(carried, params, new, more), loss

    keys = lambda number: () if keys_of is None else (keys_of(number),)
    inputs = [(batch, *keys(number)) for number, batch in enumerate(batches(data))]
    return run_plain(step, (params, optimizer.init(params), start), inputs)


def mean_task(
    init: Callable[..., Any],
    losses_of: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    data: Any,
    rules: Any = "up",
    keyed: bool = False,
    settings: Mapping[str, Any] | None = None,
    **more: Any,
) -> NaturalTask:
    """Returns the task with the loss `losses_of(params, batch[, keys]).mean()`, and its script."""

    def loss_fn(params: Any, batch: Any, key: Any) -> Any:
        return sk.mean(losses_of(params, batch, *([sk.example_keys()] if keyed else [])))

    task = sk.Task(init, loss_fn, optimizer, train_data=data, rules=columns(rules), **more)
    mean = lambda params, *batch: losses_of(params, *batch).mean()
    plain = lambda: train_plain(init, mean, optimizer, data, example_keys if keyed else None)[:3]
    return NaturalTask(task, plain, settings or {})


def columns(rules: Any) -> Any:
    """Returns the rules that shard the columns of the leaves that match a pattern; other rules are unchanged."""
    return [(rules, [None, "mlp"])] if isinstance(rules, str) else rules


def step_key(step: int) -> jax.Array:
    """Returns the key that the site specifies for a step (counted from 0) of seed 0, computed without spmdkit."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 0x73746570), step)


def example_keys(step: int, num: int = BATCH, salt: int = 0) -> jax.Array:
    """Returns the keys of the examples of a step, computed without spmdkit."""
    base = jax.random.fold_in(jax.random.fold_in(step_key(step), 0x65786D70), salt)
    return jax.vmap(lambda place: jax.random.fold_in(base, place))(jax.numpy.arange(num))


# ---- runs ------------------------------------------------------------------------------------------------------------


def program_of(task: sk.Task, mesh: str, **settings: Any) -> Program:
    """Returns the program of a task on one of MESHES. Small leaves are also sharded, and rows are not shuffled."""
    axes = MESHES[mesh]
    settings = {"batch_size": BATCH, "steps": STEPS, "data": {"shuffle": False}} | settings
    if "fsdp" in axes:
        settings = {"layout": {"min_shard_bytes": 1}} | settings
    num = int(np.prod([1, *axes.values()]))
    return Program(sk.Config(task="t.py:t", mesh=axes, **settings), task, jax.devices()[:num])


def train(natural: NaturalTask, mesh: str, **settings: Any) -> Trained:
    """Returns the run of a task on one of MESHES."""
    program = program_of(natural.task, mesh, steps=natural.steps, **natural.settings, **settings)
    if natural.loop is not None:
        return natural.loop(program)
    state, losses = program.init(), []
    for _, batch in program.batches():
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
    return Trained(losses, natural.params_of(jax.device_get(state.params)), jax.device_get(state), program)


def check_evaluation(trained: Trained, expected: Mapping[str, Any]) -> None:
    """Asserts that the evaluation of the last state has the expected metrics."""
    found = trained.program.eval(jax.device_put(trained.state, trained.program.state_sharding))
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)


def assert_same(found: Trained, expected: tuple[Any, Any, Any], tolerance: float = TOLERANCE) -> None:
    """Asserts that a run has the losses, parameters and optimizer state of a plain script, per leaf in the relative
    2-norm.

    The optimizer state detects wrong gradients that the parameters do not: Adam's update is invariant to their scale,
    its moments are not.
    """
    losses, params, opt_state = expected
    np.testing.assert_allclose(found.losses, np.asarray(losses, np.float64), rtol=tolerance, atol=tolerance * 1e-2)
    errors = leaf_errors(found.params, jax.device_get(params))
    errors |= state_errors(found.state.opt_state, opt_state, params)
    wrong = {path: float(error) for path, error in errors.items() if not error <= tolerance}
    assert not wrong, f"relative errors above {tolerance}: {wrong}"


def state_errors(found: Any, expected: Any, params: Any) -> dict[str, float]:
    """Returns path -> relative 2-norm error of an optimizer's state, for each tree like the parameters and each other
    leaf."""
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
    """Returns an array as numbers; for a key, its data."""
    return jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def repeated_work(task: sk.Task, mesh: str) -> list[Finding]:
    """Returns the plan's findings of repeated work in a task on one of MESHES."""
    return [found for found in read_program(program_of(task, mesh)).findings if found.code == "repeated-work"]


def line_of(source: str) -> str:
    """Returns the text of a line, `file.py:23`."""
    path, _, number = source.rpartition(":")
    return Path(path).read_text().splitlines()[int(number) - 1].strip()


def page() -> str:
    """Returns docs/development/tasks.md."""
    made_by = {name.partition(" ")[0]: _MADE_BY[name] for name in task_names()}
    makers = [inspect.unwrap(getattr(make, "func", make)) for make in made_by.values()]
    rows = "\n".join(
        f"| [{make.__name__.replace('_', ' ')}](../../tests/tasks/{Path(inspect.getfile(make)).name}) "
        f"| {(make.__doc__ or '').splitlines()[0].rstrip('.')} |"
        for make in makers
    )
    return f"""# Tasks

Forty programs of published kinds. [tests/tasks](../../tests/tasks) has the model, the plain JAX script for one device
and the task of spmdkit of each. Losses, parameters and optimizer state equal those of the plain script to
{TOLERANCE:.0e} (relative, float32) on one device, {{data: 4}}, {{data: 2, fsdp: 2}} and {{data: 2, tensor: 2}}.
The page is written by `python -m tests.support.tasks`.

`verify` reports {{data: 4}}, {{data: 2, fsdp: 2}}, {{data: 2, tensor: 2}} and two microbatches on {{data: 4}} as equal
to one device for every task (all eighteen optimizers, both phases of `two phases`): three steps of 16 rows, float32,
without mutants ([tests/verify/test_verify_tasks.py](../../tests/verify/test_verify_tasks.py)).

| task | description |
| --- | --- |
{rows}
"""


if __name__ == "__main__":
    # Imported under its module name, since the tasks register there.
    importlib.import_module("tests.support.tasks").PAGE.write_text(
        importlib.import_module("tests.support.tasks").page()
    )
