"""Ends a test that waits without end, or that reads without end. Independent of the load of the machine."""

import contextlib
import signal
import threading
from pathlib import Path

import pytest

SAMPLE_S, NUM_SAMPLES = 0.05, 400
"""A test is blocked if every thread sleeps in this many consecutive samples. A thread that waits for a processor does
not sleep."""
PROCESSOR_S = 60


@contextlib.contextmanager
def fails_if_blocked():
    """Fails the test if its process is blocked, or takes a minute of processor time."""

    def fail(*_):
        pytest.fail("a read or write blocks, or has no end")

    signals = signal.SIGALRM, signal.SIGPROF
    before = [signal.signal(number, fail) for number in signals]
    main, ended = threading.get_ident(), threading.Event()

    def watch():
        num_idle = 0
        while not ended.wait(SAMPLE_S):
            num_idle = num_idle + 1 if all_sleep() else 0
            if num_idle == NUM_SAMPLES:
                signal.pthread_kill(main, signal.SIGALRM)

    thread = threading.Thread(target=watch)
    thread.start()
    signal.setitimer(signal.ITIMER_PROF, PROCESSOR_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        ended.set()
        thread.join()
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


def all_sleep():
    """Returns whether all threads of this process except the calling one sleep (Linux; otherwise False)."""
    states, me = [], str(threading.get_native_id())
    for path in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            states += [path.read_text().rpartition(")")[2].split()[0]] if path.parent.name != me else []
    return bool(states) and set(states) == {"S"}
