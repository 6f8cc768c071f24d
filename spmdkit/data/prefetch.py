"""Batches ahead of time: read on the host by grain and prefetched to the devices.

`host_batches` reads rows: with grain's threads, or without grain for arrays in memory, where grain would take 8 us a
batch and 0.3 s to import. `device_batches` runs one thread that puts batches on the devices ahead of time, or none.
(grain's `experimental.device_put` does not measure the wait, and hangs its consumer if the data raise SystemExit.)
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from spmdkit.data.schedule import Schedule
from spmdkit.data.source import HostBatch, Source, read_step
from spmdkit.foundation.timeouts import DATA_CLOSE_S


def host_batches(
    source: Source,
    schedule: Schedule,
    positions: np.ndarray | None,
    start: int,
    stop: int | None,
    prefetch: int = 2,
    threads: int = 1,
) -> Iterator[tuple[int, HostBatch]]:
    """Yields (step, HostBatch) for start <= step < stop. No batch before `start` is read.

    `positions` are this process's rows of the global batch, int in [0, batch_size), None for all of them; `stop` None
    is endless, or the end of a finite schedule. `threads` and `prefetch` have no effect on arrays in memory.

    Raises:
      UserCodeError, ConfigError: the exception of `Source.gather`, with the step; the cause is the user's exception.
    """
    if stop is None:
        stop = schedule.num_batches + 1 if schedule.finite else sys.maxsize
    if start >= stop:
        return
    if positions is not None and np.array_equal(positions, np.arange(schedule.batch_size)):
        positions = None
    if source.in_memory:
        for step in range(start, stop):
            yield step, HostBatch(*read_step(source, schedule, positions, step))
        return
    from spmdkit.data.grain_reader import StepDataset, read

    dataset = StepDataset(source, schedule, positions, start, stop)
    batches = read(dataset, threads, max(prefetch, threads) if threads else 0)
    try:
        for step, (examples, mask) in enumerate(batches, start):
            yield step, HostBatch(examples, mask)
    finally:
        batches.close()


class DeviceBatches:
    """Iterator of (step, device batch, wait_s); see `device_batches`. Also a context manager."""

    def __init__(self, batches: Iterable[tuple[int, Any]], put: Callable[[Any], Any], depth: int):
        self._ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._slots: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for _ in range(depth):
            self._slots.put(True)
        # The thread references the queues and not this object, so that an abandoned iterator can be collected.
        self._thread = threading.Thread(
            target=_produce, args=(batches, put, self._ready, self._slots), daemon=True, name="spmdkit-device-batches"
        )
        # Runs once: on close(), when collected, or at interpreter exit, before a thread inside JAX could be terminated.
        self._stop = weakref.finalize(self, _stop, self._thread, self._slots)
        self._thread.start()

    def __iter__(self) -> DeviceBatches:
        return self

    def __next__(self) -> tuple[int, Any, float]:
        if not self._stop.alive:
            raise StopIteration
        begin = time.perf_counter()
        item, error = self._ready.get()
        wait_s = time.perf_counter() - begin
        if item is None:
            self.close()
            raise error if error is not None else StopIteration
        self._slots.put(True)
        step, batch = item
        return step, batch, wait_s

    def interrupt(self) -> None:
        """Ends the iteration immediately and abandons the thread, even if the user's data never return. Callable from
        any thread."""
        if self._stop.detach() is not None:
            self._slots.put(False)
        self._ready.put((None, None))

    def close(self) -> None:
        """Stops the thread, waits for it at most `DATA_CLOSE_S`, and drops unused batches."""
        self._stop()

    def __enter__(self) -> DeviceBatches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _WithoutThread(DeviceBatches):
    """`DeviceBatches` that puts a batch when it is requested."""

    def __init__(self, batches: Iterable[tuple[int, Any]], put: Callable[[Any], Any]):
        self._batches, self._put = batches, put
        self._iterator = iter(batches)

    def __next__(self) -> tuple[int, Any, float]:
        begin = time.perf_counter()
        step, batch = next(self._iterator)
        batch = self._put(batch)
        return step, batch, time.perf_counter() - begin

    def interrupt(self) -> None:
        self._iterator = iter(())

    def close(self) -> None:
        self.interrupt()
        getattr(self._batches, "close", lambda: None)()


def device_batches(iterator: Iterable[tuple[int, Any]], put: Callable[[Any], Any], depth: int = 2) -> DeviceBatches:
    """Returns an iterator of (step, put(batch), wait_s) that puts at most `depth` batches ahead of the consumer. With
    0, none is ahead, and there is no thread.

    `put` runs in a background thread. It must pass explicit shardings, since JAX's context managers (`set_mesh`,
    `default_device`) do not apply to other threads. `wait_s` is the time that the consumer waited, 0 if the input is
    fast enough. Exceptions of `iterator` or `put` are raised in the consumer, after the batches before them. The thread
    closes `iterator`.
    """
    if depth < 0:
        raise ValueError(f"depth must be at least 0, got {depth}")
    return DeviceBatches(iterator, put, depth) if depth else _WithoutThread(iterator, put)


def _produce(
    batches: Iterable[tuple[int, Any]],
    put: Callable[[Any], Any],
    ready: queue.SimpleQueue[Any],
    slots: queue.SimpleQueue[Any],
) -> None:
    error: BaseException | None = None
    try:
        iterator = iter(batches)
        while slots.get():
            step, batch = next(iterator)
            ready.put(((step, put(batch)), None))
    except StopIteration:
        pass
    except BaseException as raised:  # noqa: BLE001  raised in the consumer, which would otherwise wait indefinitely
        error = raised
    try:
        getattr(batches, "close", lambda: None)()
    except BaseException as raised:  # noqa: BLE001  as above
        error = error or raised
    ready.put((None, error))


def _stop(thread: threading.Thread, slots: queue.SimpleQueue[Any]) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            slots.get_nowait()
    slots.put(False)
    if thread is not threading.current_thread():
        thread.join(DATA_CLOSE_S)
