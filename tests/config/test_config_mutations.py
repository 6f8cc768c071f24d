"""Every field of the schema, misspelt and filled with every wrong kind of value: a ConfigError or a good config, no
more."""

import pytest

from spmdkit.config import Config, parse_config, to_yaml
from spmdkit.config.wording import sections
from spmdkit.errors import ConfigError

VALUES = {
    "null": None,
    "true": True,
    "false": False,
    "zero": 0,
    "one": 1,
    "minus one": -1,
    "negative": -7,
    "huge": 10**400,
    "large": 2**63,
    "half": 0.5,
    "whole float": 64.0,
    "tiny": 5e-324,
    "nan": float("nan"),
    "infinity": float("inf"),
    "minus infinity": float("-inf"),
    "empty text": "",
    "digits": "10",
    "word": "zebra",
    "NUL": "a\0b",
    "unicode": "\u202e\U0001f600",
    "surrogate": "\udcff",
    "long text": "x" * 100_000,
    "empty list": [],
    "list": ["zebra", 3, None],
    "nested list": [[[[[]]]]],
    "empty mapping": {},
    "mapping": {"zebra": 3},
    "mapping with a name": {"name": "zebra"},
    "mapping with a name of another kind": {"name": ["adam"]},
    "mapping with a number as key": {3: 4},
    "mapping with null as key": {None: 4},
    "object": object(),
    "bytes": b"x",
    "tuple": ("a", "b"),
    "set": {1},
}


def fields():
    for path, section in sections(Config):
        for name in section.model_fields:
            yield (*path, name)


FIELDS = list(fields())


def nested(path, value):
    for part in reversed(path):
        value = {part: value}
    return value


def attempt(path, value):
    """Returns the message of the ConfigError, or None when the config is good and can be written."""
    mapping = {"task": "a.py:t", **nested(path, value)}
    try:
        config = parse_config(mapping)
    except ConfigError as error:
        text = str(error)
        assert text and len(text) < 20_000
        assert "pydantic" not in text and "input_value" not in text and "Value error" not in text
        assert text.isprintable() or "\n" in text
        text.encode()
        return text
    to_yaml(config)
    return None


def test_the_walk_finds_every_section():
    names = {".".join(path) for path in FIELDS}
    assert {"mesh.data", "checkpoint.best.mode", "remat.save", "model_state.group", "profile.steps"} <= names
    assert len(names) > 60


@pytest.mark.parametrize("path", FIELDS, ids=".".join)
def test_a_misspelt_key_is_an_error_that_names_it(path):
    for typo in (path[-1] + "x", path[-1][:-1] + "_", path[-1].upper(), path[-1][::-1] + "q"):
        text = attempt((*path[:-1], typo), 1)
        assert text is not None and f"{'.'.join((*path[:-1], typo))}: unknown key." in text


@pytest.mark.parametrize("path", FIELDS, ids=".".join)
def test_no_value_gives_anything_but_a_config_error(path):
    refused = [name for name, value in VALUES.items() if attempt(path, value) is not None]
    always = {"nan", "infinity", "minus infinity", "object", "bytes", "set", "huge"}
    assert always <= set(refused)
    assert len(refused) >= 20


@pytest.mark.parametrize("path", FIELDS, ids=".".join)
def test_a_refused_value_is_told_under_its_own_key(path):
    text = attempt(path, object())
    assert text is not None
    assert any(line.startswith(".".join(path)) and "found a Python object" in line for line in text.splitlines())
