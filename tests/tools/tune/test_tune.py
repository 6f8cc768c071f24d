"""`spmdkit tune`: which variant wins, what is dropped, killed, stored and written."""

import json
import subprocess
import sys
import textwrap
import time

import pytest

from spmdkit.cluster import detect_cluster, join
from spmdkit.config import load_config
from spmdkit.errors import ConfigError
from spmdkit.plan.machine.target import target_of
from spmdkit.plan.search.candidates import PRESETS, variants
from spmdkit.program.opening import task_of
from spmdkit.tools.tune import command, measure, search
from spmdkit.tools.tune.command import TuneOptions, run_tune

TASK = """
import jax, jax.numpy as jnp, numpy as np, optax
import spmdkit as sk
X = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
@sk.task
def task(scale=1.0, detach=False, scan_layers=True):
    def init(key):
        w = jnp.full((2, 4, 4), 0.1)
        return {"w": w} if scan_layers else {"w0": w[0], "w1": w[1]}
    def loss_fn(params, batch, key):
        first, second = params["w"] if scan_layers else (params["w0"], params["w1"])
        second = jax.lax.stop_gradient(second) if detach else second
        return sk.mean(((batch["x"] @ first @ second - scale * batch["x"]) ** 2).sum(1))
    return sk.Task(init, loss_fn, optax.adamw(1e-3), train_data={"x": X})
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("SPMDKIT_COMPILE_CACHE", "off")
    (tmp_path / "task.py").write_text(textwrap.dedent(TASK))
    (tmp_path / "run.yaml").write_text(
        "task: task.py:task\nsteps: 20\nbatch_size: 16\ndevices: cpu:2\nmesh: {data: 2}\n"
    )
    return load_config(tmp_path / "run.yaml")


def row(name, refused=None, **changes):
    return {"name": name, "changes": changes, "refused": refused}


def figures(ratio, same=True):
    return {"ratio": ratio, "low": ratio - 0.01, "high": ratio + 0.01, "faster": ratio < 0.98, "same": same}


def searched(variants, ratios):
    """Returns the variants of a search in which changes -> figures are given."""
    evaluate = lambda changes, _: ratios["+".join(f"{changes[key]}" for key in changes)]
    return search._search(variants, evaluate, time.monotonic() + 60)


def test_the_unchanged_config_wins_ties():
    found = searched({"remat": [row("a", remat="a"), row("b", remat="b")]}, {"a": figures(0.99), "b": figures(1.2)})
    assert [variant.status for variant in found] == ["not faster", "not faster"]


def test_a_variant_that_computes_something_else_loses():
    ratios = {"a": figures(0.5, same=False), "b": figures(0.9)}
    found = searched({"remat": [row("a", remat="a"), row("b", remat="b")]}, ratios)
    assert [(v.name, v.status) for v in found] == [("a", "differs"), ("b", "faster"), ("b", "faster")]


def test_a_setting_starts_from_the_best_before():
    variants = {"scan": [row("s", scan="s")], "remat": [row("no", refused="no marks", remat="x"), row("b", remat="b")]}
    found = searched(variants, {"s": figures(0.8), "s+b": figures(0.7)})
    assert found[-1].setting == "all" and found[-1].changes == {"scan": "s", "remat": "b"} and found[-1].name == "s, b"
    assert [(v.name, v.reason) for v in found if v.status == "refused"] == [("no", "no marks")]


def test_a_later_setting_within_noise_is_not_added():
    variants = {"scan": [row("s", scan="s")], "remat": [row("b", remat="b")]}
    found = searched(variants, {"s": figures(0.8), "s+b": figures(0.795)})
    assert found[-1].changes == {"scan": "s"}


def test_a_variant_that_hangs_is_killed(monkeypatch):
    started = []

    def hang(command, **options):
        started.append(subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], **options))
        return started[0]

    monkeypatch.setattr(search, "start", hang)
    assert search._in_process({}, 0.1) == {"refused": "no result after 0 s", "status": "killed"}
    assert started[0].returncode == -9


def test_variants_change_one_setting(config):
    target, task = target_of(join(detect_cluster({}), "cpu:2").devices), task_of(config)
    found = variants(config, task, target, search.SETTINGS)
    names = {setting: [x["changes"] for x in rows] for setting, rows in found.items()}
    assert names["compiler"] == [{"compiler_options": dict(options)} for options in PRESETS["cpu"]]
    assert names["scan"] == [{"task_args": {"scan_layers": False}}] and names["attention"] == []
    assert names["prefetch"] == [{"data.prefetch": 1}, {"data.prefetch": 2}, {"data.prefetch": 4}]
    assert {"microbatches": 2} in names["microbatches"] and {"remat": "full"} in names["remat"]
    assert {"microbatches": 16} not in names["microbatches"], "8 rows of a device"


def test_a_task_without_stacked_layers_refuses_them():
    other = load_config("configs/linear_regression.yaml", ["devices=cpu:2"])
    target = target_of(join(detect_cluster({}), "cpu:2").devices)
    (refused,) = variants(other, task_of(other), target, ["scan"])["scan"]
    assert "scan_layers" in refused["refused"] or "task_args" in refused["refused"]


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"microbatches": 2}, True),
        ({"task_args": {"scan_layers": False}}, True),
        ({"task_args": {"scale": 1.01}}, False),
        ({"task_args": {"detach": True}}, False),
    ],
    ids=["microbatches", "scan", "another task", "the same loss"],
)
def test_loss_and_gradient_are_compared(config, changes, same):
    cluster = join(detect_cluster({}), "cpu:2")
    found = measure._differences(config, measure.replace_keys(config, changes), cluster)
    assert found["same"] is same and (found["gradient_difference"] < 1e-5) is same


def test_blocks_alternate_and_have_equal_steps(config, monkeypatch):
    monkeypatch.setattr(measure, "BLOCK_S", 0.01)
    programs = [measure.open_program(config, task_of(config), join(detect_cluster({}), "cpu:2").devices)] * 2
    found = measure._ratios(programs, time.monotonic())
    assert found["pairs"] == len(found["ratios"]) == measure.MIN_PAIRS and found["step_s"] > 0


def test_a_result_is_stored_and_written(config, monkeypatch, capsys):
    best = search.Variant("scan", "scan_layers False", {"task_args": {"scan_layers": False}}, "faster")
    best.figures = figures(0.8) | {"step_s": 0.01, "loss_difference": 0.0, "gradient_difference": 1e-7}
    last = search.Variant("all", best.name, best.changes, "faster", figures=best.figures)
    calls = []
    measured = lambda config, seconds: (calls.append(seconds), ([best, last], {"device": "cpu", "num": 2}))[1]
    monkeypatch.setattr(command, "on_devices", measured)
    for _ in range(2):
        run_tune(config, TuneOptions(as_json=True))
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert len(calls) == 1 and (first["reused"], second["reused"]) == (False, True)
    text = (config.folder / "run_tuned.yaml").read_text()
    assert "scan_layers: false" in text and "0.800 (0.790 to 0.810)" in text.splitlines()[0]
    assert load_config(config.folder / "run_tuned.yaml").task_args == {"scan_layers": False}
    (config.folder / "task.py").write_text(textwrap.dedent(TASK) + "\n")  # another program
    run_tune(config, TuneOptions())
    assert len(calls) == 2 and "best: scan_layers False" in capsys.readouterr().out


def test_without_a_device_predicted_times_decide(config, monkeypatch):
    class Plans:
        def __enter__(self):
            return self.plan, 1

        def __exit__(self, *error):
            pass

        def plan(self, changes):
            seconds = 0.5 if changes == {"task_args": {"scan_layers": False}} else 1.0
            return {"predicted_step_s": seconds, "fits": "microbatches" not in changes}

    monkeypatch.setattr(search, "planner_on", lambda config, target: Plans())
    found = search.on_target(config, target_of(join(detect_cluster({}), "cpu:2").devices), 60)
    assert found[-1].changes == {"task_args": {"scan_layers": False}} and found[-1].status == "faster"
    assert {v.reason for v in found if v.setting == "microbatches"} >= {"does not fit"}
    assert "prefetch" not in {v.setting for v in found}


def test_no_time_is_an_error(config):
    with pytest.raises(ConfigError, match="--seconds is 0"):
        run_tune(config, TuneOptions(seconds=0))
