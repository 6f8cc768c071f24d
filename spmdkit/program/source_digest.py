"""The source text of a user's project: the files that a config names, and every module of the project that they import.

One function for all comparisons of source text: between processes before the first step, by `verify --resume`, and
between two starts of a run. Imports are read from the source, also inside functions; nothing is imported or run. A
module belongs to the project if its file is outside of Python, of installed packages and of spmdkit. If the task itself
is installed, its package belongs to the project.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from spmdkit.config import Config
from spmdkit.foundation import files, plugins

_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages(?:[/\\]|$)")
_PYTHON = tuple({sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib")})


class _File(NamedTuple):
    """One file of a project: its display name, which is the same on every host, and the package of its relative
    imports."""

    name: str
    path: Path
    package: str


def texts(config: Config) -> dict[str, str]:
    """Returns `{name: text}` of all files of the config's task, reducer, hooks and trackers and of their imports,
    sorted by name.

    Names are those of the config (`tasks/mine.py`) or derived from the module's (`models/net.py`). A file that cannot
    be read has no text; its import reports the error.
    """
    named = [_target(entry) for entry in _named_by(config)]
    files_named = [target for target in named if target.endswith(".py")]
    folders = list(dict.fromkeys((config.folder / target).resolve().parent for target in files_named))
    own = frozenset(target.split(".")[0] for target in named if not target.endswith(".py"))
    finder = _Finder(folders, own)
    todo = [_File(target, (config.folder / target).resolve(), "") for target in files_named]
    todo += [file for target in named if not target.endswith(".py") for file in finder.files_of(target)]
    found: dict[Path, tuple[str, str]] = {}
    while todo:
        file = todo.pop(0)
        if file.path in found or not file.path.is_file():
            continue
        text = file.path.read_bytes().decode(errors="replace")
        found[file.path] = file.name, text
        todo += [file for name in imported(text, file.package) for file in finder.files_of(name)]
    return dict(sorted(found.values()))


def digests(config: Config) -> dict[str, str]:
    """Returns `{name: 16 hex digits}` of the same files."""
    return {name: digest(text) for name, text in texts(config).items()}


def digest(text: str) -> str:
    """Returns 16 hex digits that change when the text does."""
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]


def package_digests() -> dict[str, str]:
    """Returns `{name: digest}` of spmdkit's own files."""
    folder = Path(files.PACKAGE)
    return {
        path.relative_to(folder).as_posix(): digest(path.read_text(encoding="utf-8"))
        for path in sorted(folder.rglob("*.py"))
    }


def _named_by(config: Config) -> Iterator[str]:
    """Yields the user-defined objects of the config: `file.py:name` or `module:name`."""
    yield config.task
    choices: list[Any] = [config.reducer, config.sync, *config.hooks, *config.log.trackers]
    yield from (plugins.split(choice)[0] for choice in choices if plugins.is_reference(choice))


def _target(entry: str) -> str:
    return entry.rpartition(":")[0]


# ---- what a text imports
# -----------------------------------------------------------------------------------------------


def imported(text: str, package: str) -> list[str]:
    """Returns the dotted names that a module imports, each once; of `from a import b` both `a` and `a.b`, which may be
    a module.

    Args:
        package: the package of the module, for relative imports.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []
    return list(dict.fromkeys(name for node in ast.walk(tree) for name in _names(node, package) if name))


def _names(node: ast.AST, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = _absolute("." * node.level + (node.module or ""), package)
        yield base
        yield from (f"{base}.{alias.name}" for alias in node.names if base)
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
            yield _absolute(node.args[0].value, package)


def _absolute(name: str, package: str) -> str:
    """Returns a dotted name without leading dots; empty if there is no package to resolve it."""
    rest = name.lstrip(".")
    level = len(name) - len(rest)
    if level == 0:
        return rest
    parts = package.split(".") if package else []
    if level - 1 >= len(parts):
        return ""
    return ".".join([*parts[: len(parts) - level + 1], *([rest] if rest else [])])


# ---- where a module is
# -------------------------------------------------------------------------------------------------


class _Finder:
    """Finds files of modules as Python would, without importing the packages around them.

    Args:
        folders: those of the files that the config names, which Python searches first.
        own: top-level packages that belong to the project wherever they are.
    """

    def __init__(self, folders: Sequence[Path], own: frozenset[str]):
        self._folders, self._own = folders, own
        self._found: dict[str, list[_File]] = {}

    def files_of(self, name: str) -> list[_File]:
        """Returns the files that the import of a dotted name runs: those of the packages around it, then its own. Empty
        for a library."""
        if name not in self._found:
            self._found[name] = list(self._search(name))
        return self._found[name]

    def _search(self, name: str) -> Iterator[_File]:
        top, *rest = name.split(".")
        places: list[Path] = []
        for number, part in enumerate([top, *rest]):
            dotted = ".".join([top, *rest][: number + 1])
            around = places if number else self._places(top)
            kind, found = _look(part, around)
            if kind == "nothing" and not number:
                kind, found = self._by_python(top)
            if kind == "nothing" or (kind != "folder" and not self._is_own(top, found[0])):
                return
            shown = dotted.replace(".", "/")
            if kind == "module":
                yield _File(f"{shown}.py", found[0], dotted.rpartition(".")[0])
                return
            if kind == "package":
                yield _File(f"{shown}/__init__.py", found[0], dotted)
            places = [found[0].parent] if kind == "package" else found

    def _places(self, top: str) -> list[Path]:
        if top in sys.stdlib_module_names:
            return []
        rest = [Path(place or os.curdir).absolute() for place in sys.path]
        return [*self._folders, *(place for place in rest if top in self._own or not _is_library(f"{place}{os.sep}"))]

    def _is_own(self, top: str, path: Path) -> bool:
        return top in self._own or not _is_library(str(path))

    def _by_python(self, top: str) -> tuple[str, list[Path]]:
        """Returns the spec that Python itself has for a top-level name: editable installs have their own finders."""
        try:
            spec = None if top in sys.stdlib_module_names else importlib.util.find_spec(top)
        except (ImportError, ValueError, AttributeError):
            spec = None
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            return "nothing", []
        return ("package" if spec.submodule_search_locations else "module"), [Path(spec.origin).resolve()]


def _look(part: str, places: Iterable[Path]) -> tuple[str, list[Path]]:
    """Returns (package, its __init__), (module, its file), (folder, those without an __init__) or (empty, none)."""
    folders = []
    for place in places:
        package, module = place / part / "__init__.py", place / f"{part}.py"
        if package.is_file():
            return "package", [package.resolve()]
        if module.is_file():
            return "module", [module.resolve()]
        if package.parent.is_dir():
            folders.append(package.parent)
    return ("folder" if folders else "nothing"), folders


def _is_library(path: str) -> bool:
    if path.startswith(files.PACKAGE) or _INSTALLED.search(path):
        return True
    return path.startswith(_PYTHON)
