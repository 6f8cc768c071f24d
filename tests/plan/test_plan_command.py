"""`spmdkit plan`: its JSON, its table, its budget, its refusals; and the plan that `train` makes."""

import contextlib
import io
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.cli import main
from spmdkit.errors import ConfigError
from spmdkit.plan.command import PlanOptions, make_plan, run_plan
from spmdkit.plan.document import tokens_of_batch
from spmdkit.plan.machine.target import target_of
from spmdkit.plan.table import WIDTH, console, show
from spmdkit.run.loop import train
from tests.support.core_runs import program_of
from tests.support.plan_files import TASK, config, write

WIDE, LAYERS, BATCH = 64, 4, 64


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """What the command prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        run_plan(write(tmp_path_factory.mktemp("plan")), [], PlanOptions(as_json=True))
    return json.loads(out.getvalue())


def test_the_json_has_every_key_of_the_contract(plan):
    keys = {"target", "num_devices", "mesh", "fits", "memory", "collectives", "flops", "predicted_step_s", "findings"}
    assert keys <= plan.keys()
    assert {"argument_bytes", "temp_bytes", "peak_bytes", "limit_bytes"} <= plan["memory"].keys()
    keys = {"op", "axes", "dtype", "bytes", "count", "in_loop", "source"}
    assert all(keys <= row.keys() for row in plan["collectives"])
    assert {"path", "shape", "dtype", "spec", "memory_kind", "bytes", "reason"} <= plan["layout"][0].keys()
    assert (plan["target"], plan["num_devices"], plan["mesh"]["fsdp"]) == ("cpu:8", 8, 4)


def test_what_user_code_prints_is_not_in_the_json(tmp_path, capsys):
    chatty = tmp_path / "chatty.py"
    chatty.write_text(Path(TASK.removesuffix(":task")).read_text() + "print('loaded')\n")
    main(["plan", str(write(tmp_path, task=f"{chatty}:task")), "--json"])
    out, errors = capsys.readouterr()
    assert json.loads(out)["fits"] and "loaded" in errors
    print("restored")
    assert capsys.readouterr().out == "restored\n"


def test_figures_of_a_plan_by_hand(plan):
    assert plan["flops"] == plan["model_flops"] == 6 * BATCH * WIDE**2 * LAYERS / 8
    leaf = WIDE * WIDE * LAYERS * 4
    assert plan["memory"]["parts"]["parameters"] == leaf / 4
    assert plan["memory"]["parts"]["optimizer state"] == 2 * leaf / 4 + 4
    assert sum(plan["memory"]["parts"].values()) == plan["memory"]["peak_bytes"]
    row = next(row for row in plan["layout"] if row["path"] == "params/layers")
    assert (row["bytes"], row["device_bytes"], row["spec"]) == (leaf, leaf / 4, [None, "fsdp"])
    assert sum(plan["time"]["parts"].values()) == pytest.approx(plan["predicted_step_s"])
    assert 0 < plan["time"]["mfu"] < 1
    assert plan["time"]["examples_per_s"] == pytest.approx(BATCH / plan["predicted_step_s"])
    least = sum(plan["wire"]["least"].values())
    assert least == 2 * (2 - 1) / 2 * leaf / 4 + 3 * 3 / 4 * leaf
    assert 0.5 * least < plan["collective_bytes"] < 4 * least


@pytest.mark.parametrize("shifted, tokens", [(True, 16 * 12), (False, 16 * 13)])
def test_tokens_are_the_positions_that_are_predicted(shifted, tokens):
    def loss(params, batch, key):
        read, target = (batch["tokens"][:, :-1], batch["tokens"][:, 1:]) if shifted else (batch["tokens"],) * 2
        return sk.mean(((params["table"][read].sum(-1) - target.astype(jnp.float32)) ** 2).mean(-1))

    init = lambda key: {"table": jnp.zeros((32, 8)), "unused": jnp.zeros((0, 8))}
    made = sk.Task(init, loss, optax.sgd(0.1), train_data={"tokens": np.zeros((16, 13), np.int32)})
    assert tokens_of_batch(program_of(made, mesh={"data": 8}, batch_size=16)) == tokens


def test_remat_adds_flops_to_the_program_alone(plan):
    again = make_plan(config(remat="full"))
    assert again["model_flops"] == plan["model_flops"]
    assert again["time"]["hlo_flops"] == again["flops"] > plan["flops"]


@pytest.mark.parametrize("target", ["gpu:h200:2x4", "here"])
def test_other_machines_plan_the_same_program(target, plan):
    other = make_plan(config(), target)
    assert other["collective_bytes"] == plan["collective_bytes"]
    assert other["flops"] == plan["flops"]
    if target.startswith("gpu"):
        assert any(row["crosses"] and row["link"] == "network" for row in other["collectives"])
        assert not any(row["crosses"] for row in other["collectives"] if row["axes"] == ["fsdp"])
        assert "Unreliable: step time" in other["notes"][0]


def test_the_table_fits_a_hundred_columns(plan):
    out = console()
    with out.capture() as captured:
        show(plan, out)
        hidden = {"cpu fsdp": {"busy_s": 3e-3, "exposed_s": 1e-3, "bytes": 8}}
        show(plan | {"time": plan["time"] | {"links": hidden}}, out)
    text = captured.get()
    assert "2 ms of the links' time overlaps with instructions" in text
    assert max(map(len, text.splitlines())) <= WIDTH
    for part in ("Memory", "fits", "Wire", "Time", "MFU", "Findings", "cpu:8", "data 2 x fsdp 4"):
        assert part in text


def test_an_exceeded_budget_fails_plan_and_train(tmp_path, capsys):
    budget = {"collective_bytes": 1000, "peak_memory": 1000, "collectives_in_loop": 0}
    exceeded = (
        r"budget.collective_bytes is 1000 bytes, a device sends \d+.*; budget.peak_memory is 1000 bytes, a device "
        r"needs \d+.*; budget.collectives_in_loop is 0, the program has \d+ inside loops"
    )
    with pytest.raises(ConfigError, match=exceeded) as refused:
        run_plan(write(tmp_path, budget=budget), [], PlanOptions(as_json=True))
    assert refused.value.exit_code == 78
    assert len(json.loads(capsys.readouterr().out)["budget"]["exceeded"]) == 3
    with pytest.raises(ConfigError, match=f"train does not begin: {exceeded}"):
        train(config(budget=budget, run_dir=str(tmp_path / "run")))
    assert "exceeded" in json.loads((tmp_path / "run" / "plan.json").read_text())["budget"]


def test_a_budget_that_is_met_changes_nothing(tmp_path):
    met = config(budget={"collective_bytes": 10**9, "peak_memory": 10**9}, run_dir=str(tmp_path / "run"))
    assert train(met).run.step == 2
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["predicted_step_s"] > 0


def test_a_step_too_large_names_the_nearest_fit(tmp_path, monkeypatch):
    settings = {"mesh": {"data": 8}, "task_args": {"layers": 16}, "batch_size": 4096}
    small = config(run_dir=str(tmp_path / "run"), **settings)
    whole, halved = (make_plan(config(microbatches=m, **settings))["memory"]["peak_bytes"] for m in (1, 2))
    between = (whole + halved) // 2
    assert halved < between < whole
    monkeypatch.setattr("spmdkit.program.memory.memory_of_this_machine", lambda: between * 8)
    assert target_of(jax.devices()).memory_limit_bytes == between
    planned = []  # memory alone decides: no text of a program is read
    monkeypatch.setattr("spmdkit.plan.document.plan_program", lambda *_: planned.append(True))
    message = r"a step needs .* of each device, cpu has .*A step has to fit\. Try microbatches: [24]"
    with pytest.raises(ConfigError, match=message):
        train(small)
    assert planned == []


def test_a_state_too_large_is_refused_first(tmp_path, monkeypatch):
    monkeypatch.setattr("spmdkit.program.memory.memory_of_this_machine", lambda: 8 * 1000)
    with pytest.raises(ConfigError, match=r"the train state needs .* of each device, cpu has 1000 B"):
        train(config(run_dir=str(tmp_path / "run")))
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_mesh_of_another_size_is_refused():
    with pytest.raises(ConfigError, match=r"mesh needs data\(2\) x fsdp\(4\) = 8 devices, found 4"):
        make_plan(config(), "gpu:h100:4")
