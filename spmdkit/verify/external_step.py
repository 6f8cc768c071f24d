"""`sk.verify_step(make, meshes=[...])`: compares a step that does not use spmdkit, with its own mesh axes and
shardings, on meshes and on one device.

    def make(devices):            # [data, tensor], the shape of the tried mesh; (1, 1) for one device
        mesh = jax.sharding.Mesh(devices, ("data", "tensor"))
        ...
        return jax.jit(train_step, in_shardings=..., out_shardings=...), (state, batch)

    report = sk.verify_step(make, meshes=[{"data": 4}, {"data": 2, "tensor": 2}])

Every returned leaf is compared, over several steps if the step returns a new state:

    tolerance of a leaf = max(FLOOR_ULPS * eps * |leaf|, MULTIPLE * its largest change when one ulp moves the arguments
    on one device)

Each leaf has its own scale: a state has parameters of size 100 and moments of 1e-6, and an optimizer that divides by
its gradient hides a factor everywhere else. A leaf with a second term beyond `LARGEST` is reported as noise.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmdkit.cluster import detect_cluster, join
from spmdkit.errors import ConfigError
from spmdkit.foundation.trees import is_key, named_leaves
from spmdkit.foundation.user_code import call_user
from spmdkit.verify.device_binding import check_devices, check_holds_no_device, shard_arguments
from spmdkit.verify.difference import boundary_of, factor_of
from spmdkit.verify.dtypes import HALF_ULPS, eps, is_half, is_inexact, wide
from spmdkit.verify.locate_step import Traced, locate_step
from spmdkit.verify.noise import LARGEST, MULTIPLE
from spmdkit.verify.probes import one_ulp

FLOOR_ULPS = 64
NUM_PROBES = 4
CLOSE = 0.5
"""A result with the shapes of an argument is its new value if it is within this relative 2-norm of it, else its
gradient."""

NOTHING = "nothing could be compared: every result is below noise. Try fewer layers or steps, or 64-bit types."

QUANTITIES = ("loss", "gradient", "state", "value")

Make = Callable[[np.ndarray], tuple[Callable[..., Any], Sequence[Any]]]
Leaves = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Step:
    """A step on its devices, with its arguments on the host and the sharding of each leaf; None if uncommitted."""

    run: Callable[..., Any]
    arguments: tuple[Any, ...]
    shardings: list[Any]


class Report(dict[str, Any]):
    """The report of `sk.verify_step`: plain values under the names of `spmdkit verify --json`. `str` gives a readable
    form."""

    def __str__(self) -> str:
        good = sum(case["passed"] for case in self["cases"])
        lines = [line for case in self["cases"] for line in _format_case(case)]
        lines += [f"note: {note}" for note in self["notes"]]
        verdict = "passed" if self["passed"] else "failed"
        return "\n".join([*lines, f"{verdict}: {good} of {len(self['cases'])} meshes equal to one device."])


def _format_case(case: Mapping[str, Any]) -> Iterator[str]:
    errors = ", ".join(f"{q} {e:.1e}" for q in QUANTITIES if (e := case[f"{q}_error"]) is not None)
    yield f"{_named(case['mesh'])}: {'equal' if case['passed'] else 'DIFFERS'} ({errors})"
    if not case["passed"]:
        seen = case["diagnosis"]
        yield f"  {seen['kind']}: {seen['found']}"
        if case["located"] is not None:
            yield f"  first {case['located']['text']}"
        yield f"  repair: {seen['repair']}"


def verify_step(
    make: Make | Callable[..., Any],
    *,
    meshes: Sequence[Mapping[str, int]],
    arguments: Sequence[Any] | None = None,
    specs: Sequence[Any] | None = None,
    steps: int = 2,
) -> Report:
    """Returns how a hand-written step on each mesh differs from one device.

    Args:
        make: `make(devices) -> (step, arguments)`; `devices` is an array with one dim per axis in `meshes`, in order of
            appearance. With `arguments`, the step itself, which may name axes but contain no devices.
        meshes: sizes of the axes, by name; a missing axis has size one.
        arguments: of a step that is passed directly.
        specs: a `PartitionSpec` for each argument, or a tree of specs that is a prefix of it; None: replicated.
        steps: number of consecutive steps, if a result is the new value of an argument.

    Raises:
        ConfigError: the arguments do not fit together, or contain devices.
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
    """Returns the names of all axes, in order of appearance."""
    axes = tuple(dict.fromkeys(axis for sizes in meshes if isinstance(sizes, Mapping) for axis in sizes))
    bad = [s for s in meshes if not isinstance(s, Mapping) or not all(isinstance(n, int) and n > 0 for n in s.values())]
    if bad or not axes:
        raise ConfigError(
            f"sk.verify_step: meshes is {list(meshes)}. It must be a list of sizes by axis name, each at least 1. "
            'Try meshes=[{"data": 4}, {"data": 2, "tensor": 2}].'
        )
    return axes


def _open(make: Make, devices: Sequence[jax.Device], sizes: Mapping[str, int]) -> Step:
    """Returns the step on the first devices, in the shape of a mesh of these sizes."""
    shape = tuple(sizes.values())
    given = np.array(devices[: math.prod(shape)], dtype=object).reshape(shape)
    made = call_user(lambda: make(given), "make")
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0]) and isinstance(made[1], tuple | list)):
        raise ConfigError(
            f"make(devices) returned {type(made).__name__}. It must return the step and its arguments: return step, "
            "(state, batch)."
        )
    step, arguments = made[0], tuple(made[1])
    check_devices(step, arguments, given)
    return Step(step, jax.tree.map(_to_host, arguments), [_sharding_of(x) for x in jax.tree.leaves(arguments)])


def _sharding_of(x: Any) -> Any:
    """Returns the sharding of a committed array; None for host values and uncommitted arrays."""
    return x.sharding if isinstance(x, jax.Array) and x.committed else None


def _to_host(x: Any) -> Any:
    """Returns a leaf as numpy array. A key is copied, since a step may donate it."""
    return jnp.copy(x) if is_key(x) else np.asarray(x)


def _placed(step: Step, random: np.random.Generator | None = None) -> list[Any]:
    """Returns the arguments on their devices. Each run needs a new copy, since a step may donate its arguments.

    Args:
        random: moves them by one ulp first.
    """
    given = step.arguments
    if random is not None:
        move = one_ulp(random, "float64" if jax.config.jax_enable_x64 else "float32")  # type: ignore[attr-defined]
        given = jax.tree.map(lambda x: x if is_key(x) else move(x), given)
    flat, structure = jax.tree.flatten(given)
    copies = [jnp.copy(x) if is_key(x) else x for x in flat]
    placed = [x if s is None else jax.device_put(x, s) for x, s in zip(copies, step.shardings, strict=True)]
    return list(jax.tree.unflatten(structure, placed))


def _located(one: Step, many: Step, axes: Mapping[str, int]) -> dict[str, Any]:
    """Returns `located`: the first value that differs in the first step, or None."""
    moved = [_placed(one, np.random.default_rng(i)) for i in range(2)]
    of = [(*getattr(step.run, "of_mesh", (None, step.run)), _placed(step)) for step in (one, many)]
    sides = [Traced(run, arguments, mesh) for mesh, run, arguments in of]
    found = locate_step(sides[0], moved, sides[1], axes)
    return {"located": None if found is None else {**found._asdict(), "text": found.text}}


def _run(step: Step, steps: int, random: np.random.Generator | None = None) -> Leaves:
    """Returns every leaf of the step's results on the host, by `step 1: 0/params/w`.

    Args:
        random: moves the arguments by one ulp first.
    """
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
    """Returns the results that are new values of arguments: index of the result -> index of the argument."""
    found: dict[int, int] = {}
    for i, result in enumerate(results):
        for j, argument in enumerate(arguments):
            if j not in found.values() and _is_like(argument, result) and _is_close(argument, result):
                found[i] = j
                break
    return found


def _is_like(a: Any, b: Any) -> bool:
    one, other = map(_flat, (a, b))
    if not one[0] or one[1] != other[1]:
        return False
    return all(x.shape == y.shape and x.dtype == y.dtype for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


def _flat(tree: Any) -> tuple[Any, Any]:
    return jax.tree.flatten(tree)


def _is_close(argument: Any, result: Any) -> bool:
    pairs = zip(*map(jax.tree.leaves, (argument, result)), strict=True)
    both = [(wide(x), wide(y)) for x, y in pairs if is_inexact(x)]
    size, moved = (
        math.sqrt(sum(float(np.sum(np.abs(z) ** 2)) for z in zs))
        for zs in ([x for x, _ in both], [y - x for x, y in both])
    )
    return bool(both) and size > 0 and moved <= CLOSE * size


def _kind(result: Any, arguments: Sequence[Any]) -> str:
    if isinstance(result, np.ndarray) and result.ndim == 0:
        return "loss"
    parts = (part for argument in arguments for part in _parts(argument))
    return "gradient" if any(_is_like(part, result) for part in parts) else "value"


def _parts(tree: Any, depth: int = 3) -> Iterator[Any]:
    """Yields a tree and its subtrees: the parameters may be part of a state."""
    yield tree
    children = jax.tree_util.default_registry.flatten_one_level(tree) if depth else None
    for child in () if children is None else children[0]:
        yield from _parts(child, depth - 1)


def _tolerances(reference: Leaves, probes: Sequence[Leaves]) -> tuple[dict[str, float], dict[str, float]]:
    """Returns (tolerance of each leaf as a 2-norm, leaves that are noise with the relative effect of one ulp)."""
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
    if found is None or found.shape != expected.shape:
        return math.inf
    if not is_inexact(expected):
        return 0.0 if np.array_equal(found, expected) else math.inf
    difference = float(np.linalg.norm((wide(found) - wide(expected)).ravel()))
    return (
        difference
        if math.isfinite(difference) or not np.array_equal(wide(found), wide(expected), equal_nan=True)
        else 0.0
    )


def _case(mesh: dict[str, int], found: Leaves, expected: Leaves, tolerance: Mapping[str, float]) -> dict[str, Any]:
    distances = {path: _distance(found.get(path), x) for path, x in expected.items()}
    wrong = [path for path, d in distances.items() if not d <= tolerance[path]]
    relative = {path: d / max(float(np.linalg.norm(wide(expected[path]))), 1e-30) for path, d in distances.items()}
    outcome: dict[str, Any] = {"mesh": mesh}
    for quantity in QUANTITIES:
        own = [relative[p] for p in expected if _quantity(p) == quantity and (p in wrong or relative[p] < LARGEST)]
        outcome[f"{quantity}_error"] = max(own, default=None)
    outcome |= {"worst_leaf": max(relative, key=relative.__getitem__), "passed": not wrong}
    if wrong:
        failed = [q for q in QUANTITIES if any(_quantity(path) == q for path in wrong)]
        seen = _diagnosis(mesh, wrong, found, expected, relative)
        outcome |= {"failed": failed, "worst_leaf": wrong[0], "diagnosis": seen}
    return outcome


def _quantity(path: str) -> str:
    return path.partition(": ")[2].partition(" ")[0]


def _diagnosis(
    mesh: Mapping[str, int], wrong: Sequence[str], found: Leaves, expected: Leaves, relative: Mapping[str, float]
) -> dict[str, str]:
    first = wrong[0]
    step = [path for path in wrong if path.startswith(first.partition(": ")[0])]
    where = f"'{first}' differs by {relative[first]:.1e}, the first of {len(step)} that do in this step"
    if first not in found or found[first].shape != expected[first].shape:
        return {
            "kind": "shape",
            "found": f"'{first}' is missing or has another shape",
            "repair": "The shapes of the step's results depend on the mesh.",
        }
    for path in step:
        if not is_inexact(expected[path]) or not np.any(expected[path]):
            continue
        factor = factor_of(found, expected, [path])
        axes = None if factor is None else _axes_of(factor, mesh)
        if axes is not None and factor is not None:
            times = f"{factor:.4g} times" if factor > 1 else f"1/{1 / factor:.4g} of"
            kind, repair = (
                ("reduced twice", f"A complete value is added up over {axes} again, or a sum replaces a mean.")
                if factor > 1
                else ("not reduced", f"A sum over {axes} is missing, or its result is divided again.")
            )
            return {
                "kind": kind,
                "found": f"{where}; '{path}' is {times} that of one device: the size of {axes}",
                "repair": repair,
            }
    if (turn := boundary_of(found[first], expected[first])) is not None:
        found_at = f"{where}; dim {turn[0]} of it is right on one side of index {turn[1]} and wrong on the other"
        return {
            "kind": "shard boundary",
            "found": found_at,
            "repair": "Values beyond the shard are missing or misplaced.",
        }
    repair = "First check what the step computes over an axis: shard_map, collectives, axis_index, its own mean rows."
    return {"kind": "other", "found": where, "repair": repair}


def _axes_of(factor: float, mesh: Mapping[str, int]) -> str | None:
    """Returns the axes with a size that equals a factor or its inverse; a single axis before several."""
    size = factor if factor > 1 else 1 / max(factor, 1e-30)
    large = {axis: n for axis, n in mesh.items() if n > 1}
    groups = [{axis: n} for axis, n in large.items()] + [large]
    for group in groups:
        if abs(size / math.prod(group.values()) - 1) < 0.02:
            return " x ".join(group)
    return None


def _named(mesh: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1) or "one device"
