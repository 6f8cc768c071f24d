"""How a file is read: the YAML dialect, places, hostile and broken files. Nothing in a file runs code."""

import math
import os
import random

import pytest

from spmdkit.config import load_config
from spmdkit.errors import ConfigError


def load(tmp_path, text, overrides=()):
    path = tmp_path / "run.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_config(path, overrides)


def message(tmp_path, text):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert caught.value.exit_code == 78
    return str(caught.value).replace(str(tmp_path / "run.yaml"), "run.yaml")


def test_values_are_read_as_in_yaml_1_2(tmp_path):
    values = {"1e-3": 0.001, "1e6": 1e6, ".5": 0.5, "012": 12, "0x10": 16, "0o17": 15, "+3": 3, "1_000": "1_000"}
    values |= {"off": "off", "yes": "yes", "true": True, "False": False, "2024-01-01": "2024-01-01", "1:30": "1:30"}
    values |= {"'1e-3'": "1e-3", "~": None, "''": "", "$HOME": "$HOME"}
    values |= {repr(math.pi): math.pi, "5e-324": 5e-324, str(2**62): 2**62}
    args = load(tmp_path, f"task: a.py:t\ntask_args: {{x: [{', '.join(values)}]}}\n").task_args["x"]
    assert args == list(values.values()) and list(map(type, args)) == list(map(type, values.values()))


def test_byte_order_mark_and_unicode_are_read(tmp_path):
    assert load(tmp_path, "\ufefftask: ä.py:t\n").task == "ä.py:t"


BROKEN = {
    "empty": ("", "run.yaml: is empty. A config needs at least one line: `task: my_task.py:task`."),
    "a list": ("- task\n", "run.yaml:1: needs a mapping of keys (`steps: 100`), found ['task'] (a list)."),
    "a word": ("task\n", "run.yaml:1: needs a mapping of keys (`steps: 100`), found 'task' (text)."),
    "not utf-8": (b"task: a.py:t\nseed: \xff\n", "run.yaml:2: needs UTF-8 text, found the byte 0xff."),
    "NUL": ("task: a.py:t\nseed: 1\0", "run.yaml:2: the character '\\x00' is not allowed in YAML. Remove it."),
    "tab": ("mesh:\n\tdata: 1\n", "run.yaml:2: not YAML: found character '\\t' that cannot start any token"),
    "two colons": ("task: a: b\n", "run.yaml:1: not YAML: mapping values are not allowed here."),
    "open bracket": ("task: a.py:t\nmesh: {data: 1\n", "run.yaml:2: not YAML: expected ',' or '}'"),
    "two documents": ("task: a.py:t\n---\nseed: 1\n", "run.yaml:2: another document begins here; a config is one."),
    "key twice": ("task: a.py:t\nseed: 1\nseed: 2\n", "run.yaml:3: seed is given twice, first on line 2."),
    "no value": ("task: a.py:t\nmesh:\n  data:\n", "run.yaml:3: mesh.data has no value. Write one after it, or null"),
    "a mapping as key": ("? {a: 1}\n: 2\n", "run.yaml:1: a key is a list or a mapping; keys are plain text."),
    "anchor": ("task: &t a.py:t\n", "run.yaml:1: &t is refused: a config holds plain values."),
    "alias": ("task: a.py:t\nseed: *t\n", "run.yaml:2: *t is refused: a config holds plain values."),
    "merge key": ("task: a.py:t\n<<: {seed: 1}\n", "run.yaml:2: <<: unknown key."),
    "string tag": ("task: !!str a.py:t\n", "run.yaml:1: !!str is refused: a config holds plain values."),
    "deep": ("task: a.py:t\ntask_args: {a: " + "[" * 40 + "]" * 40 + "}\n", "run.yaml:2: nested more than 32 deep."),
    "very deep": ("[" * 500_000, "run.yaml:1: nested more than 32 deep."),
    "many values": ("task_args: {a: [" + "1," * 200_000 + "]}", "run.yaml:1: more than 10000 values."),
    "long number": ("seed: " + "9" * 5000, "run.yaml:1: a number with 5000 digits."),
    "too large": ("#" * 2**20 + "\n", "run.yaml: has 1048577 bytes. A config has at most 1048576 (1 MiB)"),
    "bomb": ("a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n", "run.yaml:1: &a is refused"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_reported_with_its_line(name, tmp_path):
    text, expected = BROKEN[name]
    assert expected in message(tmp_path, text)


@pytest.mark.parametrize(
    "value",
    [
        "!!python/object/apply:os.system ['touch {path}']",
        "!!python/name:os.system",
        "!<tag:yaml.org,2002:python/object/apply:os.system> ['touch {path}']",
        "!!set {{a, b}}",
    ],
)
def test_no_tag_makes_an_object_or_runs_anything(value, tmp_path):
    proof = tmp_path / "proof"
    text = f"task: a.py:t\ntask_args:\n  x: {value.format(path=proof)}\n"
    assert "run.yaml:3: !" in message(tmp_path, text)
    assert not proof.exists()


def test_reading_a_config_does_not_import_the_task(tmp_path):
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    assert load(tmp_path, "task: evil.py:task\n").task_reference() == (str(tmp_path / "evil.py"), "task")


def test_a_missing_file_is_reported_with_the_nearest(tmp_path):
    (tmp_path / "gpt.yaml").write_text("task: a.py:t\n")
    with pytest.raises(ConfigError, match=r"gtp\.yaml: no such file\. Did you mean 'gpt\.yaml'\?"):
        load_config(tmp_path / "gtp.yaml")
    with pytest.raises(ConfigError, match=r"no such file, and no folder .*nowhere"):
        load_config(tmp_path / "nowhere" / "gpt.yaml")
    with pytest.raises(ConfigError, match=r"is a directory; a config is a YAML file"):
        load_config(tmp_path)


def test_an_impossible_path_is_a_config_error():
    for path in ("a\0b.yaml", "x" * 5000, "/dev/null", "\udcff.yaml"):
        with pytest.raises(ConfigError):
            load_config(path)


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="a file that root cannot read")
def test_an_unreadable_file_is_a_config_error():
    with pytest.raises(ConfigError, match="cannot be read: Invalid argument"):
        load_config("/proc/self/clear_refs")


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "run.yaml")
    with pytest.raises(ConfigError, match="is no regular file"):
        load_config(tmp_path / "run.yaml")


def test_paths_mean_relative_to_the_config(tmp_path, monkeypatch):
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "gpt.yaml").write_text("task: ../examples/gpt.py:task\n")
    monkeypatch.chdir(tmp_path)
    config = load_config("configs/gpt.yaml")
    assert config.source == folder / "gpt.yaml"
    assert config.folder == folder
    assert config.resolved_run_dir() == folder / "runs" / "gpt"
    assert config.task_reference() == (str(tmp_path / "examples" / "gpt.py"), "task")
    assert load_config("configs/gpt.yaml", ["run_dir=out/a"]).resolved_run_dir() == folder / "out" / "a"
    assert load_config("configs/gpt.yaml", [f"run_dir={tmp_path}/b"]).resolved_run_dir() == tmp_path / "b"


def test_positions_name_the_path_of_the_user(tmp_path, monkeypatch):
    (tmp_path / "gpt.yaml").write_text("task: a.py:t\nmesh:\n  data: 4\n  fsdp: 2\n")
    monkeypatch.chdir(tmp_path)
    config = load_config("gpt.yaml", ["mesh.data=2"])
    assert config.where("mesh.fsdp") == "gpt.yaml:4: mesh.fsdp"
    assert config.where("mesh") == "gpt.yaml:2: mesh"
    assert config.where("mesh.data") == "override mesh.data=2: mesh.data"
    assert config.where("batch_size") == "gpt.yaml: batch_size"


def test_random_damage_gives_a_config_or_error(tmp_path):
    draw = random.Random(1)
    good = (
        "task: a.py:t\nmesh: {data: 4, fsdp: -1}\nlayout:\n  rules:\n    - [w, [embed, null]]\nseed: 3 # c\nema: 0.9\n"
    )
    junk = [
        *"{}[]:,-?|>&*!%@`'\"#\t\n \0",
        "\ufeff",
        "\u2028",
        "\U0001f600",
        "null",
        "---",
        "<<",
        "1e9",
        "!!set",
        "\udcff",
    ]
    outcomes = set()
    for _ in range(150):
        text = good
        for _ in range(draw.randrange(1, 4)):
            start = draw.randrange(len(text))
            text = text[:start] + "".join(draw.choices(junk, k=draw.randrange(3))) + text[start + draw.randrange(4) :]
        try:
            load(tmp_path, text.encode("utf-8", "surrogateescape"))
            outcomes.add("good")
        except ConfigError as error:
            assert str(error).startswith(str(tmp_path))
            outcomes.add("refused")
    assert outcomes == {"good", "refused"}
