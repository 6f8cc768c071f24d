"""What Horovod's own tests assert, one row each, run by every rank of one set of processes: `python -m
tests.horovod.semantics OUT`; then the digits example, whose parameters go to OUT too.

Each row names the tests of horovod 0.28.1 whose values and errors it repeats: `name, name; FILE: name`, without
`test_horovod_`, of test/parallel/ test_torch.py unless said; `none: ...` is what no test of theirs asserts. A row
raises where they would fail. What live Horovod does otherwise (it hangs) is in the rows that begin with `better`.
"""

import contextlib
import functools
import importlib.util
import json
import os
import sys
import time
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import sparse

import spmdkit.horovod as hvd
from tests.support.compile_cache import one_mlir_context

EXAMPLE = Path(__file__).parents[2] / "examples" / "horovod_digits.py"
ROWS = {}
SHORT = "short" in sys.argv
DTYPES = ("bool", "float16") if SHORT else ("bool", "uint8", "int8", "int32", "int64", "float16", "float32", "float64")
REDUCED = ("float32",) if SHORT else ("int32", "int64", "float32", "float64")
SHAPES = [(12, 3, 2)[:dim] for dim in ((2,) if SHORT else (1, 2, 3))]
"""12 rows are a multiple of 2, 3 and 4 ranks. Each pair of a dtype and a shape is a program to compile: the short form
has one of each kind."""

INTERNAL = hvd.HorovodInternalError
FACTOR = 0.1915194503788923


def row(horovod):
    """Adds a row to the table; `horovod` names the tests that it repeats."""

    def add(fn):
        ROWS[fn.__name__] = (horovod, fn)
        return fn

    return add


@contextlib.contextmanager
def raises(kind, *parts):
    """Asserts that the body raises, with each of `parts` in the message."""
    try:
        yield
    except kind as error:
        missing = [part for part in parts if part not in str(error)]
        assert not missing, f"{missing} not in {error}"
    else:
        raise AssertionError(f"did not raise {kind} with {parts}")


def same(got, expected, rtol=0.0, atol=0.0):
    """Asserts dtype, shape and values."""
    assert isinstance(got, jax.Array), type(got)
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), (got, expected)
    np.testing.assert_allclose(np.asarray(got).astype(float), np.asarray(expected).astype(float), rtol=rtol, atol=atol)


def close(got, expected, rtol=1e-5):
    np.testing.assert_allclose(got, expected, rtol=rtol, atol=rtol * 0.1)


def random(dtype, shape=(12, 3), seed=1234):
    """Returns whole numbers, the same on every rank."""
    low = 0 if np.dtype(dtype).kind == "u" else -100
    return np.random.default_rng(seed).integers(low, 100, shape).astype(dtype)


def of_ranks(dtype, shape=(12, 3)):
    """Returns [size, *shape], another array for each rank, the same on every rank."""
    return random(dtype, (hvd.size(), *shape))


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def full(value, shape=(12, 3), dtype=np.float32):
    return np.full(shape, value).astype(dtype)


def rows_of(x, n, position):
    """Returns the rows of one of `n` ranks of a reducescatter or alltoall."""
    each = len(x) // n
    return x[each * position : each * (position + 1)]


def is_whole(dtype):
    return np.dtype(dtype).kind == "i"


@functools.cache
def even_odd():
    """Returns (the open set of this rank's parity, both sets)."""
    sets = [hvd.add_process_set([r for r in range(hvd.size()) if r % 2 == i]) for i in (0, 1)]
    return sets[hvd.rank() % 2], sets


def power_of_two():
    return hvd.size() & (hvd.size() - 1) == 0


# ---- values ----------------------------------------------------------------------------------------------------------


@row("allreduce, allreduce_average, allreduce_min, allreduce_max, allreduce_product")
def allreduce_by_each_reduction():
    n = hvd.size()
    for dtype in REDUCED:
        for shape in SHAPES:
            x = random(dtype, shape)
            same(hvd.allreduce(x, average=False), x * n)
            same(hvd.allreduce(x, average=True), x)
            same(hvd.allreduce(x), x)
        whole = of_ranks(dtype)
        mine = whole[hvd.rank()]
        same(hvd.allreduce(mine, op=hvd.Min), whole.min(0))
        same(hvd.allreduce(mine, op=hvd.Max), whole.max(0))
        same(hvd.allreduce(mine, op=hvd.Product), whole.prod(0, dtype=dtype), rtol=0 if n <= 3 else 1e-4)
    whole = of_ranks("int64")
    same(hvd.allreduce(whole[hvd.rank()]), np.trunc(whole.sum(0) / n).astype("int64"))
    half = random("float16")
    same(hvd.allreduce(half, op=hvd.Sum), half * np.float16(n))


@row("allreduce_prescale, allreduce_postscale; none: of live Horovod 0.28.1, in golden_horovod.json")
def scales_are_applied_in_float64_to_integers_and_float32_to_half():
    for dtype in dict.fromkeys(("int64", *REDUCED, "float16")):
        x = random(dtype)
        wide = np.dtype("float32" if dtype == "float16" else "float64" if is_whole(dtype) else dtype).type
        before = ((x.astype(wide) * wide(FACTOR)).astype(dtype)).astype(wide) * hvd.size()
        after = (x.astype(wide) * hvd.size()) * wide(FACTOR)
        rtol = 0 if is_whole(dtype) else {"float16": 2e-3, "float32": 3e-7, "float64": 1e-15}[dtype]
        same(hvd.allreduce(x, average=False, prescale_factor=FACTOR), before.astype(dtype), rtol=rtol)
        same(hvd.allreduce(x, average=False, postscale_factor=FACTOR), after.astype(dtype), rtol=rtol)
    golden = json.loads((Path(__file__).parent / "golden_horovod.json").read_text())["prescale"]
    got = hvd.allreduce(np.array(golden["input"]), op=hvd.Sum, prescale_factor=golden["factor"])
    assert np.asarray(got).tolist() == [x // golden["ranks"] * hvd.size() for x in golden["result"]]


@row(
    "allreduce_process_sets, allgather_process_sets, broadcast_process_sets, alltoall_process_sets, "
    "reducescatter_process_sets, grouped_allreduce_process_sets, grouped_allgather_process_sets, "
    "grouped_reducescatter_process_sets"
)
def operations_of_both_process_sets():
    this, sets = even_odd()
    n, position = this.size(), this.rank()
    assert this.included() and this.ranks[position] == hvd.rank()
    whole = of_ranks("float32")
    ours, x, on = whole[this.ranks], whole[hvd.rank()], {"process_set": this}
    total, all_rows = ours.sum(0, dtype="float32"), ours.reshape(-1, 3)
    same(hvd.allreduce(x, op=hvd.Sum, **on), total)
    same(hvd.allgather(x, **on), all_rows)
    same(hvd.broadcast(x, this.ranks[-1], **on), ours[-1])
    same(hvd.alltoall(x, **on), np.concatenate([rows_of(part, n, position) for part in ours]))
    same(hvd.reducescatter(x, op=hvd.Sum, **on), rows_of(total, n, position))
    for k in (0, 1):
        same(hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum, **on)[k], (k + 1) * total)
        same(hvd.grouped_allgather([x, 2 * x], **on)[k], (k + 1) * all_rows)
        same(hvd.grouped_reducescatter([x, 2 * x], op=hvd.Sum, **on)[k], (k + 1) * rows_of(total, n, position))
    with raises(ValueError, f"rank {hvd.rank()} is not in", "included()"):
        hvd.allreduce(x, process_set=sets[1 - hvd.rank() % 2])
    with raises(NotImplementedError, "Adasum does not support non-global process sets yet."):
        hvd.allreduce(x, op=hvd.Adasum, **on)


@row(
    "grouped_allreduce, grouped_allreduce_average, grouped_allgather, grouped_reducescatter, "
    "grouped_reducescatter_average, grouped_reducescatter_prescale, grouped_reducescatter_postscale; none: several "
    "broadcasts are hvd.broadcast_parameters"
)
def groups_are_done_together():
    n, mine = hvd.size(), lambda x: rows_of(x, hvd.size(), hvd.rank())
    arrays = [random(dtype, seed=seed) for seed, dtype in enumerate(("float32", "int64", "float64"))]
    x = arrays[2]
    for got, expected in (
        (hvd.grouped_allreduce(arrays, op=hvd.Sum), [x * n for x in arrays]),
        (hvd.grouped_allreduce(arrays), arrays),
        (hvd.grouped_allgather(arrays), [np.concatenate([x] * n) for x in arrays]),
        (hvd.grouped_reducescatter(arrays, op=hvd.Sum), [mine(x) * n for x in arrays]),
        (hvd.grouped_reducescatter(arrays), [mine(x) for x in arrays]),
        (hvd.grouped_reducescatter([x, x], op=hvd.Sum, prescale_factor=0.37), [mine(x * 0.37 * n)] * 2),
        (hvd.grouped_reducescatter([x, x], op=hvd.Sum, postscale_factor=0.37), [mine(x * n * 0.37)] * 2),
        (hvd.broadcast_parameters([x + hvd.rank(), full(hvd.rank())], root_rank=1), [x + 1, full(1)]),
    ):
        for y, wanted in zip(got, expected, strict=True):
            same(y, wanted, rtol=1e-14)


@row("allgather, allgather_variable_size, allgather_async_fused")
def allgather_of_equal_and_other_first_dims():
    n, rank = hvd.size(), hvd.rank()
    for dtype in DTYPES:
        for shape in SHAPES:
            same(hvd.allgather(full(rank, shape, dtype)), np.concatenate([full(r, shape, dtype) for r in range(n)]))
    for sizes in ([17, 32, 81, 12][:n], [2 * r for r in range(n)]):
        x = full(rank, (sizes[rank], 3))
        same(hvd.allgather(x), np.concatenate([full(r, (rows, 3)) for r, rows in enumerate(sizes)]))
    handles = [hvd.allgather_async(full(rank + i), name=f"gather {i}") for i in range(3)]
    for i, handle in enumerate(handles):
        same(hvd.synchronize(handle), np.concatenate([full(r + i) for r in range(n)]))


@row("broadcast")
def broadcast_moves_every_bit():
    for dtype in (*DTYPES, "complex64"):
        for root in range(hvd.size()):
            got = hvd.broadcast(full(hvd.rank(), dtype=dtype), root)
            assert got.dtype == dtype and (np.asarray(got) == full(root, dtype=dtype)).all()
    odd = np.array([-0.0, np.nan, np.inf, -np.inf, 5e-324])
    assert np.asarray(hvd.broadcast(odd if hvd.rank() == 1 else np.zeros(5), 1)).tobytes() == odd.tobytes()


@row("alltoall, alltoall_equal_split")
def alltoall_with_and_without_splits():
    n, rank = hvd.size(), hvd.rank()
    for dtype in DTYPES:
        for tail in ((2,),) if SHORT else ((), (2,)):
            values = np.repeat(np.arange(n), rank + 1).astype(dtype)
            x = np.broadcast_to(values.reshape(-1, *[1] * len(tail)), (values.size, *tail))
            expected = full(rank, (sum(range(1, n + 1)), *tail), dtype)
            out, received = hvd.alltoall(x, splits=[rank + 1] * n)
            same(out, expected)
            assert np.asarray(received).tolist() == list(range(1, n + 1))
            same(hvd.alltoall(x), expected)
    out, received = hvd.alltoall(zeros(3, 2), splits=[0] * n)  # nothing to anybody
    same(out, zeros(0, 2))
    assert np.asarray(received).tolist() == [0] * n
    to_0 = np.arange(5, dtype=np.int32) if rank else np.zeros(0, np.int32)
    out, received = hvd.alltoall(to_0, splits=np.array([5 * (rank > 0)] + [0] * (n - 1), np.int32))
    assert np.asarray(out).tolist() == (list(range(5)) * (n - 1) if rank == 0 else [])
    assert np.asarray(received).tolist() == ([0] + [5] * (n - 1) if rank == 0 else [0] * n)


@row(
    "reducescatter, reducescatter_average, reducescatter_prescale, reducescatter_postscale, "
    "reducescatter_async_fused; test_tensorflow.py: reducescatter_cpu_uneven"
)
def reducescatter_of_even_and_uneven_rows():
    n, rank, mine = hvd.size(), hvd.rank(), lambda x: rows_of(x, hvd.size(), hvd.rank())
    for dtype in (*REDUCED, "float16"):
        for shape in SHAPES:
            x = random(dtype, shape)
            same(hvd.reducescatter(x, op=hvd.Sum), mine(x * np.dtype(dtype).type(n)))
            same(hvd.reducescatter(x, op=hvd.Average), mine(x))
            same(hvd.reducescatter(x), mine(x))
    x, i = random("float64"), random("int64")
    same(hvd.reducescatter(x, op=hvd.Sum, prescale_factor=0.37), mine(x * 0.37 * n), rtol=1e-14)
    same(hvd.reducescatter(x, op=hvd.Sum, postscale_factor=0.37), mine(x * n * 0.37), rtol=1e-14)
    same(hvd.reducescatter(i, op=hvd.Sum, prescale_factor=0.37), mine(np.trunc(i * 0.37).astype("int64") * n))
    handles = [hvd.reducescatter_async(x + k, name=f"scatter {k}", op=hvd.Sum) for k in range(3)]
    for k, handle in enumerate(handles):
        same(hvd.synchronize(handle), mine((x + k) * n))
    for num in (1, *range(13, 12 + n)):  # the first ranks have one row more
        x, extra = random("float32", (num, 3)), num % n
        begin = num // n * rank + min(rank, extra)
        same(hvd.reducescatter(x, op=hvd.Sum), (x * n)[begin : begin + num // n + (rank < extra)])


@row("test_adasum_pytorch.py: orthogonal, parallel, stability, stability_2")
def adasum_of_orthogonal_parallel_tiny_and_far_apart_arrays():
    n, rank = hvd.size(), hvd.rank()
    if not power_of_two():
        with raises(NotImplementedError, "Running Adasum with non-power of 2 ranks is not supported yet"):
            hvd.allreduce(zeros(3), op=hvd.Adasum)
        return
    rng = np.random.default_rng(2)

    def check(q, expected, rtol):
        """Compares with the Adasum of the columns of `q`, of any size: squares may overflow."""
        got, largest = hvd.allreduce(q[:, rank], op=hvd.Adasum), np.abs(expected).max()
        error = np.linalg.norm(np.asarray(got).astype(np.longdouble) / largest - expected / largest)
        assert error <= rtol * np.linalg.norm(expected / largest), error

    for dtype, rtol in (("float16", 5e-3), ("float32", 1e-5), ("float64", 1e-12)):
        for size in (23,) if SHORT else (n * 20 - 17, n * 2 + 1, n + 2, 4096):
            q = np.linalg.qr(rng.normal(size=(size, n)))[0].astype(dtype)
            check(q, q.astype(float).sum(1), rtol)
            q = np.outer(rng.normal(size=size), rng.uniform(0.5, 2, size=n)).astype(dtype)  # none cancels: float16
            check(q, q.astype(float).sum(1) / n, rtol)
    for dtype in ("float32", "float64"):
        tiny, big = float(np.finfo(dtype).tiny), float(np.sqrt(np.finfo(dtype).max))
        q = np.outer(rng.normal(0, 1, 23) * tiny * 1e6, rng.uniform(0.5, 2, n)).astype(dtype)  # XLA has no denormals
        check(q, q.astype(float).sum(1) / n, 1e-3)
        scale = [big ** ((i + 1) / n) * tiny ** ((n - i - 1) / n) for i in range(n)]
        q = np.outer(rng.normal(0, 1, 23), scale).astype(dtype)
        check(q, q.astype(np.longdouble).sum(1) / n, 1e-3)
    grouped = hvd.grouped_allreduce([q[:, rank], q[:8, rank]], op=hvd.Adasum)
    assert np.asarray(grouped[0]).tobytes() == np.asarray(hvd.allreduce(q[:, rank], op=hvd.Adasum)).tobytes()
    bits = np.asarray(hvd.allgather(np.asarray(grouped[0])[None]))
    assert (bits == bits[0]).all()


@row("compression_fp16; test_tensorflow.py: compression_fp16; none: half in a compiled step")
def half_on_the_wire_and_the_dtype_of_the_caller_back():
    fp16, n = hvd.Compression.fp16, hvd.size()
    for dtype in ("float64", "int64") if SHORT else ("float16", "float32", "float64", "int32", "int64"):
        x = jnp.ones((12, 3), dtype)
        sent, context = fp16.compress(x)
        assert sent.dtype == (jnp.float16 if dtype.startswith("float") else dtype)
        assert fp16.decompress(sent, context).dtype == dtype
        same(hvd.allreduce(x, op=hvd.Sum, compression=fp16), full(n, dtype=dtype))
    sent, context = hvd.Compression.none.compress(x)
    assert sent is x and hvd.Compression.none.decompress(sent, context) is x
    got = hvd.allreduce(np.float32([1 / 3]), compression=fp16)
    assert float(got[0]) == float(np.float32(np.float16(1 / 3)))
    backward = jax.jit(lambda x: fp16.compress(2 * x)[0])  # the halves of a compiled step
    forward = jax.jit(lambda g: 1 - fp16.decompress(g, jnp.float32))
    assert backward(full(1)).dtype == jnp.float16
    same(forward(hvd.allreduce(backward(full(hvd.rank())))), full(1 - (n - 1)))


# ---- gradients -------------------------------------------------------------------------------------------------------


@row(
    "allreduce_grad, allreduce_grad_average, grouped_allreduce_grad, grouped_allreduce_grad_average, "
    "grouped_allgather_grad, broadcast_grad, alltoall_equal_split_grad, reducescatter_grad, "
    "reducescatter_grad_average, grouped_reducescatter_grad, allreduce_grad_process_sets, "
    "grouped_allreduce_grad_process_sets, allgather_grad_process_sets, broadcast_grad_process_sets, "
    "alltoall_grad_process_sets, reducescatter_grad_process_sets"
)
def gradients_of_sums_of_results():
    x = jnp.ones((12, 3), jnp.float32)

    def check(process_set):
        n, on, root = process_set.size(), {"process_set": process_set}, process_set.ranks[-1]
        for operation, expected in (
            (lambda x: hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum, **on), 3 * n),
            (lambda x: hvd.allreduce(x, **on), 1),
            (lambda x: hvd.grouped_allgather([x, 2 * x], **on), 3),
            (lambda x: hvd.broadcast(x, root, **on), hvd.rank() == root),
            (lambda x: hvd.alltoall(x, **on), 1),
            (lambda x: hvd.grouped_reducescatter([x, 2 * x], op=hvd.Sum, **on), 3 * n),
            (lambda x: hvd.reducescatter(x, **on), 1),
        ):
            got = jax.grad(lambda x, operation=operation: sum(y.sum() for y in jax.tree.leaves(operation(x))))(x)
            same(got, full(expected))

    check(hvd.global_process_set)
    check(even_odd()[0])
    with raises(NotImplementedError, "Max", "stop_gradient"):
        jax.grad(lambda x: hvd.allreduce(x, op=hvd.Max).sum())(x)


@row("allgather_grad, alltoall_grad")
def gradients_belong_to_rows_and_ranks():
    n, rank = hvd.size(), hvd.rank()
    weight = np.arange(3, dtype=np.float32) + rank
    loss = lambda x: (hvd.allreduce(x, op=hvd.Sum, prescale_factor=3.0) * weight).sum()
    same(jax.grad(loss)(jnp.ones(3, jnp.float32)), 3 * sum(np.arange(3, dtype=np.float32) + r for r in range(n)))
    sizes = [3, 2, 7, 4][:n]
    x = jnp.ones((sizes[rank], 2), jnp.float32)
    weights = np.concatenate([full(r, (rows, 2)) for r, rows in enumerate(sizes)])
    same(jax.grad(lambda x: (hvd.allgather(x) * weights).sum())(x), full(rank, x.shape))
    of_rank_0 = 1.0 if rank == 0 else 0.0  # only rank 0 uses what it gathers: each gets its rows of the mean
    same(jax.grad(lambda x: hvd.allgather(x).sum() * of_rank_0)(x), full(1 / n, x.shape), rtol=1e-6)
    x = jnp.asarray(np.repeat(np.arange(n), rank + 1), jnp.float32)
    got = jax.grad(lambda x: (hvd.alltoall(x, [rank + 1] * n)[0] * rank).sum())(x)
    same(got, np.repeat(np.arange(n, dtype=np.float32), rank + 1))


# ---- mistakes: an error on every rank, with the request of each ------------------------------------------------------


@row(
    "allreduce_error, allreduce_type_error, allgather_error, allgather_type_error, broadcast_error, "
    "broadcast_type_error, broadcast_rank_error, alltoall_type_error, alltoall_equal_split_length_error, "
    "alltoall_splits_error, alltoall_splits_type_error, alltoall_rank_error, reducescatter_scalar_error, "
    "grouped_reducescatter_scalar_error, reducescatter_adasum, reducescatter_error, reducescatter_type_error"
)
def differing_requests_are_an_error_on_every_rank():
    n, rank = hvd.size(), hvd.rank()
    of_parity = zeros(12, dtype=np.int32 if rank % 2 == 0 else np.float32)
    requests = ("rank 0: allreduce Average float32[17,10]", "rank 1: allreduce Average float32[17,11]")
    with raises(INTERNAL, "mismatched shapes", *requests):
        hvd.allreduce(zeros(17, 10 + rank))
    with raises(INTERNAL, "mismatched shapes"):  # the same number of elements
        hvd.allreduce(zeros(17, 10) if rank % 2 else zeros(10, 17))
    with raises(INTERNAL, "mismatched dtypes", "int32[12]", "float32[12]"):
        hvd.allreduce(of_parity)
    with raises(INTERNAL, "mismatched reduction", "Sum", "Max"):
        hvd.allreduce(zeros(17), op=hvd.Sum if rank else hvd.Max)
    for scale in ("prescale", "postscale"):
        with raises(INTERNAL, f"mismatched {scale}", f"{scale} 2"):
            hvd.allreduce(zeros(17), **{f"{scale}_factor": 2.0 if rank else 1.0})
    with raises(INTERNAL, "mismatched"):
        hvd.grouped_allreduce([zeros(12)] * (2 if rank else 1))
    with raises(INTERNAL, "mismatched dims after the first", "float32[17,10,17]", "float32[17,20,17]"):
        hvd.allgather(zeros(17, 10 * (rank + 1), 17))
    with raises(INTERNAL, "mismatched shapes", "float32[17,10]", "float32[17,20]"):
        hvd.broadcast(zeros(17, 10 * (rank + 1)), 0)
    with raises(INTERNAL, "mismatched root", "root 0", "root 1"):
        hvd.broadcast(zeros(3), rank)
    with raises(INTERNAL, "mismatched dims after the first"):
        hvd.alltoall(zeros(2 * n, 10 * (rank + 1), 2))
    with raises(INTERNAL, "mismatched shapes"):
        hvd.reducescatter(zeros(17, 10 + rank))
    for call in (hvd.allgather, lambda x: hvd.broadcast(x, 0), hvd.alltoall, hvd.reducescatter):
        with raises(INTERNAL, "mismatched dtypes"):
            call(of_parity)
    for part, call in (
        ("supersedes average. Please provide only one", lambda: hvd.allreduce(zeros(3), average=True, op=hvd.Sum)),
        ("Cast it", lambda: hvd.allreduce(zeros(17, dtype=bool))),
        ("scalar", lambda: hvd.allgather(np.float32(1))),
        ("root_rank 99", lambda: hvd.broadcast(zeros(3), 99)),
        ("not a multiple", lambda: hvd.alltoall(zeros(n + 1))),
        (f"add up to {n} rows, and there are {n - 1}", lambda: hvd.alltoall(zeros(n - 1), np.ones(n, np.int32))),
        ("list of integers", lambda: hvd.alltoall(zeros(n), zeros(n))),
        ("scalar", lambda: hvd.reducescatter(np.float32(rank))),
        ("scalar", lambda: hvd.grouped_reducescatter([zeros(4), np.float32(1)])),
        ("Adasum", lambda: hvd.reducescatter(zeros(4, 2), op=hvd.Adasum)),
    ):
        with raises(ValueError, part):
            call()
    same(hvd.allreduce(full(1)), full(1))  # and nothing is left behind


@row(
    "allreduce_duplicate_name_error, allgather_duplicate_name_error, broadcast_duplicate_name_error, "
    "reducescatter_duplicate_name_error; none: alltoall"
)
def duplicate_pending_names_are_an_error():
    """Rank 0 first, then the others, with a barrier between, as their tests do."""
    x = full(1)
    for request in (
        lambda: hvd.allreduce_async(x, name="twice"),
        lambda: hvd.allgather_async(x, name="twice"),
        lambda: hvd.broadcast_async(x, root_rank=0, name="twice"),
        lambda: hvd.reducescatter_async(x, name="twice"),
        lambda: hvd.alltoall_async(x[:0], name="twice"),
    ):
        for of_rank_0 in (True, False):
            if (hvd.rank() == 0) == of_rank_0:
                request()
                with raises(ValueError, "same name", "'twice'"):
                    request()
            hvd.barrier()


@row("none: live Horovod 0.28.1 hangs, and waits for a name that one rank has alone")
def better_differing_operations_and_names_are_an_error():
    rank, x = hvd.rank(), zeros(3)
    with raises(
        INTERNAL, "mismatched operation", "rank 0: allgather float32[3]", "rank 1: allreduce Average float32[3]"
    ):
        hvd.allreduce(x) if rank else hvd.allgather(x)
    with raises(INTERNAL, "mismatched operation", "rank 0: barrier", "rank 1: broadcast float32[3] root 0"):
        hvd.broadcast(x, 0) if rank else hvd.barrier()
    requests = "rank 0: allreduce Average float32[3] 'a'", "rank 1: allreduce Average float32[3] 'b'"
    with raises(INTERNAL, "wait for different operations", *requests):
        hvd.allreduce(x, name="b" if rank else "a")
    with raises(INTERNAL, "wait for different operations"):
        if rank == 0:
            hvd.allreduce_async(x), hvd.allreduce_async(x)  # unnamed calls that the others do not make
        hvd.allreduce(x, name=f"only {rank}")
    same(hvd.allreduce(full(1), op=hvd.Sum), full(hvd.size()))
    tree = {"w": zeros(2), "head" if rank else "tail": zeros(2)}
    requests = "mismatched names of leaves", "rank 0: ", "with ['tail']", "rank 1: ", "with ['head']"
    optimizer = hvd.DistributedOptimizer(optax.sgd(1.0))
    with raises(INTERNAL, *requests):
        optimizer.update(tree, optimizer.init(tree))
    with raises(INTERNAL, *requests):
        hvd.broadcast_parameters(tree, root_rank=0)
    with raises(INTERNAL, "mismatched names of leaves", "with loss", "with accuracy"):
        hvd.callbacks.MetricAverageCallback().on_epoch_end(0, {"accuracy" if rank else "loss": 1.0})


@row("none: live Horovod 0.28.1 hangs")
def better_a_mistake_of_one_rank_is_reported_to_all():
    is_wrong = hvd.rank() == 0
    kind = ValueError if is_wrong else INTERNAL
    with raises(kind, "not a multiple"):
        hvd.alltoall(zeros(hvd.size() + is_wrong))
    with raises(kind, "scalar"):
        hvd.allgather(np.float32(1) if is_wrong else zeros(1))
    with raises(kind, "bool"):
        hvd.allreduce(zeros(1, dtype=bool if is_wrong else np.float32))
    kind = TypeError if is_wrong else INTERNAL
    with raises(kind, "the object['f'] is a function", "not pickled"):
        hvd.broadcast_object({"f": raises} if is_wrong else None)
    with raises(kind, "the object[1] is a set"):
        hvd.allgather_object([1, {2}] if is_wrong else None)


# ---- rounds: names in any order, join, barriers ----------------------------------------------------------------------


@row("allreduce_async_fused; none: names in any order, tensors are fused by name")
def asynchronous_calls_by_name_in_any_order():
    handles = [hvd.allreduce_async(random("float32", seed=i), average=False, name=f"fused {i}") for i in range(6)]
    while not all(hvd.poll(handle) for handle in handles):
        pass
    for i, handle in enumerate(handles):
        same(hvd.synchronize(handle), random("float32", seed=i) * hvd.size())
    order = range(4) if hvd.rank() % 2 == 0 else reversed(range(4))
    handles = {i: hvd.allreduce_async(full(i), name=f"any {i}", op=hvd.Sum) for i in order}
    for i in (2, 0, 3, 1) if hvd.rank() % 2 else (1, 3, 0, 2):
        same(hvd.synchronize(handles[i]), full(i * hvd.size()))


@row("join_allreduce; none: documentation of join, ranks with unequal numbers of batches")
def a_rank_that_has_joined_gives_zeros():
    n, rank = hvd.size(), hvd.rank()
    for dtype in REDUCED:
        number = np.dtype(dtype).type
        for first in range(n):
            arrays = [random(dtype), random(dtype, seed=7)]
            if rank == first:
                last = hvd.join()
            else:
                handles = [hvd.allreduce_async(x, name=f"tensor_{i}", average=True) for i, x in enumerate(arrays)]
                got = [hvd.synchronize(handle) for handle in handles]
                same(hvd.allreduce(arrays[0], op=hvd.Sum), arrays[0] * number(n - 1))
                last = hvd.join()
                for y, x in zip(got, arrays, strict=True):
                    mean = x * number(n - 1) / number(n)
                    same(y, np.trunc(mean).astype(dtype) if is_whole(dtype) else mean, 0 if is_whole(dtype) else 1e-6)
            assert last != first and 0 <= last < n
            assert hvd.allgather_object(last) == [last] * n
    got = [float(hvd.allreduce(np.array([rank + 1.0]), op=hvd.Sum)[0]) for _ in range(2 + rank)]
    assert hvd.join() == n - 1
    assert got == [sum(r + 1 for r in range(n) if 2 + r > batch) for batch in range(2 + rank)]


@row("join_allgather, join_broadcast; none: alltoall and reducescatter, as controller.cc has it")
def what_needs_data_of_all_is_an_error_after_a_join():
    for first in range(hvd.size()):
        if hvd.rank() != first:
            root = int(first == 0)
            for call in (
                hvd.allgather,
                lambda x, root=root: hvd.broadcast(x, root, name="join_broadcast"),
                hvd.alltoall,
                hvd.reducescatter,
                lambda x: hvd.allreduce(x, op=hvd.Max),
            ):
                with raises(INTERNAL, "not supported while ranks have joined", f"[{first}]"):
                    call(full(1))
        last = hvd.join()
        assert last != first
        assert hvd.allgather_object(last) == [last] * hvd.size()


@row("global_barrier_op, process_set_barrier_op, barrier_with_multiple_collectives")
def barriers_wait_for_all_of_the_set():
    this, _ = even_odd()
    arrived = Path(sys.argv[1], "arrived")
    if hvd.rank() == 0:
        time.sleep(0.3)
        arrived.touch()
    hvd.barrier()
    assert arrived.exists()
    hvd.barrier(process_set=this)
    handle = hvd.allreduce_async(full(1), name="pending", op=hvd.Sum)
    hvd.barrier()
    same(hvd.synchronize(handle), full(hvd.size()))


# ---- objects, parameters, the optimizer ------------------------------------------------------------------------------


@row("broadcast_object, broadcast_object_process_sets, allgather_object")
def objects_go_as_json():
    rank, n = hvd.rank(), hvd.size()
    plain = {
        "a": 123,
        0: [1, 2],
        "t": (1, None, True),
        "b": b"\x00\n",
        "f": 0.1,
        "inf": float("inf"),
        ("k", 1): {"!": []},
    }
    assert hvd.broadcast_object(plain if rank == 0 else {}) == plain
    of = lambda r: {"metric_val_1": r} | ({"metric_val_2": 42} if r == 1 else {})
    assert hvd.allgather_object(of(rank)) == [of(r) for r in range(n)]
    got = hvd.broadcast_object({"x": np.arange(6, dtype=np.int16).reshape(2, 3), "s": np.float32(0.5)}, root_rank=1)
    assert (got["x"].dtype, got["x"].tolist(), got["s"].dtype) == (np.int16, [[0, 1, 2], [3, 4, 5]], np.float32)
    this, _ = even_odd()
    root = this.ranks[-1]
    assert hvd.broadcast_object({"root": rank}, root, process_set=this) == {"root": root}
    assert hvd.allgather_object("x" * rank, process_set=this) == ["x" * r for r in this.ranks]


@row("broadcast_state, broadcast_state_options, broadcast_state_no_grad")
def parameters_and_optimizer_state_of_the_root():
    rank = hvd.rank()
    params = {"w": full(1 + rank), "frozen": full(rank, 2, np.int32), "h": jnp.full(2, rank, jnp.bfloat16)}
    got = hvd.broadcast_parameters(params, root_rank=1)
    same(got["w"], full(2))
    same(got["frozen"], full(1, 2, np.int32))
    assert got["h"].dtype == jnp.bfloat16 and float(got["h"][0]) == 1
    assert hvd.broadcast_parameters({"lr": 0.5 + rank, "n": 3 + rank}, 0) == {"lr": 0.5, "n": 3}
    of_rank = lambda r: jax.tree.map(lambda x: x + np.asarray(r, x.dtype), optimizer.init(params))
    optimizer = optax.inject_hyperparams(optax.sgd)(0.1, momentum=0.9)
    got = hvd.broadcast_optimizer_state(of_rank(rank), root_rank=0)
    assert jax.tree.structure(got) == jax.tree.structure(of_rank(0))
    jax.tree.map(same, got, of_rank(0))
    assert hvd.broadcast_optimizer_state(optimizer, root_rank=0) is optimizer


PARAMS = {"w": np.ones((12, 3), np.float32), "b": np.zeros(3, np.float32)}


def gradients_of_rank(step=0, rank=None):
    """Returns gradients that differ from rank to rank."""
    rng = np.random.default_rng(100 * step + (hvd.rank() if rank is None else rank))
    return {"w": rng.normal(size=(12, 3)).astype(np.float32), "b": rng.normal(size=3).astype(np.float32)}


def mean_of_ranks(steps=(0,), factor=1.0):
    """Returns the mean over ranks of the sums over steps."""
    every = [gradients_of_rank(step, rank) for rank in range(hvd.size()) for step in steps]
    return jax.tree.map(lambda *xs: sum(xs) / hvd.size() * np.float32(factor), *every)


def updated(optimizer, steps, params=PARAMS, gradients=gradients_of_rank):
    """Yields the updates of an optimizer, step by step."""
    state = optimizer.init(params)
    for step in range(steps):
        updates, state = optimizer.update(gradients(step), state, params)
        yield updates


def close_trees(got, expected, rtol=3e-5):
    jax.tree.map(lambda x, y: close(x, y, rtol), got, expected)


@row(
    "force_allreduce, gradient_clipping, no_named_parameters, optimizer_no_named_parameters, delta_optimizer, "
    "model_parallelism, optimizer_process_sets"
)
def the_optimizer_reduces_gradients_before_its_step():
    clipped, sgd = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1)), optax.sgd(0.1, momentum=0.5)
    for plain, options in (
        (clipped, {}),
        (sgd, {"gradient_predivide_factor": 2.0}),
        (sgd, {"compression": hvd.Compression.fp16}),
    ):
        distributed = hvd.DistributedOptimizer(plain, named_parameters=PARAMS.items(), **options)
        alone = plain._replace(update=jax.jit(plain.update))
        wanted = updated(alone, 2, gradients=lambda step: mean_of_ranks((step,)))
        for got, expected in zip(updated(distributed, 2), wanted, strict=True):
            close_trees(got, expected, 3e-3 if "compression" in options else 3e-5)
    (got,) = updated(hvd.DistributedOptimizer(optax.sgd(1.0), op=hvd.Sum), 1)
    close_trees(got, mean_of_ranks(factor=-hvd.size()))
    even = even_odd()[1][0]
    (got,) = updated(hvd.DistributedOptimizer(optax.sgd(1.0), process_set=even), 1)
    members = even.ranks if hvd.rank() % 2 == 0 else [hvd.rank()]  # others update independently
    close(got["w"], -sum(gradients_of_rank(rank=r)["w"] for r in members) / len(members))


@row("test_tensorflow.py: local_gradient_aggregation; test_tensorflow2_keras.py: gradient_aggregation")
def gradients_of_several_passes_are_added_up_on_the_rank():
    for average in (False, True):
        options = {"backward_passes_per_step": 4, "average_aggregated_gradients": average}
        for step, got in enumerate(updated(hvd.DistributedOptimizer(optax.sgd(1.0), **options), 9)):
            factor = (0.25 if average else 1.0) if step % 4 == 3 else 0.0
            close_trees(got, mean_of_ranks(range(step - 3, step + 1) if factor else (step,), -factor), 1e-4)


@row("duplicate_names, missing_named_parameters; none: arguments of the optimizer")
def what_the_optimizer_refuses():
    sgd = optax.sgd(0.1)
    for kind, part, options in (
        (ValueError, "must be unique. Found duplicates: w", {"named_parameters": [("w", 1), ("w", 2)]}),
        (ValueError, "sequence of tuples", {"named_parameters": [PARAMS["w"]]}),
        (ValueError, "one or more model parameters were not named", {"named_parameters": [("w", 1)]}),
        (ValueError, "not supported with op != Average", {"op": hvd.Sum, "gradient_predivide_factor": 2.0}),
        (ValueError, "backward_passes_per_step must be > 0", {"backward_passes_per_step": 0}),
        (NotImplementedError, "Omit it", {"groups": 2}),
    ):
        with raises(kind, part):
            hvd.DistributedOptimizer(sgd, **options).init(PARAMS)
    optimizer = hvd.DistributedOptimizer(sgd)
    with raises(NotImplementedError, "outside of it"):
        jax.jit(optimizer.update)(gradients_of_rank(), optimizer.init(PARAMS), PARAMS)
    with raises(INTERNAL, "mismatched"):
        optimizer.update({"w": zeros(12, 3 + hvd.rank())}, optimizer.init(PARAMS))


@row("none: horovod/torch/optimizer.py, _DistributedAdasumOptimizer combines updates")
def adasum_of_the_optimizer_is_of_its_updates():
    gradients, expected = full(0), full(0)
    gradients[hvd.rank()], expected[: hvd.size()] = 1.0 + hvd.rank(), -0.1
    if power_of_two():
        optimizer = hvd.DistributedOptimizer(optax.adam(0.1), op=hvd.Adasum)
        (got,) = updated(optimizer, 1, full(0), lambda step: gradients)
        close(got, expected, 1e-4)  # orthogonal: each rank's own step


@row("sparse_embeddings, async_sparse_allreduce, async_sparse_allreduce_process_sets")
def sparse_gradients_go_as_rows():
    tokens = lambda rank: [1, 2, 4, 5] if rank == 0 else [1, 3, 3]
    counts = lambda ranks: sum(np.bincount(tokens(rank), minlength=12) for rank in ranks).astype(np.float32)
    mine = np.array(tokens(hvd.rank()), np.int32)
    rows = sparse.BCOO((np.ones((len(mine), 3), np.float32), mine[:, None]), shape=(12, 3))
    this, _ = even_odd()
    for process_set, op, divisor in ((hvd.global_process_set, hvd.Average, hvd.size()), (this, hvd.Sum, 1)):
        got = hvd.sparse_allreduce_async(rows, "rows", op, process_set)().todense()
        close(got, counts(process_set.ranks)[:, None].repeat(3, 1) / divisor)
    with raises(NotImplementedError, "hvd.Sum or hvd.Average"):
        hvd.sparse_allreduce_async(rows, "rows", hvd.Max)
    params = {"w": full(1), "b": full(1, 3)}
    for as_dense, passes in ((False, 1), (True, 1), (False, 2)):
        optimizer = hvd.DistributedOptimizer(optax.sgd(1.0), sparse_as_dense=as_dense, backward_passes_per_step=passes)
        *_, got = updated(optimizer, passes, params, lambda step: {"w": rows, "b": params["b"]})
        mean = counts(range(hvd.size()))[:, None].repeat(3, 1) / hvd.size()
        close_trees(got, {"w": -passes * mean, "b": -passes * params["b"]})


# ---- elastic, callbacks ----------------------------------------------------------------------------------------------


@row("test_torch_elastic.py: elastic_state")
def elastic_state_is_committed_restored_and_synced():
    model = {"weight": jnp.full((2, 2), 1.0 + hvd.rank()), "bias": full(1 + hvd.rank(), 2)}
    other = {"weight": jnp.array([[1.0, 2.0], [3.0, 4.0]]), "bias": zeros(2)}
    state = hvd.elastic.State(model=model, batch=20 + hvd.rank(), history=[("a", hvd.rank())])
    state.sync()
    assert all((np.asarray(x) == 1).all() for x in jax.tree.leaves(state.model))
    assert (state.batch, state.history) == (20, [("a", 0)])
    state.model, state.batch = other, 21
    state.history.append(1)
    state.restore()
    assert (np.asarray(state.model["weight"]) == 1).all() and isinstance(state.model["weight"], jax.Array)
    assert (state.batch, state.history) == (20, [("a", 0)])
    state.model, state.batch = other, 21
    state.commit()
    other["weight"].delete()  # as a donated buffer is
    state.restore()
    assert (np.asarray(state.model["weight"]).tolist(), state.batch) == ([[1, 2], [3, 4]], 21)


@row("test_torch_elastic.py: elastic_sampler")
def elastic_sampler_repeats_nothing():
    n, data = hvd.size(), list(range(8 * hvd.size()))
    sampler = hvd.elastic.ElasticSampler(data, shuffle=True)
    state = hvd.elastic.State(sampler=sampler)
    everywhere, orders = lambda: hvd.allgather_object(list(sampler)), []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        orders.append(everywhere())
        assert sorted(i for part in orders[-1] for i in part) == data and orders[-1] not in orders[:-1]
    for batch in range(4):
        sampler.record_batch(batch, 2)
        assert sampler.processed_num == 2 * (batch + 1) * n
        if batch == 1:
            state.commit()
    state.restore()
    assert sampler.processed_num == 4 * n and len(sampler) == 4
    first, rest = {i for part in orders[-1] for i in part[:4]}, {i for part in everywhere() for i in part}
    assert first | rest == set(data) and not first & rest
    sampler.record_batch(2, 2)
    state.commit()
    state.sync()
    assert sampler.processed_num == 6 * n and len(sampler) == 2
    sampler.set_epoch(3)
    assert len(sampler) == 8


@row("test_tensorflow2_keras.py: train_model_lr_schedule; none: _keras/callbacks.py")
def learning_rates_warm_up_with_momentum_correction():
    n = hvd.size()
    state = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1 * n, momentum=0.9).init({"w": zeros(2)})
    read = lambda name: float(hvd.callbacks.hyperparameter(state, name))
    warmup = hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1 * n, warmup_epochs=2, steps_per_epoch=4, verbose=1)
    old, rates = read("learning_rate"), []
    for epoch in range(3):
        warmup.on_epoch_begin(epoch)
        for batch in range(4):
            state = warmup.on_batch_begin(batch, state)
            rates.append(read("learning_rate"))
            assert epoch == 2 or abs(read("momentum") - 0.9 * rates[-1] / old) < 1e-6
            state = warmup.on_batch_end(batch, state)
            assert abs(read("momentum") - 0.9) < 1e-6
            old = rates[-1]
        logs = {}
        warmup.on_epoch_end(epoch, state, logs)
        assert abs(logs["lr"] - rates[-1]) < 1e-7
    close(rates, [0.1 * ((step + 1) / 4 * (n - 1) / 2 + 1) for step in range(8)] + [0.1 * n] * 4)
    schedule = hvd.callbacks.LearningRateScheduleCallback(
        initial_lr=1.0, multiplier=0.1, start_epoch=1, end_epoch=3, momentum_correction=False
    )
    seen = []
    for epoch in range(4):
        schedule.on_epoch_begin(epoch)
        state = schedule.on_batch_end(0, schedule.on_batch_begin(0, state))
        seen.append(read("learning_rate"))
    close(seen, [0.1 * n, 1.0, 0.1, 0.1])
    logs = {"loss": float(hvd.rank()), "accuracy": 1.0}
    hvd.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    assert logs == {"loss": (n - 1) / 2, "accuracy": 1.0}
    with raises(ValueError, "inject_hyperparams"):
        hvd.callbacks.hyperparameter(optax.sgd(0.1).init({}), "learning_rate")
    assert hvd.callbacks.scaled_learning_rate(0.1) == 0.1 * n
    assert hvd.callbacks.scaled_learning_rate(0.1, 2, hvd.Adasum) == 0.2


@row("none: 64 bits, tracing, build flags")
def what_is_refused_on_each_rank():
    jax.config.update("jax_enable_x64", False)
    try:
        with raises(ValueError, "jax_enable_x64"):
            hvd.allreduce(np.array([2**40]))
        same(hvd.allreduce(np.array([2, 3]), op=hvd.Sum), np.array([2, 3], np.int32) * hvd.size())
        assert hvd.allreduce(0.5).dtype == jnp.float32
    finally:
        jax.config.update("jax_enable_x64", True)
    for transform in (jax.jit, jax.vmap):
        with raises(NotImplementedError, "while JAX traces", "outside of it"):
            transform(hvd.allreduce)(zeros(3))
    assert (hvd.mpi_built(), hvd.gloo_built(), hvd.nccl_built(), hvd.cuda_built()) == (False, True, 0, False)


# ---- process sets, shutdown and init: these rows close what the others use -------------------------------------------


@row("test_process_sets_static.py: static; test_tensorflow_process_sets_dynamic.py: add_get_remove_process_set")
def process_sets_are_added_and_removed():
    this, sets = even_odd()
    for process_set in reversed(sets):
        assert hvd.remove_process_set(process_set)
    with raises(ValueError, "hvd.add_process_set"):
        hvd.allreduce(zeros(3), process_set=this)
    is_last = hvd.rank() == hvd.size() - 1
    last = hvd.add_process_set([hvd.size() - 1])
    assert (last.size(), last.rank(), last.included()) == (1, 0 if is_last else None, is_last)
    for ranks, part in (
        ([hvd.size() - 1], "Attempted to add a duplicate process set"),
        (list(range(hvd.size())), "Attempted to add a duplicate process set"),
        ([hvd.size()], f"from 0 to {hvd.size() - 1}"),
    ):
        with raises(ValueError, part):
            hvd.add_process_set(ranks)
    requests = "rank 0: add_process_set ranks [0]", "rank 1: add_process_set ranks [1]"
    with raises(INTERNAL, "mismatched ranks", *requests):
        hvd.add_process_set([min(hvd.rank(), 1)])
    assert not hvd.remove_process_set(hvd.global_process_set)
    assert hvd.remove_process_set(last)
    assert last.process_set_id is None and last.size() is None and last.included() is None
    assert not hvd.remove_process_set(last)
    with raises(ValueError, "list of ranks"):
        hvd.ProcessSet(["a"])


@row("rank, size, is_initialized, reinit")
def ranks_and_init_again():
    n, rank = hvd.size(), hvd.rank()
    assert hvd.is_initialized()
    assert (rank, n) == (int(os.environ["SPMDKIT_PROCESS_ID"]), int(os.environ["SPMDKIT_NUM_PROCESSES"]))
    assert (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (rank, n, 0, 1)
    before = hvd.allreduce(full(1), op=hvd.Sum)
    hvd.shutdown()
    assert not hvd.is_initialized()
    for call in (hvd.rank, lambda: hvd.allreduce(full(1))):
        with raises(ValueError, "Horovod has not been initialized; use hvd.init()"):
            call()
    hvd.init()
    assert (hvd.rank(), hvd.size()) == (rank, n)
    same(before, full(n))
    same(hvd.allreduce(full(1), op=hvd.Sum), np.asarray(before))


@row("none: common/elastic.py, run_fn under HorovodInternalError and HostsUpdatedInterrupt")
def elastic_run_goes_on_from_the_last_commit():
    state = hvd.elastic.State(batch=0, params=np.zeros(2))
    resets, tries = [], []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])

    @hvd.elastic.run
    def train(state, steps):
        tries.append(state.batch)
        while state.batch < steps:
            if len(tries) == 1 and state.batch == 3:
                hvd.allreduce(zeros(2 + hvd.rank()))  # an error on all ranks
            state.params = state.params + np.asarray(hvd.allreduce(np.ones(2)))
            state.batch += 1
            if state.batch == 2:
                state.commit()
            if state.batch == 4 and len(tries) == 2:
                if hvd.rank() == 0:
                    state.on_hosts_updated(1.0)
                state.commit()
        return state.batch

    assert train(state, 6) == 6
    assert np.asarray(state.params).tolist() == [6, 6]
    assert tries == [0, 2, 4] and resets == [hvd.size()] * 2

    @hvd.elastic.run
    def always(state):
        tries.append(-1)
        hvd.allreduce(zeros(2 + hvd.rank()))

    with raises(INTERNAL, "mismatched shapes"):
        always(state)
    assert tries.count(-1) == 3


# ---- the job ---------------------------------------------------------------------------------------------------------


def example(short=SHORT):
    """Returns examples/horovod_digits.py as a module; the short form has noisy patterns in place of scikit-learn's."""
    spec = importlib.util.spec_from_file_location("horovod_digits", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if short:
        rng, module.NUM_TRAIN = np.random.default_rng(0), 480
        labels = rng.integers(0, 10, 600).astype(np.int32)
        images = rng.normal(size=(10, 8, 8, 1))[labels] + rng.normal(size=(600, 8, 8, 1)) / 2
        data = {"images": images.astype(np.float32), "labels": labels}
        module.digits = lambda: [{k: v[i:j] for k, v in data.items()} for i, j in ((0, 480), (480, 600))]
    return module


def main(out, arguments):
    """Runs the table on this rank, in order, and writes row -> None or the traceback; then runs the example."""
    one_mlir_context()
    jax.config.update("jax_enable_x64", True)
    hvd.init()
    found = {}
    for name, (_, fn) in ROWS.items():
        try:
            fn()
            found[name] = None
        except Exception:  # noqa: BLE001
            found[name] = traceback.format_exc()
        finally:
            Path(out, f"{hvd.rank()}.json").write_text(json.dumps(found))
        if any(why is not None for why in hvd.allgather_object(found[name])):
            raise SystemExit(1)  # ranks may be in different rows now
    jax.config.update("jax_enable_x64", False)
    digits = example()
    params = digits.train(digits.parser.parse_args(arguments))
    np.savez(Path(out, f"{hvd.rank()}.npz"), **{name: np.asarray(value) for name, value in params.items()})
    hvd.shutdown()  # a forked process does not run what is registered for its exit


if __name__ == "__main__":
    main(sys.argv[1], [word for word in sys.argv[2:] if word != "short"])
