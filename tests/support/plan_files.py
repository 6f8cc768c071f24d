"""Configs of the small task, in memory and as files."""

import json
import subprocess
import sys
from pathlib import Path

from spmdkit.config import parse_config, to_yaml

TASK = f"{Path(__file__).with_name('plan_tasks.py')}:task"


def config(**changes):
    """Returns a config on 8 fake devices, data 2 x fsdp 4."""
    base = {"task": TASK, "batch_size": 64, "steps": 2, "devices": "cpu:8", "mesh": {"data": 2, "fsdp": 4}}
    return parse_config(base | {"log": {"progress": "off"}, "checkpoint": None} | changes)


def write(folder, **changes):
    """Returns the file of a config."""
    path = folder / "config.yaml"
    path.write_text(to_yaml(config(**changes)))
    return path


def plan(tmp_path, target, *arguments, code=0, **changes):
    """Returns (JSON, error output) of `spmdkit plan` for a target."""
    command = [sys.executable, "-m", "spmdkit", "plan", str(write(tmp_path, **changes)), "--target", target, "--json"]
    ended = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=300)
    assert ended.returncode == code, ended.stderr
    return json.loads(ended.stdout) if ended.stdout else None, ended.stderr
