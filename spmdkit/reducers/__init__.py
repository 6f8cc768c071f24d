"""How the gradients of the replicas become one: a file each, found by its name.

A reducer is a module with `apply(tree, axes) -> tree`: inside a `shard_map` it takes what one replica computed (sums, not
means) and returns what every replica holds afterwards, provably the same on all of them.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from spmdkit.errors import ConfigError
from spmdkit.words import nearest

Apply = Callable[[Any, tuple[str, ...]], Any]


def names() -> list[str]:
    """Returns the names of the reducers that come with the package."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def get(name: str) -> Apply:
    """Returns the `apply` function of the reducer called `name`.

    Raises:
        ConfigError: there is no such reducer.
    """
    if name not in names():
        raise ConfigError(f"reducer: '{name}' is not known. Valid: {', '.join(names())}.{nearest(name, names())}")
    return importlib.import_module(f"{__name__}.{name}").apply


SEAMS = {"get": get}
"""What `verify` replaces (verify/mistakes.py)."""
