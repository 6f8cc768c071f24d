"""`sk.verify_step(make, meshes=[...])`: compares a step that does not use spmdkit, with custom mesh axes and
shardings, on meshes and on one device.

    def make(devices):            # [data, tensor], the shape of the tested mesh; (1, 1) for one device
        mesh = jax.sharding.Mesh(devices, ("data", "tensor"))
        ...
        return jax.jit(train_step, in_shardings=..., out_shardings=...), (state, batch)

Every returned leaf has its own tolerance. Several steps are compared if the step returns a new state:

    tolerance of a leaf = max(FLOOR_ULPS * eps * |leaf|, MULTIPLE * its largest change when one ulp moves the arguments
    on one device)

A leaf is reported as noise if the second term exceeds `LARGEST`, relative to the leaf's norm.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmdkit import compat
from spmdkit.cluster import detect_cluster, join
from spmdkit.compat.user_mesh import ignores_user_settings
from spmdkit.errors import ConfigError
from spmdkit.foundation.formatting import format_error
from spmdkit.foundation.jaxprs import equations
from spmdkit.foundation.trees import canonical_dtype, is_key, named_leaves
from spmdkit.foundation.user_code import call_user
from spmdkit.verify.cases import describe_case
from spmdkit.verify.diagnosis import Diagnosis, explain_factor, factor_of
from spmdkit.verify.dtypes import HALF_ULPS, eps, is_half, is_inexact, wide
from spmdkit.verify.locate import locate, tapped
from spmdkit.verify.noise import LARGEST, MULTIPLE
from spmdkit.verify.probes import one_ulp
from spmdkit.verify.search import TapValues
from spmdkit.verify.sharding_relation import distance

FLOOR_ULPS = 64
NUM_PROBES = 4
CLOSE = 0.5
"""A result with the shapes of an argument is the argument's new value if it lies within this relative 2-norm, else its
gradient."""

NOTHING = "nothing could be compared: every result is below noise. Try fewer layers or steps, or 64-bit types."

QUANTITIES = ("loss", "gradient", "state", "value")

Make = Callable[[np.ndarray], tuple[Callable[..., Any], Sequence[Any]]]
Leaves = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Step:
    """A step on its devices, its arguments on the host, and the sharding of each leaf (None if uncommitted)."""

    run: Callable[..., Any]
    arguments: tuple[Any, ...]
    shardings: list[Any]


class Report(dict[str, Any]):
    """The report of `sk.verify_step`: plain values with the keys of `spmdkit verify --json`. `str` returns a readable
    form."""

    def __str__(self) -> str:
        good = sum(case["passed"] for case in self["cases"])
        lines = [line for case in self["cases"] for line in _format_case(case)]
        lines += [f"note: {note}" for note in self["notes"]]
        verdict = "passed" if self["passed"] else "failed"
        return "\n".join([*lines, f"{verdict}: {good} of {len(self['cases'])} meshes equal to one device."])


def _format_case(case: Mapping[str, Any]) -> Iterator[str]:
    errors = ", ".join(f"{q} {format_error(e)}" for q in QUANTITIES if (e := case[f"{q}_error"]) is not None)
    mesh = describe_case({axis: size for axis, size in case["mesh"].items() if size > 1}, 1)
    yield f"{mesh}: {'equal' if case['passed'] else 'DIFFERS'} ({errors})"
    if not case["passed"]:
        diagnosis = case["diagnosis"]
        yield f"  {diagnosis['kind']}: {diagnosis['found']}"
        if case["located"] is not None:
            yield f"  first {case['located']['text']}"
        yield f"  repair: {diagnosis['repair']}"


@ignores_user_settings
def verify_step(
    make: Make | Callable[..., Any],
    *,
    meshes: Sequence[Mapping[str, int]],
    arguments: Sequence[Any] | None = None,
    specs: Sequence[Any] | None = None,
    steps: int = 2,
) -> Report:
    """Returns the differences between a user-written step on each mesh and on one device.

    Args:
        make: `make(devices) -> (step, arguments)`; `devices` is an array with one dim per axis in `meshes`, in order of
            appearance. With `arguments`, the step itself, which may name axes but must not contain devices.
        meshes: axis sizes by name; a missing axis has size one.
        arguments: arguments of a step that is passed directly.
        specs: a `PartitionSpec` for each argument, or a prefix tree of specs; None: replicated.
        steps: number of consecutive steps, if a result is the new value of an argument.

    Raises:
        ConfigError: the arguments are inconsistent, or the step contains devices.
        UserCodeError: the function raised.
    """
    axes = _axes(meshes)
    if steps < 1:
        raise ConfigError(f"sk.verify_step: steps is {steps}. It must be at least 1. The default is 2.")
    num = max(math.prod(sizes.values()) for sizes in meshes)
    devices = join(detect_cluster({}), f"cpu:{num}").devices
    if arguments is not None:
        check_holds_no_device(make, arguments, devices[0], axes)
        make = shard_arguments(make, arguments, specs, axes)
    elif specs is not None:
        raise ConfigError(
            "sk.verify_step has specs and no arguments. specs belong to a step that is passed directly; "
            "make(devices) shards its own arguments. Pass arguments=(...), or leave specs out."
        )
    one = _open(make, devices, dict.fromkeys(axes, 1))
    reference = _run(one, steps)
    probes = [_run(one, steps, np.random.default_rng(i)) for i in range(NUM_PROBES)]
    tolerance, noisy = _tolerances(reference, probes)
    cases = []
    for sizes in meshes:
        whole = dict.fromkeys(axes, 1) | dict(sizes)
        opened = _open(make, devices, whole)
        case = _case(dict(sizes), _run(opened, steps), reference, tolerance)
        cases.append(case if case["passed"] else case | _located(one, opened, whole))
    compared = [path for path, x in reference.items() if is_inexact(x) and path not in noisy]
    notes = [
        f"'{path}' is below noise: one ulp in the arguments moves it by {e:.0e} relative" for path, e in noisy.items()
    ]
    if not compared:
        notes.append(NOTHING)
    return Report(
        passed=bool(compared) and all(case["passed"] for case in cases),
        cases=cases,
        below_noise=sorted(noisy),
        steps=steps,
        notes=notes,
    )


def _axes(meshes: Sequence[Mapping[str, int]]) -> tuple[str, ...]:
    axes = tuple(dict.fromkeys(axis for sizes in meshes if isinstance(sizes, Mapping) for axis in sizes))
    bad = [s for s in meshes if not isinstance(s, Mapping) or not all(isinstance(n, int) and n > 0 for n in s.values())]
    if bad or not axes:
        raise ConfigError(
            f"sk.verify_step: meshes is {list(meshes)}. It must be a list of sizes by axis name, each at least 1. "
            'Try meshes=[{"data": 4}, {"data": 2, "tensor": 2}].'
        )
    return axes


def _open(make: Make, devices: Sequence[jax.Device], sizes: Mapping[str, int]) -> Step:
    shape = tuple(sizes.values())
    device_array = np.array(devices[: math.prod(shape)], dtype=object).reshape(shape)
    pair = call_user(lambda: make(device_array), "make")
    if not (isinstance(pair, tuple) and len(pair) == 2 and callable(pair[0]) and isinstance(pair[1], tuple | list)):
        raise ConfigError(
            f"make(devices) returned {type(pair).__name__}. It must return the step and its arguments: return step, "
            "(state, batch)."
        )
    step, arguments = pair[0], tuple(pair[1])
    check_devices(step, arguments, device_array)
    return Step(step, jax.tree.map(_to_host, arguments), [_sharding_of(x) for x in jax.tree.leaves(arguments)])


def _sharding_of(x: Any) -> Any:
    return x.sharding if isinstance(x, jax.Array) and x.committed else None


def _to_host(x: Any) -> Any:
    """Returns a leaf as a numpy array. A key is copied, since a step may donate it."""
    return jnp.copy(x) if is_key(x) else np.asarray(x)


def _placed(step: Step, random: np.random.Generator | None = None) -> list[Any]:
    """Returns the arguments on their devices. Each run needs a new copy, since a step may donate its arguments."""
    values = step.arguments
    if random is not None:
        move = one_ulp(random, "float64" if jax.config.jax_enable_x64 else "float32")  # type: ignore[attr-defined]
        values = jax.tree.map(lambda x: x if is_key(x) else move(x), values)
    flat, structure = jax.tree.flatten(values)
    copies = [jnp.copy(x) if is_key(x) else x for x in flat]
    placed = [x if s is None else jax.device_put(x, s) for x, s in zip(copies, step.shardings, strict=True)]
    return list(jax.tree.unflatten(structure, placed))


def _located(one: Step, many: Step, axes: Mapping[str, int]) -> dict[str, Any]:
    """Returns `located`: the first value that differs in the first step. It is None if the step cannot be traced, or if
    no single line is responsible."""
    ulps = [np.random.default_rng(i) for i in range(2)]
    try:
        expected, *moved = _tapped(one, [None, *ulps])
        (found,) = _tapped(many, [None])
    except Exception:  # noqa: BLE001 - the step is compiled already or has side effects; the case fails without a location
        return {"located": None}
    at = locate(expected, moved, found, {axis: size for axis, size in axes.items() if size > 1})
    return {"located": None if at is None else {**at._asdict(), "text": at.text}}


def _tapped(step: Step, moves: Sequence[np.random.Generator | None]) -> list[TapValues]:
    """Returns every value of a step for each move; a move perturbs the arguments by one ulp, None does not."""
    mesh, run = getattr(step.run, "of_mesh", (None, step.run))
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        values = tapped(jax.make_jaxpr(run)(*_placed(step)))
        return [values(jax.tree.leaves(tuple(_placed(step, random)))) for random in moves]


def _run(step: Step, steps: int, random: np.random.Generator | None = None) -> Leaves:
    """Returns every leaf of the step's results on the host, by path (`step 1: state 0/params/w`)."""
    arguments, leaves = _placed(step, random), Leaves()
    for number in range(1, steps + 1):
        before = [jax.tree.map(_on_host, x) for x in arguments]
        returned = call_user(lambda: step.run(*arguments), "the step")
        results = list(returned) if isinstance(returned, tuple | list) else [returned]
        on_host = [jax.tree.map(_on_host, x) for x in results]
        new = _new_values(before, on_host)
        for i, result in enumerate(on_host):
            kind = "state" if i in new else _kind(result, before)
            leaves |= {f"step {number}: {kind} {i}{'/' if path else ''}{path}": x for path, x in named_leaves(result)}
        if not new:
            break
        for i, j in new.items():
            arguments[j] = results[i]
    return leaves


def _on_host(x: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if is_key(x) else x)


def _new_values(arguments: Sequence[Any], results: Sequence[Any]) -> dict[int, int]:
    new: dict[int, int] = {}
    for i, result in enumerate(results):
        for j, argument in enumerate(arguments):
            if j not in new.values() and _is_like(argument, result) and _is_close(argument, result):
                new[i] = j
                break
    return new


def _is_like(a: Any, b: Any) -> bool:
    one, other = ([(path, x.shape, x.dtype) for path, x in named_leaves(tree)] for tree in (a, b))
    return bool(one) and one == other


def _is_close(argument: Any, result: Any) -> bool:
    pairs = zip(jax.tree.leaves(argument), jax.tree.leaves(result), strict=True)
    both = [(wide(x).ravel(), wide(y).ravel()) for x, y in pairs if is_inexact(x)]
    if not both:
        return False
    x, y = (np.concatenate(side) for side in zip(*both, strict=True))
    return bool(np.linalg.norm(x) > 0 and np.linalg.norm(y - x) <= CLOSE * np.linalg.norm(x))


def _kind(result: Any, arguments: Sequence[Any]) -> str:
    if isinstance(result, np.ndarray) and result.ndim == 0:
        return "loss"
    parts = (part for argument in arguments for part in _parts(argument))
    return "gradient" if any(_is_like(part, result) for part in parts) else "value"


def _parts(tree: Any, depth: int = 3) -> Iterator[Any]:
    """Yields a tree and its subtrees, since the parameters may be part of a state."""
    yield tree
    children = jax.tree_util.default_registry.flatten_one_level(tree) if depth else None
    for child in () if children is None else children[0]:
        yield from _parts(child, depth - 1)


def _tolerances(reference: Leaves, probes: Sequence[Leaves]) -> tuple[dict[str, float], dict[str, float]]:
    """Returns (tolerance of each leaf as a 2-norm, relative effect of one ulp on each leaf that is noise)."""
    tolerance, noisy = {}, {}
    for path, x in reference.items():
        if not is_inexact(x):
            tolerance[path] = 0.0
            continue
        norm = float(np.linalg.norm(wide(x)))
        moved = max(_distance(probe.get(path), x) for probe in probes)
        tolerance[path] = max((HALF_ULPS if is_half(x) else FLOOR_ULPS) * eps(x) * norm, MULTIPLE * moved)
        if MULTIPLE * moved > LARGEST * norm:
            noisy[path] = moved / norm if norm else math.inf
    return tolerance, noisy


def _distance(found: np.ndarray | None, expected: np.ndarray) -> float:
    return math.inf if found is None or found.shape != expected.shape else distance(found, expected)


def _case(mesh: dict[str, int], found: Leaves, expected: Leaves, tolerance: Mapping[str, float]) -> dict[str, Any]:
    distances = {path: _distance(found.get(path), x) for path, x in expected.items()}
    wrong = [path for path, d in distances.items() if not d <= tolerance[path]]
    relative = {path: d / max(float(np.linalg.norm(wide(expected[path]))), 1e-30) for path, d in distances.items()}
    outcome: dict[str, Any] = {"mesh": mesh}
    for quantity in QUANTITIES:
        errors = [relative[p] for p in expected if _quantity(p) == quantity and (p in wrong or relative[p] < LARGEST)]
        outcome[f"{quantity}_error"] = max(errors, default=None)
    outcome |= {"worst_leaf": max(relative, key=relative.__getitem__), "passed": not wrong}
    if wrong:
        failed = [q for q in QUANTITIES if any(_quantity(path) == q for path in wrong)]
        diagnosis = _diagnosis(mesh, wrong, found, expected, relative)._asdict()
        outcome |= {"failed": failed, "worst_leaf": wrong[0], "diagnosis": diagnosis}
    return outcome


def _quantity(path: str) -> str:
    return path.partition(": ")[2].partition(" ")[0]


def _diagnosis(
    mesh: Mapping[str, int], wrong: Sequence[str], found: Leaves, expected: Leaves, relative: Mapping[str, float]
) -> Diagnosis:
    first = wrong[0]
    step = [path for path in wrong if path.startswith(first.partition(": ")[0])]
    where = f"'{first}' differs by {relative[first]:.1e}, the first of {len(step)} that do in this step"
    if first not in found or found[first].shape != expected[first].shape:
        repair = "The shapes of the step's results depend on the mesh."
        return Diagnosis("shape", f"'{first}' is missing or has another shape", repair)
    for path in step:
        if not is_inexact(expected[path]) or not np.any(expected[path]):
            continue
        if (explained := explain_factor(factor_of(found, expected, [path]), mesh)) is not None:
            kind, size, axes = explained
            is_twice = kind == "reduced twice"
            repair = (
                f"A complete value is added up over {axes} again, or a sum replaces a mean."
                if is_twice
                else f"A sum over {axes} is missing, or its result is divided again."
            )
            times = f"{size} times" if is_twice else f"1/{size} of"
            return Diagnosis(kind, f"{where}; '{path}' is {times} the value on one device: the size of {axes}", repair)
    repair = "First check what the step computes over an axis: shard_map, collectives, axis_index, its own mean rows."
    return Diagnosis("other", where, repair)


def shard_arguments(
    step: Callable[..., Any], arguments: Sequence[Any], specs: Sequence[Any] | None, axes: Sequence[str]
) -> Any:
    """Returns the `make` function of a step without devices: it shards the arguments by their specs and sets the
    mesh."""
    host = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else np.asarray(x), tuple(arguments))
    chosen = [PartitionSpec()] * len(host) if specs is None else list(specs)
    if len(chosen) != len(host):
        raise ConfigError(
            f"sk.verify_step: {len(host)} arguments and {len(chosen)} specs. Each argument needs one. Use "
            "PartitionSpec() for a replicated argument."
        )

    def make(devices: np.ndarray) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        mesh = compat.auto_mesh(devices, axes)
        is_spec = lambda x: isinstance(x, PartitionSpec)
        placed = []
        for argument, spec in zip(host, chosen, strict=True):
            whole = jax.tree.map(lambda s, part: jax.tree.map(lambda _: s, part), spec, argument, is_leaf=is_spec)
            shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), whole, is_leaf=is_spec)
            placed.append(jax.device_put(argument, shardings))
        jitted = jax.jit(step)

        @functools.wraps(step)
        def run(*args: Any) -> Any:
            with jax.set_mesh(mesh):
                return jitted(*args)

        run.of_mesh = mesh, jitted  # type: ignore[attr-defined]
        return run, tuple(placed)

    return make


def check_holds_no_device(
    step: Callable[..., Any], arguments: Sequence[Any], device: jax.Device, axes: Sequence[str]
) -> None:
    """Rejects a step that is passed directly and contains a mesh of devices."""
    mesh = compat.auto_mesh(np.array([device], dtype=object).reshape((1,) * len(axes)), axes)
    shapes = jax.tree.map(_shape, tuple(arguments))
    jaxpr = _traced(step, shapes)  # without a mesh: under one, JAX itself rejects a step that contains another

    def trace() -> Any:
        with jax.set_mesh(mesh):
            return jax.make_jaxpr(step)(*shapes)

    foreign = next(_meshes_in(jaxpr or call_user(trace, "the step"), frozenset([device])), None)
    if foreign is not None:
        raise ConfigError(
            f"the step passed to sk.verify_step contains a mesh of {foreign[0]} devices, {foreign[1]}. A step that is "
            "passed directly runs on every mesh in `meshes`, so it may name axes only. Pass a function make(devices) "
            "-> (step, arguments) that creates the mesh, or use PartitionSpec only."
        )


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    array = x if isinstance(x, jax.Array) else np.asarray(x)
    return jax.ShapeDtypeStruct(array.shape, canonical_dtype(array.dtype))


def check_devices(step: Callable[..., Any], arguments: Sequence[Any], devices: np.ndarray) -> None:
    """Rejects a step or arguments that `make` put on devices it did not receive."""
    given = frozenset(devices.ravel())
    rule = "make(devices) must put everything on these devices: jax.sharding.Mesh(devices, names)."
    for path, x in named_leaves(tuple(arguments)):
        if isinstance(x, jax.Array) and not x.sharding.device_set <= given:
            others = len(x.sharding.device_set)
            raise ConfigError(
                f"make received {len(given)} devices, and argument '{path}' is on {others} devices, some of them "
                f"others. {rule}"
            )
    jaxpr = _traced(step, arguments)
    foreign = None if jaxpr is None else next(_meshes_in(jaxpr, given), None)
    if foreign is not None:
        raise ConfigError(
            f"make received {len(given)} devices, and its step contains a mesh of {foreign[0]}, {foreign[1]}. {rule}"
        )


def _traced(step: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Returns the jaxpr of a step, or None if it cannot be traced: it is already compiled, or has side effects."""
    try:
        return jax.make_jaxpr(step)(*arguments)
    except Exception:  # noqa: BLE001 - the run raises it again
        return None


def _meshes_in(jaxpr: Any, given: frozenset[jax.Device]) -> Iterator[tuple[int, str]]:
    """Yields (number of devices, location) for each use of a mesh with devices other than `given`."""
    for eqn in equations(jaxpr):
        for mesh in map(_mesh_of, jax.tree.leaves(list(eqn.params.values()))):
            if mesh is not None and not mesh.empty and frozenset(mesh.devices.ravel()) != given:
                yield mesh.devices.size, f"used at {compat.source_line(eqn)}"


def _mesh_of(value: Any) -> Mesh | None:
    mesh = value.mesh if isinstance(value, NamedSharding) else value
    return mesh if isinstance(mesh, Mesh) else None
