"""The built-in hooks, one file each, selected by name, with `make(config) -> Hook | None` (None: not enabled)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from spmdkit.errors import ConfigError
from spmdkit.foundation import plugins
from spmdkit.run.hooks.base import Hook


def of_run(config: Any, own: Iterable[Hook]) -> list[Hook]:
    """Returns the built-in hooks and the user's hooks in their order. Raises ConfigError if two have the same name."""
    ours = [make(config) for make in plugins.load_all("default_hooks").values()]
    enabled = [hook for hook in ours if hook is not None]
    for hook in own:
        if any(hook.name == other.name for other in enabled):
            raise ConfigError(
                f"hooks: two are called '{hook.name}'. The state of a hook is saved under its name. Rename one."
            )
        enabled.append(hook)
    return sorted(enabled, key=lambda hook: hook.order)
