"""`key=value` on the command line: dotted keys, YAML values, the same checks, messages that name the override."""

import pytest

from spmdkit.config import load_config
from spmdkit.errors import ConfigError
from tests.support.messages import Parts, assert_parts

BASE = """task: a.py:t
steps: 7
precision: bfloat16
checkpoint: null
mesh: {data: 4, fsdp: 2}
task_args: {width: 8}
"""


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(BASE)
    return file


def message(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value).replace(str(path), "run.yaml")


def test_overrides_set_keys_at_every_depth(path):
    changes = ["steps=9", "mesh.data=-1", "task_args.width=64", "task_args.name='8'", "learning_rate=1e-3"]
    changes += ["log.progress=off", "layout.rules=[[w, [embed, null]]]", "eval={every_steps: 5}"]
    config = load_config(path, [*changes, "checkpoint.every_steps=5", "data.shuffle=false", "layout.zero=1"])
    assert config.steps == 9
    assert config.mesh.sizes() == {"data": -1, "fsdp": 2}
    assert config.task_args == {"width": 64, "name": "8"}
    assert config.learning_rate == 1e-3
    assert config.log.progress == "off"
    assert config.layout.rules == [("w", ("embed", None))]
    assert config.eval.every_steps == 5
    assert config.checkpoint is not None and config.checkpoint.every_steps == 5 and config.checkpoint.keep == 3
    assert config.data.shuffle is False


def test_the_last_override_of_a_mapping_wins(path):
    assert load_config(path, ["mesh={tensor: 2}"]).mesh.sizes() == {"tensor": 2}
    assert load_config(path, ["steps=1", "steps=2"]).steps == 2
    assert load_config(path, ["mesh={tensor: 2}", "mesh.data=4"]).mesh.sizes() == {"data": 4, "tensor": 2}
    assert load_config(path, ["mesh.data=null"]).mesh.sizes() == {"fsdp": 2}


BAD = {
    "mesh.dtaa=4": Parts("mesh.dtaa:", "unknown key", repair="'data'?"),
    "stepps=4": Parts("stepps:", "unknown key", repair="'steps'?"),
    "steps='4'": Parts("steps:", "found '4' (text)", "integer", "Write steps: 4"),
    "steps=4.0": Parts("steps:", "found 4.0 (a number)", "integer", "Try steps: 100"),
    "steps": Parts(found="no `=`", rule="key=value", repair="steps=..."),
    "=4": Parts(found="found ''", rule="a dotted key before `=`", repair="mesh.data=8"),
    "mesh..data=4": Parts(found="found 'mesh..data'", rule="a dotted key before `=`"),
    "steps=": Parts("steps", "no value", repair="steps=null"),
    "steps.every=3": Parts("key every", "steps is 7 (a whole number)"),
    "precision.reduction=bfloat16": Parts(
        "key reduction", "precision is 'bfloat16' (text)", "keys of mappings", "precision='{reduction: ...}'"
    ),
    "mesh={data: 1": Parts(found="not YAML", rule="expected ',' or '}'"),
    "mesh={data: 1, data: 2}": Parts("data", "given twice, first on line 1", repair="Keep one"),
    "task_args.x=!!python/name:os.system": Parts("!!python/name:os.system", "is refused"),
    "task_args.x=*a": Parts("*a", "is refused"),
    "task_args.x=.nan": Parts("task_args.x:", "found nan", "a finite number"),
    "mesh={data: -1, fsdp: -1}": Parts("mesh.fsdp:", ("is -1", "mesh.data")),
    "a\nb=1": Parts("'a\\nb':", "unknown key"),
}


@pytest.mark.parametrize("override", BAD)
def test_a_bad_override_is_named(override, path):
    text = message(path, override)
    shown = override if override.isprintable() else repr(override)
    assert text.startswith(f"override {shown}: ")
    assert_parts(text, *BAD[override])


def test_a_broken_rule_names_the_override(path):
    assert message(path, "mesh={data: 8}", "layout.zero=2").startswith("override layout.zero=2: layout.zero: is 2, and")
    assert message(path, "batch_size=30").startswith("override batch_size=30: batch_size: is 30; the mesh splits")
