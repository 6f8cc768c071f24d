"""`--search` finds, ranks and rejects with reasons; `--diff` says what moved."""

import contextlib
import dataclasses
import io
import json
from pathlib import Path
from unittest.mock import Mock

import pytest

from spmdkit.cli import main
from spmdkit.config import load_config
from spmdkit.errors import ConfigError
from spmdkit.mesh.chips import CHIPS
from spmdkit.plan.command import PlanOptions, choose_target, make_plan, run_plan
from spmdkit.plan.compare import compare
from spmdkit.plan.search.candidates import candidates
from spmdkit.plan.search.search import search
from spmdkit.plan.table import show_candidates
from spmdkit.program.opening import task_of
from tests.support.plan_files import config, write


def found(search_over, **changes):
    asked = config(**changes)
    return candidates(asked, task_of(asked), choose_target(asked, None), search_over)


def test_every_legal_mesh_is_a_candidate_once():
    four = {"devices": "cpu:4", "mesh": {"data": 4}, "batch_size": 32}
    rows = found(["mesh"], task_args={"width": 24}, **four)
    meshes = [tuple(c.sizes.values()) for c in rows]
    assert len(meshes) == len(set(meshes)) == 6  # 4 = 2^2 over three axes: 4! / (2! 2!)
    assert {c.status for c in rows} == {"not compiled"}
    assert [c.estimate_s for c in rows] == sorted(c.estimate_s for c in rows)
    refused = [c for c in found(["mesh"], task_args={"width": 18}, **four) if c.status == "refused"]
    assert refused and all("18" in c.reason for c in refused)


def test_microbatches_remat_and_zero_vary():
    rows = found(["microbatches", "remat", "zero"], batch_size=32)
    remats = ("none", "dots", "full", "offload_layer_inputs")  # the model marks no values for the other policies
    kinds = {(c.changes.get("microbatches", 1), c.changes.get("remat", "none"), c.changes["layout.zero"]) for c in rows}
    assert kinds == {(m, r, z) for m in (1, 2, 4) for r in remats for z in (1, 2, 3)}
    with pytest.raises(ConfigError, match="--search-over names 'meshes'"):
        found(["meshes"])


def test_batch_offload_and_precision_vary():
    rows = found(["batch", "offload", "precision"], mesh={"data": 8})
    kinds = {(c.batch_size, *c.changes.get("offload", []), c.changes.get("precision.compute", "float32")) for c in rows}
    assert kinds == {
        (64 * n, *o, p) for n in (1, 2, 4, 8) for o in ((), ("optimizer",)) for p in ("float32", "bfloat16")
    }
    assert [c.estimate_per_example_s for c in rows] == sorted(c.estimate_per_example_s for c in rows)
    by_name = {c.name: c.estimate_s for c in rows}
    assert by_name["data 8"] < by_name["data 8, batch_size 128"] < 2 * by_name["data 8"]
    assert by_name["data 8"] < by_name["data 8, offload optimizer"]


def test_tiles_vary_on_tpus():
    requested = config(devices="cpu:1", mesh={})
    here = choose_target(requested, None)
    with pytest.raises(ConfigError, match="attention, the tiles of splash attention, which runs on TPUs"):
        candidates(requested, task_of(requested), here, ["attention"])
    rows = candidates(requested, task_of(requested), dataclasses.replace(here, chip=CHIPS["v6e"]), ["attention"])
    assert {(c.changes.get("attention", {}).get("block_q"), c.estimate_s) for c in rows} == {
        (tile, rows[0].estimate_s) for tile in (None, 512, 1024, 2048)
    }
    assert rows[-1].name == "one device, attention block_q 2048 block_kv 2048 fused_backward True"


def test_axes_of_some_models_vary_on_request():
    two = {"devices": "cpu:2", "mesh": {"data": 2}}
    assert len(found(["mesh"], **two)) == 3
    rows = {c.name: c for c in found(["mesh", "context", "pipeline"], **two)}
    assert len(rows) == 5
    assert "shards nothing over context" in rows["context 2"].reason
    assert "no parameter is sharded over pipeline" in rows["pipeline 2"].reason


def started_here(command, **_):
    """Runs the command of a candidate in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main(command[3:])
    return Mock(**{"communicate.return_value": (out.getvalue(), "")})


@pytest.mark.parametrize("in_a_process", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_best_is_compiled_and_written(in_a_process, tmp_path, capsys, monkeypatch):
    if not in_a_process:
        monkeypatch.setattr("spmdkit.plan.planner.start", started_here)
    out = tmp_path / "best.yaml"
    run_plan(write(tmp_path), [], PlanOptions("cpu:4", search=True, compile=1, write=out, as_json=True))
    printed = json.loads(capsys.readouterr().out)
    assert [row["status"] for row in printed["candidates"][:2]] == ["best", "not compiled"]
    assert printed["num_compiled"] == 1 and all(row["reason"] for row in printed["candidates"])
    assert load_config(out).devices == "cpu:4"
    assert load_config(out).mesh.sizes() == {a: n for a, n in printed["mesh"].items() if n > 1}
    assert make_plan(load_config(out))["predicted_step_s"] == pytest.approx(printed["predicted_step_s"])


def searched(monkeypatch, most, plan, over="microbatches"):
    """Returns the ranking of 1, 2, 4 and 8 microbatches, or of what `over` names; `plan(microbatches)` takes the place
    of the compiler."""
    compiled = lambda self, changes, target: plan(changes.get("microbatches", 1))
    monkeypatch.setattr("spmdkit.plan.planner.PlanProcesses.__call__", compiled)
    requested = config(mesh={"data": 8})
    return search(requested, choose_target(requested, None), [over], most, lambda line: None)


def test_candidates_are_ranked_by_their_plans(monkeypatch):
    def plan(m):
        if m == 8:
            return "the compiler ended with code 1"
        memory, budget = {"peak_bytes": 10, "limit_bytes": 100}, {"exceeded": ["too much"] * (m == 4)}
        return {"fits": True, "memory": memory, "predicted_step_s": 3.0 - m, "budget": budget}

    rows = [(c.name, c.status, c.reason) for c in searched(monkeypatch, 4, plan).candidates]
    assert rows[0][:2] == ("data 8, microbatches 2", "best")
    assert rows[1] == ("data 8", "fits", "fits; 2.00 times the best step")
    assert [row[1:] for row in rows[2:]] == [("refused", "too much"), ("refused", "the compiler ended with code 1")]


def test_batches_are_ranked_by_the_time_per_example(monkeypatch):
    memory = {"peak_bytes": 10, "limit_bytes": 100}
    plan = lambda _: {"fits": True, "memory": memory, "predicted_step_s": 1.0, "budget": {"exceeded": []}}
    best, *others = searched(monkeypatch, 1, plan, "batch").candidates
    assert best.reason == "the shortest predicted time per example of those that fit"
    assert {each.batch_size for each in others} - {best.batch_size}


def test_estimates_have_the_unit_of_predictions(monkeypatch):
    memory = {"peak_bytes": 10, "limit_bytes": 100}
    plan = lambda m: {"fits": True, "memory": memory, "predicted_step_s": 7.0, "budget": {"exceeded": []}}
    first, second, *rest = searched(monkeypatch, 2, plan).candidates
    assert (first.status, second.status) == ("best", "fits")
    assert second.equal == first.name and first.equal is None
    assert [c.status for c in rest] == ["not compiled"] * 2
    assert all(5 < c.estimate_s < 10 for c in (first, second, *rest))
    assert {c.equal for c in rest} == {second.name}  # without fsdp, microbatches cost nothing


def test_refused_candidates_are_printed_first(capsys):
    row = {"predicted_step_s": None, "estimated_step_s": None, "peak_bytes": None}
    refused = [row | {"name": f"data {n}", "status": "refused", "reason": f"no {n}"} for n in range(13)]
    best = row | {"name": "fsdp 8", "status": "best", "reason": "shortest", "predicted_step_s": 0.5}
    later = [row | {"name": f"tensor {n}", "status": "not compiled", "reason": "late"} for n in range(12)]
    show_candidates([best, *later, *refused])
    text = capsys.readouterr().out
    lines = [line.split()[:2] for line in text.splitlines()]
    assert text.count("data ") == 10 and "and 3 more: no N" in text
    assert lines.index(["data", "0"]) < lines.index(["fsdp", "8"])
    assert text.count("tensor ") == 9 and "and 3 more: not compiled" in text


def test_a_search_without_a_fit_names_the_smallest(monkeypatch):
    def plan(m):
        needed = {"peak_bytes": 8000 // m, "limit_bytes": 1000}
        return {"fits": False, "memory": needed, "predicted_step_s": 1.0, "budget": {"exceeded": []}}

    result = searched(monkeypatch, 3, plan)
    assert result.best is None and result.num_compiled == 3
    assert [c.status for c in result.candidates] == ["does not fit"] * 3 + ["not compiled"]
    assert "The smallest is data 8, microbatches 4: needs 2.0 KiB of 1000 B a device" in str(result.nothing_fits())


def test_the_difference_of_two_plans_is_what_moved(tmp_path, capsys):
    a, b = make_plan(config()), make_plan(config(mesh={"data": 8}))
    moved = compare(a, b)
    assert moved["what"]["mesh"] == ["data 2 x fsdp 4", "data 8"]
    assert "params/layers" in moved["layout"]
    assert moved["memory"]["parameters"] == [a["memory"]["parts"]["parameters"], b["memory"]["parts"]["parameters"]]
    assert any("over fsdp" in name and after is None for name, (_, after) in moved["collectives"].items())
    assert compare(b, a)["collectives"] == {name: pair[::-1] for name, pair in moved["collectives"].items()}
    assert compare(a, a)["what"] == compare(a, a)["collectives"] == {}
    files = tmp_path / "a.json", tmp_path / "b.json"
    for file, plan in zip(files, (a, b), strict=True):
        file.write_text(json.dumps(plan))
    run_plan(files[0], [], PlanOptions(diff=files[1]))
    text = capsys.readouterr().out
    assert "data 2 x fsdp 4 -> data 8" in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (PlanOptions(search_over="mesh,remat"), "--search-over has no effect without --search"),
        (PlanOptions(diff=Path("x.json"), search=True), "--diff compares two plans"),
        (PlanOptions(diff=Path("absent.json")), "absent.json cannot be read as a plan"),
        (PlanOptions(search=True, compile=0), "--compile is 0"),
    ],
)
def test_options_without_effect_are_refused(options, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        run_plan(write(tmp_path), [], options)
