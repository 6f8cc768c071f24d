"""`sk.manual`: a part of a model in which every device sees its own shards and collectives are written out.

    y = sk.manual(fn, in_dims=[("batch", "sequence", None), ("embed", "mlp")], out_dims=("batch", "sequence", None))(x, w)

Outside of it arrays are global and the partitioner chooses the collectives. Inside `fn` an array is what one device holds, and
what crosses the wire is what `fn` says: `axes("mlp")` gives the mesh axes behind a logical name, and `all_gather`,
`reduce_scatter`, `all_reduce`, `all_to_all` and `ring_shift` take such axes. Over no axes they are the identity, so that one
text serves every mesh.

How: one `jax.shard_map`, manual over all mesh axes, as a primitive whose batching rule puts the mapped dim of an enclosing
`vmap(spmd_axis_name=)` (the replicas of the mapped form, the stages of a pipeline) in front of each spec. The body itself is
never batched over mesh axes: JAX's own rule refuses residuals of operands that are not mapped (`_RepError`, jax 0.10.2).
Its gradient is such a part too. What it finds kept of the forward pass is what `remat` names (`ops/remat.py`), and the inputs; the
rest it computes a second time. What all_gather joins is never kept: it is gathered again for the backward pass.

Gradients are right by type (`check_vma`): an operand that is the same along an axis gets the sum of its cotangents over it, and
`all_gather` turns into `reduce_scatter`. Nothing is ever summed over replica axes here; that is the reducer's.

Wire: forward, what `fn` sends; backward, every all_gather again, whatever else is computed a second time, the transpose of each
collective, and one all-reduce over every axis along which an operand is the same and its cotangent is not.
Source: jax documentation, "shard_map" (typing of manual axes, 2025).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import batching, mlir
from jax.sharding import Mesh, PartitionSpec

from spmdkit import compat, scope
from spmdkit.errors import ConfigError
from spmdkit.mesh import MODEL_AXES
from spmdkit.ops.collectives import axes
from spmdkit.ops.kept import Linearized, floats
from spmdkit.ops.remat import everything_but_gathered
from spmdkit.tree import describe, named_leaves

Dims = tuple[str | None, ...]


def manual(
    fn: Callable[..., Any], in_dims: Sequence[Any], out_dims: Any, name: str | None = None, *, kernel: bool = False
) -> Callable[..., Any]:
    """Returns `fn` as a function of global arrays that runs on the shards which the logical names of the dims give.

    Args:
        fn: `fn(*shards) -> shards`, pytrees of arrays. It closes over no traced array: pass it as an argument.
        in_dims: for each argument a pytree prefix of dims. Dims are a tuple with, for each dim, a logical name (`layout.axes`),
            a mesh axis, several of them joined by `+` (cut over the first, then over the next), or None; names that are
            missing at the end are None.
        out_dims: the same for the result. Along an axis that they do not name, a result has to be the same.
        name: what messages call it; default the function's own.
        kernel: whether `fn` calls a kernel (Pallas, cuDNN), which neither the partitioner nor a vmap over devices can cut.

    On a mesh without model axes, in a per-replica step and inside of another `manual`, `fn` is called as it is; with `kernel` only
    where its arrays are those of one device (ZeRO 1 and 2 and the stages of a pipeline are a vmap over devices).

    Raises:
        ConfigError: a dim is not divisible by its axes, a name is unknown, or a result differs along an axis that its dims
            do not name.
    """
    name = name or getattr(fn, "__name__", "fn")

    @functools.wraps(fn)
    def run(*args: Any) -> Any:
        step = scope.current_step()
        if not cuts(step, kernel):
            return fn(*args)
        assert step.mesh is not None
        args = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else jnp.asarray(x), args)
        leaves, treedef = jax.tree.flatten(args)
        in_specs = _flat_specs(step, tuple(in_dims), args)
        for spec, (path, leaf) in zip(in_specs, named_leaves(args), strict=True):
            _check_divisible(step, f"{name}: argument {path}", leaf.shape, spec)
        inner = dataclasses.replace(step, in_manual=True)
        seen: list[Any] = []

        def body(*shards: jax.Array) -> tuple[jax.Array, ...]:
            with scope.tracing(inner):
                out = fn(*jax.tree.unflatten(treedef, shards))
            specs = _flat_specs(step, out_dims, out)
            seen[:] = [jax.tree.structure(out), specs]
            return tuple(
                _typed(step, f"{name}: result {path}", x, spec)
                for (path, x), spec in zip(named_leaves(out), specs, strict=True)
            )

        shapes = _trace_once(step, body, leaves, in_specs)
        treedef_out, out_specs = seen
        part = _Part(body, inner, step.mesh, in_specs, tuple(out_specs), tuple(shapes))
        return jax.tree.unflatten(treedef_out, _differentiable(part)(*leaves))

    return run


def cuts(step: scope.Step, kernel: bool = False) -> bool:
    """Returns whether `manual` has anything to cut: a mesh with model axes (a `kernel`: any axes), and no manual part around it."""
    if step.in_manual or step.form == "manual" or step.mesh is None:
        return False
    if kernel:
        return step.mesh.size > 1
    return any(step.size(a) > 1 for a in MODEL_AXES if a not in (*step.data_axes, *step.mapped_axes))


# ---- specs ------------------------------------------------------------------------------------------------------------


def _is_dims(x: Any) -> bool:
    return isinstance(x, tuple) and all(d is None or isinstance(d, str) for d in x)


def _flat_specs(step: scope.Step, dims: Any, values: Any) -> tuple[PartitionSpec, ...]:
    """Returns the spec of each leaf of `values`, of which `dims` is a prefix."""

    def specs(dims: Dims, value: Any) -> list[PartitionSpec]:
        cut = [axes(*d.split("+")) if d is not None else () for d in dims]
        spec = PartitionSpec(*(None if not a else a[0] if len(a) == 1 else a for a in cut))
        for leaf in jax.tree.leaves(value):
            if len(dims) > jnp.ndim(leaf):
                raise ConfigError(
                    f"sk.manual: {len(dims)} names {dims} for {describe(leaf)}. At most one name for each dim."
                )
        return [spec] * len(jax.tree.leaves(value))

    with scope.tracing(step):
        nested = jax.tree.map(specs, dims, values, is_leaf=_is_dims)
    return tuple(s for s in jax.tree.leaves(nested, is_leaf=lambda x: isinstance(x, PartitionSpec)))


def _check_divisible(step: scope.Step, what: str, shape: tuple[int, ...], spec: PartitionSpec) -> None:
    for i, (length, names) in enumerate(zip(shape, spec, strict=False)):
        cut = (names,) if isinstance(names, str) else names or ()
        if length % step.size(*cut):
            raise ConfigError(
                f"sk.manual: {what} has shape {shape}; dim {i} is cut over {' x '.join(cut)} = {step.size(*cut)}, and {length} is not "
                f"divisible by it. Make the dim a multiple of {step.size(*cut)}, or use another mesh."
            )


def _named(spec: PartitionSpec) -> tuple[str, ...]:
    return tuple(a for names in spec for a in ((names,) if isinstance(names, str) else names or ()))


def _typed(step: scope.Step, what: str, x: Any, spec: PartitionSpec) -> jax.Array:
    """Returns a result typed as varying over the axes of its spec.

    Raises:
        ConfigError: it differs along other axes too.
    """
    x = jnp.asarray(x)
    extra = [a for a in compat.varying_axes(x) if a in MODEL_AXES and a not in _named(spec) and step.size(a) > 1]
    # Axes of a pipeline's stages and of ZeRO 1 and 2 belong to an enclosing vmap: there a result may differ.
    if extra := sorted(a for a in extra if a not in step.mapped_axes and a not in step.data_axes):
        raise ConfigError(
            f"sk.manual: {what} is {describe(x)} and differs along {extra}, which its dims do not name. Devices along "
            "them would disagree. Reduce it (all_reduce, reduce_scatter), or name the dim that they cut."
        )
    return compat.as_varying(x, _named(spec))


def _trace_once(step: scope.Step, body: Any, leaves: Sequence[Any], in_specs: Any) -> list[jax.ShapeDtypeStruct]:
    """Returns the global shapes of the results, and refuses traced arrays that `fn` closes over."""
    assert step.mesh is not None
    locals_: list[Any] = []

    def probe(*shards: jax.Array) -> jax.Array:
        locals_[:] = body(*shards)
        return jnp.zeros(())

    shaped = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    mapped = jax.shard_map(probe, mesh=step.mesh, in_specs=tuple(in_specs), out_specs=PartitionSpec())
    closed = jax.make_jaxpr(mapped)(*shaped)
    if any(isinstance(c, jax.core.Tracer) for c in closed.consts):
        raise ConfigError(
            "sk.manual: fn closes over a traced array. Inside, arrays are shards, and what comes from outside has to say how it "
            "is cut. Pass it as an argument, with its dims in in_dims."
        )
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in locals_]


# ---- the primitive -----------------------------------------------------------------------------------------------------


class _Level(NamedTuple):
    """One enclosing vmap: its mesh axes (None for a vmap of the user's own) and which operands it maps."""

    axes: tuple[str, ...] | None
    size: int
    mapped: tuple[bool, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class _Part:
    """A body with the step that it sees and its specs; `local_shapes` of the results, and the vmaps around it, the outermost first."""

    body: Callable[..., tuple[jax.Array, ...]]
    step: scope.Step
    mesh: Mesh
    in_specs: tuple[PartitionSpec, ...]
    out_specs: tuple[PartitionSpec, ...]
    local_shapes: tuple[jax.ShapeDtypeStruct, ...]
    levels: tuple[_Level, ...] = ()

    def run(self, *args: jax.Array) -> tuple[jax.Array, ...]:
        """Runs the part as a `shard_map`."""
        levels = self.levels
        over = tuple(a for level in levels for a in level.axes or ())
        spmd = tuple(level.axes for level in levels)

        def in_spec(i: int, spec: PartitionSpec) -> PartitionSpec:
            return PartitionSpec(*(_one(level.axes) for level in levels if level.mapped[i]), *spec)

        def local(*shards: jax.Array) -> tuple[jax.Array, ...]:
            fn = self.body
            for level in reversed(levels):
                fn = _over_level(fn, level, self.mesh)
            return compat.as_varying(fn(*compat.as_varying(shards, over)), over)

        mapped = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=tuple(in_spec(i, s) for i, s in enumerate(self.in_specs)),
            out_specs=tuple(PartitionSpec(*map(_one, spmd), *s) for s in self.out_specs),
        )
        return mapped(*args)

    def bind(self, *args: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(_manual_p.bind(*args, part=self))


def _one(names: tuple[str, ...] | None) -> Any:
    return names[0] if names is not None and len(names) == 1 else names


def _over_level(fn: Callable[..., Any], level: _Level, mesh: Mesh) -> Callable[..., Any]:
    """Returns `fn` over the leading dim of the mapped shards: one position where the mesh axes cut it to one."""
    num = level.size
    for a in level.axes or ():
        num //= mesh.shape[a]
    if level.axes is None or num > 1:
        return jax.vmap(fn, in_axes=tuple(0 if m else None for m in level.mapped))

    def squeezed(*shards: jax.Array) -> tuple[jax.Array, ...]:
        out = fn(*(x[0] if m else x for x, m in zip(shards, level.mapped, strict=True)))
        return tuple(x[None] for x in out)

    return squeezed


def _differentiable(part: _Part) -> Callable[..., Any]:
    """Returns the part as a function with a gradient: the body's own, computed on the shards."""
    num_out = len(part.out_specs)
    kept_specs: list[PartitionSpec] = []
    probed: list[Linearized] = []

    @jax.custom_vjp
    def call(*args: jax.Array) -> tuple[jax.Array, ...]:
        return part.bind(*args)

    def forward(*args: jax.Array) -> Any:
        keeping, linear = _keeping(part, args)
        kept_specs[:], probed[:] = keeping.out_specs[num_out:], [linear]
        out = keeping.bind(*args)
        kept = tuple(checkpoint_name(x, mark) for x, mark in zip(out[num_out:], linear.marks, strict=True))
        return out[:num_out], (args, kept)

    def backward(residuals: Any, cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
        args, kept = residuals
        of_args, of_results = floats(args), floats(part.local_shapes)

        def body(*shards: jax.Array) -> tuple[jax.Array, ...]:
            values, left = shards[: len(args)], shards[len(args) :]
            with scope.tracing(part.step):  # a gradient that the body brings itself asks for its axes too
                linear = _linearized(part, values, *probed)
                return linear.backward(values, [x[0] for x in left[: len(kept)]], left[len(kept) :])

        gradient = _Part(
            body,
            part.step,
            part.mesh,
            (*part.in_specs, *kept_specs, *(part.out_specs[i] for i in of_results)),
            tuple(part.in_specs[i] for i in of_args),
            tuple(_local(part.mesh, args[i], part.in_specs[i]) for i in of_args),
        )
        grads = dict(zip(of_args, gradient.bind(*args, *kept, *(cotangents[i] for i in of_results)), strict=True))
        return tuple(grads.get(i) for i in range(len(args)))

    call.defvjp(forward, backward)
    return call


def _linearized(part: _Part, shards: Sequence[jax.Array], before: Linearized | None = None) -> Linearized:
    """Returns the body at `shards`, which keeps what a trace `before` has kept."""
    remat = part.step.remat
    found = Linearized(part.body, shards, everything_but_gathered if remat is None else remat.in_parts)
    if before is not None and found.made_by != before.made_by:
        raise RuntimeError(f"two traces of one sk.manual part keep different values: {before.made_by}, {found.made_by}")
    return found


def _keeping(part: _Part, args: Sequence[jax.Array]) -> tuple[_Part, Linearized]:
    """Returns the part with what is kept for its gradient behind its results, and the trace that says what that is.

    A kept value gets a leading dim that is cut over the axes along which it differs: each device's own.
    """
    found: list[Linearized] = []

    def probe(*shards: jax.Array) -> jax.Array:
        with scope.tracing(part.step):
            found[:] = [_linearized(part, shards)]
        return jnp.zeros(())

    def body(*shards: jax.Array) -> tuple[jax.Array, ...]:
        with scope.tracing(part.step):
            out, kept = _linearized(part, shards, linear).forward(shards)
            return (*out, *(x[None] for x in kept))

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
    jax.eval_shape(jax.shard_map(probe, mesh=part.mesh, in_specs=part.in_specs, out_specs=PartitionSpec()), *shapes)
    (linear,) = found
    # Axes of replicas and of a pipeline's stages belong to an enclosing vmap, as in _typed.
    outer = {*part.step.data_axes, *part.step.mapped_axes}
    differs = [tuple(a for a in MODEL_AXES if a in compat.varying_axes_of(x) and a not in outer) for x in linear.kept]
    keeping = dataclasses.replace(
        part,
        body=body,
        out_specs=(*part.out_specs, *(PartitionSpec(names or None) for names in differs)),
        local_shapes=(*part.local_shapes, *(jax.ShapeDtypeStruct((1, *x.shape), x.dtype) for x in linear.kept)),
    )
    return keeping, linear


def _local(mesh: Mesh, x: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    shape = list(x.shape)
    for i, names in enumerate(spec):
        for a in (names,) if isinstance(names, str) else names or ():
            shape[i] //= mesh.shape[a]
    return jax.ShapeDtypeStruct(tuple(shape), x.dtype)


_manual_p = jax.extend.core.Primitive("spmdkit_manual")
_manual_p.multiple_results = True


@_manual_p.def_impl
def _impl(*args: Any, part: _Part) -> Any:
    return jax.jit(part.run)(*args)


@_manual_p.def_abstract_eval
def _abstract(*avals: Any, part: _Part) -> list[Any]:
    lead = tuple(level.size for level in part.levels)
    found = []
    for local, spec in zip(part.local_shapes, part.out_specs, strict=True):
        shape = list(local.shape)
        for i, names in enumerate(spec):
            for a in (names,) if isinstance(names, str) else names or ():
                shape[i] *= part.mesh.shape[a]
        found.append(jax.core.ShapedArray((*lead, *shape), local.dtype))
    return found


def _batch(axis_data: Any, args: Sequence[Any], dims: Sequence[int | None], *, part: _Part) -> Any:
    """Adds one level: mapped operands carry it in front, and so does every result. Without a mapped one there is no level."""
    if all(d is None for d in dims):
        return part.bind(*args), [None] * len(part.local_shapes)
    moved = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
    spmd = axis_data.spmd_name
    level = _Level(None if spmd is None else tuple(spmd), axis_data.size, tuple(d is not None for d in dims))
    out = dataclasses.replace(part, levels=(level, *part.levels)).bind(*moved)
    return out, [0] * len(out)


batching.fancy_primitive_batchers[_manual_p] = _batch
mlir.register_lowering(_manual_p, mlir.lower_fun(lambda *args, part: part.run(*args), multiple_results=True))
