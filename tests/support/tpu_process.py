"""Runs code with the real TPU compiler in a separate process, since libtpu can be loaded only once."""

import json
import os
import subprocess
import sys
from pathlib import Path


def printed_json(code):
    """Returns the JSON of each line that `code` prints. The code can import modules of tests/support."""
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root)}
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=root)
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]
