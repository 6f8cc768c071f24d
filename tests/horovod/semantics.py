"""What Horovod's own tests assert, one row each, run by every rank of one set of processes: `python -m
tests.horovod.semantics OUT`.

Each row names the tests of horovod 0.28.1 whose values and errors it repeats: `name, name; FILE: name`, without
`test_horovod_`, of test/parallel/ test_torch.py unless said; `none: ...` is what no test of theirs asserts. A row
raises where they would fail. What live Horovod does otherwise (it hangs) is in the rows that begin with `better`.
"""

import contextlib
import json
import sys
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import spmdkit.horovod as hvd

ROWS = {}
SHORT = "short" in sys.argv
DTYPES = ("uint8", "float16") if SHORT else ("uint8", "int8", "int32", "int64", "float16", "float32", "float64")
REDUCED = ("int64", "float32") if SHORT else ("int32", "int64", "float32", "float64")
DIMS = (2,) if SHORT else (1, 2, 3)
"""Each pair of a dtype and a shape is a program to compile: the short form has one of each kind."""


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
        raise AssertionError(f"did not raise {kind}")


def same(got, expected, rtol=0.0, atol=0.0):
    """Asserts dtype, shape and values."""
    assert isinstance(got, jax.Array), type(got)
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), (
        got.dtype,
        got.shape,
        expected.dtype,
        expected.shape,
    )
    np.testing.assert_allclose(np.asarray(got).astype(float), np.asarray(expected).astype(float), rtol=rtol, atol=atol)


def random(shape, dtype, seed=1234, low=-100, high=100):
    """Returns whole numbers, the same on every rank."""
    low = 0 if np.dtype(dtype).kind == "u" else low
    return np.random.default_rng(seed).integers(low, high, shape).astype(dtype)


def of_ranks(shape, dtype):
    """Returns [size, *shape], another array for each rank, the same on every rank."""
    return random((hvd.size(), *shape), dtype)


def mine(whole):
    return whole[hvd.rank()]


def others(n):
    return [r for r in range(hvd.size()) if r != n]


def even_odd():
    """Returns (the open set of this rank's parity, both sets)."""
    sets = [hvd.add_process_set([r for r in range(hvd.size()) if r % 2 == i]) for i in (0, 1)]
    return sets[hvd.rank() % 2], sets


def close(sets):
    for process_set in reversed(sets):
        assert hvd.remove_process_set(process_set)


@row("rank, size, is_initialized, reinit")
def places_and_init_again():
    import os

    assert hvd.is_initialized()
    assert (hvd.rank(), hvd.size()) == (int(os.environ["SPMDKIT_PROCESS_ID"]), int(os.environ["SPMDKIT_NUM_PROCESSES"]))
    assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank(), hvd.size())
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    before = hvd.rank(), hvd.size()
    kept = hvd.allreduce(np.ones(3, np.float32), op=hvd.Sum)
    hvd.shutdown()
    assert not hvd.is_initialized()
    with raises(ValueError, "Horovod has not been initialized; use hvd.init()."):
        hvd.rank()
    with raises(ValueError, "use hvd.init()"):
        hvd.allreduce(np.ones(3))
    hvd.init()
    assert (hvd.rank(), hvd.size()) == before
    same(kept, np.full(3, hvd.size(), np.float32))
    same(hvd.allreduce(np.ones(3, np.float32), op=hvd.Sum), np.asarray(kept))


@row("allreduce, allreduce_average")
def allreduce_sums_and_averages():
    for dtype in REDUCED:
        for dim in DIMS:
            x = random([17] * dim, dtype)
            same(hvd.allreduce(x, average=False), x * hvd.size())
            same(hvd.allreduce(x, average=True), x)
            same(hvd.allreduce(x), x)
    whole = of_ranks((5, 2), "int64")
    same(hvd.allreduce(mine(whole)), np.trunc(whole.sum(0) / hvd.size()).astype("int64"))
    half = random((8, 3), "float16")
    same(hvd.allreduce(half, op=hvd.Sum), half * np.float16(hvd.size()))
    with raises(ValueError, "The op parameter supersedes average. Please provide only one of them."):
        hvd.allreduce(x, average=True, op=hvd.Sum)


@row("allreduce_min, allreduce_max, allreduce_product")
def allreduce_min_max_product():
    for dtype in REDUCED:
        whole = of_ranks((17, 2), dtype)
        same(hvd.allreduce(mine(whole), op=hvd.Min), whole.min(0))
        same(hvd.allreduce(mine(whole), op=hvd.Max), whole.max(0))
        same(
            hvd.allreduce(mine(whole), op=hvd.Product), whole.prod(0, dtype=dtype), rtol=0 if hvd.size() <= 3 else 1e-4
        )


@row("allreduce_async_fused")
def async_allreduces_of_many_names():
    arrays = [random([17] * (1 + i % 3), "float32", seed=i) for i in range(6)]
    handles = [hvd.allreduce_async(x, average=False, name=f"fused {i}") for i, x in enumerate(arrays)]
    while not all(hvd.poll(handle) for handle in handles):
        pass
    for handle, x in zip(handles, arrays, strict=True):
        same(hvd.synchronize(handle), x * hvd.size())


@row("allreduce_prescale, allreduce_postscale")
def scales_are_applied_in_float64_to_integers_and_float32_to_half():
    factor = 0.1915194503788923
    for dtype in (*REDUCED, "float16"):
        x = random((17, 17), dtype)
        wide = {"float16": "float32"}.get(dtype, "float64" if np.dtype(dtype).kind == "i" else dtype)
        before = ((x.astype(wide) * np.dtype(wide).type(factor)).astype(dtype)).astype(wide) * hvd.size()
        after = (x.astype(wide) * hvd.size()) * np.dtype(wide).type(factor)
        rtol = 0 if np.dtype(dtype).kind == "i" else {"float16": 2e-3, "float32": 3e-7, "float64": 1e-15}[dtype]
        same(hvd.allreduce(x, average=False, prescale_factor=factor), before.astype(dtype), rtol=rtol)
        same(hvd.allreduce(x, average=False, postscale_factor=factor), after.astype(dtype), rtol=rtol)


@row("none: live Horovod 0.28.1, prescale 0.37 of int64 [0, 7, 14, 21, 28] on 3 ranks is [0, 6, 15, 21, 30]")
def the_golden_prescale():
    golden = json.loads((Path(__file__).parent / "golden_horovod.json").read_text())["prescale"]
    got = hvd.allreduce(np.array(golden["input"]), op=hvd.Sum, prescale_factor=golden["factor"])
    assert np.asarray(got).tolist() == [x // golden["ranks"] * hvd.size() for x in golden["result"]]


@row(
    "allreduce_process_sets, allgather_process_sets, broadcast_process_sets, alltoall_process_sets, reducescatter_process_sets, "  # noqa: E501
    "grouped_allreduce_process_sets, grouped_allgather_process_sets, grouped_reducescatter_process_sets"
)
def both_process_sets_at_once():
    this, sets = even_odd()
    n, place = this.size(), this.rank()
    assert this.included() and this.ranks[place] == hvd.rank()
    whole = of_ranks((2 * n, 3), "float32")
    ours = whole[this.ranks]
    same(hvd.allreduce(mine(whole), op=hvd.Sum, process_set=this), ours.sum(0, dtype="float32"))
    same(hvd.allgather(mine(whole), process_set=this), ours.reshape(-1, 3))
    same(hvd.broadcast(mine(whole), this.ranks[-1], process_set=this), ours[-1])
    same(hvd.alltoall(mine(whole), process_set=this), ours[:, 2 * place : 2 * place + 2].reshape(-1, 3))
    same(
        hvd.reducescatter(mine(whole), op=hvd.Sum, process_set=this),
        ours.sum(0, dtype="float32")[2 * place : 2 * place + 2],
    )
    total, two, rows = ours.sum(0, dtype="float32"), [mine(whole), 2 * mine(whole)], slice(2 * place, 2 * place + 2)
    for k, got in enumerate(hvd.grouped_allreduce(two, op=hvd.Sum, process_set=this), 1):
        same(got, k * total)
    for k, got in enumerate(hvd.grouped_allgather(two, process_set=this), 1):
        same(got, k * ours.reshape(-1, 3))
    for k, got in enumerate(hvd.grouped_reducescatter(two, op=hvd.Sum, process_set=this), 1):
        same(got, k * total[rows])
    other = sets[1 - hvd.rank() % 2]
    if other.size():
        with raises(ValueError, f"rank {hvd.rank()} is not in", "included()"):
            hvd.allreduce(mine(whole), process_set=other)
    with raises(NotImplementedError, "Adasum does not support non-global process sets yet."):
        hvd.allreduce(mine(whole), op=hvd.Adasum, process_set=this)
    close(sets)
    with raises(ValueError, "hvd.add_process_set"):
        hvd.allreduce(mine(whole), process_set=this)


@row("test_process_sets_static.py: static; test_tensorflow_process_sets_dynamic.py: add_get_remove_process_set")
def process_sets_come_and_go():
    last = hvd.add_process_set([hvd.size() - 1])
    assert (last.size(), last.rank(), last.included()) == (
        1,
        0 if hvd.rank() == hvd.size() - 1 else None,
        hvd.rank() == hvd.size() - 1,
    )
    with raises(ValueError, "Attempted to add a duplicate process set"):
        hvd.add_process_set([hvd.size() - 1])
    with raises(ValueError, "Attempted to add a duplicate process set"):
        hvd.add_process_set(list(range(hvd.size())))
    with raises(ValueError, f"from 0 to {hvd.size() - 1}"):
        hvd.add_process_set([hvd.size()])
    with raises(
        hvd.HorovodInternalError,
        "mismatched ranks",
        "rank 0: add_process_set ranks [0]",
        "rank 1: add_process_set ranks [1]",
    ):
        hvd.add_process_set([min(hvd.rank(), 1)])
    assert not hvd.remove_process_set(hvd.global_process_set)
    assert hvd.remove_process_set(last)
    assert last.process_set_id is None and last.size() is None and last.included() is None
    assert not hvd.remove_process_set(last)
    with raises(ValueError, "list of ranks"):
        hvd.ProcessSet(["a"])


@row("allreduce_error, allreduce_type_error")
def another_shape_or_dtype_of_an_allreduce_is_an_error_everywhere():
    rank = hvd.rank()
    with raises(
        hvd.HorovodInternalError,
        "mismatched shapes",
        "rank 0: allreduce Average float32[17,10]",
        "rank 1: allreduce Average float32[17,11]",
    ):
        hvd.allreduce(np.zeros((17, 10 + rank), np.float32))
    with raises(hvd.HorovodInternalError, "mismatched shapes"):  # the same number of elements
        hvd.allreduce(np.zeros((17, 10, 23) if rank % 2 else (10, 17, 23), np.float32))
    with raises(hvd.HorovodInternalError, "mismatched dtypes", "int32[17]", "float32[17]"):
        hvd.allreduce(np.zeros(17, np.int32 if rank % 2 == 0 else np.float32))
    with raises(hvd.HorovodInternalError, "mismatched reduction", "Sum", "Max"):
        hvd.allreduce(np.zeros(17, np.float32), op=hvd.Sum if rank else hvd.Max)
    with raises(hvd.HorovodInternalError, "mismatched prescale", "prescale 2"):
        hvd.allreduce(np.zeros(17, np.float32), prescale_factor=2.0 if rank else 1.0)
    with raises(hvd.HorovodInternalError, "mismatched postscale", "postscale 2"):
        hvd.allreduce(np.zeros(17, np.float32), postscale_factor=2.0 if rank else 1.0)
    with raises(ValueError, "bool", "Cast it"):
        hvd.allreduce(np.zeros(17, bool))
    same(hvd.allreduce(np.ones(3, np.float32)), np.ones(3, np.float32))  # and nothing is left behind


def duplicate(ask):
    """Repeats the five tests of `duplicate_name`: rank 0 first, then the others, with barriers between."""
    for of_rank_0 in (True, False):
        if (hvd.rank() == 0) == of_rank_0:
            ask()
            with raises(ValueError, "same name", "'duplicate_name'"):
                ask()
        hvd.barrier()


@row(
    "allreduce_duplicate_name_error, allgather_duplicate_name_error, broadcast_duplicate_name_error, reducescatter_duplicate_name_error; "  # noqa: E501
    "none: alltoall"
)
def two_of_one_name_at_once_are_an_error():
    x = np.ones((17, 2), np.float32)
    for ask in (
        lambda: hvd.allreduce_async(x, name="duplicate_name"),
        lambda: hvd.allgather_async(x, name="duplicate_name"),
        lambda: hvd.broadcast_async(x, root_rank=0, name="duplicate_name"),
        lambda: hvd.reducescatter_async(x, name="duplicate_name"),
        lambda: hvd.alltoall_async(x[:0], name="duplicate_name"),
    ):
        duplicate(ask)


@row("allreduce_grad, allreduce_grad_average, grouped_allreduce_grad, grouped_allreduce_grad_average")
def gradients_of_allreduce():
    for dtype in REDUCED[-1:]:
        x = jnp.asarray(random((5, 2), dtype))
        same(jax.grad(lambda x: hvd.allreduce(x, op=hvd.Sum).sum())(x), np.full((5, 2), hvd.size(), dtype))
        same(jax.grad(lambda x: hvd.allreduce(x).sum())(x), np.ones((5, 2), dtype))
        two = jax.grad(lambda xs: sum(y.sum() for y in hvd.grouped_allreduce(xs, op=hvd.Sum)))([x, x[0]])
        same(two[0], np.full((5, 2), hvd.size(), dtype))
        same(two[1], np.full(2, hvd.size(), dtype))
        same(jax.grad(lambda x: hvd.grouped_allreduce([x])[0].sum())(x), np.ones((5, 2), dtype))
    weight = np.arange(2.0, dtype=np.float32) + hvd.rank()
    expected = 3 * sum(np.arange(2.0, dtype=np.float32) + r for r in range(hvd.size()))
    same(
        jax.grad(lambda x: (hvd.allreduce(x, op=hvd.Sum, prescale_factor=3.0) * weight).sum())(
            jnp.ones(2, jnp.float32)
        ),
        expected,
    )
    with raises(NotImplementedError, "Max", "stop_gradient"):
        jax.grad(lambda x: hvd.allreduce(x, op=hvd.Max).sum())(jnp.ones(2))


@row(
    "allreduce_grad_process_sets, grouped_allreduce_grad_process_sets, allgather_grad_process_sets, broadcast_grad_process_sets, "  # noqa: E501
    "alltoall_grad_process_sets, reducescatter_grad_process_sets"
)
def gradients_in_process_sets():
    this, sets = even_odd()
    n, x = this.size(), jnp.ones((2 * this.size(), 2), jnp.float32)
    same(jax.grad(lambda x: hvd.allreduce(x, op=hvd.Sum, process_set=this).sum())(x), np.full_like(x, n))
    two = jax.grad(lambda xs: sum(y.sum() for y in hvd.grouped_allreduce(xs, op=hvd.Sum, process_set=this)))([x, x[0]])
    same(two[0], np.full_like(x, n))
    same(two[1], np.full_like(x[0], n))
    same(jax.grad(lambda x: hvd.allgather(x, process_set=this).sum())(x), np.ones_like(x))
    root = this.ranks[-1]
    expected = np.full_like(x, float(hvd.rank() == root))
    same(jax.grad(lambda x: hvd.broadcast(x, root, process_set=this).sum())(x), expected)
    same(jax.grad(lambda x: hvd.alltoall(x, process_set=this).sum())(x), np.ones_like(x))
    same(jax.grad(lambda x: hvd.reducescatter(x, op=hvd.Sum, process_set=this).sum())(x), np.full_like(x, n))
    close(sets)


@row(
    "grouped_allreduce, grouped_allreduce_average, grouped_allgather, grouped_reducescatter, "
    "grouped_reducescatter_average, grouped_reducescatter_prescale, grouped_reducescatter_postscale; none: several "
    "broadcasts are hvd.broadcast_parameters"
)
def groups_are_done_together():
    arrays = [
        random([4 * hvd.size()] * dim, dtype, seed=dim) for dim, dtype in ((1, "float32"), (2, "int64"), (3, "float64"))
    ]
    for got, x in zip(hvd.grouped_allreduce(arrays, op=hvd.Sum), arrays, strict=True):
        same(got, x * hvd.size())
    for got, x in zip(hvd.grouped_allreduce(arrays), arrays, strict=True):
        same(got, x)
    for got, x in zip(hvd.grouped_allgather(arrays), arrays, strict=True):
        same(got, np.concatenate([x] * hvd.size()))
    rows = slice(4 * hvd.rank(), 4 * hvd.rank() + 4)
    for got, x in zip(hvd.grouped_reducescatter(arrays, op=hvd.Sum), arrays, strict=True):
        same(got, x[rows] * hvd.size())
    for got, x in zip(hvd.grouped_reducescatter(arrays), arrays, strict=True):
        same(got, x[rows])
    x = arrays[2]
    for got in hvd.grouped_reducescatter([x, x], op=hvd.Sum, prescale_factor=0.37):
        same(got, (x * 0.37 * hvd.size())[rows], rtol=1e-14)
    for got in hvd.grouped_reducescatter([x, x], op=hvd.Sum, postscale_factor=0.37):
        same(got, (x * hvd.size() * 0.37)[rows], rtol=1e-14)
    several = hvd.broadcast_parameters([x + hvd.rank(), jnp.full((2, 3), hvd.rank())], root_rank=1)
    same(several[0], x + 1)
    same(several[1], np.full((2, 3), 1))
    with raises(hvd.HorovodInternalError, "mismatched"):
        hvd.grouped_allreduce([arrays[0]] * (2 if hvd.rank() else 1))


@row("allgather, allgather_variable_size, allgather_async_fused")
def allgather_of_equal_and_other_first_dims():
    for dtype in (*DTYPES, "bool"):
        for dim in DIMS:
            x = np.full([17] * dim, hvd.rank()).astype(dtype)
            same(hvd.allgather(x), np.concatenate([np.full([17] * dim, r).astype(dtype) for r in range(hvd.size())]))
    sizes = [17, 32, 81, 12][: hvd.size()]
    for dtype in REDUCED:
        x = np.full((sizes[hvd.rank()], 3), hvd.rank(), dtype)
        same(hvd.allgather(x), np.concatenate([np.full((n, 3), r, dtype) for r, n in enumerate(sizes)]))
    none_of_rank_0 = np.full((2 * hvd.rank(), 2), hvd.rank(), np.float32)
    same(hvd.allgather(none_of_rank_0), np.concatenate([np.full((2 * r, 2), r, np.float32) for r in range(hvd.size())]))
    handles = [hvd.allgather_async(np.full((2, i + 1), hvd.rank(), np.int32), name=f"gather {i}") for i in range(3)]
    for i, handle in enumerate(handles):
        same(hvd.synchronize(handle), np.repeat(np.arange(hvd.size(), dtype=np.int32), 2)[:, None].repeat(i + 1, 1))


@row("allgather_error, allgather_type_error")
def another_rest_or_dtype_of_an_allgather_is_an_error_everywhere():
    with raises(hvd.HorovodInternalError, "mismatched dims after the first", "float32[17,10,17]", "float32[17,20,17]"):
        hvd.allgather(np.zeros((17, 10 * (hvd.rank() + 1), 17), np.float32))
    with raises(hvd.HorovodInternalError, "mismatched dtypes"):
        hvd.allgather(np.zeros((17, 3), np.int32 if hvd.rank() % 2 == 0 else np.float32))
    with raises(ValueError, "scalar"):
        hvd.allgather(np.float32(1))


@row("allgather_grad, grouped_allgather_grad")
def gradients_of_allgather_are_means():
    sizes = [3, 2, 7, 4][: hvd.size()]
    x = jnp.ones((sizes[hvd.rank()], 2), jnp.float32)
    weights = np.concatenate([np.full((n, 2), r, np.float32) for r, n in enumerate(sizes)])
    same(jax.grad(lambda x: (hvd.allgather(x) * weights).sum())(x), np.full_like(x, hvd.rank()))
    two = jax.grad(lambda xs: sum((y * weights[:, :1]).sum() for y in hvd.grouped_allgather(xs)))([x, 2 * x])
    same(two[1], np.full_like(x, hvd.rank()))
    of_rank_0 = 1.0 if hvd.rank() == 0 else 0.0  # only rank 0 uses what it gathers: each gets its rows of the mean
    got = jax.grad(lambda x: hvd.allgather(x).sum() * of_rank_0)(x)
    same(got, np.full_like(x, 1 / hvd.size()), rtol=1e-6)


@row("broadcast, broadcast_grad")
def broadcast_moves_every_bit():
    for dtype in (*DTYPES, "bool", "complex64"):
        for root in range(hvd.size()):
            x = np.full((17, 2), hvd.rank()).astype(dtype)
            same(hvd.broadcast(x, root), np.full((17, 2), root).astype(dtype)) if dtype != "complex64" else None
            assert (np.asarray(hvd.broadcast(x, root)) == np.full((17, 2), root).astype(dtype)).all()
    odd = np.array([-0.0, np.nan, np.inf, -np.inf, 5e-324], np.float64) if hvd.rank() == 1 else np.zeros(5)
    assert np.asarray(hvd.broadcast(odd, 1)).tobytes() == np.array([-0.0, np.nan, np.inf, -np.inf, 5e-324]).tobytes()
    for root in range(hvd.size()):
        expected = np.full((3, 2), float(hvd.rank() == root), np.float32)
        same(jax.grad(lambda x, root=root: hvd.broadcast(x, root).sum())(jnp.ones((3, 2), jnp.float32)), expected)


@row("broadcast_error, broadcast_type_error, broadcast_rank_error")
def another_shape_dtype_or_root_of_a_broadcast_is_an_error_everywhere():
    with raises(hvd.HorovodInternalError, "mismatched shapes", "float32[17,10]", "float32[17,20]"):
        hvd.broadcast(np.zeros((17, 10 * (hvd.rank() + 1)), np.float32), 0)
    with raises(hvd.HorovodInternalError, "mismatched dtypes"):
        hvd.broadcast(np.zeros(3, np.int32 if hvd.rank() % 2 == 0 else np.float32), 0)
    with raises(hvd.HorovodInternalError, "mismatched root", "root 0", "root 1"):
        hvd.broadcast(np.zeros(3, np.float32), hvd.rank())
    with raises(ValueError, "root_rank 99"):
        hvd.broadcast(np.zeros(3, np.float32), 99)


@row("alltoall, alltoall_equal_split")
def alltoall_with_and_without_splits():
    n, rank = hvd.size(), hvd.rank()
    for dtype in (*DTYPES, "bool"):
        for tail in ((), (2,)):
            values = np.repeat(np.arange(n), rank + 1).astype(dtype)
            x = np.broadcast_to(values.reshape(-1, *[1] * len(tail)), (values.size, *tail))
            expected = np.full((sum(range(1, n + 1)), *tail), rank).astype(dtype)
            out, received = hvd.alltoall(x, splits=[rank + 1] * n)
            same(out, expected)
            assert np.asarray(received).tolist() == list(range(1, n + 1))
            same(hvd.alltoall(x), expected)
    out, received = hvd.alltoall(np.zeros((3, 2), np.float32), splits=[0] * n)  # nothing to anybody
    same(out, np.zeros((0, 2), np.float32))
    assert np.asarray(received).tolist() == [0] * n
    to_0 = np.arange(5, dtype=np.int32) if rank else np.zeros(0, np.int32)
    out, received = hvd.alltoall(to_0, splits=np.array([5 * (rank > 0)] + [0] * (n - 1), np.int32))
    assert np.asarray(out).tolist() == (list(range(5)) * (n - 1) if rank == 0 else [])
    assert np.asarray(received).tolist() == ([0] + [5] * (n - 1) if rank == 0 else [0] * n)


@row(
    "alltoall_type_error, alltoall_equal_split_length_error, alltoall_splits_error, alltoall_splits_type_error, alltoall_rank_error"  # noqa: E501
)
def what_is_wrong_with_an_alltoall():
    n, rank = hvd.size(), hvd.rank()
    with raises(hvd.HorovodInternalError, "mismatched dtypes"):
        hvd.alltoall(np.zeros((17 * n, 2), np.int32 if rank % 2 == 0 else np.float32))
    with raises(ValueError, "not a multiple"):
        hvd.alltoall(np.zeros(n + 1))
    with raises(ValueError, f"add up to {n} rows, and there are {n - 1}"):
        hvd.alltoall(np.zeros(n - 1), np.ones(n, np.int32))
    with raises(ValueError, "list of integers"):
        hvd.alltoall(np.zeros(n), np.zeros(n, np.float32))
    with raises(hvd.HorovodInternalError, "mismatched dims after the first"):
        hvd.alltoall(np.ones((2 * n, 10 * (rank + 1), 2)))


@row("alltoall_grad, alltoall_equal_split_grad")
def gradients_of_alltoall_go_back():
    n, rank = hvd.size(), hvd.rank()
    x = jnp.asarray(np.repeat(np.arange(n), rank + 1), jnp.float32)
    same(jax.grad(lambda x: hvd.alltoall(x, [rank + 1] * n)[0].sum())(x), np.ones_like(x))
    same(jax.grad(lambda x: hvd.alltoall(x).sum())(x), np.ones_like(x))
    same(jax.grad(lambda x: (hvd.alltoall(x) * rank).sum())(x), np.repeat(np.arange(n, dtype=np.float32), rank + 1))


@row("reducescatter, reducescatter_average, reducescatter_prescale, reducescatter_postscale, reducescatter_async_fused")
def reducescatter_of_even_rows():
    n, rows = hvd.size(), slice(4 * hvd.rank(), 4 * hvd.rank() + 4)
    for dtype in (*REDUCED, "float16"):
        for dim in DIMS:
            x = random([4 * n, 5, 2][:dim], dtype)
            same(hvd.reducescatter(x, op=hvd.Sum), (x * np.dtype(dtype).type(n))[rows])
            same(hvd.reducescatter(x, op=hvd.Average), x[rows])
            same(hvd.reducescatter(x), x[rows])
    x = random((4 * n, 3), "float64")
    same(hvd.reducescatter(x, op=hvd.Sum, prescale_factor=0.37), (x * 0.37 * n)[rows], rtol=1e-14)
    same(hvd.reducescatter(x, op=hvd.Sum, postscale_factor=0.37), (x * n * 0.37)[rows], rtol=1e-14)
    i = random((4 * n, 3), "int64")
    same(hvd.reducescatter(i, op=hvd.Sum, prescale_factor=0.37), (np.trunc(i * 0.37).astype("int64") * n)[rows])
    handles = [hvd.reducescatter_async(x + k, name=f"scatter {k}", op=hvd.Sum) for k in range(3)]
    for k, handle in enumerate(handles):
        same(hvd.synchronize(handle), ((x + k) * n)[rows])


@row("test_tensorflow.py: reducescatter_cpu_uneven")
def reducescatter_of_uneven_rows_gives_the_first_ranks_one_more():
    n, rank = hvd.size(), hvd.rank()
    for extra in range(n):
        x = random((4 * n + extra, 2), "float32")
        begin = 4 * rank + min(rank, extra)
        same(hvd.reducescatter(x, op=hvd.Sum), (x * n)[begin : begin + 4 + (rank < extra)])
    one = np.ones((1, 2), np.float32)
    same(hvd.reducescatter(one, op=hvd.Sum), (one * n)[: int(rank == 0)])


@row(
    "reducescatter_scalar_error, grouped_reducescatter_scalar_error, reducescatter_adasum, reducescatter_error, reducescatter_type_error"  # noqa: E501
)
def what_is_wrong_with_a_reducescatter():
    with raises(ValueError, "scalar"):
        hvd.reducescatter(np.float32(hvd.rank()))
    with raises(ValueError, "scalar"):
        hvd.grouped_reducescatter([np.zeros(4), np.float32(1)])
    with raises(ValueError, "Adasum"):
        hvd.reducescatter(np.zeros((4, 2), np.float32), op=hvd.Adasum)
    with raises(hvd.HorovodInternalError, "mismatched shapes"):
        hvd.reducescatter(np.zeros((17, 10 + hvd.rank()), np.float32))
    with raises(hvd.HorovodInternalError, "mismatched dtypes"):
        hvd.reducescatter(np.zeros(17, np.int32 if hvd.rank() % 2 == 0 else np.float32))


@row("reducescatter_grad, reducescatter_grad_average, grouped_reducescatter_grad")
def gradients_of_reducescatter():
    x = jnp.ones((4 * hvd.size(), 2), jnp.float32)
    same(jax.grad(lambda x: hvd.reducescatter(x, op=hvd.Sum).sum())(x), np.full_like(x, hvd.size()))
    same(jax.grad(lambda x: hvd.reducescatter(x).sum())(x), np.ones_like(x))
    got = jax.grad(lambda xs: sum(y.sum() for y in hvd.grouped_reducescatter(xs, op=hvd.Sum)))([x, x])[1]
    same(got, np.full_like(x, hvd.size()))


@row("test_adasum_pytorch.py: orthogonal, parallel, stability, stability_2")
def adasum_of_orthogonal_parallel_tiny_and_far_apart_arrays():
    n, rank = hvd.size(), hvd.rank()
    if n & (n - 1):
        with raises(NotImplementedError, "Running Adasum with non-power of 2 ranks is not supported yet"):
            hvd.allreduce(np.ones(3, np.float32), op=hvd.Adasum)
        return
    rng = np.random.default_rng(2)
    for dtype, rtol in (("float16", 5e-3), ("float32", 1e-5), ("float64", 1e-12)):
        for size in (n * 20 - 17,) if SHORT else (n * 20 - 17, n * 2 + 1, n + 2, 4096):
            q = np.linalg.qr(rng.normal(size=(size, n)))[0].astype(dtype)
            close_to(hvd.allreduce(q[:, rank], op=hvd.Adasum), q.astype(float).sum(1), rtol)
            q = np.outer(rng.normal(size=size), rng.uniform(0.5, 2, size=n)).astype(
                dtype
            )  # none cancels another: float16
            close_to(hvd.allreduce(q[:, rank], op=hvd.Adasum), q.astype(float).sum(1) / n, rtol)
    for dtype in ("float32", "float64"):
        tiny, big = float(np.finfo(dtype).tiny), float(np.sqrt(np.finfo(dtype).max))
        q = np.outer(rng.normal(0, 1, 1024) * tiny * 1e6, rng.uniform(0.5, 2, n)).astype(dtype)  # XLA has no denormals
        close_to(hvd.allreduce(q[:, rank], op=hvd.Adasum), q.astype(float).sum(1) / n, 1e-3)
        scale = [big ** ((i + 1) / n) * tiny ** ((n - i - 1) / n) for i in range(n)]
        q = np.outer(rng.normal(0, 1, 1024), scale).astype(dtype)
        close_to(hvd.allreduce(q[:, rank], op=hvd.Adasum), q.astype(np.longdouble).sum(1) / n, 1e-3)
    grouped = hvd.grouped_allreduce([q[:, rank], q[:8, rank]], op=hvd.Adasum)
    assert np.asarray(grouped[0]).tobytes() == np.asarray(hvd.allreduce(q[:, rank], op=hvd.Adasum)).tobytes()
    bits = hvd.allgather(np.asarray(grouped[0])[None])
    assert (np.asarray(bits) == np.asarray(bits)[0]).all()


def close_to(got, expected, rtol):
    error = np.linalg.norm(
        np.asarray(got).astype(np.longdouble) / np.abs(expected).max() - expected / np.abs(expected).max()
    )
    assert error <= rtol * np.linalg.norm(expected / np.abs(expected).max()), error


@row("join_allreduce")
def a_rank_that_has_joined_gives_zeros():
    n = hvd.size()
    for dtype in REDUCED:
        for first in range(n):
            a, b = random((5, 5), dtype), random(17, dtype, seed=7)
            if hvd.rank() == first:
                last = hvd.join()
            else:
                handles = [hvd.allreduce_async(x, name=f"tensor_{i}", average=True) for i, x in enumerate((a, b))]
                got = [hvd.synchronize(handle) for handle in handles]
                same(hvd.allreduce(a, op=hvd.Sum), a * np.dtype(dtype).type(n - 1))
                last = hvd.join()
                for y, x in zip(got, (a, b), strict=True):
                    expected = (
                        np.trunc(x * (n - 1) / n).astype(dtype)
                        if np.dtype(dtype).kind == "i"
                        else x * np.dtype(dtype).type(n - 1) / np.dtype(dtype).type(n)
                    )
                    same(y, expected, rtol=0 if np.dtype(dtype).kind == "i" else 1e-6)
            assert last != first and last in others(first)
            assert hvd.allgather_object(last) == [last] * n


@row("join_allgather, join_broadcast; none: alltoall and reducescatter, as controller.cc has it")
def what_needs_data_of_all_is_an_error_after_a_join():
    for first in range(hvd.size()):
        if hvd.rank() != first:
            x = np.ones((2 * hvd.size(), 2), np.float32)
            root = others(first)[0]
            for call in (
                lambda x=x: hvd.allgather(x),
                lambda x=x, root=root: hvd.broadcast(x, root, name="test_horovod_join_broadcast"),
                lambda x=x: hvd.alltoall(x),
                lambda x=x: hvd.reducescatter(x),
                lambda x=x: hvd.allreduce(x, op=hvd.Max),
            ):
                with raises(hvd.HorovodInternalError, "not supported while ranks have joined", f"[{first}]"):
                    call()
        last = hvd.join()
        assert last != first
        assert hvd.allgather_object(last) == [last] * hvd.size()


@row("none: documentation of join, ranks with unequal numbers of batches")
def unequal_numbers_of_batches():
    n, rank = hvd.size(), hvd.rank()
    got = [float(hvd.allreduce(np.array([rank + 1.0]), op=hvd.Sum)[0]) for _ in range(2 + rank)]
    assert hvd.join() == n - 1
    assert got == [sum(r + 1 for r in range(n) if 2 + r > batch) for batch in range(2 + rank)]


@row("broadcast_state, broadcast_state_options, broadcast_state_no_grad")
def parameters_and_optimizer_state_of_the_root():
    import optax

    for make in (
        lambda: optax.sgd(0.1 + hvd.rank(), momentum=0.9),
        lambda: optax.adam(0.1),
        lambda: optax.inject_hyperparams(optax.adamw)(0.1 + hvd.rank()),
    ):
        optimizer = make()
        params = {
            "w": jnp.full((3, 2), 1.0 + hvd.rank()),
            "frozen": jnp.full(2, hvd.rank(), jnp.int32),
            "h": jnp.full(2, hvd.rank(), jnp.bfloat16),
        }
        state = optimizer.init(params)
        state = jax.tree.map(lambda x: x + hvd.rank(), state)
        params = hvd.broadcast_parameters(params, root_rank=1)
        same(params["w"], np.full((3, 2), 2.0, params["w"].dtype))
        same(params["frozen"], np.ones(2, np.int32))
        assert params["h"].dtype == jnp.bfloat16 and float(params["h"][0]) == 1
        got = hvd.broadcast_optimizer_state(state, root_rank=0)
        assert jax.tree.structure(got) == jax.tree.structure(state)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(state), strict=True):
            assert (x.dtype, x.shape) == (y.dtype, y.shape)
            if hvd.rank() == 0:
                same(x, y)
        all_of_them = hvd.allgather_object([np.asarray(x).tolist() for x in jax.tree.leaves(got)])
        assert all(one == all_of_them[0] for one in all_of_them)
        assert hvd.broadcast_optimizer_state(optimizer, root_rank=0) is optimizer
    assert hvd.broadcast_parameters({"lr": 0.5 + hvd.rank(), "n": 3 + hvd.rank()}, 0) == {"lr": 0.5, "n": 3}


@row("broadcast_object, broadcast_object_process_sets, allgather_object")
def objects_go_as_json():
    expected = {
        "hello": 123,
        0: [1, 2],
        "t": (1, None, True),
        "b": b"\x00\n",
        "f": 0.1,
        "nan": float("inf"),
        ("k", 1): {"!": []},
    }
    assert hvd.broadcast_object(expected if hvd.rank() == 0 else {}) == expected
    of = {"metric_val_1": hvd.rank()} | ({"metric_val_2": 42} if hvd.rank() == 1 else {})
    assert hvd.allgather_object(of) == [
        {"metric_val_1": r} | ({"metric_val_2": 42} if r == 1 else {}) for r in range(hvd.size())
    ]
    array = hvd.broadcast_object({"x": np.arange(6, dtype=np.int16).reshape(2, 3), "s": np.float32(0.5)}, root_rank=1)
    assert (
        array["x"].dtype == np.int16
        and array["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
        and array["s"].dtype == np.float32
    )
    this, sets = even_odd()
    root = this.ranks[-1]
    assert hvd.broadcast_object({"root": hvd.rank()}, root, process_set=this) == {"root": root}
    assert hvd.allgather_object("x" * hvd.rank(), process_set=this) == ["x" * r for r in this.ranks]
    close(sets)
    kind = TypeError if hvd.rank() == 0 else hvd.HorovodInternalError
    with raises(kind, "the object['f'] is a function", "not pickled"):
        hvd.broadcast_object({"f": raises} if hvd.rank() == 0 else None)
    with raises(kind, "the object[1] is a set"):
        hvd.allgather_object([1, {2}] if hvd.rank() == 0 else None)


@row("compression_fp16; test_tensorflow.py: compression_fp16")
def half_on_the_wire_and_the_dtype_of_the_caller_back():
    for dtype in ("float16", "float32", "float64", "int32", "int64", "uint8"):
        x = jnp.ones((5, 17), dtype)
        sent, context = hvd.Compression.fp16.compress(x)
        floating = dtype.startswith("float")
        assert sent.dtype == (jnp.float16 if floating else dtype)
        assert hvd.Compression.fp16.decompress(sent, context).dtype == dtype
        if dtype != "uint8":
            same(hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16), np.full((5, 17), hvd.size(), dtype))
    sent, context = hvd.Compression.none.compress(x)
    assert sent is x and hvd.Compression.none.decompress(sent, context) is x
    got = hvd.allreduce(np.float32([1 / 3]), compression=hvd.Compression.fp16)
    assert float(got[0]) == float(np.float32(np.float16(1 / 3)))


@row("none: the step is compiled, the reduction between its halves is not")
def half_in_a_compiled_step():
    fp16, w = hvd.Compression.fp16, jnp.asarray(random((8,), "float32")) / 7
    batches = [jnp.asarray(random((4, 8), "float32", seed=r)) / 50 for r in range(hvd.size())]
    backward = jax.jit(lambda w, x: fp16.compress(jax.grad(lambda w: ((x @ w) ** 2).mean())(w))[0])
    forward = jax.jit(lambda w, g: w - 0.1 * fp16.decompress(g, jnp.float32))
    sent = backward(w, mine(batches))
    assert sent.dtype == jnp.float16 and "f16[8]" in backward.lower(w, mine(batches)).compile().as_text()
    got = forward(w, hvd.allreduce(sent))
    expected = w - 0.1 * sum(backward(w, x).astype(jnp.float32) for x in batches) / hvd.size()
    same(got, np.asarray(expected), rtol=1e-2, atol=1e-3)
    same(hvd.allgather(got[None]), np.broadcast_to(got, (hvd.size(), 8)))


def gradients_of_rank(step=0):
    """Returns gradients that differ from rank to rank."""
    rng = np.random.default_rng(100 * step + hvd.rank())
    return {"w": rng.normal(size=(4, 3)).astype(np.float32), "b": rng.normal(size=3).astype(np.float32)}


def mean_of_ranks(steps=(0,), factor=1.0):
    """Returns the mean over ranks of the sums over steps."""
    of_all = [
        {"w": rng.normal(size=(4, 3)).astype(np.float32), "b": rng.normal(size=3).astype(np.float32)}
        for rank in range(hvd.size())
        for rng in (np.random.default_rng(100 * step + rank) for step in steps)
    ]
    return jax.tree.map(lambda *xs: sum(xs) / hvd.size() * np.float32(factor), *of_all)


@row(
    "force_allreduce, gradient_clipping, no_named_parameters, optimizer_no_named_parameters, delta_optimizer, model_parallelism"  # noqa: E501
)
def the_optimizer_reduces_gradients_before_its_step():
    import optax

    params = {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}
    for optimizer in (optax.sgd(0.1, momentum=0.5), optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1)))[
        SHORT:
    ]:
        for predivide, compression in (
            (1.0, hvd.Compression.none),
            (2.0, hvd.Compression.none),
            (1.0, hvd.Compression.fp16),
        ):
            distributed = hvd.DistributedOptimizer(
                optimizer, named_parameters=params.items(), compression=compression, gradient_predivide_factor=predivide
            )
            state, expected = distributed.init(params), optimizer.init(params)
            rtol = 3e-3 if compression is hvd.Compression.fp16 else 3e-5
            for step in range(2):
                updates, state = distributed.update(gradients_of_rank(step), state, params)
                wanted, expected = optimizer.update(mean_of_ranks((step,)), expected, params)
                for name in params:
                    np.testing.assert_allclose(updates[name], wanted[name], rtol=rtol, atol=rtol * 0.1)
    plain = hvd.DistributedOptimizer(optax.sgd(1.0), op=hvd.Sum)
    updates, _ = plain.update(gradients_of_rank(), plain.init(params))
    np.testing.assert_allclose(updates["w"], -mean_of_ranks(factor=hvd.size())["w"], rtol=1e-5, atol=1e-6)


@row("test_tensorflow.py: local_gradient_aggregation; test_tensorflow2_keras.py: gradient_aggregation")
def gradients_of_several_passes_are_added_up_on_the_rank():
    import optax

    params = {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}
    for average in (False, True):
        optimizer = hvd.DistributedOptimizer(
            optax.sgd(1.0), backward_passes_per_step=4, average_aggregated_gradients=average
        )
        state = optimizer.init(params)
        for step in range(10):
            updates, state = optimizer.update(gradients_of_rank(step), state, params)
            steps = range(step - 3, step + 1)
            factor = (0.25 if average else 1.0) if step % 4 == 3 else 0.0
            expected = mean_of_ranks(steps if factor else (step,), -factor)
            for name in params:
                np.testing.assert_allclose(updates[name], expected[name], rtol=1e-4, atol=1e-5)


@row("duplicate_names, missing_named_parameters; none: arguments of the optimizer")
def what_the_optimizer_refuses():
    import optax

    params = {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}
    sgd = optax.sgd(0.1)
    with raises(ValueError, "must be unique", "w"):
        hvd.DistributedOptimizer(sgd, named_parameters=[("w", 1), ("w", 2)])
    with raises(ValueError, "sequence of tuples"):
        hvd.DistributedOptimizer(sgd, named_parameters=[params["w"]])
    with raises(ValueError, "one or more model parameters were not named"):
        hvd.DistributedOptimizer(sgd, named_parameters=[("w", 1)]).init(params)
    with raises(ValueError, "gradient_predivide_factor not supported with op != Average"):
        hvd.DistributedOptimizer(sgd, op=hvd.Sum, gradient_predivide_factor=2.0)
    with raises(ValueError, "backward_passes_per_step must be > 0"):
        hvd.DistributedOptimizer(sgd, backward_passes_per_step=0)
    with raises(NotImplementedError, "groups", "Omit it"):
        hvd.DistributedOptimizer(sgd, groups=2)
    optimizer = hvd.DistributedOptimizer(sgd)
    with raises(NotImplementedError, "outside of it"):
        jax.jit(optimizer.update)(gradients_of_rank(), optimizer.init(params), params)
    with raises(hvd.HorovodInternalError, "mismatched"):
        optimizer.update({"w": np.zeros((4, 3 + hvd.rank()), np.float32)}, optimizer.init(params))


@row("optimizer_process_sets")
def the_optimizer_of_a_process_set():
    import optax

    _, sets = even_odd()
    even = sets[0]
    params = {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}
    optimizer = hvd.DistributedOptimizer(optax.sgd(1.0), process_set=even)
    updates, _ = optimizer.update(gradients_of_rank(), optimizer.init(params), params)
    if hvd.rank() % 2 == 0:
        of_set = [np.random.default_rng(r).normal(size=(4, 3)).astype(np.float32) for r in even.ranks]
        expected = sum(of_set) / len(of_set)
    else:
        expected = gradients_of_rank()["w"]
    np.testing.assert_allclose(updates["w"], -expected, rtol=1e-5, atol=1e-6)
    close(sets)


@row("none: horovod/torch/optimizer.py, _DistributedAdasumOptimizer combines updates")
def adasum_of_the_optimizer_is_of_its_updates():
    import optax

    params = {"w": jnp.zeros((hvd.size(), 2))}
    gradients = {"w": jnp.zeros((hvd.size(), 2)).at[hvd.rank()].set(1.0 + hvd.rank())}
    if hvd.size() & (hvd.size() - 1):
        return
    optimizer = hvd.DistributedOptimizer(optax.adam(0.1), op=hvd.Adasum)
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    np.testing.assert_allclose(
        updates["w"], np.full((hvd.size(), 2), -0.1), rtol=1e-4
    )  # orthogonal: each rank's own step


@row("sparse_embeddings, async_sparse_allreduce, async_sparse_allreduce_process_sets")
def sparse_gradients_go_as_rows():
    import optax
    from jax.experimental import sparse

    this, sets = even_odd()
    rng = np.random.default_rng(hvd.rank())
    for process_set in (hvd.global_process_set, this):
        arrays = [rng.random((rows, 4)) * (rng.random((rows, 4)) > 0.8) for rows in (17, 32)]
        expected = [hvd.allreduce(x, process_set=process_set) for x in arrays]
        handles = [
            hvd.sparse_allreduce_async(sparse.BCOO.fromdense(jnp.asarray(x)), f"{i}", hvd.Average, process_set)
            for i, x in enumerate(arrays)
        ]
        for handle, wanted in zip(handles, expected, strict=True):
            np.testing.assert_allclose(handle().todense(), wanted, rtol=1e-12)
    close(sets)
    params = {"embedding": jnp.ones((10, 3), jnp.float32), "b": jnp.ones(3, jnp.float32)}
    tokens = [1, 2, 4, 5] if hvd.rank() == 0 else [1, 3, 4]
    rows = sparse.BCOO((jnp.ones((len(tokens), 3), jnp.float32), jnp.array(tokens)[:, None]), shape=(10, 3))
    counts = np.zeros(10, np.float32)
    for rank in range(hvd.size()):
        np.add.at(counts, [1, 2, 4, 5] if rank == 0 else [1, 3, 4], 1)
    for as_dense in (False, True):
        for passes in (1, 2):
            optimizer = hvd.DistributedOptimizer(
                optax.sgd(1.0), sparse_as_dense=as_dense, backward_passes_per_step=passes
            )
            state = optimizer.init(params)
            for _ in range(passes):
                updates, state = optimizer.update({"embedding": rows, "b": jnp.ones(3, jnp.float32)}, state, params)
            np.testing.assert_allclose(
                updates["embedding"], -passes * (counts / hvd.size())[:, None].repeat(3, 1), rtol=1e-6
            )
            np.testing.assert_allclose(updates["b"], -passes * np.ones(3), rtol=1e-6)


@row("global_barrier_op, process_set_barrier_op, barrier_with_multiple_collectives")
def barriers_wait_for_all_of_the_set():
    import time

    if hvd.rank() == 0:
        time.sleep(0.3)
    arrived = time.monotonic()
    hvd.barrier()
    passed = time.monotonic()
    assert passed >= hvd.broadcast_object(arrived, 0)
    this, sets = even_odd()
    hvd.barrier(process_set=this)
    handle = hvd.allreduce_async(np.ones(3, np.float32), name="beside", op=hvd.Sum)
    hvd.barrier()
    same(hvd.synchronize(handle), np.full(3, hvd.size(), np.float32))
    close(sets)


@row("none: names in any order, tensors are fused by name")
def named_asynchronous_calls_in_any_order():
    order = range(4) if hvd.rank() % 2 == 0 else reversed(range(4))
    handles = {i: hvd.allreduce_async(np.full(2, i, np.float32), name=f"any {i}", op=hvd.Sum) for i in order}
    for i in (2, 0, 3, 1) if hvd.rank() % 2 else (1, 3, 0, 2):
        same(hvd.synchronize(handles[i]), np.full(2, i * hvd.size(), np.float32))


@row("none: live Horovod 0.28.1 hangs")
def better_another_operation_on_another_rank_is_an_error_everywhere():
    x = np.zeros(3, np.float32)
    with raises(
        hvd.HorovodInternalError,
        "mismatched operation",
        "rank 0: allgather float32[3]",
        "rank 1: allreduce Average float32[3]",
    ):
        hvd.allreduce(x) if hvd.rank() else hvd.allgather(x)
    with raises(
        hvd.HorovodInternalError, "mismatched operation", "rank 0: barrier", "rank 1: broadcast float32[3] root 0"
    ):
        hvd.broadcast(x, 0) if hvd.rank() else hvd.barrier()
    with raises(
        hvd.HorovodInternalError,
        "wait for different operations",
        "rank 0: allreduce Average float32[3] 'a'",
        "rank 1: allreduce Average float32[3] 'b'",
    ):
        hvd.allreduce(x, name="b" if hvd.rank() else "a")
    with raises(hvd.HorovodInternalError, "wait for different operations"):
        if hvd.rank() == 0:
            hvd.allreduce_async(x), hvd.allreduce_async(x)  # unnamed calls that the others do not make
        hvd.allreduce(x, name=f"only {hvd.rank()}")
    same(hvd.allreduce(np.ones(3, np.float32), op=hvd.Sum), np.full(3, hvd.size(), np.float32))


@row("none: tensors are matched by name, and a name that one rank has alone is waited for")
def better_other_names_of_leaves_are_an_error_everywhere():
    import optax

    own = "head" if hvd.rank() else "tail"
    tree = {"w": np.ones(2, np.float32), own: np.ones(2, np.float32)}
    asked = "mismatched names of leaves", "rank 0: ", "with ['tail']", "rank 1: ", "with ['head']"
    optimizer = hvd.DistributedOptimizer(optax.sgd(1.0))
    with raises(hvd.HorovodInternalError, *asked):
        optimizer.update(tree, optimizer.init(tree))
    with raises(hvd.HorovodInternalError, *asked):
        hvd.broadcast_parameters(tree, root_rank=0)
    with raises(hvd.HorovodInternalError, "mismatched names of leaves", "with loss", "with accuracy"):
        hvd.callbacks.MetricAverageCallback().on_epoch_end(0, {"accuracy" if hvd.rank() else "loss": 1.0})


@row("none: live Horovod 0.28.1 hangs")
def better_a_mistake_of_one_rank_is_told_to_all():
    kind = ValueError if hvd.rank() == 0 else hvd.HorovodInternalError
    with raises(kind, "not a multiple"):
        hvd.alltoall(np.zeros(hvd.size() + (hvd.rank() == 0)))
    with raises(kind, "scalar"):
        hvd.allgather(np.float32(1) if hvd.rank() == 0 else np.ones(1, np.float32))
    with raises(kind, "bool"):
        hvd.allreduce(np.zeros(1, bool if hvd.rank() == 0 else np.float32))


@row("none")
def what_means_nothing_here_says_why_and_what_instead():
    with raises(NotImplementedError, "do not change in place", "x = hvd.allreduce(x)"):
        hvd.allreduce_(np.zeros(3))
    with raises(NotImplementedError, "spmdkit launch"):
        hvd.run(print)
    with raises(NotImplementedError, "BatchNorm(axis_name"):
        hvd.SyncBatchNorm(3)
    with raises(NotImplementedError, "jax.profiler"):
        hvd.start_timeline("file")
    for transform in (jax.jit, jax.vmap):
        with raises(NotImplementedError, "while JAX traces", "outside of it"):
            transform(lambda x: hvd.allreduce(x))(np.zeros(3, np.float32))
    with raises(NotImplementedError, "hvd.elastic.State(params=params"):
        hvd.elastic.TorchState(model=None)
    with raises(NotImplementedError, "hvd.broadcast_parameters"):
        hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    with raises(NotImplementedError, "Use instead: hvd.size()"):
        hvd.size_op()
    for module, name in ((hvd, ""), (hvd.elastic, ".elastic"), (hvd.callbacks, ".callbacks")):
        with raises(AttributeError, f"'spmdkit.horovod{name}' has no attribute 'nothing'"):
            module.nothing  # noqa: B018
    assert (hvd.mpi_built(), hvd.gloo_built(), hvd.nccl_built(), hvd.cuda_built()) == (False, True, 0, False)


@row("test_torch_elastic.py: elastic_state")
def elastic_state_is_committed_restored_and_synced():
    value = 1.0 if hvd.rank() == 0 else 2.0
    model = {"weight": jnp.full((2, 2), value), "bias": jnp.full(2, value)}
    other = {"weight": jnp.array([[1.0, 2.0], [3.0, 4.0]]), "bias": jnp.zeros(2)}
    state = hvd.elastic.State(model=model, batch=20 + hvd.rank(), epoch=10 + hvd.rank(), history=[("a", hvd.rank())])
    state.sync()
    assert all((np.asarray(x) == 1).all() for x in jax.tree.leaves(state.model))
    assert (state.batch, state.epoch, state.history) == (20, 10, [("a", 0)])
    state.model, state.batch, state.epoch = other, 21, 11
    state.history.append(1)
    state.restore()
    assert (np.asarray(state.model["weight"]) == 1).all() and isinstance(state.model["weight"], jax.Array)
    assert (state.batch, state.epoch, state.history) == (20, 10, [("a", 0)])
    state.model, state.batch, state.epoch = other, 21, 11
    state.commit()
    other["weight"].delete()  # as a donated buffer is
    state.restore()
    assert np.asarray(state.model["weight"]).tolist() == [[1, 2], [3, 4]]
    assert (state.batch, state.epoch) == (21, 11)


@row("test_torch_elastic.py: elastic_sampler")
def elastic_sampler_repeats_nothing():
    n, each = hvd.size(), 8
    data = list(range(each * n))
    sampler = hvd.elastic.ElasticSampler(data, shuffle=True)
    state = hvd.elastic.State(sampler=sampler)
    state.sync()
    assert (sampler.epoch, sampler.processed_num) == (0, 0)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        seen = hvd.allgather_object(list(sampler))
        assert sorted(i for part in seen for i in part) == data
        for batch in range(4):
            sampler.record_batch(batch, 2)
            assert sampler.processed_num == 2 * (batch + 1) * n
    sampler.set_epoch(2)
    order = hvd.allgather_object(list(sampler))
    sampler.record_batch(0, 2), sampler.record_batch(1, 2)
    state.commit()
    sampler.record_batch(2, 2), sampler.record_batch(3, 2)
    state.restore()
    assert sampler.processed_num == 4 * n and len(sampler) == 4
    first = {i for part in order for i in part[:4]}
    rest = {i for part in hvd.allgather_object(list(sampler)) for i in part}
    assert first | rest == set(data) and not first & rest
    sampler.record_batch(2, 2)
    state.commit()
    state.sync()
    assert sampler.processed_num == 6 * n and len(sampler) == 2
    sampler.set_epoch(3)
    assert len(sampler) == each


@row("none: common/elastic.py, run_fn under HorovodInternalError and HostsUpdatedInterrupt")
def elastic_run_goes_on_from_the_last_commit():
    state = hvd.elastic.State(batch=0, params=jnp.zeros(2))
    resets, tries = [], []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])

    @hvd.elastic.run
    def train(state, steps):
        tries.append(state.batch)
        while state.batch < steps:
            if len(tries) == 1 and state.batch == 3:
                hvd.allreduce(np.zeros(2 + hvd.rank()))  # an error on all ranks
            state.params = state.params + hvd.allreduce(jnp.ones(2))
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
        hvd.allreduce(np.zeros(2 + hvd.rank()))

    with raises(hvd.HorovodInternalError, "mismatched shapes"):
        always(state)
    assert tries.count(-1) == 3


@row("test_tensorflow2_keras.py: train_model_lr_schedule; none: _keras/callbacks.py")
def learning_rates_warm_up_with_momentum_correction():
    import optax

    n = hvd.size()
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1 * n, momentum=0.9)
    state = optimizer.init({"w": jnp.ones(2)})
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
    expected = [0.1 * ((step + 1) / 4 * (n - 1) / 2 + 1) for step in range(8)] + [0.1 * n] * 4
    np.testing.assert_allclose(rates, expected, rtol=1e-5)
    schedule = hvd.callbacks.LearningRateScheduleCallback(
        initial_lr=1.0, multiplier=0.1, start_epoch=1, end_epoch=3, momentum_correction=False
    )
    seen = []
    for epoch in range(4):
        schedule.on_epoch_begin(epoch)
        state = schedule.on_batch_end(0, schedule.on_batch_begin(0, state))
        seen.append(read("learning_rate"))
    np.testing.assert_allclose(seen, [0.1 * n, 1.0, 0.1, 0.1], rtol=1e-5)
    logs = {"loss": float(hvd.rank()), "accuracy": 1.0}
    hvd.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    assert logs == {"loss": (n - 1) / 2, "accuracy": 1.0}
    with raises(ValueError, "inject_hyperparams"):
        hvd.callbacks.hyperparameter(optax.sgd(0.1).init({}), "learning_rate")
    assert hvd.callbacks.scaled_learning_rate(0.1) == 0.1 * n
    assert hvd.callbacks.scaled_learning_rate(0.1, 2, hvd.Adasum) == 0.2


@row("none: 64 bits")
def integers_that_do_not_fit_are_refused():
    jax.config.update("jax_enable_x64", False)
    try:
        with raises(ValueError, "jax_enable_x64"):
            hvd.allreduce(np.array([2**40]))
        same(hvd.allreduce(np.array([2, 3]), op=hvd.Sum), np.array([2, 3], np.int32) * hvd.size())
        assert hvd.allreduce(0.5).dtype == jnp.float32
    finally:
        jax.config.update("jax_enable_x64", True)


def main(out):
    """Runs the table on this rank, in order; writes row -> None or the traceback."""
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
            break  # ranks may stand in different places now
    hvd.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
