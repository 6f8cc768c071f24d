"""`key=value` on the command line: dotted keys, YAML values, the same checks, messages that name the override."""

import pytest

from spmdkit.config import load_config, overrides, source
from spmdkit.config.problems import Place
from spmdkit.errors import ConfigError

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
    config = load_config(
        path,
        [
            "steps=9",
            "mesh.data=-1",
            "task_args.width=64",
            "task_args.name='8'",
            "learning_rate=1e-3",
            "log.progress=off",
            "layout.rules=[[w, [embed, null]]]",
            "eval={every_steps: 5}",
            "checkpoint.every_steps=5",
            "data.shuffle=false",
        ],
    )
    assert config.steps == 9
    assert config.mesh.sizes() == {"data": -1, "fsdp": 2}
    assert config.task_args == {"width": 64, "name": "8"}
    assert config.learning_rate == 1e-3
    assert config.log.progress == "off"
    assert config.layout.rules == [("w", ("embed", None))]
    assert config.eval.every_steps == 5
    assert config.checkpoint is not None and config.checkpoint.every_steps == 5 and config.checkpoint.keep == 3
    assert config.data.shuffle is False


def test_an_override_of_a_mapping_replaces_it_and_the_last_one_wins(path):
    assert load_config(path, ["mesh={tensor: 2}"]).mesh.sizes() == {"tensor": 2}
    assert load_config(path, ["steps=1", "steps=2"]).steps == 2
    assert load_config(path, ["mesh={tensor: 2}", "mesh.data=4"]).mesh.sizes() == {"data": 4, "tensor": 2}
    assert load_config(path, ["mesh.data=null"]).mesh.sizes() == {"fsdp": 2}


def test_the_file_is_not_needed_to_name_what_an_override_sets(tmp_path):
    (tmp_path / "only.yaml").write_text("steps: 3\n")
    assert load_config(tmp_path / "only.yaml", ["task=a.py:t"]).task == "a.py:t"


BAD = {
    "mesh.dtaa=4": "override mesh.dtaa=4: mesh.dtaa: unknown key. Did you mean 'data'?",
    "stepps=4": "override stepps=4: stepps: unknown key. Did you mean 'steps'?",
    "steps='4'": "override steps='4': steps: should be a valid integer, found '4' (text). Write steps: 4",
    "steps=4.0": "override steps=4.0: steps: should be a valid integer, found 4.0 (a number). Try steps: 100.",
    "steps": "override steps: needs key=value, found no `=`. Write steps=...",
    "=4": "override =4: needs a dotted key before `=`, found ''. Write for example mesh.data=8.",
    "mesh..data=4": "override mesh..data=4: needs a dotted key before `=`, found 'mesh..data'.",
    "steps=": "override steps=: steps has no value. Write one after `=`, or steps=null.",
    "steps.every=3": "override steps.every=3: steps is 7 (a whole number), which has no key every.",
    "precision.reduce=bfloat16": "override precision.reduce=bfloat16: precision is 'bfloat16' (text), which has no key "
    "reduce. An override sets keys of mappings. Give the whole value: precision='{reduce: ...}'.",
    "mesh={data: 1": "override mesh={data: 1: not YAML: expected ',' or '}'",
    "mesh={data: 1, data: 2}": "override mesh={data: 1, data: 2}: data is given twice, first on line 1.",
    "task_args.x=!!python/name:os.system": "override task_args.x=!!python/name:os.system: !!python/name:os.system is refused",
    "task_args.x=*a": "override task_args.x=*a: *a is refused",
    "task_args.x=.nan": "override task_args.x=.nan: task_args.x: needs a finite number, found nan.",
    "mesh={data: -1, fsdp: -1}": "override mesh={data: -1, fsdp: -1}: mesh.fsdp: is -1, and so is mesh.data.",
    "layout.zero=1": None,
    "a\nb=1": "override 'a\\nb=1': 'a\\nb': unknown key.",
}


@pytest.mark.parametrize("override", BAD)
def test_a_bad_override_is_named_instead_of_a_line(override, path):
    expected = BAD[override]
    if expected is None:
        assert load_config(path, [override]).layout.zero == 1
    else:
        assert message(path, override).startswith(expected)


def test_a_rule_broken_by_an_override_is_told_where_the_other_key_stands(path):
    assert message(path, "mesh={data: 8}", "layout.zero=2").startswith("override layout.zero=2: layout.zero: is 2, and")
    assert message(path, "batch_size=30").startswith("override batch_size=30: batch_size: is 30; the mesh cuts")


def test_the_values_of_the_file_are_not_changed_by_overrides():
    document = source.parse(BASE, lambda line: Place(f"x:{line}", line), "x")
    first = overrides.apply(document, ["mesh.data=8", "checkpoint.keep=1"])
    assert document.value["mesh"] == {"data": 4, "fsdp": 2} and document.value["checkpoint"] is None
    assert first.value["mesh"] == {"data": 8, "fsdp": 2}
    assert document.places["mesh", "data"].line == 5 and first.places["mesh", "data"].where == "override mesh.data=8"
