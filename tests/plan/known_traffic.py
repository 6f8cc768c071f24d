"""Small programs whose traffic is known by hand: what each device sends in one step, by op and mesh axes.

Written with explicit collectives in `shard_map`, on a mesh data 2 x fsdp 4 of eight devices, so that the strategy's own
formula is the answer and no partitioner decides. F32[64, 128] is 32 KiB, called W.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

W = 64 * 128 * 4
SIZES = {"data": 2, "fsdp": 4}
PROGRAMS = {}


def program(**expected):
    """Registers a program with its bytes: `all_reduce_data=...` is what is sent by all_reduce over data."""
    own = {compiler: expected.pop(compiler, None) for compiler in ("cpu", "tpu")}

    def register(function):
        PROGRAMS[function.__name__] = (function, {c: expected if own[c] is None else own[c] for c in own})
        return function

    return register


def compiled(name, devices):
    """Returns the compiled program."""
    mesh = Mesh(np.array(devices[:8]).reshape(2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    function, _ = PROGRAMS[name]
    inner, in_specs, out_specs, shapes = function()
    args = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for (shape, dtype), spec in zip(shapes, in_specs, strict=True)
    ]
    run = jax.shard_map(inner, mesh=mesh, in_specs=tuple(in_specs), out_specs=out_specs, check_vma=False)
    return jax.jit(run).lower(*args).compile()


def sent(bill):
    """Returns `op_axes` -> bytes, None where a trip count is unknown."""
    found = {}
    for c in bill.collectives:
        if c.counted:
            key = "_".join([c.op, *c.axes])
            found[key] = None if c.bytes is None or found.get(key, 0) is None else found.get(key, 0) + c.bytes
    return found


def ring(n):
    return [(i, (i + 1) % n) for i in range(n)]


F32 = ((64, 128), jnp.float32)


@program(all_reduce_data=W)  # 2 (2-1)/2 W
def mirrored():
    return lambda w: lax.psum(w, "data"), [P()], P(), [F32]


@program(reduce_scatter_fsdp=3 * W // 4, all_reduce_data=W // 4, all_gather_fsdp=3 * W // 4)
def hierarchical():
    def run(w):
        part = lax.psum_scatter(w, "fsdp", tiled=True)
        return lax.all_gather(lax.psum(part, "data") * 2, "fsdp", tiled=True)

    return run, [P()], P(), [F32]


@program(all_reduce_fsdp=2 * 3 * W // 4, all_gather_fsdp=3 * W // 4)
def zero_1():
    def run(w, g):
        g = lax.psum(g, "fsdp")
        own = lax.dynamic_slice_in_dim(g, lax.axis_index("fsdp") * 16, 16)
        return lax.all_gather(w - own, "fsdp", tiled=True)

    return run, [P("fsdp"), P()], P(), [F32, F32]


@program(reduce_scatter_fsdp=3 * W // 4, all_gather_fsdp=3 * W // 4)
def zero_2():
    def run(w, g):
        return lax.all_gather(w - lax.psum_scatter(g, "fsdp", tiled=True), "fsdp", tiled=True)

    return run, [P("fsdp"), P()], P(), [F32, F32]


@program(all_gather_fsdp=3 * 2 * 3 * W // 4, reduce_scatter_fsdp=3 * 3 * W // 4)  # three layers, gathered twice
def zero_3():
    def loss(layers, x):
        block = jax.checkpoint(lambda x, w: (jnp.sin(lax.all_gather(w, "fsdp", tiled=True) * x), None))
        return lax.scan(block, x, layers)[0].sum()

    return jax.value_and_grad(loss), [P(None, "fsdp"), P()], (P(), P(None, "fsdp")), [((3, 64, 128), jnp.float32), F32]


@program(all_reduce_fsdp=2 * 2 * 3 * (16 * 64 * 4) // 4)  # the products of both pairs, forward; x[32 / 2, 64]
def tensor_pair():
    def run(x, up, down):
        times = functools.partial(jnp.matmul, precision="highest")  # else a TPU multiplies, and sends, bfloat16
        for _ in range(2):
            x = lax.psum(times(jnp.tanh(times(x, up)), down), "fsdp")
        return x

    shapes = [((32, 64), jnp.float32), F32, ((128, 64), jnp.float32)]
    return run, [P("data"), P(None, "fsdp"), P("fsdp")], P("data"), shapes


@program(collective_permute_fsdp=4 * W // 4)  # four steps, each sends a quarter of W
def ring_in_a_scan():
    def run(w):
        def step(carry, _):
            block, total = carry
            return (lax.ppermute(block, "fsdp", ring(4)), total + jnp.sin(block)), None

        return lax.scan(step, (w, jnp.zeros_like(w)), length=4)[0][1]

    return run, [P("fsdp")], P("fsdp"), [F32]


@program(collective_permute_fsdp=W // 4)  # the last device has no target and sends nothing; the others send their part
def line():
    return lambda w: lax.ppermute(w, "fsdp", [(0, 1), (1, 2), (2, 3)]), [P("fsdp")], P("fsdp"), [F32]


@program(all_to_all_fsdp=3 * (W // 4) // 4)
def exchange():
    return lambda w: lax.all_to_all(w, "fsdp", 1, 0, tiled=True), [P("fsdp")], P(None, "fsdp"), [F32]


@program(all_reduce_data=W)  # once, after the loop
def accumulation():
    def run(w, x):
        add = lambda total, x: (total + jnp.outer(x, jnp.sin(x[0] * w[0])), None)
        return lax.psum(lax.scan(add, jnp.zeros((64, 128)), x)[0], "data")

    return run, [P(), P(None, None)], P(), [F32, ((8, 64), jnp.float32)]


@program(all_reduce_fsdp=5 * 3 * (2 * 3 * W // 4), collective_permute_data=5 * W)
def nested_scans():
    def run(w):
        def inner(w, _):
            return jnp.tanh(lax.psum(w, "fsdp")), None

        def outer(w, _):
            return lax.ppermute(lax.scan(inner, w, length=3)[0], "data", ring(2)) * 2, None

        return lax.scan(outer, w, length=5)[0]

    return run, [P()], P(), [F32]


@program(all_reduce_data=6 * W)  # i = 2, 5, ..., 17
def while_with_a_known_bound():
    def run(w):
        step = lambda carry: (carry[0] + 3, jnp.tanh(lax.psum(carry[1], "data")))
        return lax.while_loop(lambda carry: carry[0] <= 17, step, (2, w))[1]

    return run, [P()], P(), [F32]


@program(all_reduce_data=None)
def while_until_it_converges():
    def run(w):
        step = lambda w: jnp.tanh(lax.psum(w, "data"))
        return lax.while_loop(lambda w: jnp.sum(w) > 1.0, step, w)

    return run, [P()], P(), [F32]


@program(all_reduce_fsdp=2 * 3 * W // 4)  # the dearer branch
def conditional():
    def run(w, flag):
        dear, cheap = (lambda w: lax.psum(w, "fsdp")), (lambda w: jnp.zeros_like(w) + lax.psum(w[0], "fsdp"))
        return lax.cond(flag[0] > 0, dear, cheap, w)

    return run, [P(), P()], P(), [F32, ((1,), jnp.int32)]


@program(all_reduce_data=W // 2, cpu={"all_reduce_data": W})  # XLA's CPU compiler adds bfloat16 up in float32
def bfloat16():
    return lambda w: lax.psum(w, "data"), [P()], P(), [((64, 128), jnp.bfloat16)]


@program()
def groups_of_one():
    return lambda w: lax.psum(w, "data", axis_index_groups=[[0], [1]]), [P()], P(), [F32]


@program(all_reduce_fsdp=W)  # pairs inside the axis: 2 (2-1)/2 W
def part_of_an_axis():
    return lambda w: lax.psum(w, "fsdp", axis_index_groups=[[0, 1], [2, 3]]), [P()], P(), [F32]


@program(all_reduce_data_fsdp=2 * 7 * (W + 4) // 8)  # XLA's combiner makes one operation of two arrays
def two_arrays():
    run = lambda w: (lax.psum(w, ("data", "fsdp")), lax.psum(w.sum(), ("data", "fsdp")))
    return run, [P()], (P(), P()), [F32]
