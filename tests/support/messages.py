"""Checks a message by its parts: the request, the found value, the rule, the smallest repair. Wording between the parts
is free.

A part is text that a user acts on: the key with its line, names, numbers, the word that describes the problem, the line
to write. tests/config/test_bad_configs.py compares a few messages literally.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from spmdkit.errors import ConfigError

Part = str | tuple[str, ...]


class Parts(NamedTuple):
    """Text that a message must contain; for a tuple, each item."""

    requested: Part = ()
    found: Part = ()
    rule: Part = ()
    repair: Part = ()

    def missing(self, text: str) -> list[str]:
        """Returns the missing parts of a message, as `repair: Try data: 4`. Line breaks count as spaces."""
        folded = " ".join(text.split())
        parts = {name: (part,) if isinstance(part, str) else part for name, part in self._asdict().items()}
        return [f"{name}: {text}" for name, texts in parts.items() for text in texts if text not in folded]


def assert_parts(text: object, requested: Part = (), found: Part = (), rule: Part = (), repair: Part = ()) -> None:
    """Asserts that a message, or the message of an exception, has each of these parts."""
    missing = Parts(requested, found, rule, repair).missing(str(text))
    assert not missing, f"missing: {missing}\n{text}"


@contextlib.contextmanager
def raises(
    requested: Part = (), found: Part = (), rule: Part = (), repair: Part = (), error: type[Exception] = ConfigError
) -> Iterator[None]:
    """Asserts that the block raises an error with these parts in its message."""
    with pytest.raises(error) as caught:
        yield
    assert_parts(caught.value, requested, found, rule, repair)
