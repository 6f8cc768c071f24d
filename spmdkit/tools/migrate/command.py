"""`spmdkit migrate FILE`: reads the config of another project and prints one for spmdkit, with a line for each
setting."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from spmdkit.config import parse_config
from spmdkit.errors import ConfigError
from spmdkit.foundation import plugins
from spmdkit.foundation.formatting import visible
from spmdkit.tools.migrate.base import KINDS, LOST, Migration, Translation, remove_without_effect, shown

MAX_BYTES = 10**6
TASK = "task.py:task"


class Migrated(NamedTuple):
    """The config as YAML with the translation of each setting as comments, and the settings that are lost: those that
    change training and have no counterpart. `problem`: why `spmdkit config check` rejects the config, or empty."""

    text: str
    lost: list[str]
    problem: str


def migrate(path: str | Path, project: str | None = None, devices: int = 1) -> Migrated:
    """Returns the config of another project as one for spmdkit.

    Args:
        project: accelerate, deepspeed, maxtext or an installed plug-in; None: the project that knows most of the
            settings in the file.
        devices: sizes per device are multiplied by this.
    Raises: ConfigError for a file that cannot be read, is not a mapping, or belongs to no known project.
    """
    if devices < 1:
        raise ConfigError(f"--devices {devices}: it is at least 1. Give the number of devices of the job: --devices 8.")
    settings = read(Path(path))
    readers = plugins.load_all("migrations")
    name = chosen(settings, {name: reader.NAMES for name, reader in readers.items()}, project, path)
    migration = readers[name].migrate(settings, devices, Path(path).parent)
    remove_without_effect(migration)
    problem = problem_of(migration)
    lost = list(dict.fromkeys(line.key for line in migration.lines if line.kind == LOST))
    return Migrated(text(migration, f"{Path(path).name}, a config of {name}", problem), lost, problem)


def problem_of(migration: Migration) -> str:
    """Returns why `spmdkit config check` rejects the config, in one line; empty if it accepts it."""
    try:
        parse_config({"task": TASK, **migration.config})
    except ConfigError as error:
        return " ".join(str(error).split())
    return ""


def read(path: Path) -> Mapping[str, Any]:
    """Returns the settings of a YAML or JSON file. Raises ConfigError if there are none."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(
                f"migrate {path}: {path.stat().st_size} bytes, a config has at most {MAX_BYTES}. Give the config file "
                "itself."
            )
        written = path.read_text()
        settings = json.loads(written) if path.suffix == ".json" else yaml.safe_load(written)
    except OSError as error:
        raise ConfigError(
            f"migrate {path}: {error.strerror or error}. Give the path of a config that exists."
        ) from None
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        why = " ".join(str(error).split())
        raise ConfigError(
            f"migrate {path}: it cannot be read as {path.suffix or 'YAML'}: {why}. Fix that line."
        ) from None
    if not isinstance(settings, Mapping) or not settings:
        found = "nothing" if not settings else type(settings).__name__
        raise ConfigError(
            f"migrate {path}: found {found}, and a config is a mapping of settings. Give the config itself."
        )
    return {str(name): value for name, value in settings.items()}


def chosen(
    settings: Mapping[str, Any], projects: Mapping[str, frozenset[str]], project: str | None, path: str | Path
) -> str:
    """Returns the project of a config; `projects`: project -> names of its settings. Raises ConfigError if it is
    unclear."""
    if project is not None and project not in projects:
        raise ConfigError(f"migrate --project {project}: it is one of {', '.join(projects)}.")
    fitting = {name: len(names & settings.keys()) for name, names in projects.items()}
    best = max(fitting, key=lambda name: fitting[name])
    if project is None and fitting[best] == 0:
        some = ", ".join(list(settings)[:5])
        raise ConfigError(
            f"migrate {path}: its settings ({some}) belong to none of {', '.join(projects)}. Name the project: "
            "--project accelerate."
        )
    return project or best


def text(migration: Migration, source: str, problem: str = "") -> str:
    """Returns the config as YAML with a comment for each setting, lost ones first. If the config is rejected, the
    reason is at the top."""
    head = [
        f"# From {source}; check it with `spmdkit config check`. The translation of each setting is listed at the end."
    ]
    head += [f"# NOT ACCEPTED YET: {visible(problem)}"] if problem else []
    config = []
    for name, value in {"task": TASK, **migration.config}.items():
        note = "  # your function with @sk.task that returns sk.Task(...)" if name == "task" else ""
        flow = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False).strip()
        config.append(f"{name}: {flow.removesuffix('...').strip()}{note}")
    lost, *rest = (_comments(kind, migration.lines) for kind in KINDS)
    return "\n".join([*head, *lost, *lost[:1], *config, *(line for lines in rest for line in lines)]) + "\n"


def _comments(kind: str, lines: list[Translation]) -> list[str]:
    of_kind = [comment_line(line) for line in lines if line.kind == kind]
    return ["#", f"# {kind}:", *of_kind] if of_kind else []


def comment_line(line: Translation) -> str:
    """Returns the comment of one setting."""
    value = " ".join(shown(line.value).split())
    return f"#   {line.key}: {value if len(value) <= 60 else value[:57] + '...'} -> {line.why}"
