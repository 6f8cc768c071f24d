"""Every field of the schema, misspelled and set to every kind of value: a ConfigError or a valid config, nothing
else."""

import string

from hypothesis import given, settings
from hypothesis import strategies as st

from spmdkit.config import Config, parse_config, to_yaml
from spmdkit.config.wording import sections
from spmdkit.errors import ConfigError

FIELDS = [(*path, name) for path, section in sections(Config) for name in section.model_fields]

NEVER_VALID = (float("nan"), float("inf"), float("-inf"), object(), b"x", {1}, 10**400)
"""Values that no key accepts."""
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([2**63, 5e-324, 64.0, "", "zebra", "10", "a\0b", "\u202e\U0001f600", "\udcff", "x" * 100_000]),
    st.floats(),
    st.text(max_size=8),
)
KEYS = st.one_of(st.none(), st.integers(0, 9), st.sampled_from(["name", "zebra"]), st.text(max_size=8))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.tuples(inner, inner), st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=5,
)


def problem_of(path, value):
    """Returns the message of the ConfigError, or None where the config is valid and can be written."""
    for part in reversed(path):
        value = {part: value}
    try:
        config = parse_config({"task": "a.py:t", **value})
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


@settings(max_examples=5)
@given(st.text(string.ascii_letters + "_", min_size=1, max_size=3), st.integers(0, 20))
def test_a_misspelled_key_is_reported_by_its_name(inserted, position):
    for *path, name in FIELDS:
        typo = name[:position] + inserted + name[position:]
        if (*path, typo) not in FIELDS:
            assert f"{'.'.join((*path, typo))}: unknown key." in (problem_of((*path, typo), 1) or "")


@settings(max_examples=10)
@given(VALUES)
def test_any_value_gives_a_config_or_error(value):
    for path in FIELDS:
        problem_of(path, value)


def test_a_value_that_no_key_accepts_is_refused():
    for value in NEVER_VALID:
        assert [path for path in FIELDS if problem_of(path, value) is None] == []


def test_a_rejected_value_is_reported_by_its_key():
    for path in FIELDS:
        lines = (problem_of(path, object()) or "").splitlines()
        assert any(line.startswith(".".join(path)) and "found a Python object" in line for line in lines), path
