"""Public text uses the standard terms of the field: no word of `WORDS` in the pages, messages, help and docstrings."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
PACKAGES = sorted(path for path in (ROOT / "spmdkit").iterdir() if path.is_dir() or path.suffix == ".py")

WORDS = re.compile(
    r"\b(told|tells?|said|says|asked|asks|answer(s|ed)?|whose|(of|by) whom|nobody|anew|for ever|hurt|without a word"
    r"|teeth|set aside|made up for|besides?|stands in|at once|mended|guise|odd one)\b",
    re.IGNORECASE,
)


def is_private_docstring(node):
    return isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name.startswith("_") and ast.get_docstring(node)


def texts(tree):
    """Yields (line, text) of the docstrings of public names and of the strings with more than one word."""
    private = {id(node.body[0].value) for node in ast.walk(tree) if is_private_docstring(node)}
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and re.search(r"\w\s+\w", node.value)
        if is_text and id(node) not in private:
            yield from enumerate(node.value.splitlines(), node.lineno)


def wrong_words(lines, path):
    """Returns `file:line: word` for each word of `WORDS`."""
    where = path.relative_to(ROOT)
    return [f"{where}:{n}: {match[0]}" for n, text in lines for match in WORDS.finditer(text)]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_uses_standard_terms(path):
    assert wrong_words(enumerate(path.read_text().splitlines(), 1), path) == []


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_messages_and_docstrings_use_standard_terms(package):
    files = sorted(package.rglob("*.py")) if package.is_dir() else [package]
    assert [wrong for file in files for wrong in wrong_words(texts(ast.parse(file.read_text())), file)] == []
