"""The compiler's output on stderr, while other threads start processes."""

import os
import subprocess

import pytest

from spmdkit.program.compile_log import capture

LINE = b"[SPMD] Involuntary full rematerialization of x\n"


@pytest.mark.processes
def test_a_process_that_starts_during_compilation_is_not_awaited(capfd):
    with capture() as lines:
        child = subprocess.Popen(["sh", "-c", "sleep 8; echo late >&2"])
        os.write(2, LINE)
    assert child.poll() is None and lines == [LINE.decode().strip()]
    assert LINE.decode() in capfd.readouterr().err
    child.kill()
    child.wait()
