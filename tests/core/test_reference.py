"""The reference lists every event, measured metric, file, exit code, config key and symbol, and no event that the code
does not write."""

import ast
import re
from pathlib import Path

import pytest

import spmdkit as sk
from spmdkit.config import Config
from spmdkit.config.sections import ParameterGroup
from spmdkit.config.wording import sections
from spmdkit.errors import ExitCode
from spmdkit.foundation import run_status
from spmdkit.foundation.constants import MEASURED
from tests.support.scripts import load_script

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"

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
    """Returns the names in the first column of the table of events."""
    table = (REFERENCE / "events.md").read_text()
    return {name for row in re.findall(r"^\| (`.*?) \|", table, re.M) for name in re.findall(r"`(\w+)`", row)}


def test_the_events_are_those_that_are_written():
    events = written_events()
    assert events == listed_events()
    assert [name for name in events if not re.fullmatch(r"[a-z]+(_[a-z]+)*", name)] == []


@pytest.fixture(scope="module")
def generate():
    return load_script(ROOT / "docs" / "generate.py")


def test_every_config_key_is_listed_with_its_meaning(generate):
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| [^|]+ \| [^|]+ \|$", generate.config(), re.M)
    models = [*(section for _, section in sections(Config)), ParameterGroup]
    keys = [name for model in models for name in model.model_fields]
    assert sorted(name for name, _ in rows) == sorted(keys)
    assert [name for name, meaning in rows if not meaning] == []


def test_metrics_and_exit_codes_are_listed(generate):
    page = (REFERENCE / "metrics.md").read_text()
    assert [name for name in MEASURED if f"`{name}`" not in page] == []
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", generate.exit_codes(), re.M)}
    assert listed == {int(code) for code in ExitCode}


def test_every_symbol_and_command_has_a_section(generate):
    page = generate.api()
    names = [name for name in sk.__all__ if not name.startswith("__")]
    parts = iter(re.split(r"^### `sk\.(\w+)`\n", page, flags=re.M)[1:])
    text = {
        name: re.sub(r"```python\n.*?```", "", part, flags=re.S).strip()
        for name, part in zip(parts, parts, strict=True)
    }
    assert sorted(text) == sorted(names)
    assert [name for name in names if not text[name]] == []
    assert {"spmdkit train", "spmdkit checkpoint ls"} <= set(re.findall(r"^## `(.+)`$", generate.commands(), re.M))


def test_mistakes_are_listed_with_their_repairs(generate):
    page = generate.errors()
    assert "| unknown key | `run.yaml:8: stepps:` ... `unknown key` |" in page and "| 78 |" in page
