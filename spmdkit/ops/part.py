"""The JAX primitive of one `sk.manual` part: a `shard_map` over all mesh axes, with rules for vmap and for derivatives.

Its batching rule prepends the mapped dim of an enclosing `vmap(spmd_axis_name=)` (the replicas of the mapped form, the
stages of a pipeline) to each spec. The body itself is never batched over mesh axes: JAX's own rule rejects residuals of
operands that are not mapped (`_RepError`, jax 0.10.2). The gradient is such a part too. Its residuals are the inputs
and the values that `remat` selects (`ops/remat.py`); all other values are recomputed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad, batching, mlir
from jax.sharding import Mesh, PartitionSpec

from spmdkit import compat
from spmdkit.mesh.mesh import MODEL_AXES, dim_axes
from spmdkit.ops.remat import save_all_but_gathered
from spmdkit.ops.residuals import Linearized, floats
from spmdkit.step import trace_context
from spmdkit.step.checks.implicit_psum import refuse_summed, traced


class _Level(NamedTuple):
    """One enclosing vmap: its mesh axes (None for a user's vmap) and the operands that it maps."""

    axes: tuple[str, ...] | None
    size: int
    mapped: tuple[bool, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """A body with its trace context, its specs, the `local_shapes` of its results, and the enclosing vmaps, outermost
    first.

    Attributes:
        watched: name and body, if the body takes a derivative that JAX's types could sum over the devices of a vmap.
        num_fixed: for a part that is linear in its last operands (tangents), the number of operands before them.
        pull: the transpose of such a part on shards, `(fixed, cotangents) -> cotangents of the last operands`.
    """

    body: Callable[..., tuple[jax.Array, ...]]
    context: trace_context.Context
    mesh: Mesh
    in_specs: tuple[PartitionSpec, ...]
    out_specs: tuple[PartitionSpec, ...]
    local_shapes: tuple[jax.ShapeDtypeStruct, ...]
    levels: tuple[_Level, ...] = ()
    watched: tuple[str, Callable[..., tuple[jax.Array, ...]]] | None = None
    num_fixed: int = 0
    pull: Callable[..., tuple[jax.Array, ...]] | None = None

    def run(self, *args: jax.Array) -> tuple[jax.Array, ...]:
        """Runs the part as a `shard_map`."""
        spmd = tuple(level.axes for level in self.levels)
        mapped = jax.shard_map(
            self._in_levels(self.body),
            mesh=self.mesh,
            in_specs=self._specs(),
            out_specs=tuple(PartitionSpec(*map(_one, spmd), *s) for s in self.out_specs),
        )
        return mapped(*args)

    def _specs(self) -> tuple[PartitionSpec, ...]:
        """Returns the specs of the operands, with the dims of the vmaps first."""
        of: Callable[[int], Any] = lambda i: (_one(level.axes) for level in self.levels if level.mapped[i])
        return tuple(PartitionSpec(*of(i), *spec) for i, spec in enumerate(self.in_specs))

    def _in_levels(self, fn: Callable[..., tuple[jax.Array, ...]]) -> Callable[..., tuple[jax.Array, ...]]:
        """Returns `fn` for shards with the dims of the vmaps first, all typed as varying over the axes of the vmaps."""
        over = tuple(a for level in self.levels for a in level.axes or ())

        def local(*shards: jax.Array) -> tuple[jax.Array, ...]:
            run = fn
            for level in reversed(self.levels):
                run = _over_level(run, level, self.mesh)
            return compat.as_varying(run(*compat.as_varying(shards, over)), over)

        return local

    def check(self, *args: Any) -> None:
        """Raises ConfigError if the body takes a derivative that JAX's types would sum over the axes of a vmap."""
        axes = [a for level in self.levels for a in level.axes or () if self.mesh.shape[a] > 1]
        if self.watched is None or not axes:
            return
        name, body = self.watched

        trace = functools.partial(traced, self._in_levels(body), self.mesh, self._specs(), args)
        refuse_summed(f"sk.manual: {name}", trace(typed=True), lambda: trace(typed=False), axes)

    def bind(self, *args: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(_manual_p.bind(*args, part=self))


def _one(names: tuple[str, ...] | None) -> Any:
    return names[0] if names is not None and len(names) == 1 else names


def _over_level(fn: Callable[..., Any], level: _Level, mesh: Mesh) -> Callable[..., Any]:
    """Returns `fn` mapped over the leading dim of the mapped shards; a dim that is sharded to size 1 is squeezed."""
    num = level.size
    for a in level.axes or ():
        num //= mesh.shape[a]
    if level.axes is None or num > 1:
        return jax.vmap(fn, in_axes=tuple(0 if m else None for m in level.mapped))

    def squeezed(*shards: jax.Array) -> tuple[jax.Array, ...]:
        out = fn(*(x[0] if m else x for x, m in zip(shards, level.mapped, strict=True)))
        return tuple(x[None] for x in out)

    return squeezed


def differentiable(part: Part) -> Callable[..., Any]:
    """Returns the part as a differentiable function; the body is differentiated on shards."""
    num_out = len(part.out_specs)

    @jax.custom_jvp
    def call(*args: jax.Array) -> tuple[jax.Array, ...]:
        return part.bind(*args)

    @call.defjvp
    def of_tangents(args: Sequence[jax.Array], tangents: Sequence[Any]) -> Any:
        keeping, linear = _with_residuals(part, args)
        out = keeping.bind(*args)
        residuals = tuple(checkpoint_name(x, mark) for x, mark in zip(out[num_out:], linear.marks, strict=True))
        of_args, of_results = floats(args), floats(part.local_shapes)

        def pull(fixed: Sequence[jax.Array], cotangents: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
            values, residuals = fixed[: len(args)], fixed[len(args) :]
            with trace_context.tracing(part.context):  # a custom gradient of the body uses its axes
                return _linearized(part, values, linear).backward(values, [x[0] for x in residuals], cotangents)

        tangent = tangent_of(part, of_args, more_specs=keeping.out_specs[num_out:], pull=pull)
        results = dict(zip(of_results, tangent.bind(*args, *residuals, *(tangents[i] for i in of_args)), strict=True))
        zero: Callable[[Any], Any] = lambda x: np.zeros(x.shape, jax.dtypes.float0)
        return out[:num_out], tuple(results[i] if i in results else zero(out[i]) for i in range(num_out))

    return call


def tangent_of(part: Part, of_args: Sequence[int], more_specs: Sequence[PartitionSpec] = (), pull: Any = None) -> Part:
    """Returns the part `(*args, *more, *tangents of some args) -> tangents of the results`, linear in the tangents.

    `more_specs`: specs of the operands `more`, used only by the transpose. `pull`: the transpose on shards; default:
    the transpose of this part's body.
    """
    num, fixed = len(part.in_specs), len(part.in_specs) + len(more_specs)
    of_results = floats(part.local_shapes)

    def body(*shards: jax.Array) -> tuple[jax.Array, ...]:
        def of_floats(*xs: jax.Array) -> list[jax.Array]:
            full_args = list(shards[:num])
            for i, x in zip(of_args, xs, strict=True):
                full_args[i] = x
            out = part.body(*full_args)
            return [out[i] for i in of_results]

        with trace_context.tracing(part.context):
            out, tangents = jax.jvp(of_floats, [shards[i] for i in of_args], list(shards[fixed:]))
        return tuple(compat.typed_like(t, y) for t, y in zip(tangents, out, strict=True))

    def pull_of_body(fixed: Sequence[jax.Array], cotangents: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        axes: list[Any] = []

        def linear(*tangents: jax.Array) -> list[jax.Array]:
            out = [compat.typed_like(y, c) for y, c in zip(body(*fixed, *tangents), cotangents, strict=True)]
            axes[:] = map(compat.varying_axes, out)
            return out

        like = (compat.typed_like(jnp.zeros(fixed[i].shape, fixed[i].dtype), fixed[i]) for i in of_args)
        transpose: Callable[[Any], tuple[jax.Array, ...]] = jax.linear_transpose(linear, *like)
        return transpose([compat.as_varying(c, sorted(a)) for c, a in zip(cotangents, axes, strict=True)])

    def mapped(level: _Level) -> _Level:
        args = level.mapped
        return level._replace(mapped=(*args, *(True,) * len(more_specs), *(args[i] for i in of_args)))

    return Part(
        body,
        part.context,
        part.mesh,
        (*part.in_specs, *more_specs, *(part.in_specs[i] for i in of_args)),
        tuple(part.out_specs[i] for i in of_results),
        tuple(part.local_shapes[i] for i in of_results),
        tuple(map(mapped, part.levels)),
        num_fixed=fixed,
        pull=pull or pull_of_body,
    )


def _linearized(part: Part, shards: Sequence[jax.Array], before: Linearized | None = None) -> Linearized:
    """Returns the linearized body at `shards`, with the same residuals as the trace `before`."""
    remat = part.context.options.remat
    trace = Linearized(part.body, shards, save_all_but_gathered if remat is None else remat.in_parts)
    if before is not None and trace.made_by != before.made_by:
        raise RuntimeError(f"two traces of one sk.manual part keep different values: {before.made_by}, {trace.made_by}")
    return trace


def _with_residuals(part: Part, args: Sequence[jax.Array]) -> tuple[Part, Linearized]:
    """Returns (the part that returns its residuals after its results, the trace that defines them). Each residual has a
    leading dim that is sharded over the axes along which it varies."""
    traces: list[Linearized] = []

    def probe(*shards: jax.Array) -> jax.Array:
        with trace_context.tracing(part.context):
            traces[:] = [_linearized(part, shards)]
        return jnp.zeros(())

    def body(*shards: jax.Array) -> tuple[jax.Array, ...]:
        with trace_context.tracing(part.context):
            out, residuals = _linearized(part, shards, linear).forward(shards)
            return (*out, *(x[None] for x in residuals))

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
    with compat.hide_spmd_vmap_axes():
        jax.eval_shape(jax.shard_map(probe, mesh=part.mesh, in_specs=part.in_specs, out_specs=PartitionSpec()), *shapes)
    (linear,) = traces
    # The axes of replicas and pipeline stages belong to an enclosing vmap.
    outer = {*part.context.sharding.data_axes, *part.context.mapped_axes}
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
        for a in dim_axes(names):
            shape[i] //= mesh.shape[a]
    return jax.ShapeDtypeStruct(tuple(shape), x.dtype)


_manual_p = jax.extend.core.Primitive("spmdkit_manual")
_manual_p.multiple_results = True


def _impl(*args: Any, part: Part) -> Any:
    return jax.jit(part.run)(*args)


def _abstract(*avals: Any, part: Part) -> list[Any]:
    lead = tuple(level.size for level in part.levels)
    avals_out = []
    for local, spec in zip(part.local_shapes, part.out_specs, strict=True):
        shape = list(local.shape)
        for i, names in enumerate(spec):
            for a in dim_axes(names):
                shape[i] *= part.mesh.shape[a]
        avals_out.append(jax.core.ShapedArray((*lead, *shape), local.dtype))
    return avals_out


def _batch(axis_data: Any, args: Sequence[Any], dims: Sequence[int | None], *, part: Part) -> Any:
    """Adds one level: the leading dim of mapped operands and of all results. Without mapped operands no level is
    added."""
    if all(d is None for d in dims):
        return part.bind(*args), [None] * len(part.local_shapes)
    moved = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
    spmd = axis_data.spmd_name
    level = _Level(None if spmd is None else tuple(spmd), axis_data.size, tuple(d is not None for d in dims))
    outer = dataclasses.replace(part, levels=(level, *part.levels))
    outer.check(*moved)
    out = outer.bind(*moved)
    return out, [0] * len(out)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, part: Part) -> Any:
    """The derivative of a mapped part or of a gradient: the derivative of its body."""
    out = part.bind(*primals)
    of_args = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]
    result_tangents = iter(tangent_of(part, of_args).bind(*primals, *(tangents[i] for i in of_args)))
    of_results = floats(part.local_shapes)
    zero: Callable[[Any], Any] = lambda x: ad.Zero(jax.typeof(x).to_tangent_aval())
    return out, [next(result_tangents) if i in of_results else zero(x) for i, x in enumerate(out)]


def _transpose(cotangents: Sequence[Any], *operands: Any, part: Part) -> list[Any]:
    """Returns the cotangents of the last operands, summed over vmaps that do not map the operand."""
    num, pull = part.num_fixed, part.pull
    fixed, linear = operands[:num], operands[num:]
    assert pull is not None and not any(map(ad.is_undefined_primal, fixed))
    cotangents = [ad.instantiate_zeros(c) for c in cotangents]
    lead = [sum(level.mapped[num + i] for level in part.levels) for i in range(len(linear))]
    avals = [x.aval if ad.is_undefined_primal(x) else x for x in linear]  # a constant has a known zero tangent
    shapes = [jax.ShapeDtypeStruct(x.shape[n:], x.dtype) for x, n in zip(avals, lead, strict=True)]
    gradient = Part(
        lambda *shards: pull(shards[:num], shards[num:]),
        part.context,
        part.mesh,
        (*part.in_specs[:num], *part.out_specs),
        part.in_specs[num:],
        tuple(_local(part.mesh, x, spec) for x, spec in zip(shapes, part.in_specs[num:], strict=True)),
        tuple(level._replace(mapped=(*level.mapped[:num], *(True,) * len(cotangents))) for level in part.levels),
    )
    grads = gradient.bind(*fixed, *cotangents)
    unmapped = [[n for n, level in enumerate(part.levels) if not level.mapped[num + i]] for i in range(len(linear))]
    summed = (g.sum(dims) if dims else g for g, dims in zip(grads, unmapped, strict=True))
    return [None] * num + [g if ad.is_undefined_primal(x) else None for g, x in zip(summed, linear, strict=True)]


_manual_p.def_impl(_impl)
_manual_p.def_abstract_eval(_abstract)
ad.primitive_jvps[_manual_p] = _jvp
ad.primitive_transposes[_manual_p] = _transpose
batching.fancy_primitive_batchers[_manual_p] = _batch
mlir.register_lowering(_manual_p, mlir.lower_fun(lambda *args, part: part.run(*args), multiple_results=True))
