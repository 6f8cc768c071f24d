"""What membership stand on, on plain JAX: after a death inside a collective all others come out of it, and meet again
in another job of another size."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("plain_jax.py")


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("victim", "sizes"), [("0", "4,4"), ("1", "4,3"), ("2", "5,5,4,5")], ids=["process 0", "fewer", "five, and again"]
)
def test_plain_jax_survives_death_inside_a_collective(victim, sizes):
    done = subprocess.run(
        [sys.executable, str(PROGRAM), victim, "collective", sizes], capture_output=True, text=True, timeout=90
    )
    num = int(sizes[-1])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("DONE 8 8.0") == num, done.stdout
