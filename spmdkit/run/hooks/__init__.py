"""What is due around a step: a file each, found by its name.

A file has `make(config) -> Hook | None`, None if the config does not enable it. `of_run` puts a user's own between
them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from spmdkit.errors import ConfigError
from spmdkit.foundation import plugins
from spmdkit.run.hooks.base import Hook


def of_run(config: Any, own: Iterable[Hook]) -> list[Hook]:
    """Returns the hooks of a run in their order: ours, and the user's `own`. Raises ConfigError: two have one name."""
    ours = [make(config) for make in plugins.load_all("default_hooks").values()]
    found = [hook for hook in ours if hook is not None]
    for hook in own:
        if any(hook.name == other.name for other in found):
            raise ConfigError(
                f"hooks: two are called '{hook.name}'. A name is a hook's own: its state is saved under it. Rename one."
            )
        found.append(hook)
    return sorted(found, key=lambda hook: hook.order)
