"""Configs from several files and the environment: `base`, `${env:NAME}`, JSON and TOML."""

import json
import os

import pytest

from spmdkit import cli
from spmdkit.config import Config, load_config, origins, replace_keys, to_yaml
from spmdkit.errors import ConfigError
from spmdkit.foundation import redact
from spmdkit.run.startup.consistency import start_facts

BASE = """task: tasks/digits.py:task
batch_size: 64
mesh: {data: 2, fsdp: 2}
optimizer: {name: adamw, learning_rate: 1e-3, weight_decay: 0.1}
reducer: {powersgd: {rank: 4}}
layout: {rules: [[w, [embed, mlp]]], zero: 2}
eval: {every_steps: 5, batch_size: 8}
init_from: {path: runs/first, names: {"maps.py:rename": {depth: 2}}}
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Returns a function that writes files in a folder and returns the first one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(redact, "_known", set())
    (tmp_path / "sub").mkdir()

    def write(**texts):
        for name, text in texts.items():
            (tmp_path / name.replace("__", "/").replace("_", ".")).write_text(text)
        return next(iter(texts)).replace("__", "/").replace("_", ".")

    return write


def refused(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_mappings_are_merged_and_other_values_replaced(files):
    top = "base: base.yaml\nmesh: {data: 4}\nlayout: {rules: []}\neval: {batch_size: 16}\n"
    config = load_config(files(run_yaml=top, base_yaml=BASE))
    assert config.mesh.sizes() == {"data": 4, "fsdp": 2} and config.layout.rules == [] and config.layout.zero == 2
    assert (config.eval.every_steps, config.eval.batch_size) == (5, 16)
    assert config.resolved_run_dir().name == "run"
    assert load_config("run.yaml", ["mesh.fsdp=1"]).mesh.sizes() == {"data": 4, "fsdp": 1}


def test_a_choice_of_another_name_drops_the_options_of_the_base(files):
    top = "base: base.yaml\noptimizer: {name: sgd, learning_rate: 0.1}\nreducer: {topk: {fraction: 0.1}}\n"
    config = load_config(files(run_yaml=top, base_yaml=BASE))
    assert config.optimizer == {"name": "sgd", "learning_rate": 0.1} and config.reducer == {"topk": {"fraction": 0.1}}
    same = load_config(
        files(run_yaml="base: base.yaml\noptimizer: {name: adamw, b2: 0.9}\nreducer: {powersgd: {rank: 2}}")
    )
    assert same.optimizer == {"name": "adamw", "learning_rate": 1e-3, "weight_decay": 0.1, "b2": 0.9}
    assert same.reducer == {"powersgd": {"rank": 2}}
    schedule = files(
        run_yaml="base: b.yaml\nbatch_size: {0: 8, 5: 16}\n", b_yaml="task: a.py:t\nbatch_size: {0: 4, 2: 8}\n"
    )
    assert load_config(schedule).batch_size == {0: 8, 5: 16}


def test_paths_of_a_base_keep_their_folder(files, tmp_path):
    run = files(
        sub__run_yaml="base: mid.yaml\nseed: 1\n", sub__mid_yaml="base: ../base.yaml\nsteps: 7\n", base_yaml=BASE
    )
    config = load_config(run)
    assert config.task_reference() == (str(tmp_path / "tasks/digits.py"), "task") and config.steps == 7
    assert os.path.normpath(config.init_from.located(config.folder)) == str(tmp_path / "runs/first")
    assert config.init_from.names == {"../maps.py:rename": {"depth": 2}}
    assert config.resolved_run_dir() == tmp_path / "sub/runs/run"


def test_every_setting_has_an_origin(files, capsys):
    files(sub__run_yaml="base: ../base.yaml\neval: {batch_size: 16}\nprecision: bfloat16\n", base_yaml=BASE)
    rows = dict(origins(load_config("sub/run.yaml", ["steps=3"])))
    assert rows["steps=3"] == "override steps=3" and rows["seed=0"] == "default"
    assert rows["eval.every_steps=5"] == "base.yaml:7" and rows["eval.batch_size=16"] == "sub/run.yaml:2"
    assert rows["eval.params=params"] == "default" and any(
        key.startswith("precision={compute: bfloat16,") and place == "sub/run.yaml:3" for key, place in rows.items()
    )
    assert (
        rows["optimizer.weight_decay=0.1"] == "base.yaml:4"
        and rows["layout.rules=[[w, [embed, mlp]]]"] == "base.yaml:6"
    )
    assert cli.main(["config", "show", "--origin", "sub/run.yaml"]) == 0
    assert "\nbatch_size=64 " in capsys.readouterr().out


def test_problems_name_the_file_of_the_value(files):
    run = files(sub__run_yaml="seed: 1\nbase: ../base.yaml\n", base_yaml="task: a.py:t\nstepps: 3\n")
    assert refused(run).startswith("base.yaml:2: stepps: unknown key.")
    assert refused(files(run_yaml="base: bse.yaml\n")).startswith(
        "run.yaml:1: base: bse.yaml: no such file. Did you mean 'base.yaml'?"
    )
    assert "run.yaml:1: base: needs the path of a config, found ['base.yaml']" in refused(
        files(run_yaml="base: [base.yaml]\n")
    )
    cycle = files(run_yaml="base: other.yaml\n", other_yaml="base: run.yaml\n")
    assert refused(cycle).startswith("other.yaml:1: base: run.yaml has this file as its base.")
    texts = {f"c{n}_yaml": f"base: c{n + 1}.yaml\n" for n in range(12)}
    assert "c8.yaml:1: base: c9.yaml is base number 9" in refused(files(**texts))


VALUES = {
    "steps: ${env:N}": ("steps", 12),
    "eval: {every_steps: '${env:N}'}": ("eval", {"every_steps": 12}),
    "learning_rate: ${env:NOT_SET:3e-3}": ("learning_rate", 3e-3),
    "run_dir: runs/${env:N}_${env:NOT_SET:b}": ("run_dir", "runs/12_b"),
    "run_dir: ${env:NOT_SET:}": ("run_dir", None),
    "task_args: {names: ['${env:WORD}', x]}": ("task_args", {"names": ["blue violets", "x"]}),
}


@pytest.mark.parametrize("line", VALUES)
def test_references_have_the_type_of_their_text(line, files, monkeypatch):
    monkeypatch.setenv("N", "12")
    monkeypatch.setenv("WORD", "blue violets")
    key, value = VALUES[line]
    files(run_yaml=f"task: a.py:t\n{line}\n")
    found = load_config("run.yaml").model_dump(exclude_defaults=True).get(key)
    assert found == value and type(found) is type(value)
    assert load_config(files(run_yaml="task: a.py:t\n"), [line.replace(": ", "=", 1)]) == load_config(
        files(run_yaml=f"task: a.py:t\n{line}\n")
    )


REFUSED = {
    "steps: ${env:NO_N}": "steps: the environment has no variable NO_N. Set it, or write a default: ${env:NO_N:VALUE}.",
    "run_dir: runs/${HOME}/x": "run_dir: '${HOME}' (text): only ${env:NAME} and ${env:NAME:default} are replaced",
    "run_dir: ${oc.env:HOME}": "Write ${env:NAME}.",
    "run_dir: '${HOME'": "Write ${env:HOME}.",
    "task_args: {a: ['${x}']}": "task_args.a[0]: '${x}' (text): only ${env:NAME}",
    "steps: ${env:HOSTILE}": "steps: should be a valid integer",
}


@pytest.mark.parametrize("line", REFUSED)
def test_other_references_are_rejected_with_the_line(line, files, monkeypatch):
    monkeypatch.setenv("HOSTILE", "!!python/object/apply:os.system [id]")
    message = refused(files(run_yaml=f"task: a.py:t\n{line}\n"))
    assert message.startswith("run.yaml:2: ") and REFUSED[line] in message


def test_values_of_python_have_no_references():
    with pytest.raises(ConfigError, match=r"run_dir: 'runs/\$\{env:A\}' .*In Python write os\.environ"):
        Config(task="a.py:t", run_dir="runs/${env:A}")


def test_a_run_stores_the_reference_and_masks_the_value(files, monkeypatch, tmp_path):
    monkeypatch.setenv("CODE_NAME", "violet-harbour")
    monkeypatch.setenv("N", "123456")
    text = "task: a.py:t\nrun_dir: runs/${env:CODE_NAME}\nsteps: ${env:N}\n"
    text += "eval: {every_steps: '${env:N}'}\ntask_args: {name: '${env:CODE_NAME}'}\n"
    config = load_config(files(run_yaml=text))
    stored = to_yaml(replace_keys(config, {"seed": 3}), absolute_paths=True, hide_secrets=True, keep_references=True)
    assert "violet-harbour" not in stored and f"run_dir: {tmp_path}/runs/${{env:CODE_NAME}}" in stored
    (tmp_path / "sub/stored.yaml").write_text(stored)
    assert load_config("sub/stored.yaml") == replace_keys(
        config, {"seed": 3, "run_dir": f"{tmp_path}/runs/violet-harbour", "task": f"{tmp_path}/a.py:t"}
    )
    assert "steps: ${env:N}" not in to_yaml(replace_keys(config, {"steps": 5}), keep_references=True)
    assert redact.redact_text("no violet-harbour, 123456") == "no ***, 123456"
    facts = start_facts(config)
    monkeypatch.setenv("CODE_NAME", "violet-harbours")
    assert start_facts(load_config("run.yaml")) != facts, "processes with different values are different"


def test_json_and_toml_are_read(files, monkeypatch):
    monkeypatch.setenv("N", "12")
    yaml = "task: a.py:t\nsteps: 12\nlearning_rate: 0.003\nmesh: {data: 2}\neval: {every_steps: 5}\n"
    yaml += "task_args: {day: '2024-01-01'}\n"
    same = {"task": "a.py:t", "steps": 12, "learning_rate": 3e-3, "mesh": {"data": 2}, "eval": {"every_steps": 5}}
    toml = 'task = "a.py:t"\nsteps = "${env:N}"\nlearning_rate = 3e-3\nmesh.data = 2\n'
    toml += "[eval]\nevery_steps = 5\n[task_args]\nday = 2024-01-01\n"
    expected = load_config(files(a_yaml=yaml))
    assert load_config(files(b_json=json.dumps(same | {"task_args": {"day": "2024-01-01"}}, indent="\t"))) == expected
    assert load_config(files(c_toml=toml)) == expected
    assert load_config(files(d_yaml="base: c.toml\nsteps: 3\n")).eval.every_steps == 5


BROKEN_TOML = {
    "steps: 3\n": "c.toml:1: not TOML: Expected '=' after a key in a key/value pair. Write `key = value`",
    "task = 'a.py:t'\n[eval]\nevery = 3\n": "c.toml:3: eval.every: unknown key.",
    "task = 'a.py:t'\nmesh.dta = 3\n": "c.toml:2: mesh.dta: unknown key. Did you mean 'data'?",
    'seed = 1\nrun_dir = "${HOME}"\n': "c.toml:2: run_dir: '${HOME}' (text): only",
    "a = " + "[" * 3000 + "]" * 3000: "c.toml: not TOML: ",
    "a = " + "[" * 40 + "]" * 40: "c.toml:1: a: nested more than 32 deep.",
}


@pytest.mark.parametrize("text", BROKEN_TOML)
def test_broken_toml_is_one_message(text, files):
    assert refused(files(c_toml=text)).startswith(BROKEN_TOML[text])
