"""The mesh in context while user code is traced, and the meaning of its sharding annotations there.

`jax.set_mesh` and `jax.sharding.use_abstract_mesh` are the public forms. They refuse to replace a mesh of another size,
and `set_mesh` cannot be used inside a trace.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

F = TypeVar("F", bound=Callable[..., Any])
ResolveSpec = Callable[[PartitionSpec], PartitionSpec | None]
ResolveSharding = Callable[[NamedSharding], NamedSharding | None]
"""Return what an annotation of user code means on the program's mesh, or None if it has no meaning there."""
EntersShardMap = Callable[[str, Any], Mesh | None]
"""Receives the line of user code (or an empty string) that calls a `jax.shard_map`, and its mesh or None; returns the
mesh on the program's devices and in the user's names, or None if JAX has the right one."""
DropsJit = Callable[[str, list[str]], bool]
"""Receives the source of a `jax.jit` function of user code and its arguments that place arrays (`donate_argnums`,
`in_shardings`); returns whether they are dropped."""


@contextlib.contextmanager
def mesh_in_context(mesh: Mesh | None) -> Iterator[None]:
    """Context in which a bare `PartitionSpec` refers to the axes of `mesh`. Manual axes of a `shard_map` and explicit
    axes stay in context. None: no mesh is in context until the body sets one; no effect inside a trace."""
    from jax._src import config, core
    from jax._src import mesh as mesh_lib

    now = mesh_lib.get_abstract_mesh()
    has_types = mesh is not None and now.size == mesh.size and not now.are_all_axes_auto
    if has_types or now._any_axis_manual or (mesh is None and not core.trace_state_clean()):
        yield
        return
    abstract = mesh_lib.empty_abstract_mesh if mesh is None else mesh.abstract_mesh
    states: Any = mesh_lib if hasattr(mesh_lib, "device_context") else config  # moved in jax 0.12
    concrete = states.device_context.swap_local(mesh_lib.empty_concrete_mesh)
    before = states.abstract_mesh_context_manager.swap_local(abstract)
    try:
        yield
    finally:
        states.abstract_mesh_context_manager.set_local(before)
        states.device_context.set_local(concrete)


def ignores_user_settings(fn: F) -> F:
    """Returns `fn`, in which a mesh that the caller set (`jax.set_mesh`) is not in context, and settings that are for
    code outside of a compiled program have no effect: a transfer guard, and `jax_debug_nans` and `jax_debug_infs`,
    which would end the process where `on_nonfinite` acts."""

    @functools.wraps(fn)
    def call(*args: Any, **options: Any) -> Any:
        has_mesh, settings = not jax.sharding.get_abstract_mesh().empty, _settings_to_change()
        if not has_mesh and not settings:
            return fn(*args, **options)
        with contextlib.ExitStack() as stack:
            if has_mesh:
                stack.enter_context(mesh_in_context(None))
            for setting in settings:
                stack.enter_context(setting)
            return fn(*args, **options)

    return cast(F, call)


_GUARDS = ("", "_host_to_device", "_device_to_device", "_device_to_host")


def _settings_to_change() -> list[contextlib.AbstractContextManager[Any]]:
    config: Any = jax.config
    guards = [getattr(config, f"jax_transfer_guard{direction}") for direction in _GUARDS]
    is_guarded = any(level not in (None, "allow", "log") for level in guards)
    return [
        *([jax.transfer_guard("allow")] if is_guarded else []),
        *([jax.debug_nans(False)] if config.jax_debug_nans else []),
        *([jax.debug_infs(False)] if config.jax_debug_infs else []),
    ]


def resolve_annotations(spec: ResolveSpec, sharding: ResolveSharding, enters: EntersShardMap, drops: DropsJit) -> None:
    """Passes every `PartitionSpec` and every `NamedSharding` of `with_sharding_constraint` to a function; a result of
    None removes the constraint. Drops the axes that an enclosing `vmap(spmd_axis_name=)` maps, over which the rows of a
    replica are sharded already; JAX (0.10.2) refuses them. A `shard_map` over a mesh of the user has that mesh in
    context, and one without a mesh that of `enters`. Donation and
    shardings of a `jax.jit` inside a trace are passed to `drops`. Idempotent."""
    from jax._src import pjit, source_info_util
    from jax._src import shard_map as shard_map_lib
    from jax.interpreters import batching

    primitive: Any = pjit.sharding_constraint_p
    rules = batching.fancy_primitive_batchers
    if "bind" in vars(primitive):
        return
    source_info_util.register_exclusion(__file__)  # the user's line is the caller's
    pjit._create_sharding_for_array = functools.partial(_of_spec, pjit._create_sharding_for_array, spec)
    pjit._infer_params = functools.partial(_without_placement, pjit._infer_params, drops)
    primitive.bind = functools.partial(_of_sharding, primitive.bind, sharding)
    rules[primitive] = functools.partial(_without_mapped_axes, rules[primitive])
    shard_map_lib._shard_map = functools.partial(_on_own_mesh, shard_map_lib._shard_map, enters)


_PLACES = ("donate_argn", "in_shardings", "out_shardings", "in_layouts", "out_layouts", "user_specified_in_shardings")


def _without_placement(infer: Any, drops: DropsJit, fun: Any, info: Any, *arguments: Any) -> Any:
    if (placing := _placing(info)) and drops(info.fun_sourceinfo, placing):
        info = _unplaced(info)
    return infer(fun, info, *arguments)


@functools.cache
def _plain() -> Any:
    return cast(Any, jax.jit(lambda: None))._jit_info


@functools.lru_cache(maxsize=1024)  # by identity, as JAX caches the traces of a function
def _unplaced(info: Any) -> Any:
    fields = [name for name in info._fields if name.startswith(_PLACES)]
    return info._replace(**{name: getattr(_plain(), name) for name in fields})


def _placing(info: Any) -> list[str]:
    """Returns the arguments of `jax.jit` that place its inputs or outputs."""
    shardings = [
        name
        for name in ("in_shardings", "out_shardings")
        if any(isinstance(x, jax.sharding.Sharding | PartitionSpec) for x in getattr(info, f"{name}_leaves"))
    ]
    return (["donate_argnums"] if info.donate_argnums or info.donate_argnames else []) + shardings


def _of_spec(create: Any, resolve: ResolveSpec, mesh: Any, spec: Any, *names: Any) -> Any:
    if isinstance(spec, PartitionSpec):
        resolved = resolve(spec)
        spec = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * len(spec)) if resolved is None else resolved
    return create(mesh, spec, *names)


def _of_sharding(bind: Any, resolve: ResolveSharding, x: Any, *, sharding: Any, **params: Any) -> Any:
    if isinstance(sharding, NamedSharding):
        spec = sharding.spec
        if len(spec) and all(dim is PartitionSpec.UNCONSTRAINED for dim in spec):
            return x
        sharding = resolve(sharding)
    return x if sharding is None else bind(x, sharding=sharding, **params)


def _without_mapped_axes(rule: Any, axis_data: Any, operands: Any, dims: Any, *, sharding: Any, **params: Any) -> Any:
    names = frozenset(axis_data.spmd_name or ())
    if names and dims[0] is not None and isinstance(sharding, NamedSharding):
        renamed = {name: None if name in names else name for name in sharding.mesh.axis_names}
        sharding = sharding.update(spec=renamed_axes(sharding.spec, renamed))
    return rule(axis_data, operands, dims, sharding=sharding, **params)


def renamed_axes(spec: PartitionSpec, names: Mapping[str, str | None]) -> PartitionSpec:
    """Returns a spec with its mesh axes renamed; axes without a new name are omitted."""

    def renamed(dim: Any) -> Any:
        if dim is None or dim is PartitionSpec.UNCONSTRAINED:
            return dim
        return tuple(names[a] for a in ((dim,) if isinstance(dim, str) else dim) if names.get(a) is not None) or None

    return PartitionSpec(*map(renamed, spec))


def _on_own_mesh(shard_map: Any, enters: EntersShardMap, f: Any, *, mesh: Any, in_specs: Any, **options: Any) -> Any:
    mapped = shard_map(f, mesh=mesh, in_specs=in_specs, **options)

    @functools.wraps(f)
    def in_context_of_its_mesh(*args: Any) -> Any:
        context, is_concrete = jax.sharding.get_abstract_mesh(), isinstance(mesh, Mesh)
        own = enters(_calling_line(), mesh if is_concrete else None) if mesh is None or is_concrete else None
        sizes, names = (own or context).shape, options.get("axis_names") or ()
        if math.prod(sizes.values()) > 1 and names and all(sizes.get(name) == 1 for name in names):
            return _over_size_one(f, names, args)
        is_right = is_concrete and context == mesh.abstract_mesh
        if own is None or is_right or context.empty or context == own.abstract_mesh or context._any_axis_manual:
            return mapped(*args)
        with mesh_in_context(own):
            return shard_map(f, mesh=own, in_specs=in_specs, **options)(*args)

    return in_context_of_its_mesh


def _over_size_one(f: Any, names: Iterable[str], args: Any) -> Any:
    """Returns `f(*args)` with axes of size one bound. XLA (jaxlib 0.10.2) refuses the collectives of a `shard_map` over
    part of a mesh where those axes have size one."""
    names = tuple(names)
    for name in names:
        f = jax.vmap(f, None, axis_name=name, axis_size=1)
    return jax.tree.map(lambda x: x.reshape(x.shape[len(names) :]), f(*args))


_JAX, _SPMDKIT = (os.path.dirname(file) + os.sep for file in (jax.__file__, os.path.dirname(__file__)))


def _calling_line() -> str:
    """Returns `file.py:12` of the call of a function of JAX; empty if this package calls it."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_JAX, __file__)):
        frame = frame.f_back
    file = frame.f_code.co_filename
    return "" if file.startswith(_SPMDKIT) else f"{file.removeprefix(os.getcwd() + os.sep)}:{frame.f_lineno}"
