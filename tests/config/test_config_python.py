"""Configs built in Python, changed, compared and written: the same checks, the same values, no device touched."""

import random
import subprocess
import sys

import pydantic
import pytest
import yaml

from spmdkit.config import (
    Config,
    Mesh,
    check_batch,
    json_schema,
    load_config,
    parse_config,
    replace_keys,
    to_yaml,
)
from spmdkit.errors import ConfigError
from spmdkit.foundation import constants

FULL = {
    "task": "dir/a.py:t",
    "task_args": {
        "width": 64,
        "names": ["1e-3", "off", "2024-01-01", "012", "null", "", "ä\n", "~", "=", "<<"],
        "x": None,
    },
    "run_dir": "runs/first",
    "seed": 2**32 - 1,
    "steps": 20,
    "batch_size": 64,
    "microbatches": 2,
    "devices": [0, 2],
    "mesh": {"data": -1, "fsdp": 2},
    "layout": {
        "rules": [["blocks/.*/kernel", ["embed", None, ["data", "fsdp"]]]],
        "axes": {"mlp": ["fsdp", "tensor"], "own": None, "two": "data"},
        "zero": 1,
        "min_shard_bytes": 0,
    },
    "offload": ["optimizer"],
    "reducer": {"sum": None},
    "precision": {"compute": "bfloat16", "reduction": "bfloat16"},
    "remat": {"save": ["attention"], "offload": ["block"]},
    "compiler_options": {"xla_a": True, "xla_b": None, "xla_c": 3},
    "optimizer": {"name": "adamw", "b2": 0.95},
    "learning_rate": {"name": "piecewise_constant", "init_value": 1e-3, "boundaries_and_scales": {10: 0.1}},
    "clip_norm": 1,
    "ema": 0.999,
    "model_state": {"group": 2},
    "checkpoint": {"every_steps": 5, "every_seconds": None, "best": {"metric": "loss", "mode": "min"}},
    "eval": {"every_steps": 5, "params": "ema"},
    "profile": {"steps": [3, 5]},
}


def test_a_python_config_is_checked_like_files():
    config = Config(task="a.py:t", mesh={"data": 8})
    assert config.mesh.sizes() == {"data": 8} and config.source is None and config.steps == 100
    with pytest.raises(ConfigError) as caught:
        Config(task="a.py:t", mesh={"dtaa": 8}, steps="3", batch_size=True)
    assert str(caught.value).splitlines() == [
        "steps: should be a valid integer, found '3' (text). Write steps: 3, without quotes.",
        (
            "batch_size: should be a valid integer, or a schedule such as {0: 256, 2000: 1024}, found true. "
            "Try batch_size: 32."
        ),
        (
            "mesh.dtaa: unknown key. Did you mean 'data'? Your own name of an axis needs its role, such as roles: "
            "{dtaa: data}."
        ),
    ]
    with pytest.raises(ConfigError, match=r"eval.params: is ema, and there is no average"):
        Config(task="a.py:t", eval={"params": "ema"})


def test_a_config_holds_only_plain_values():
    for value in (object(), {1, 2}, b"x", (1, 2), float("nan"), {"a": lambda: 1}, {None: 1}):
        with pytest.raises(ConfigError, match=r"^task_args\.x"):
            Config(task="a.py:t", task_args={"x": value})
    loop: list = []
    loop.append(loop)
    with pytest.raises(ConfigError, match="nested more than 32 deep"):
        Config(task="a.py:t", task_args={"x": loop})


def test_a_config_is_frozen():
    config = Config(task="a.py:t")
    with pytest.raises(pydantic.ValidationError):
        config.steps = 3
    with pytest.raises(pydantic.ValidationError):
        config.mesh.data = 3


def test_parse_config_starts_paths_from_its_source(tmp_path):
    config = parse_config({"task": "a.py:t"}, source=tmp_path / "x.yaml")
    assert config.resolved_run_dir() == tmp_path / "runs" / "x"
    for value in (None, 3, [1], "task: a.py:t"):
        with pytest.raises(ConfigError, match="a config needs a mapping of keys, found"):
            parse_config(value)
    with pytest.raises(ConfigError, match=r"x\.yaml: steps: should be"):
        parse_config({"task": "a.py:t", "steps": 0}, source=tmp_path / "x.yaml")


def test_a_written_config_loads_back_equal(tmp_path):
    for values in ({"task": "a.py:t"}, {"task": "a.py:t", "checkpoint": None}, FULL):
        config = parse_config(values)
        text = to_yaml(config)
        path = tmp_path / "config.yaml"
        path.write_text(text, encoding="utf-8")
        assert load_config(path) == config
        assert to_yaml(load_config(path)) == text
        assert parse_config(yaml.safe_load(text)) == config


def test_any_text_and_number_survives_writing(tmp_path):
    draw = random.Random(0)
    alphabet = "019.e+-_:#'\"{}[],&*!|>%@` \n\ttrueofnlyINFx~äž\u2028\x85"
    for _ in range(30):
        texts = ["".join(draw.choices(alphabet, k=draw.randrange(0, 9))) for _ in range(20)]
        numbers = [draw.uniform(-1, 1) * 10.0 ** draw.randrange(-300, 300) for _ in range(10)]
        config = Config(task="a.py:t", task_args={"texts": texts, "numbers": numbers, "keys": dict.fromkeys(texts, 1)})
        (tmp_path / "c.yaml").write_text(to_yaml(config), encoding="utf-8")
        assert load_config(tmp_path / "c.yaml") == config


def test_the_written_config_can_hold_absolute_paths(tmp_path):
    (tmp_path / "a.yaml").write_text("task: sub/a.py:t\n")
    text = to_yaml(load_config(tmp_path / "a.yaml"), absolute_paths=True)
    moved = parse_config(yaml.safe_load(text), source="/elsewhere/config.yaml")
    assert moved.task_reference() == (str(tmp_path / "sub" / "a.py"), "t")
    assert moved.resolved_run_dir() == tmp_path / "runs" / "a"


def test_replaced_keys_are_checked_again(tmp_path):
    (tmp_path / "a.yaml").write_text("task: a.py:t\nmesh: {data: 4}\nbatch_size: 32\ncheckpoint: null\n")
    config = load_config(tmp_path / "a.yaml")
    changed = replace_keys(config, {"mesh": {"fsdp": 2}, "microbatches": 4, "checkpoint.keep": 5})
    assert changed.mesh.sizes() == {"fsdp": 2} and changed.checkpoint.keep == 5
    assert config.mesh.sizes() == {"data": 4} and config.checkpoint is None
    assert changed.where("batch_size").endswith("a.yaml:3: batch_size")
    assert changed.where("mesh").endswith("a.yaml: mesh")
    with pytest.raises(
        ConfigError, match=r"a\.yaml:3: batch_size: is 32; the mesh splits a batch into data\(3\) = 3, found"
    ):
        replace_keys(config, {"mesh.data": 3})


def test_check_batch_judges_the_resolved_mesh():
    config = Config(task="a.py:t", mesh={"data": -1}, batch_size=12)
    check_batch(config, {"data": 4})
    with pytest.raises(
        ConfigError, match=r"^batch_size: is 12; .*data\(8\) = 8, found a remainder of 4\..*Try batch_size: 8 or 16"
    ):
        check_batch(config, {"data": 8})
    with pytest.raises(ConfigError, match=r"Try batch_size: 16\.$"):
        check_batch(config, {"data": 16})


def test_every_key_of_the_schema_is_described():
    schema = json_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["additionalProperties"] is False and schema["required"] == ["task"]
    assert set(schema["properties"]) == set(Config.model_fields) and set(Mesh.model_fields) == set(constants.AXES)
    described = [node for node in (schema, *schema["$defs"].values()) if "properties" in node]
    for node in described:
        for name, value in node["properties"].items():
            target = schema["$defs"].get(value.get("$ref", "").removeprefix("#/$defs/"), {})
            text = value.get("description") or target.get("description", "")
            assert len(text) > 10 and text.endswith(".") and "\n" not in text, f"{node.get('title')}.{name}: {text!r}"
    assert len(described) > 20
    references = set(_references(schema))
    assert references and all(r.removeprefix("#/$defs/") in schema["$defs"] for r in references)


def _references(node):
    if isinstance(node, dict):
        yield from ([node["$ref"]] if "$ref" in node else [])
        node = list(node.values())
    for value in node if isinstance(node, list) else []:
        yield from _references(value)


def test_reading_a_config_starts_no_device(tmp_path):
    plain, named = tmp_path / "plain.yaml", tmp_path / "named.yaml"
    plain.write_text("task: a.py:t\nlearning_rate: 1e-3\n")
    named.write_text(
        "task: a.py:t\nlearning_rate: {name: cosine_decay, init_value: 1, decay_steps: 9}\noptimizer: {name: lamb}\n"
    )
    code = f"""
import sys
from spmdkit.config import load_config, build_optimizer
load_config({str(plain)!r})
assert "optax" not in sys.modules
config = load_config({str(named)!r})
build_optimizer(config.optimizer, config.learning_rate)
from spmdkit import compat
assert not compat.backends_initialized()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
