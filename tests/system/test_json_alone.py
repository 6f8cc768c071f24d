"""`--json`: standard output carries one JSON object and nothing else, whatever libraries of C++ write there."""

import json
import subprocess
import sys
from pathlib import Path

from tests.support.environment import environment_of_a_user

ROOT = Path(__file__).parents[2]

# Stands for Gloo's greetings, which go to file descriptor 1 without Python: before and after the object, and in the
# midst of a line.
GREETED = """
import os, sys
from spmdkit.tools import doctor
from spmdkit.cli import main

whole = doctor.examine

def greeted(*args, **kwargs):
    os.write(1, b"[Gloo] Rank [Gloo] Rank 10 is connected to  is connected to 1 peer ranks.")
    return whole(*args, **kwargs)

doctor.examine = greeted
sys.exit(main(["doctor"] + sys.argv[1:]))
"""


def doctor(*options, cwd):
    return subprocess.run(
        [sys.executable, "-c", GREETED, *options],
        cwd=cwd,
        env=environment_of_a_user() | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_output_of_cpp_goes_to_standard_error(tmp_path):
    done = doctor("--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["problems"] == []
    assert "[Gloo]" in done.stderr
