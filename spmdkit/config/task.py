"""References to user-defined objects: `path/to/file.py:name` or `package.module:name`."""

from __future__ import annotations

from pathlib import Path

from spmdkit.errors import ConfigError

IN_PYTHON = "python:task"
"""The task of a config in Python that names none: the task is passed to `sk.train`."""


def split_reference(task: str, folder: Path, where: str) -> tuple[str, str]:
    """Returns (absolute path of the .py file, name) or (module, name), without opening or importing it.

    Args:
        task: the reference; a path is relative to `folder`.
        where: the start of a message about it.

    Raises:
        ConfigError: `task` has neither form.
    """
    if problem := reference_problem(task):
        raise ConfigError(f"{where}: {problem}")
    target, _, name = task.rpartition(":")
    return (str((folder / target).resolve()), name) if target.endswith(".py") else (target, name)


def reference_problem(task: str, key: str = "task") -> str:
    """Returns the problem of the reference under `key`, or an empty string."""
    rule = "needs path/to/file.py:name or package.module:name, found"
    target, colon, name = task.rpartition(":")
    if len(task) > 1000:
        return f"{rule} text of {len(task)} characters. At most 1000 are allowed. Try {key}: my_{key}.py:{key}."
    if any(ord(c) < 32 for c in task):
        return f"{rule} {task!r}. Control characters are refused."
    if not colon or task.endswith(".py"):
        file = task if task.endswith(".py") else f"my_{key}.py"
        return f"{rule} {task!r}, which has no name of a {key.capitalize()}. Try {key}: {file}:{key}."
    if not name.isidentifier():
        return f"{rule} {task!r}: {name!r} is no name of Python. Try {key}: {target or f'my_{key}.py'}:{key}."
    if not target:
        return f"{rule} {task!r}, which has no file. Try {key}: my_{key}.py:{name}."
    if target.endswith(".py"):
        return f"{rule} {task!r}: `~` is the shell's. Write the whole path." if target.startswith("~") else ""
    if not all(part.isidentifier() for part in target.split(".")):
        return f"{rule} {task!r}: {target!r} is neither a .py file nor a module. Try {key}: {target}.py:{name}."
    return ""
