"""The reducer that a config names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmdkit.communication.reducers.base import Reducer
from spmdkit.foundation import plugins, user_code


def reducer_named(choice: str | Mapping[str, Any], folder: Path) -> Reducer:
    """Returns the reducer of a choice: one of the package, or a user-defined one, in a file below `folder`.

    Raises:
        ConfigError: it does not exist, is not registered, or does not have these options.
    """
    if plugins.is_reference(choice):
        choice, common = plugins.split_common_options("reducers", choice)
        own = user_code.named(choice, "reducer", folder, Reducer)
        return dataclasses.replace(own, **common)
    made: Reducer = plugins.make("reducers", choice)
    return made
