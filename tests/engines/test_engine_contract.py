"""The contract of an engine, for every file of launch/engines: complete text, the same each time, in golden files; what
cannot work is 78."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from spmdkit.errors import FINAL, ConfigError, ExitCode
from spmdkit.foundation import redact
from spmdkit.launch.engines import all_engines
from spmdkit.launch.engines.base import AGAIN, REQUIRED, ClusterJob, complete
from spmdkit.launch.engines.submit import launch_on, prepared, submit
from spmdkit.launch.restart_policy import Restarts
from tests.engines.schema import mistakes

FOLDER = Path(__file__).parent
ENGINES = all_engines()
ARGUMENTS = ("train", "my run.yaml", "task_args={title: it's $HOME; `x`}", "steps=8")

GOLDEN = {
    "slurm": ({"partition": "gpu", "gpus_per_task": "1", "tasks_per_node": "2", "setup": "module load cuda"}, 4),
    "kubernetes": ({"image": "repo/img:1", "gpus": "8", "memory": "64Gi", "volume": "shared", "queue": "team"}, 2),
    "kubernetes-tpu": ({"image": "repo/img:1", "tpu": "tpu-v6e-slice", "topology": "4x4", "slices": "2"}, 8),
    "kubeflow": ({"image": "repo/img:1", "gpus": "8", "volume": "shared"}, 2),
    "tpu": ({"tpu": "pod-1", "zone": "us-east5-a", "project": "mine"}, 4),
    "ray": ({"address": "10.0.0.1:6379", "gpus": "8", "cpus": "16"}, 2),
    "ssh": ({"hosts": "me@host0,host1", "setup": "source ~/venv/bin/activate"}, 2),
}


def rendered(case, arguments=ARGUMENTS, restarts=3, **changes):
    options, num = GOLDEN[case]
    engine = ENGINES[case.partition("-")[0]]
    restarts = 0 if case == "kubeflow" else restarts
    options = complete(case, engine.OPTIONS, options | changes)
    return engine.render(ClusterJob(arguments, num, "my-run", restarts, 120, options, "/home/me/my project"))


def text_of(found):
    lines = [f"--- {name}\n{text}" for name, text in found.files.items()]
    return "".join(lines) + "".join(f"$ {shlex.join(command)}\n" for command in found.commands)


def test_each_engine_has_a_row_and_described_options():
    assert {case.partition("-")[0] for case in GOLDEN} == set(ENGINES)
    for name, engine in ENGINES.items():
        assert (engine.__doc__ and "Source:" in engine.__doc__) or name == "ssh"
        for option, (default, description) in engine.OPTIONS.items():
            assert description and not description.endswith(".") and isinstance(default, str), (name, option)


@pytest.mark.parametrize("case", [case for case in GOLDEN if case != "kubeflow"])
def test_every_engine_ends_at_the_same_codes(case):
    text = text_of(rendered(case))
    ends = re.findall(r"(?m)^ *0\|([\d|]+)\) |exit code \(([\d|]+)\) \.\*$|^FINAL = \(([\d, ]+)\)$", text)
    codes = [{int(code) for code in re.findall(r"\d+", "".join(found))} for found in ends]
    assert [each for each in codes if each != {42}] == [set(map(int, FINAL))]


def test_the_page_has_the_table_of_restarts():
    page = (FOLDER.parents[1] / "docs/howto/clusters/index.md").read_text()
    table = page.split("| exit code | restarted by")[1].split("\n\n")[0]
    rows = {tuple(re.findall(r"\d+", row.split("|")[1])): row.split("|")[2].strip() for row in table.splitlines()[2:]}
    never = {int(code) for codes, what in rows.items() if what.startswith("never") for code in codes}
    always = {int(code) for codes, what in rows.items() if what.startswith("always") for code in codes}
    assert never == {0, *FINAL} and always == {AGAIN}
    assert {code for codes in rows for code in map(int, codes)} >= set(map(int, ExitCode))
    for code in {*map(int, ExitCode), 137, 139}:
        restarted = Restarts(3).next_delay_s(code, 1) is not None
        assert restarted == (code not in never), code


@pytest.mark.parametrize("case", GOLDEN)
def test_text_is_the_golden_file_each_time(case, monkeypatch):
    """`WRITE_GOLDEN=1 pytest tests/engines` writes them again; a change of them is a change of what users run."""
    found, write = text_of(rendered(case)), os.environ.get("WRITE_GOLDEN")
    monkeypatch.setattr(os, "environ", {"HOME": "/elsewhere"})
    assert text_of(rendered(case)) == found
    path = FOLDER / "golden" / f"{case}.txt"
    if write:
        path.write_text(found)
    assert found == path.read_text()


def test_slurm_without_restarts_requeues_after_a_save_alone():
    text = text_of(rendered("slurm", restarts=0))
    assert text.count("scontrol requeue") == 1 and " of 0" not in text and "--max-restarts is 0" in text


def commands_in(case, text):
    """Returns the words of the line that starts spmdkit."""
    if case.startswith("kube"):
        text = yaml.safe_load(text)["spec"]
        if "trainer" in text:
            return text["trainer"]["command"]
        return text["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]["command"]
    if case == "ray":
        assigned = {ast.unparse(n.targets[0]): n.value for n in ast.parse(text).body if isinstance(n, ast.Assign)}
        return ast.literal_eval(assigned["COMMAND"])
    (line,) = [line for line in text.splitlines() if "-m spmdkit" in line][:1]
    words = shlex.split(line)
    return shlex.split(words[2]) if case == "ssh" else words


@pytest.mark.parametrize("case", GOLDEN)
def test_script_has_the_command_word_by_word(case):
    ((name, text),) = rendered(case).files.items()
    if not name.endswith((".py", ".yaml")):
        assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""
    assert commands_in(case, text)[-len(ARGUMENTS) - 2 :] == ["-m", "spmdkit", *ARGUMENTS]


@pytest.mark.parametrize("case", [case for case in GOLDEN if case.startswith("kube")])
def test_manifests_fit_the_schemas_of_their_controllers(case):
    (text,) = rendered(case, ("train", "c.yaml", "run_dir=$(HOME)")).files.values()
    assert commands_in(case, text)[-1] == "run_dir=$$(HOME)"  # Kubernetes replaces nothing
    document = yaml.safe_load(text)
    schema = json.loads((FOLDER / "schemas" / f"{document['kind'].lower()}.json").read_text())
    assert mistakes(document, schema) == []
    document["spec"]["surprise"] = 1
    assert mistakes(document, schema) == ["spec.surprise: no such field"]


def test_schema_check_finds_types_enums_and_missing_fields():
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "array", "items": {"enum": ["x"]}}}}
    assert mistakes({}, schema) == ["a: is missing"]
    assert mistakes({"a": "x"}, schema) == ["a: is no array"]
    assert mistakes({"a": ["y"]}, schema) == ["a[0]: 'y' is not one of ['x']"]


@pytest.mark.parametrize(
    ("engine", "num", "settings", "words"),
    [
        ("slrum", 2, (), ("--on slrum is not known", "'slurm'")),
        ("slurm", 2, ("partiton=x",), ("no such option", "'partition'")),
        ("slurm", 2, ("partition",), ("expected NAME=VALUE", "partition=...")),
        ("slurm", 3, ("tasks_per_node=2",), ("the last node would have 1", "-n 2")),
        ("slurm", 2, ("tasks_per_node=two",), ("whole number of at least 1",)),
        ("slurm", 2, ("partition=a\nb",), ("control character",)),
        ("slurm", 0, (), ("at least one process",)),
        ("kubernetes", 2, (), ("needs --set image=", "container image")),
        ("kubernetes", 2, ("image=i", "tpu=tpu-v5p-slice"), ("go together",)),
        ("kubernetes", 2, ("image=i", "slices=2"), ("is for TPUs",)),
        ("kubernetes", 2, ("image=i", "tpu=t", "topology=4by4"), ("expected chips", "2x2x2")),
        ("kubernetes", 2, ("image=i", "tpu=t", "topology=4x4", "slices=2"), ("that is 8 hosts", "-n 8")),
        ("ssh", 2, ("hosts=a",), ("with 1 hosts (a)", "-n 1")),
        ("tpu", 2, ("tpu=t",), ("needs --set zone=",)),
        ("ray", 2, ("strategy=spread",), ("STRICT_SPREAD", "strategy=SPREAD")),
        ("ray", 2, ("gpus=some",), ("whole number",)),
    ],
)
def test_impossible_job_is_refused_with_its_repair(engine, num, settings, words):
    with pytest.raises(ConfigError) as caught:
        prepared(engine, ("train", "c.yaml"), num, settings, "run", 0, 60)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_script_of_the_user_is_started():
    (text,) = prepared("slurm", ("mine.py", "--x"), 2, (), "run", 0, 60).files.values()
    assert "srun --kill-on-bad-exit=1 python mine.py --x" in text


@pytest.mark.parametrize(
    ("engine", "values", "words"),
    [
        ("slurm", ("My_Run", 0, 60.0), "small letters"),
        ("slurm", ("run", -1, 60.0), "restarts from 0"),
        ("slurm", ("run", 0, 0), "seconds from 1"),
        ("kubeflow", ("run", 1, 60.0), "decides about restarts"),
    ],
)
def test_names_restarts_and_seconds_are_checked(engine, values, words):
    with pytest.raises(ConfigError, match=words):
        prepared(engine, ("train", "c.yaml"), 2, ("image=i",) if engine == "kubeflow" else (), *values)


def test_dry_run_prints_everything_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert launch_on("slurm", ("train", "c.yaml"), 2, (), "run", 0, None, True) == 0
    printed = capsys.readouterr().out
    assert "#SBATCH --nodes=2" in printed and f"--chdir={tmp_path}" in printed and "$ sbatch run.sbatch" in printed
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="sbatch is not on this machine's PATH"):
        launch_on("slurm", ("train", "c.yaml"), 2, (), "run", 0, None, False)
    assert not list(tmp_path.iterdir()), "nothing is written where nothing can be run"
    (tmp_path / "sbatch").write_text("#!/bin/sh\nexit 7\n")
    (tmp_path / "sbatch").chmod(0o755)
    assert launch_on("slurm", ("train", "c.yaml"), 2, (), "run", 0, None, False) == 7
    assert (tmp_path / "launch_run" / "run.sbatch").read_text() in capsys.readouterr().out.replace(
        "\n--- in", "\n\n--- in"
    )


def test_the_first_command_that_fails_is_the_last(tmp_path):
    slurm = rendered("slurm")
    two = type(slurm)({}, (("false",), ("touch", "x")), "a shell")
    assert submit(two, tmp_path, True, lambda line: None) == 1 and not (tmp_path / "x").exists()
    assert REQUIRED not in text_of(slurm)


def test_a_python_without_ray_says_so():
    (text,) = rendered("ray").files.values()
    without = "import importlib.util\nimportlib.util.find_spec = lambda name: None\n"
    ended = subprocess.run([sys.executable, "-I", "-c", without + text], capture_output=True, text=True, timeout=20)
    assert ended.returncode == 78 and "has no Ray: pip install" in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.parametrize("case", GOLDEN)
def test_secrets_are_not_printed_or_written(case, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(redact, "_known", set())
    monkeypatch.chdir(tmp_path)
    assert redact.redact_text(text_of(rendered(case))) == text_of(rendered(case))
    options, num = GOLDEN[case]
    settings = [f"{name}={value}" for name, value in options.items()]
    args = case.partition("-")[0], (*ARGUMENTS, "task_args.db_pwd=canary"), num, settings, "my-run", 0, None
    assert launch_on(*args, dry_run=True) == 0
    printed = capsys.readouterr().out
    assert "canary" not in printed and "task_args.db_pwd=***" in printed
    with pytest.raises(ConfigError, match=r"task_args\.db_pwd=\*\*\* contains a secret, which would be written"):
        launch_on(*args, dry_run=False)
    assert not list(tmp_path.iterdir())
