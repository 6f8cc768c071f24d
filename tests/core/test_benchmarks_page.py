"""docs/benchmarks.md: whoever doubts a table finds the command that makes it, and the command is there."""

import re
import shlex
from pathlib import Path

import pytest

from spmdkit.config import load_config

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "benchmarks.md").read_text()
COMMAND = re.compile(r"`((?:\S*python |make |spmdkit )[^`]+)`")
COMMANDS = [" ".join(command.split()) for command in COMMAND.findall(PAGE)]


def test_each_section_with_a_table_has_a_command():
    sections = {part.partition("\n")[0]: part for part in PAGE.split("\n## ")[1:]}
    assert [title for title, part in sections.items() if "\n| ---" in part and not COMMAND.search(part)] == []


@pytest.mark.parametrize("command", sorted({*COMMANDS}))
def test_a_command_names_existing_scripts_and_options(command):
    words = shlex.split(command.removeprefix("SPMDKIT_COMPILE_CACHE=off "))
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M), words[1]
    elif words[0] == "spmdkit":
        configs = [word for word in words if word.endswith(".yaml") and "/" in word]
        overrides = [word for word in words if "=" in word and not word.startswith("-")]
        for path in configs:
            load_config(ROOT / path, overrides)
    else:
        (script,) = [word for word in words if word.endswith(".py")]
        text = (ROOT / script).read_text()
        if "pytest" not in words:
            assert [w for w in words if w.startswith("--") and f'"{w}"' not in text and f" {w}" not in text] == []
