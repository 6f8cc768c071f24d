"""An op alone on a mesh of at most eight devices, without a program around it: its numbers, and its compiled text."""

import math

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from spmdkit.mesh import layout, mesh
from spmdkit.plan.collectives_bill import read_bill
from spmdkit.plan.hlo.text import parse
from spmdkit.step import trace_context

GATHERED_TWICE = jax.__version_info__ >= (0, 11)
"""Whether a gather of the forward pass and the same one of the backward pass stay two where one program has both. What
a part gathers is not kept, so they are two in the formulas; jax 0.10 makes one of them where nothing lies between, as
in these small programs."""


def step(attention=None, devices=None, **asked):
    """Returns the record of a step on a mesh, as the program puts it in place."""
    num = math.prod(asked.values())
    sizes = mesh.resolve(asked, num)
    return trace_context.Context(
        trace_context.ShardingSpec(
            mesh=mesh.make_mesh(sizes, (devices or jax.devices())[:num]), sizes=sizes, inner_axes=("fsdp", "expert")
        ),
        options=trace_context.StepOptions(
            logical_axes=layout.logical_axes({}), attention=attention or trace_context.AttentionSettings()
        ),
    )


def value_and_grad(fn, *args, **asked):
    """Returns (value, gradients) of `sum(weights * fn(*args))`, on a mesh if one is asked for."""

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
        args: (shape, dims) of each argument; of an integer one (shape, dims, "int32").
        devices: instead of the eight of this process, with `options` for their compiler.
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
    """Returns the sharding that the logical names of the dims give."""
    cut = [record.sharding.inner_axes if d == "batch" else record.options.logical_axes[d] if d else () for d in dims]
    return _on(record, mesh.canonical(cut, record.sharding.sizes))


def _on(record, spec):
    return NamedSharding(record.sharding.mesh, spec)
