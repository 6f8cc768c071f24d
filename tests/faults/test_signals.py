"""Stop requests: noted once, said once, and the second Ctrl-C leaves whatever the main thread does."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from spmdkit.faults import StopSignals
from spmdkit.faults.signals import NOTICE

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_is_a_request_with_one_line(number, capsys):
    with StopSignals() as signals:
        assert signals.requested is None
        os.kill(os.getpid(), number)
        deadline = time.monotonic() + 5
        while signals.requested is None:
            assert time.monotonic() < deadline
    assert signals.requested == number
    assert capsys.readouterr().err == NOTICE + "\n"


def test_only_ctrl_c_after_a_request_exits(capsys):
    left = []
    signals = StopSignals(force_exit=left.append)
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGCHLD):
        signals.received(number)
    assert (signals.requested, left) == (signal.SIGTERM, [])
    signals.received(signal.SIGINT)
    assert (signals.requested, left) == (signal.SIGTERM, [130])
    StopSignals(announce=False).received(signal.SIGINT)
    assert capsys.readouterr().err.count(NOTICE) == 1


def test_handlers_are_restored():
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    threads = threading.active_count()
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopSignals():
        assert signal.getsignal(signal.SIGINT) is not before[0]
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, "as under nohup"
    signal.signal(signal.SIGHUP, ignored)
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before
    assert threading.active_count() == threads
    assert signal.set_wakeup_fd(-1) == -1


def test_other_threads_change_no_handler():
    seen = []

    def body():
        with StopSignals() as signals:
            seen.append((signals.requested, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [(None, signal.getsignal(signal.SIGINT))]


@pytest.mark.processes
def test_second_ctrl_c_ends_a_blocked_main_thread():
    """A main thread inside C code, as in a collective that never ends, runs no Python handler."""
    code = """
import ctypes, threading
from spmdkit.faults import StopSignals
mutex = ctypes.create_string_buffer(128)  # an unlocked mutex is all zeros
lock = ctypes.CDLL(None).pthread_mutex_lock
lock(mutex)
with StopSignals():
    threading.Timer(0.5, lambda: print("ready", flush=True)).start()  # when the main thread is inside `lock`
    lock(mutex)  # for ever; no signal interrupts it
    print("not reached", flush=True)
"""
    popen = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    late = threading.Timer(20, popen.kill)
    late.start()
    try:
        assert popen.stdout.readline() == "ready\n"
        popen.send_signal(signal.SIGINT)
        assert popen.stderr.readline() == NOTICE + "\n"
        popen.send_signal(signal.SIGINT)
        assert popen.wait(timeout=5) == 130
    finally:
        late.cancel()
        popen.kill()
        popen.communicate()
