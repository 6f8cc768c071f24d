"""The JSON schema for editors: current, true of every config of the project, and false of common mistakes."""

import json
from pathlib import Path

import jsonschema
import pytest

from spmdkit.config import load_config
from spmdkit.config.editor_schema import editor_schema
from spmdkit.config.source import read_file
from spmdkit.errors import ConfigError

FOLDER = Path(__file__).parents[2] / "configs"
CONFIGS = sorted(FOLDER.rglob("*.yaml"))


@pytest.fixture(scope="module")
def schema():
    return editor_schema()


@pytest.fixture(scope="module")
def validator(schema):
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_the_stored_schema_is_current(schema):
    stored = json.loads((FOLDER / "schema.json").read_text())
    assert stored == schema, "run: spmdkit config schema > configs/schema.json"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_is_valid_and_names_the_schema(path, validator):
    assert [error.message for error in validator.iter_errors(read_file(path, str(path)).value)] == []
    key, _, named = path.read_text().splitlines()[0].partition("$schema=")
    assert key == "# yaml-language-server: " and (path.parent / named).resolve() == FOLDER / "schema.json"


VALID = [
    {"base": "../base.yaml"},
    {"steps": "${env:STEPS}", "mesh": {"data": "${env:DATA:2}"}, "reducer": "${env:REDUCER}"},
    {"batch_size": {"0": 8, "5": 16}, "precision": "bfloat16", "on_nonfinite": "skip"},
    {"optimizer": {"name": "adamw", "b2": 0.95, "learning_rate": {"name": "linear_schedule", "init_value": 1.0}}},
    {"learning_rate": {"name": "join_schedules", "schedules": [{"name": "cosine_decay", "init_value": 1}, 1e-4]}},
    {"reducer": {"powersgd": {"rank": 2, "warmup": 10}}, "sync": {"stale": 2}},
    {"reducer": {"mine.py:make": {"scale": 2}}, "sync": "mine.py:sync", "hooks": ["a.py:hook", {"b.c:hook": {"n": 1}}]},
    {"sync": {"parameter_server": {"servers": 1, "workers": 2, "partition": {"rules": [["a.*", 0]]}}}},
    {"log": {"trackers": ["tensorboard", {"mine.py:tracker": {"url": "x"}}]}},
    {"preemption": ["gce", {"file": {"path": "/run/preempt"}}], "watchdog": None, "optimizer": None},
]
INVALID = [
    {"stepps": 3},
    {"steps": "3"},
    {"mesh": {"dta": 2}},
    {"optimizer": {"name": "adamm"}},
    {"optimizer": {"name": "adamw", "beta2": 0.95}},
    {"optimizer": {"name": "adamw", "learning_rate": "fast"}},
    {"learning_rate": {"name": "linear_schedule", "init": 1.0}},
    {"learning_rate": {"name": "join_schedules", "schedules": [{"name": "cosine"}]}},
    {"reducer": "sums"},
    {"reducer": {"powersgd": {"rnk": 2}}},
    {"reducer": {"powersgd": {"rank": "two"}}},
    {"reducer": {"topk": {}, "sign": {}}},
    {"sync": {"local_sgd": {}}},
    {"sync": {"parameter_server": {"server": 1}}},
    {"hooks": ["early_stoping"]},
    {"log": {"trackers": ["tensorbord"]}},
    {"preemption": ["azure"]},
    {"run_dir": 3},
]


@pytest.mark.parametrize("values", VALID, ids=str)
def test_valid_settings_pass(values, validator):
    task = {} if "base" in values else {"task": "a.py:t"}
    assert [error.message for error in validator.iter_errors(task | values)] == []


@pytest.mark.parametrize("values", INVALID, ids=str)
def test_a_mistake_fails_in_the_schema_as_in_a_run(values, validator, tmp_path):
    assert not validator.is_valid({"task": "a.py:t"} | values)
    (tmp_path / "run.json").write_text(json.dumps({"task": "a.py:t"} | values))
    if values.keys() & {"hooks", "log"}:  # a run opens them later
        return
    with pytest.raises(ConfigError):
        load_config(tmp_path / "run.json")


def test_a_config_without_a_task_or_a_base_is_invalid(validator):
    assert not validator.is_valid({"steps": 3})
