"""Validation of the options of reducers and syncs."""

from __future__ import annotations

import re
from collections.abc import Sequence

from spmdkit.errors import ConfigError


def is_whole(value: object, least: int) -> bool:
    """Returns whether an option is an integer of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> bool:
    """Returns whether an option is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_option(is_valid: bool, name: str, value: object, rule: str) -> None:
    """Rejects an invalid option. `rule` states the valid values and what to write."""
    if not is_valid:
        raise ConfigError(f"{name} is {value!r}. {rule}")


def check_patterns(name: str, patterns: Sequence[str]) -> None:
    """Rejects a pattern that is not a regular expression."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ConfigError(
                f"{name}: {pattern!r} is not a valid pattern ({error}). It is a regular expression for the whole path "
                "of a leaf."
            ) from None
