"""A message by its parts: what was asked, what was found, the rule, the smallest repair. Wording between the parts is
free.

A part is what a user acts on: the key with its line, names, numbers, the word that says what is wrong, the line to
write. A handful of messages are held to the letter in tests/config/test_bad_configs.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from spmdkit.errors import ConfigError

Part = str | tuple[str, ...]


class Says(NamedTuple):
    """What has to stand in a message; of a tuple, each."""

    asked: Part = ()
    found: Part = ()
    rule: Part = ()
    repair: Part = ()

    def missing(self, text: str) -> list[str]:
        """Returns what a message does not say, as `repair: Try data: 4`; line breaks count as spaces."""
        folded = " ".join(text.split())
        parts = {name: (part,) if isinstance(part, str) else part for name, part in self._asdict().items()}
        return [f"{name}: {text}" for name, texts in parts.items() for text in texts if text not in folded]


def says(text: object, asked: Part = (), found: Part = (), rule: Part = (), repair: Part = ()) -> None:
    """Asserts that a message, or an exception's, has each of these parts."""
    missing = Says(asked, found, rule, repair).missing(str(text))
    assert not missing, f"not said: {missing}\n{text}"


@contextlib.contextmanager
def refused(
    asked: Part = (), found: Part = (), rule: Part = (), repair: Part = (), error: type[Exception] = ConfigError
) -> Iterator[None]:
    """Asserts that what stands in the block is refused with these parts of a message."""
    with pytest.raises(error) as caught:
        yield
    says(caught.value, asked, found, rule, repair)
