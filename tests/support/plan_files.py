"""Configs of the small task, in memory and as files."""

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
