"""The guide lists every event, config key, measured metric and exit code, and no event that the code does not write."""

import ast
import re
from pathlib import Path

from spmdkit.config import Config
from spmdkit.config.wording import sections
from spmdkit.errors import ExitCode
from spmdkit.foundation import run_status
from spmdkit.foundation.constants import MEASURED

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guide.md").read_text()

WRITERS = {"events.write", "close_records", "note"}
"""Calls with the name of an event as their first argument."""


def written_events():
    """Returns the names of the events that the package writes."""
    found = {run_status.RUNNING}
    for path in (ROOT / "spmdkit").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                called = ast.unparse(node.func)
                if any(called == writer or called.endswith(f".{writer}") for writer in WRITERS):
                    found.add(node.args[0].value)
    return found


def listed_events():
    """Returns the names in the first column of the guide's table of events."""
    table = GUIDE.split("\n### Events\n")[1].split("\n## ")[0]
    return {name for row in re.findall(r"^\| (`.*?) \|", table, re.M) for name in re.findall(r"`(\w+)`", row)}


def test_the_guide_lists_the_events_that_are_written():
    events = written_events()
    assert events == listed_events()
    assert [name for name in events if not re.fullmatch(r"[a-z]+(_[a-z]+)*", name)] == []


def test_the_guide_names_every_config_key():
    keys = {name for _, section in sections(Config) for name in section.model_fields}
    assert sorted(key for key in keys if not re.search(rf"\b{key}\b", GUIDE)) == []


def test_the_guide_names_metrics_and_exit_codes():
    assert [name for name in MEASURED if f"`{name}`" not in GUIDE] == []
    codes = GUIDE.split("\n## Exit codes\n")[1].split("\n## ")[0]
    listed = {int(code) for code in re.findall(r"(?:^| · )(\d+)\b", codes.replace("\n", " ").strip())}
    assert listed - {128} == {int(code) for code in ExitCode} - {ExitCode.INTERRUPTED}  # 128+2
