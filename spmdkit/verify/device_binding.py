"""The devices of a hand-written step. A step that creates its own mesh cannot run on another one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmdkit import compat
from spmdkit.errors import ConfigError
from spmdkit.foundation.jaxprs import equations
from spmdkit.foundation.trees import canonical_dtype, named_leaves
from spmdkit.foundation.user_code import call_user


def shard_arguments(
    step: Callable[..., Any], arguments: Sequence[Any], specs: Sequence[Any] | None, axes: Sequence[str]
) -> Any:
    """Returns the `make` of a step without devices of its own: it shards the arguments by their specs and sets the
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
    jaxpr = _traced(step, shapes)  # without a mesh: JAX rejects a step with another one before it is seen

    def trace() -> Any:
        with jax.set_mesh(mesh):
            return jax.make_jaxpr(step)(*shapes)

    held = next(_meshes_in(jaxpr or call_user(trace, "the step"), frozenset([device])), None)
    if held is not None:
        raise ConfigError(
            f"the step passed to sk.verify_step contains a mesh of {held[0]} devices, {held[1]}. A step that is "
            "passed directly runs on every mesh in `meshes`, so it may name axes only. Pass a function make(devices) "
            "-> (step, arguments) that creates the mesh, or use PartitionSpec only."
        )


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    array = x if isinstance(x, jax.Array) else np.asarray(x)
    return jax.ShapeDtypeStruct(array.shape, canonical_dtype(array.dtype))


def check_devices(step: Callable[..., Any], arguments: Sequence[Any], devices: np.ndarray) -> None:
    """Rejects a step or arguments that `make` put on other devices than those it received."""
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
    found = None if jaxpr is None else next(_meshes_in(jaxpr, given), None)
    if found is not None:
        raise ConfigError(
            f"make received {len(given)} devices, and its step contains a mesh of {found[0]}, {found[1]}. {rule}"
        )


def _traced(step: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Returns the jaxpr of a step, or None if it cannot be traced from outside: it is compiled, or has side effects."""
    try:
        return jax.make_jaxpr(step)(*arguments)
    except Exception:  # noqa: BLE001 - the run raises it again
        return None


def _meshes_in(jaxpr: Any, given: frozenset[jax.Device]) -> Iterator[tuple[int, str]]:
    """Yields (devices, location) for each use of a mesh of other devices than `given`."""
    for eqn in equations(jaxpr):
        for mesh in map(_mesh_of, jax.tree.leaves(list(eqn.params.values()))):
            if mesh is not None and not mesh.empty and frozenset(mesh.devices.ravel()) != given:
                yield mesh.devices.size, f"used at {compat.source_line(eqn)}"


def _mesh_of(value: Any) -> Mesh | None:
    mesh = value.mesh if isinstance(value, NamedSharding) else value
    return mesh if isinstance(mesh, Mesh) else None
