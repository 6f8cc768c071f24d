"""The reducer that a config names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmdkit import kinds, user_code
from spmdkit.reducers.base import Reducer


def reducer_named(choice: str | Mapping[str, Any], folder: Path) -> Reducer:
    """Returns the reducer that a choice names: one of the package, or a user's own, in a file below `folder`.

    Raises:
        ConfigError: there is none of that name, it is not declared, or the options are not its.
    """
    if kinds.is_own(choice):
        choice, common = kinds.without_common("reducers", choice)
        own = user_code.named(choice, "reducer", folder, Reducer)
        return dataclasses.replace(own, **common)
    made: Reducer = kinds.make("reducers", choice)
    return made
