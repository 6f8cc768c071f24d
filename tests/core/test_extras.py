"""What a message, a page or a config says to install is there."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"spmdkit\[([\w,-]+)\]|\b[Ee]xtra:? `(\w+)`")


def test_every_named_extra_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pages = [
        path
        for folder, kind in (
            ("spmdkit", "*.py"),
            ("docs", "*.md"),
            ("configs", "*.yaml"),
            (".", "*.md"),
            (".", "Makefile"),
        )
        for path in (ROOT / folder).glob(kind if folder == "." else f"**/{kind}")
    ]
    named = {
        (extra, path.name)
        for path in pages
        for match in NAMED.finditer(path.read_text())
        for extra in (match[1] or match[2]).split(",")
    }
    assert {"ray", "storage", "cuda"} <= {extra for extra, _ in named}
    assert [found for found in named if found[0] not in extras] == []
    assert extras["ray"] == ["ray>=2.60,<3"]
