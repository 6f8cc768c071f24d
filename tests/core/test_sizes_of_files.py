"""A file stays under 400 lines and a function under 60, a class has its name alone; tests keep out of the inside of `Program`."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE_LINES, FUNCTION_LINES = 400, 60

LONG_FILES: dict[str, int] = {"program/program.py": 404}
LONG_FUNCTIONS: dict[str, int] = {}
"""Those of today, docstrings counted: they may shrink, and are taken out of here when they are short enough."""


def sources():
    """Returns path within the package -> text."""
    package = ROOT / "spmdkit"
    return {path.relative_to(package).as_posix(): path.read_text() for path in sorted(package.rglob("*.py"))}


def functions(text):
    """Yields (name, lines) of every function of a module, also of those within others."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.end_lineno - node.lineno + 1


def wrong(found, limit, exceptions):
    """Returns what is too long, or is an exception without need."""
    longer = {name: lines for name, lines in found.items() if lines >= limit and lines > exceptions.get(name, 0)}
    needless = {name: found.get(name) for name in exceptions if found.get(name, 0) < limit}
    return longer | needless


def test_no_file_has_400_lines():
    found = {path: text.count("\n") for path, text in sources().items()}
    assert wrong(found, FILE_LINES, LONG_FILES) == {}


def test_no_function_has_60_lines():
    found: dict[str, int] = {}
    for path, text in sources().items():
        for name, lines in functions(text):
            found[f"{path}:{name}"] = max(lines, found.get(f"{path}:{name}", 0))
    assert wrong(found, FUNCTION_LINES, LONG_FUNCTIONS) == {}


def test_no_two_classes_have_one_name():
    """A section of a config has the name of its key, whatever else is called so."""
    found: dict[str, list[str]] = {}
    for path, text in sources().items():
        for node in ast.walk(ast.parse(text)) if path != "config/sections.py" else ():
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(path)
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


def test_tests_use_no_private_name_of_a_program():
    private = re.compile(r"\bprogram(_of\(.*\))?\._[a-z]\w*")
    files = [path for path in sorted((ROOT / "tests").rglob("*.py")) if path != Path(__file__)]
    assert {str(path): m.group() for path in files for m in private.finditer(path.read_text())} == {}
