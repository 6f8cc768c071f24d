"""Every path, name and link that a page of documentation gives leads to something."""

import functools
import re
from pathlib import Path

import pytest

import spmdkit as sk
from spmdkit.step import trace_context

ROOT = Path(__file__).parents[2]
PAGES = {str(path.relative_to(ROOT)): path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))}
FOLDERS = r"(?:spmdkit|tests|examples|configs|benchmarks|docs)"
SCOPES = {value for value in vars(trace_context).values() if isinstance(value, str) and value.startswith("spmdkit/")}
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
        linked = file.read_text() if file.suffix == ".md" and file.exists() else ""
        is_generated = "<!-- generated: " in linked  # Sphinx checks the headings of these pages
        if not file.exists() or (heading and not is_generated and heading not in headings(linked)):
            wrong.append(target)
    return wrong


def stale_api(text):
    """Returns the names of `sk` that a user cannot import, and the targets of `make` that there are not."""
    spans = "\n".join(re.findall(r"`([^`\n]+)`", prose(text)))
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    wrong = [f"sk.{name}" for name in re.findall(r"\bsk\.(\w+)", spans) if name not in sk.__all__]
    return wrong + [f"make {name}" for name in re.findall(r"\bmake ([a-z-]+)", spans) if name not in targets]


def stale_words(text):
    """Returns what stands alone in backticks in a walk through the code and is no path from the package or the tests,
    nor a word of the code."""
    wrong = []
    for span in re.findall(r"`([\w./]+)(?:\(\))?`", prose(text)):
        is_path = "/" in span or re.search(r"\.(py|md)$", span)
        if is_path and span not in SCOPES and not any(next(root.glob(span), None) for root in ROOTS):
            wrong.append(span)
        if not is_path and not words_of_code().issuperset(re.findall(r"[A-Za-z]\w*", span)):
            wrong.append(span)
    return wrong


ROOTS = (ROOT, ROOT / "spmdkit", ROOT / "tests", *(path.parent for path in (ROOT / "spmdkit").rglob("__init__.py")))


@functools.cache
def words_of_code():
    """Returns every word of the package, and of what it is built and run by."""
    files = [*(ROOT / "spmdkit").rglob("*.py"), *(ROOT / "examples").glob("*.py"), ROOT / "pyproject.toml"]
    return frozenset(word for file in files for word in re.findall(r"\w+", file.read_text()))


def headings(text):
    """Returns the anchors of a page's headings, as GitHub makes them."""
    plain = (re.sub(r"[^\w\- ]", "", line.lstrip("#").strip().lower()) for line in text.splitlines() if line[:1] == "#")
    return {line.replace(" ", "-") for line in plain}


@pytest.mark.parametrize("name", PAGES)
def test_what_a_page_names_exists(name):
    text = PAGES[name].read_text()
    assert (stale_paths(text), stale_names(text), stale_links(PAGES[name], text), stale_api(text)) == ([], [], [], [])


def test_the_architecture_page_names_existing_code():
    assert stale_words(PAGES["docs/why/code.md"].read_text()) == []


def test_pages_install_the_package_from_a_checkout():
    """The package is not on the index; a stranger could own its name there."""
    pages = [ROOT / "README.md", *(ROOT / "docs" / "howto").rglob("*.md")]
    new = re.compile(r"pip install '?spmdkit\b")
    found = [(page.name, line) for page in pages for line in page.read_text().splitlines() if new.search(line)]
    assert found == []
