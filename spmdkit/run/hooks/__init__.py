"""What is due around a step: a file each, found by its name.

A file has `make(config) -> Hook | None`, None where the config asks for none of it. `of_run` puts a user's own between
them.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from typing import Any

from spmdkit.errors import ConfigError
from spmdkit.run.hooks.base import Hook


def names() -> list[str]:
    """Returns the names of the hooks that come with the package."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "base")


def of_run(config: Any, own: Iterable[Hook]) -> list[Hook]:
    """Returns the hooks of a run in their order: ours, and the user's `own`.

    Raises:
        ConfigError: two have one name.
    """
    ours = [importlib.import_module(f"{__name__}.{name}").make(config) for name in names()]
    found = [hook for hook in ours if hook is not None]
    for hook in own:
        if any(hook.name == other.name for other in found):
            raise ConfigError(
                f"hooks: two are called '{hook.name}'. A name is a hook's own: its state is saved under it. Rename one."
            )
        found.append(hook)
    return sorted(found, key=lambda hook: hook.order)
