"""Runs a single op on a mesh of at most eight devices, without a program: its values and its compiled text."""

import math

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from spmdkit.mesh import layout, mesh
from spmdkit.plan.collectives_bill import read_bill
from spmdkit.plan.hlo.text import parse
from spmdkit.step import trace_context

GATHERED_TWICE = jax.__version_info__ >= (0, 11)
"""Whether equal gathers of the forward and the backward pass remain two in one program. Gathered values are not
residuals, so the formulas count both. jax 0.10 merges them if no operation is in between, as in these small
programs."""


def step(attention=None, devices=None, reduction_dtype=None, **asked):
    """Returns the record of a step on a mesh, as installed by the program."""
    num = math.prod(asked.values())
    sizes = mesh.resolve(asked, num)
    return trace_context.Context(
        trace_context.ShardingSpec(
            mesh=mesh.make_mesh(sizes, (devices or jax.devices())[:num]), sizes=sizes, inner_axes=("fsdp", "expert")
        ),
        options=trace_context.StepOptions(
            logical_axes=layout.logical_axes({}),
            attention=attention or trace_context.AttentionSettings(),
            reduction_dtype=reduction_dtype,
        ),
    )


def value_and_grad(fn, *args, **asked):
    """Returns (value, gradients) of `sum(weights * fn(*args))`, optionally on a mesh."""

    def weighted(*args):
        out = fn(*args)
        return (out * (1 + jnp.arange(out.size).reshape(out.shape) / out.size)).sum(), out

    run = jax.jit(jax.value_and_grad(weighted, argnums=tuple(range(len(args))), has_aux=True))
    if not asked:
        return run(*args)
    record = step(**asked)
    with trace_context.tracing(record):
        return run(*jax.device_put(args, _on(record, PartitionSpec())))


def wire(fn, out, *args, backward=False, devices=None, options=None, **asked):
    """Returns (op, axes) -> bytes that one device sends for `fn(*args)`, or for the gradients of its float arguments.

    Args:
        out: dims of the result; with `backward` those of its cotangent.
        args: (shape, dims) of each argument, or (shape, dims, "int32") of an integer one.
        devices: replace the eight devices of this process; `options` are for their compiler.
    """
    record = step(devices=devices, **asked)

    abstract = lambda shape, dims, dtype="float32": jax.ShapeDtypeStruct(
        shape, dtype, sharding=sharding_of(record, dims)
    )
    given = [abstract(*arg) for arg in args]
    floats = [i for i, x in enumerate(given) if x.dtype != "int32"]

    def pulled(cotangent, *args):
        of_floats = lambda *xs: fn(*(xs[floats.index(i)] if i in floats else x for i, x in enumerate(args)))
        return jax.vjp(of_floats, *(args[i] for i in floats))[1](cotangent)

    with trace_context.tracing(record):
        result = jax.eval_shape(fn, *given)
        result = abstract(result.shape, out, result.dtype)
        outs = tuple(given[i].sharding for i in floats) if backward else result.sharding
        run = jax.jit(pulled if backward else fn, out_shardings=outs)
        compiled = run.lower(*([result] if backward else []), *given).compile(options)
    return sent_by(compiled, record)


def sent_by(compiled, record):
    """Returns (op, axes) -> bytes that one device sends in a compiled program."""
    found = {}
    for c in read_bill(parse(compiled.as_text()), record.sharding.sizes).collectives:
        found[c.op, *c.axes] = found.get((c.op, *c.axes), 0) + c.bytes
    return found


def sharding_of(record, dims):
    """Returns the sharding for the logical names of the dims."""
    cut = [record.sharding.inner_axes if d == "batch" else record.options.logical_axes[d] if d else () for d in dims]
    return _on(record, mesh.canonical(cut, record.sharding.sizes))


def _on(record, spec):
    return NamedSharding(record.sharding.mesh, spec)
