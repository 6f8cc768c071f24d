"""`spmdkit verify` as a user runs it: exit codes, JSON, table, certificates, and workers that die."""

import json
import re
import threading

import pytest

import spmdkit as sk
from spmdkit import cli
from spmdkit.config import load_config
from spmdkit.errors import ConfigError
from spmdkit.program import source_digest
from spmdkit.run.loop import train
from spmdkit.verify import VerifyOptions, cases, certificate, verify
from spmdkit.verify.mutants import MUTANTS
from spmdkit.verify.pool import Pool, _Worker

TASK = """
import os
import jax.numpy as jnp
import numpy as np
import optax
import spmdkit as sk
from jax import lax

@sk.task
def task(width=8, wrong=False, dies=False):
    x = np.linspace(-1, 1, 64 * 4, dtype=np.float32).reshape(64, 4)

    def loss_fn(params, batch, key):
        devices = lax.psum(1, ("replica", "data"))
        if dies and devices > 1:
            os.abort()
        print("a word of the user's, on standard output")
        error = jnp.tanh(batch["x"] @ params["w"]).sum(-1) - batch["x"].sum(-1)
        return sk.mean(error**2 * (devices if wrong else 1))

    init = lambda key: {"w": jnp.full((4, width), 0.1)}
    data = {"x": x}
    return sk.Task(init, loss_fn, optax.adam, train_data=data, eval_data=data)
"""
CONFIG = """
task: task.py:task
run_dir: run
steps: 2
batch_size: 16
learning_rate: 1e-2
devices: cpu:4
mesh: {data: -1}
checkpoint: null
log: {progress: "off"}
"""
FEW = ("--no-mutants", "--jobs", "1")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "run.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments):
    """Returns the exit code of `spmdkit verify run.yaml ...`."""
    with pytest.raises(SystemExit) as left:
        cli.app(["verify", "run.yaml", *arguments], prog_name="spmdkit", standalone_mode=False)
    return left.value.code


def config(**changes):
    return load_config("run.yaml", [f"{key}={value}" for key, value in changes.items()])


def test_a_right_task_gives_0_one_json_object_and_a_certificate_that_train_refuses_without_mutants(folder, capfd):
    assert run("--json", *FEW, "--microbatches", "1,2", "--certificate", "proof.json", "task_args.width=4") == 0
    said = capfd.readouterr()
    report = json.loads(said.out)
    assert "train refuses a certificate that was made with --no-mutants" in said.err
    assert report["passed"] and report["tolerance"] == pytest.approx(7.6e-6, rel=0.5) and report["mutants"] == []
    assert [(case["mesh"], case["microbatches"]) for case in report["cases"]] == [
        ({}, 2),
        ({"data": 4}, 1),
        ({"data": 4}, 2),
    ]
    case = report["cases"][1]
    keys = [
        "mesh",
        "microbatches",
        "reducer",
        "sync",
        "loss_error",
        "gradient_error",
        "parameter_error",
        "worst_leaf",
        "passed",
    ]
    assert set(keys) <= case.keys() and case["worst_leaf"] == "w" and case["reducer"] == "sum"
    assert report["skipped"] == [] and case["restore_error"] == 0 and 0 <= case["eval_error"] < 1e-6
    with pytest.raises(ConfigError, match="was made without mutants"):
        train(config(certificate="proof.json"))
    assert not (folder / "run").exists()


@pytest.mark.slow
def test_a_certificate_of_the_command_is_accepted_by_train(folder):
    assert run("--jobs", "2", "--certificate", "proof.json", "task_args.width=4") == 0
    found = json.loads((folder / "proof.json").read_text())
    assert {*found["mutants_caught"], *found["mutants_not_applicable"]} == {mutant.name for mutant in MUTANTS}
    assert train(config(certificate="proof.json")).run.step == 2


def test_a_wrong_task_gives_1_a_table_of_at_most_100_columns_and_a_certificate_that_train_refuses(folder, capfd):
    assert run(*FEW, "--certificate", "proof.json", "task_args.wrong=true") == 1
    table = capfd.readouterr().out
    assert "reduced twice" in table and "DIFFERS" in table and "failed: 0 of 1 cases" in table
    assert re.search(r"first .*task.py:\d+", table.replace("\n", "")), table
    assert max(map(len, table.splitlines())) <= 100
    with pytest.raises(ConfigError, match="did not pass"):
        train(config(certificate="proof.json", **{"task_args.wrong": "true"}))
    assert not (folder / "run").exists()


MISTAKES = """
import jax
import jax.numpy as jnp
import numpy as np
import optax
import spmdkit as sk

random = np.random.default_rng(0)
DATA = {"x": random.normal(size=(41, 8)).astype(np.float32), "y": random.normal(size=(41, 4)).astype(np.float32)}

@sk.task
def task():
    def loss_fn(params, batch, key):
        h = jnp.tanh(batch["x"] @ params["w"])
        loss = ((h - batch["y"]) ** 2).sum(-1)
        # here
        return sk.mean(loss)

    return sk.Task(lambda key: {"w": jax.random.normal(key, (8, 4)) / 3}, loss_fn, optax.adam, train_data=DATA)
"""


def run_with(folder, mistake, *arguments):
    """Returns the exit code of `spmdkit verify` where a line of the user's is `mistake`, and the number of the line."""
    text = MISTAKES.replace("# here", mistake)
    (folder / "task.py").write_text(text)
    return run(*FEW, *arguments), 1 + text.splitlines().index(f"        {mistake}")


@pytest.mark.parametrize(
    ("mistake", "remainder", "says"),
    [
        (
            "loss = (loss * sk.example_mask()).sum() / jnp.maximum(sk.example_mask().sum(), 1)",
            "mask",
            "of one shard alone, another on each",
        ),
        ("loss = loss * jax.random.bernoulli(key, 0.8, loss.shape)", "drop", "draws other numbers than one device"),
        ("loss = loss - sk.all_gather(loss)[: len(loss)].mean()", "drop", "is another value"),
    ],
    ids=["a mean over the shard", "a forgotten key", "a statistic of one replica"],
)
def test_a_mistake_in_a_users_own_line_gives_1_and_that_line(folder, capfd, mistake, remainder, says):
    code, line = run_with(folder, mistake, "--json", f"data.remainder={remainder}")
    (case,) = json.loads(capfd.readouterr().out)["cases"]
    assert code == 1 and not case["passed"]
    assert case["located"]["line"].endswith(f"task.py:{line} (loss_fn)") and says in case["located"]["text"]


def test_padding_among_the_negatives_is_refused_with_the_repair(folder):
    """No case is compared: the program of one device is wrong as well."""
    mistake = "loss = loss + jax.nn.logsumexp(h @ sk.all_gather(h, with_mask=True)[0].T, -1)"
    with pytest.raises(ConfigError, match=r"in loss_fn padding rows count.*sk\.example_mask\(\)"):
        verify_with(folder, mistake)


def verify_with(folder, mistake):
    (folder / "task.py").write_text(MISTAKES.replace("# here", mistake))
    return verify(config(**{"data.remainder": "mask"}), VerifyOptions(mutants=False, jobs=1))


@pytest.mark.slow
def test_locate_tells_the_line_of_every_mutant_that_has_one(folder, capfd):
    """And the table has a sentence for each."""
    assert run("--jobs", "1", "--locate", "task_args.width=4") == 0
    table = capfd.readouterr().out.replace("\n", "")
    assert re.search(r"reduction_dropped: spmdkit/verify/mutations.py:\d+ \(_first_only\): select_n", table), table


def test_every_worker_opens_the_task_while_the_first_makes_the_reference(monkeypatch):
    begun = threading.Barrier(3, timeout=20)

    def ask(worker, job):
        begun.wait()  # all at once, or never
        return {"outcome": job["kind"]}

    monkeypatch.setattr(_Worker, "ask", ask)
    with Pool({"devices": 1}, 3) as pool:
        assert pool.ask({"kind": "reference"}) == {"outcome": "reference"}


def test_a_worker_that_dies_costs_its_case_and_finished_cases_are_not_run_again(folder, capfd):
    options = VerifyOptions(mutants=False, jobs=1, microbatches="1,2", resume=folder / "done.jsonl")
    said = []
    report = verify(config(**{"task_args.dies": "true"}), options, said.append)
    assert [case["passed"] for case in report["cases"]] == [True, False, False]
    assert "SIGABRT" in report["cases"][1]["diagnosis"]["found"]
    assert report["pattern"] == "only with several replicas" or "data" in report["pattern"]
    again = []
    assert verify(config(**{"task_args.dies": "true"}), options, again.append)["cases"] == report["cases"]
    assert len(said) == 4 and len(again) == 1


def test_a_task_that_one_device_refuses_too_is_a_bad_config(folder):
    (folder / "task.py").write_text(TASK.replace('params["w"]', 'params["v"]'))
    with pytest.raises(sk.SpmdkitError, match="KeyError"):
        verify(config(), VerifyOptions(mutants=False, jobs=1))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"microbatches": "1,x"}, "--microbatches 1,2,4"),
        ({"devices": 0}, "--devices 8"),
        ({"devices": 3, "all_meshes": True, "max_axis": 2}, "--max-axis 3"),
        ({"steps": 0}, "at least 1"),
        ({"jobs": 0}, "at least 1"),
    ],
)
def test_options_that_cannot_work_are_told_with_the_repair(folder, options, says):
    with pytest.raises(ConfigError, match=says):
        verify(config(), VerifyOptions(**options))


def test_the_configs_own_mesh_has_to_fit_the_devices(folder):
    with pytest.raises(ConfigError, match="data: 4"):
        verify(config(**{"mesh.data": 8}), VerifyOptions())


# ---- meshes -----------------------------------------------------------------------------------------------------------


def test_every_mesh_of_eight_devices_with_axes_up_to_four_and_every_four_axis_mesh_of_sixteen():
    meshes = cases.all_meshes(8, 4)
    assert len(meshes) == 77 == len({tuple(mesh.items()) for mesh in meshes})
    assert {"data": 4, "tensor": 2} in meshes and {"data": 8} not in meshes
    assert len(cases.all_meshes(16, 2)) == 35 and all(len(mesh) == 4 for mesh in cases.all_meshes(16, 2))


# ---- certificates -----------------------------------------------------------------------------------------------------


CASE = {"mesh": {"data": 4}, "microbatches": 1, "passed": True}
CAUGHT = [{"name": mutant.name, "caught": True} for mutant in MUTANTS]
REPORT = {
    "passed": True,
    "cases": [CASE],
    "mutants": CAUGHT,
    "not_applicable": [],
    "dtype": "float32",
    "tolerances": {},
}


@pytest.fixture
def proof(folder):
    """A certificate of the folder's config on data 4, without a run."""
    certificate.write(folder / "proof.json", REPORT | certificate.identity(config()))
    return folder / "proof.json"


SIZES = {"data": 4, "fsdp": 1}


def test_a_certificate_holds_for_other_sizes_and_rates(proof):
    certificate.require(config(certificate="proof.json", **{"task_args.width": 64, "batch_size": 32}), SIZES)
    certificate.require(config(certificate="proof.json", learning_rate="0.1", steps=7, seed=3), SIZES)
    certificate.require(config(), {"data": 2})


@pytest.mark.parametrize(
    ("changes", "sizes", "says"),
    [
        ({}, {"data": 2}, "no proof for mesh {'data': 2}"),
        ({"microbatches": 2}, SIZES, "microbatches 2"),
        ({"clip_norm": 1.0}, SIZES, "clip_norm null, and the config has 1.0"),
        ({"task_args.wrong": "true"}, SIZES, "task_args"),
        ({"certificate": "none.json"}, SIZES, "does not exist"),
    ],
)
def test_a_certificate_does_not_hold_for_anything_else(proof, changes, sizes, says):
    with pytest.raises(ConfigError, match=says) as raised:
        certificate.require(config(**{"certificate": "proof.json"} | changes), sizes)
    assert "spmdkit verify" in str(raised.value)


def test_a_certificate_does_not_hold_for_another_text_of_the_task_or_of_what_it_imports(proof, folder):
    (folder / "task.py").write_text("import model\n" + TASK)
    with pytest.raises(ConfigError, match="another text"):
        certificate.require(config(certificate="proof.json"), SIZES)
    before = certificate.task_digest(config())
    (folder / "model.py").write_text("")
    assert certificate.task_digest(config()) != before


def test_a_certificate_is_about_every_module_of_the_project_that_the_task_imports(folder):
    """Packages, modules within functions, relative imports, and what they import in turn; nothing that is installed."""
    (folder / "models" / "parts").mkdir(parents=True)
    (folder / "models" / "__init__.py").write_text("from . import net\n")
    (folder / "models" / "net.py").write_text("def scale():\n    from .parts.last import SCALE\n    return SCALE\n")
    (folder / "models" / "parts" / "last.py").write_text("import optax\nSCALE = 2\n")
    (folder / "models" / "other.py").write_text("nobody imports this\n")
    (folder / "task.py").write_text("import models\n" + TASK)
    names = ["models/__init__.py", "models/net.py", "models/parts/last.py", "task.py"]
    assert list(source_digest.texts(config())) == names
    certificate.write(folder / "proof.json", REPORT | certificate.identity(config()))
    certificate.require(config(certificate="proof.json"), SIZES)
    for name in names:
        before = (folder / name).read_text()
        (folder / name).write_text(before + "\n# changed\n")
        with pytest.raises(ConfigError, match="another text"):
            certificate.require(config(certificate="proof.json"), SIZES)
        (folder / name).write_text(before)
    (folder / "models" / "other.py").write_text("still nobody")
    certificate.require(config(certificate="proof.json"), SIZES)


def test_a_certificate_does_not_hold_for_other_versions_or_another_spmdkit(folder, monkeypatch):
    with monkeypatch.context() as then:
        then.setattr("importlib.metadata.version", lambda name: "0.0.1" if name == "jax" else "1")
        certificate.write(folder / "proof.json", REPORT | certificate.identity(config()))
    with pytest.raises(ConfigError, match=r"jax 0\.0\.1"):
        certificate.require(config(certificate="proof.json"), SIZES)
    with monkeypatch.context() as then:
        then.setattr(certificate, "package_digest", lambda: "another")
        certificate.write(folder / "proof.json", REPORT | certificate.identity(config()))
    with pytest.raises(ConfigError, match="another spmdkit"):
        certificate.require(config(certificate="proof.json"), SIZES)


def test_all_mutants_have_to_be_caught_but_those_that_the_task_has_no_place_for(folder):
    def made(*caught, not_applicable=()):
        report = REPORT | certificate.identity(config()) | {"mutants": caught, "not_applicable": not_applicable}
        certificate.write(folder / "proof.json", report)
        certificate.require(config(certificate="proof.json"), SIZES)

    made(*CAUGHT)
    made(*CAUGHT[1:], not_applicable=[{"name": MUTANTS[0].name, "reason": "no microbatches"}])
    with pytest.raises(ConfigError, match=f"has not caught the mutants {MUTANTS[0].name}"):
        made(*CAUGHT[1:])
    with pytest.raises(ConfigError, match="was made without mutants"):
        made()
    certificate.require(config(certificate="proof.json"), {"data": 1})  # one device: there is nothing to compare


@pytest.mark.parametrize(
    "forged",
    [
        {"proven": [{"mesh": {"data": 8}, "microbatches": 1}]},
        {"task_digest": "0123456789abcdef"},
        {"versions": {"jax": "0.0.1"}},
        {"mutants_caught": ["none"]},
        {"seal": None},
    ],
)
def test_a_certificate_that_was_written_by_hand_or_changed_is_refused(proof, forged):
    (proof).write_text(json.dumps(json.loads(proof.read_text()) | forged))
    with pytest.raises(ConfigError, match="not as verify wrote it"):
        certificate.require(config(certificate="proof.json"), {"data": 8, "fsdp": 1})


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, '{"format": 0}', '{"format": 1}'])
def test_what_is_no_certificate_is_refused(folder, text):
    (folder / "proof.json").write_text(text)
    with pytest.raises(ConfigError, match="what verify writes"):
        certificate.require(config(certificate="proof.json"), SIZES)
