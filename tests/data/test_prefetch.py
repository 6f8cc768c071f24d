"""Streams: start anywhere, each process its rows, errors reach the consumer, and nothing outlives its close."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading
import traceback
import tracemalloc
import weakref

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.data import HostBatch, Schedule, device_batches, eval_schedule, host_batches, open_source
from spmdkit.data import prefetch as prefetch_module
from spmdkit.errors import UserCodeError
from spmdkit.program.program import Program

ARRAYS = {"x": np.arange(50, dtype=np.float32).reshape(25, 2), "y": np.arange(25)}
SOURCES = {
    "arrays": lambda: ARRAYS,
    "list": lambda: [{"x": x, "y": int(y)} for x, y in zip(ARRAYS["x"], ARRAYS["y"], strict=True)],
    "grain": lambda: grain.MapDataset.range(25).map(lambda i: {"x": ARRAYS["x"][i], "y": i}),
}
THREADS = "spmdkit-device-batches"


def stream(data, schedule, positions=None, start=1, stop=None, **options):
    return host_batches(open_source(data), schedule, positions, start, stop, **options)


def labels(batches):
    return [(step, batch.examples["y"].tolist()) for step, batch in batches]


def our_threads():
    return [thread for thread in threading.enumerate() if thread.name == THREADS]


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("threads", [1, 4])
def test_every_step_yields_the_examples_of_its_schedule(kind, threads):
    schedule = Schedule(25, 4, seed=3)
    batches = list(stream(SOURCES[kind](), schedule, start=1, stop=20, threads=threads))
    assert [step for step, _ in batches] == list(range(1, 20))
    for step, batch in batches:
        assert isinstance(batch, HostBatch) and batch.mask is None
        indices, _ = schedule.batch(step)
        np.testing.assert_array_equal(batch.examples["y"], indices)
        np.testing.assert_array_equal(batch.examples["x"], ARRAYS["x"][indices])


@pytest.mark.parametrize("kind", SOURCES)
def test_stream_from_any_step_is_the_rest(kind):
    schedule = Schedule(25, 4, seed=3, drop_remainder=False)
    full = labels(stream(SOURCES[kind](), schedule, stop=30))
    for start in (1, 2, 7, 8, 29):
        assert labels(stream(SOURCES[kind](), schedule, start=start, stop=30)) == full[start - 1 :]


def test_starting_late_reads_nothing_that_came_before():
    reads = []

    class Data:
        def __len__(self):
            return 1000

        def __getitem__(self, index):
            reads.append(index)
            return np.float32(index)

    schedule = Schedule(1000, 4, shuffle=False)
    batches = stream(Data(), schedule, start=201, stop=203)
    assert [batch.examples.tolist() for _, batch in batches] == [[800, 801, 802, 803], [804, 805, 806, 807]]
    assert sorted(reads) == [0, *range(800, 808)]  # 0 tells the shape, when the data is opened


@pytest.mark.parametrize("num_processes", [1, 3, 12])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rows_of_all_processes_form_the_batch(num_processes, interleaved):
    schedule = Schedule(25, 12, seed=1, drop_remainder=False)
    whole = list(stream(ARRAYS, schedule, stop=8))
    rows = np.arange(12)
    halves = np.array_split(rows, num_processes)
    parts = [rows[i::num_processes] if interleaved else halves[i] for i in range(num_processes)]
    streams = [list(stream(ARRAYS, schedule, part, stop=8)) for part in parts]
    for number, (step, batch) in enumerate(whole):
        for key, leaf in batch.examples.items():
            rebuilt = np.empty_like(leaf)
            for part, local in zip(parts, streams, strict=True):
                assert local[number][0] == step
                rebuilt[part] = local[number][1].examples[key]
            np.testing.assert_array_equal(rebuilt, leaf)
        mask = np.empty(12, bool)
        for part, local in zip(parts, streams, strict=True):
            mask[part] = local[number][1].mask
        np.testing.assert_array_equal(mask, schedule.batch(step)[1])
        np.testing.assert_array_equal(batch.mask, mask)


def test_evaluation_of_any_size_ends_and_is_exact():
    for batch_size in (1, 7, 25, 64):
        batches = list(stream(ARRAYS, eval_schedule(25, batch_size)))
        rows = np.ones(batch_size, bool)
        total = sum(b.examples["y"][rows if b.mask is None else b.mask].sum() for _, b in batches)
        assert total == ARRAYS["y"].sum() and len(batches) == -(-25 // batch_size)
    assert list(stream(ARRAYS, eval_schedule(25, 5), start=6)) == []


class Faulty:
    def __init__(self, bad, error):
        self.bad, self.error = bad, error

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == self.bad:
            raise self.error
        return np.float32(index)


@pytest.mark.parametrize("threads", [1, 3])
def test_data_error_surfaces_at_its_step(threads):
    batches = stream(Faulty(9, OSError("bad sector")), Schedule(40, 4, shuffle=False), threads=threads, prefetch=4)
    with device_batches(batches, put=lambda batch: batch.examples.sum(), depth=3) as device:
        assert [next(device)[:2] for _ in range(2)] == [(1, 6.0), (2, 22.0)]
        with pytest.raises(UserCodeError, match=r"step 3 .*train_data\[9\] raised OSError: bad sector") as error:
            next(device)
        assert type(error.value.__cause__) is OSError
        frames = traceback.extract_tb(error.value.__cause__.__traceback__)
        assert frames[-1].name == "__getitem__"  # the user's own line is there to read
        assert next(device, None) is None
    assert not our_threads()


@pytest.mark.parametrize(("error", "told"), [(SystemExit(3), UserCodeError), (KeyboardInterrupt(), KeyboardInterrupt)])
def test_exit_in_data_ends_the_wait(error, told):
    batches = stream(Faulty(5, error), Schedule(40, 4, shuffle=False))
    with device_batches(batches, put=lambda batch: batch) as device:
        assert next(device)[0] == 1
        with pytest.raises(told):
            next(device)


def test_batches_arrive_in_order_with_waits():
    device_put = jax.device_put
    batches = device_batches(stream(ARRAYS, Schedule(25, 5, seed=1), stop=50), lambda batch: device_put(batch.examples))
    seen = list(batches)
    assert [step for step, _, _ in seen] == list(range(1, 50))
    for step, batch, wait_s in seen:
        assert isinstance(batch["x"], jax.Array) and wait_s >= 0
        np.testing.assert_array_equal(batch["y"], Schedule(25, 5, seed=1).batch(step)[0])
    assert not our_threads()


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_at_most_depth_batches_are_ahead(depth):
    puts, reached = [], threading.Semaphore(0)

    def put(value):
        puts.append(value)
        reached.release()
        return value

    device = device_batches(enumerate(itertools.count()), put, depth)
    for taken in range(4):
        for _ in range(depth if taken == 0 else 1):
            assert reached.acquire(timeout=30)  # it does run that far ahead
        assert not reached.acquire(timeout=0.05), "a batch more than asked was put"
        assert len(puts) == taken + depth
        assert next(device)[1] == taken
    device.close()


def test_wait_is_the_time_the_consumer_stood_still(monkeypatch):
    now, looks, consumer_waits = [100.0], itertools.count(1), threading.Event()

    def clock():
        seen = now[0]
        if next(looks) == 3:  # the second batch is being asked for
            consumer_waits.set()
        return seen

    def slow():
        yield 1, "ready"
        assert consumer_waits.wait(30)
        now[0] += 7.0
        yield 2, "late"

    monkeypatch.setattr(prefetch_module.time, "perf_counter", clock)
    with device_batches(slow(), lambda value: value, depth=1) as device:
        assert [next(device), next(device)] == [(1, "ready", 0.0), (2, "late", 7.0)]


def test_close_stops_thread_and_iterator():
    closed = threading.Event()

    def endless():
        try:
            yield from enumerate(itertools.count())
        finally:
            closed.set()

    batches = endless()  # held here, so that only close() can end it
    device = device_batches(batches, lambda value: value)
    next(device)
    assert our_threads()
    device.close()
    device.close()
    assert closed.is_set() and not our_threads()
    assert next(device, None) is None


def test_no_thread_without_depth():
    closed, puts = [], []

    def numbers():
        try:
            yield from enumerate("abc", 1)
        finally:
            closed.append(True)

    device = device_batches(numbers(), lambda value: puts.append(value) or value.upper(), depth=0)
    assert [next(device)[:2] for _ in range(2)] == [(1, "A"), (2, "B")] and puts == ["a", "b"]
    assert not our_threads()
    device.close()
    device.close()
    assert closed and next(device, None) is None
    with device_batches(Faulty(0, OSError("bad sector")), put=len, depth=0) as device, pytest.raises(OSError):
        next(device)


WIDE = np.zeros((64, 2048), np.float32)  # a batch of 8 rows has 64 KiB


@pytest.mark.parametrize(
    ("data", "batch_size", "prefetch", "depth"),
    [
        (WIDE, 32, None, 0),  # 256 KiB
        (WIDE, 40, None, 2),
        (WIDE, 32, 2, 2),
        (list(WIDE), 8, None, 2),
    ],
    ids=["small", "large", "number", "examples"],
)
def test_small_batches_in_memory_need_no_thread(data, batch_size, prefetch, depth):
    task = sk.Task(
        init=lambda key: jnp.zeros(2048),
        loss_fn=lambda params, x, key: sk.mean(x @ params),
        optimizer=optax.sgd(0.1),
        train_data=data,
    )
    config = sk.Config(task="t:t", steps=3, batch_size=batch_size, devices="cpu:2", data={"prefetch": prefetch})
    with Program(config, task, jax.devices()[:2]).stream() as batches:
        assert len(our_threads()) == (depth > 0)
        assert [step for step, _, _ in batches] == [1, 2, 3]
    assert not our_threads()


def test_abandoned_iterator_is_collected():
    device = device_batches(enumerate(itertools.count()), lambda value: value)
    next(device)
    alive = weakref.ref(device)
    del device
    gc.collect()
    assert alive() is None and not our_threads()


def run_python(code, *options):
    """Returns what another interpreter prints, which ends without an error."""
    env = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, *options, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert (run.returncode, run.stderr) == (0, "")
    return run.stdout


ABANDON = """
import itertools, time, sys
import numpy as np
from spmdkit.data import *
{data}
batches = host_batches(open_source(data), Schedule(len(data), 4), None, 1, None)
device = device_batches(batches, {put})
next(device)
sys.stdout.write("left")
"""
MEMORY = "data = np.zeros((64, 2), np.float32)"
OBJECTS = "data = [np.zeros(2, np.float32)] * 64"


@pytest.mark.parametrize(
    ("data", "put"),
    [(MEMORY, "lambda b: b"), (OBJECTS, "lambda b: __import__('jax').device_put(b.examples)")],
    ids=["arrays", "examples"],
)
def test_interpreter_exit_with_open_stream_is_quick(data, put):
    code = ABANDON.format(data=data, put=put)
    assert run_python(code, "-W", "error") == "left"


def test_arrays_in_memory_do_not_import_grain():
    code = "import sys, numpy as np; from spmdkit.data import Schedule, host_batches, open_source; open_source([1.0])"
    code += "; batches = host_batches(open_source(np.zeros(8, np.int32)), Schedule(8, 4), None, 1, 9)"
    assert run_python(f"{code}; print(len(list(batches)), 'grain' in sys.modules)") == "8 False\n"


@pytest.mark.parametrize("kind,has_readers", [("arrays", False), ("list", True)])
def test_only_data_that_is_read_gets_reader_threads(kind, has_readers):
    before = {thread.ident for thread in threading.enumerate()}
    batches = stream(SOURCES[kind](), Schedule(25, 4), threads=3, prefetch=3)
    next(batches)
    assert bool({thread.ident for thread in threading.enumerate()} - before) == has_readers
    batches.close()


@pytest.mark.parametrize("make", [np.asarray, np.asfortranarray, lambda x: x[::2]])
def test_gathering_rows_never_copies_the_array(make):
    data = make(np.zeros((2**16, 32), np.float32))
    source = open_source(data)
    tracemalloc.start()
    try:
        source.gather(np.arange(4))
        assert tracemalloc.get_traced_memory()[1] < data.nbytes / 10
    finally:
        tracemalloc.stop()
