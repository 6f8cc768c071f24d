"""Every path, name and link that a page of documentation gives leads to something."""

import re
from pathlib import Path

import pytest

from spmdkit.step import scope

ROOT = Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path
    for path in (ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md")))
}
FOLDERS = r"(?:spmdkit|tests|examples|configs|benchmarks|docs)"
SCOPES = {value for value in vars(scope).values() if isinstance(value, str) and value.startswith("spmdkit/")}
"""What looks like a path, and is the name of operations in a profile."""


def prose(text):
    """Returns a page without its blocks of code."""
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)


def stale_paths(text):
    """Returns the paths in backticks that do not exist; of `folder/NAME.py` the folder has to."""
    found = re.findall(rf"`({FOLDERS}/[\w./-]+)(?::\d+)?`", prose(text))
    return [path for path in found if path not in SCOPES and not (ROOT / re.sub(r"NAME\.\w+$", "", path)).exists()]


def stale_names(text):
    """Returns the names that are said to be in a file, as in "`f` in `spmdkit/file.py`", and are not."""
    found = re.findall(rf"`(\w+)` in `({FOLDERS}/[\w./-]+\.py)`", prose(text))
    return [(n, path) for n, path in found if not re.search(rf"\b{n}\b", (ROOT / path).read_text())]


def stale_links(page, text):
    """Returns the relative links of a page whose file, or whose heading in it, does not exist."""
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        path, _, heading = target.partition("#")
        if "://" in target:
            continue
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (heading and heading not in headings(file.read_text())):
            wrong.append(target)
    return wrong


def headings(text):
    """Returns the anchors of a page's headings, as GitHub makes them."""
    plain = (re.sub(r"[^\w\- ]", "", line.lstrip("#").strip().lower()) for line in text.splitlines() if line[:1] == "#")
    return {line.replace(" ", "-") for line in plain}


@pytest.mark.parametrize("name", PAGES)
def test_what_a_page_names_exists(name):
    text = PAGES[name].read_text()
    assert (stale_paths(text), stale_names(text), stale_links(PAGES[name], text)) == ([], [], [])


def test_every_page_is_named_in_another_one():
    texts = {name: path.read_text() for name, path in PAGES.items()}
    others = {name: "".join(text for other, text in texts.items() if other != name) for name in PAGES}
    assert [name for name in PAGES if name != "README.md" and name not in others[name]] == []


def test_what_is_stale_is_seen():
    text = "`spmdkit/gone.py`, `spmdkit/reduce`, `gone` in `spmdkit/cli.py`, [a](gone.md), [b](#nowhere), `spmdkit/none/NAME.py`"
    assert stale_paths(text) == ["spmdkit/gone.py", "spmdkit/none/NAME.py"]
    assert stale_names(text) == [("gone", "spmdkit/cli.py")]
    assert stale_links(ROOT / "README.md", text) == ["gone.md", "#nowhere"]
