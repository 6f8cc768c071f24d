"""Code that compiles with the real TPU compiler, in a process of its own: libtpu is loaded once."""

import json
import os
import subprocess
import sys
from pathlib import Path


def printed_json(code):
    """Returns the JSON of each line that `code` prints; it can import the modules of tests/ops and tests/core."""
    root = Path(__file__).parents[2]
    paths = [root, root / "tests" / "ops", root / "tests" / "core", *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=root)
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]
