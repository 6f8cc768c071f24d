"""`Config`: the validated settings of a run (settings.py, rules.py), as a frozen pydantic model.

`Config(task="my_task.py:task", mesh={"data": 8})` builds one in Python from plain values (without `task`, a task is
passed to `sk.train`); `load_config` and
`parse_config` (load.py) build one from a file or a mapping, with the line of every key. All of them raise `ConfigError`
with every problem.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ModelWrapValidatorHandler, ValidationError, ValidationInfo, model_validator

from spmdkit.config import problems, rules, wording
from spmdkit.config.settings import Settings
from spmdkit.config.source import REFERENCE
from spmdkit.config.task import IN_PYTHON, split_reference
from spmdkit.errors import ConfigError
from spmdkit.foundation.formatting import name_axes


class Config(Settings):
    """Every setting of a run."""

    @model_validator(mode="wrap")
    @classmethod
    def _raise_config_error(cls, data: Any, handler: ModelWrapValidatorHandler[Config], info: ValidationInfo) -> Config:
        """Converts the errors of pydantic and of the rules into one ConfigError. `info.context` is the Origin."""
        origin = info.context if isinstance(info.context, problems.Origin) else problems.Origin()
        if origin.file is None and isinstance(data, dict):
            data = {"task": IN_PYTHON} | data
        try:
            config = handler(_with_roles(_with_epochs(data)))
        except ValidationError as error:
            invalid = wording.translate(cls, error.errors(include_url=False))
            raise ConfigError(problems.render(invalid, origin)) from None
        config._origin = origin
        name_axes(config.roles)
        if invalid := rules.check(config, config.folder):
            raise ConfigError(problems.render(invalid, origin))
        return config

    def __eq__(self, other: object) -> bool:
        """Two configs are equal if their settings are equal, regardless of their files."""
        return isinstance(other, Config) and self.model_dump() == other.model_dump()

    __hash__ = None  # type: ignore[assignment]

    @property
    def source(self) -> Path | None:
        """The absolute path of the config's file, or None for a config built in Python."""
        return self._origin.file

    @property
    def folder(self) -> Path:
        """The base folder of relative paths: that of the file, otherwise the current folder."""
        return self._origin.file.parent if self._origin.file else Path.cwd()

    def resolved_run_dir(self) -> Path:
        """Returns the absolute run directory; the default is `runs/<config name>` in the config's folder."""
        stem = self._origin.file.stem if self._origin.file else "run"
        return (self.folder / (self.run_dir or f"runs/{stem}")).resolve()

    @property
    def num_steps(self) -> int:
        """The number of steps to train. Raises ConfigError for `epochs` before the data are open."""
        if self.steps is None:
            raise ConfigError(
                f"{self.where('epochs')} is {self.epochs}, and the number of steps is known when the data are open. "
                "Here it is needed before. Set steps, and epochs: null."
            )
        return self.steps

    def task_reference(self) -> tuple[str, str]:
        """Returns (absolute path of the .py file, name) or (module, name) of the task, without opening or importing
        it."""
        return split_reference(self.task, self.folder, self.where("task"))

    def variables(self) -> dict[str, str | None]:
        """Returns the environment variables that the config refers to, with their values; None: the default."""
        found = [REFERENCE.finditer(text) for text in self._origin.references.values()]
        return {name: os.environ.get(name) for name in sorted({m["name"] for matches in found for m in matches})}

    def where(self, key: str) -> str:
        """Returns the start of a message about a dotted key: `configs/gpt.yaml:12: mesh.data`."""
        return self._origin.where(problems.key_path(key))


def _with_epochs(data: Any) -> Any:
    """Returns the values of a config with `steps: null` if it has `epochs` and no `steps`."""
    is_counted = isinstance(data, dict) and data.get("epochs") is not None and "steps" not in data
    return data | {"steps": None} if is_counted else data


def _with_roles(data: Any) -> Any:
    """Returns the values of a config with the user's names of mesh axes replaced by their roles."""
    roles = data.get("roles") if isinstance(data, dict) else None
    if not isinstance(roles, dict):
        return data
    role_of: Callable[[Any], Any] = lambda name: roles.get(name, name) if isinstance(name, str) else name
    mesh, layout = data.get("mesh"), data.get("layout")
    if isinstance(mesh, dict) and len({*map(role_of, mesh)}) == len(mesh):
        data = data | {"mesh": {role_of(name): size for name, size in mesh.items()}}
    if isinstance(layout, dict) and isinstance(layout.get("axes"), dict):
        renamed = {
            name: [*map(role_of, axes)] if isinstance(axes, list) else role_of(axes)
            for name, axes in layout["axes"].items()
        }
        data = data | {"layout": layout | {"axes": renamed}}
    return data
