"""The source text of a user's project: the files that a config names, and all project modules that they import.

Imports are read from the source, also inside functions; nothing is imported or run. A module belongs to the project if
its file is outside of Python, of installed packages and of spmdkit. If the task itself is installed, its package
belongs to the project.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, NamedTuple

from spmdkit.config import Config
from spmdkit.foundation import files, plugins

_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages(?:[/\\]|$)")
_PYTHON = tuple({sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib")})


class _File(NamedTuple):
    """A file of a project: its display name, the same on every host, and the package for its relative imports."""

    name: str
    path: Path
    package: str


def texts(config: Config) -> dict[str, str]:
    """Returns `{name: text}` for all files of the config's task, reducer, hooks and trackers and of their imports,
    sorted by name. A name is a path in the config (`tasks/mine.py`) or a module path (`models/net.py`)."""
    named = [_target(entry) for entry in _named_by(config)]
    files_named = [target for target in named if target.endswith(".py")]
    folders = list(dict.fromkeys((config.folder / target).resolve().parent for target in files_named))
    packages = frozenset(target.split(".")[0] for target in named if not target.endswith(".py"))
    finder = _Finder(folders, packages)
    todo = [_File(target, (config.folder / target).resolve(), "") for target in files_named]
    todo += [file for target in named if not target.endswith(".py") for file in finder.files_of(target)]
    contents: dict[Path, tuple[str, str]] = {}
    while todo:
        file = todo.pop(0)
        if file.path in contents or not file.path.is_file():
            continue
        text = file.path.read_bytes().decode(errors="replace")
        contents[file.path] = file.name, text
        todo += [file for name in imported(text, file.package) for file in finder.files_of(name)]
    return dict(sorted(contents.values()))


def digests(config: Config) -> dict[str, str]:
    """Returns `{name: 16 hex digits}` for the same files."""
    return {name: digest(text) for name, text in texts(config).items()}


def digest(text: str) -> str:
    """Returns 16 hex digits that change with the text."""
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]


@functools.cache
def package_digests() -> dict[str, str]:
    """Returns `{name: digest}` for the files of spmdkit. Cached, since it reads all of them (20 ms)."""
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


# ---- imports of a source text


def imported(text: str, package: str) -> list[str]:
    """Returns the dotted names that a module of `package` imports; for `from a import b` both `a` and `a.b`."""
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


# ---- location of a module


class _Finder:
    """Finds module files as Python does, without importing their parent packages.

    Args:
        folders: folders of the files that the config names, which Python searches first.
        own: top-level packages that belong to the project regardless of their location.
    """

    def __init__(self, folders: Sequence[Path], own: frozenset[str]):
        self._folders, self._own = [str(folder) for folder in folders], own
        self.files_of = functools.cache(lambda name: list(self._search(name)))

    def _search(self, name: str) -> Iterator[_File]:
        """Yields the files that importing a dotted name runs, its packages first; none for a library."""
        top, *rest = name.split(".")
        spec = None if top in sys.stdlib_module_names else self._spec_of(top)
        for number, part in enumerate([*rest, ""], 1):
            if spec is None:
                return
            dotted, folders = ".".join([top, *rest][:number]), spec.submodule_search_locations
            if spec.has_location and spec.origin is not None:
                if not spec.origin.endswith(".py") or (top not in self._own and _is_library(spec.origin)):
                    return
                package = dotted if folders is not None else dotted.rpartition(".")[0]
                display = dotted.replace(".", "/") + ("" if folders is None else "/__init__")
                yield _File(f"{display}.py", Path(spec.origin).resolve(), package)
            spec = None if folders is None or not part else PathFinder.find_spec(part, list(folders))

    def _spec_of(self, top: str) -> ModuleSpec | None:
        try:
            return PathFinder.find_spec(top, self._folders) or importlib.util.find_spec(top)
        except (ImportError, ValueError, AttributeError):
            return None


def _is_library(path: str) -> bool:
    return path.startswith((files.PACKAGE, *_PYTHON)) or _INSTALLED.search(path) is not None
