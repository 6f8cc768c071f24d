"""`spmdkit bench communication`: its JSON, its bytes against `plan`'s, what it rejects and writes; its arithmetic."""

import importlib.util
import json
import math
import re
from types import SimpleNamespace

import pytest

from spmdkit.cluster import detect_cluster, join
from spmdkit.config import load_config
from spmdkit.errors import ConfigError
from spmdkit.metrics.report.communication import communication_page, communication_section
from spmdkit.metrics.report.run import report_body
from spmdkit.plan.command import make_plan
from spmdkit.tools.bench import figures
from spmdkit.tools.bench.communication import ComparisonOptions, run_communication
from spmdkit.tools.bench.interleaved import Block, block_steps, period, ratios
from spmdkit.tools.bench.variants import BASELINE, Row, choice_text, read, rows_of

INT8 = "int8(warmup=4)"
CONFIG = "configs/linear_regression.yaml"
OVERRIDES = ["devices=cpu:4"]


def bench(**options):
    config = load_config(CONFIG, OVERRIDES)
    return run_communication(config, join(detect_cluster({}), config.devices), ComparisonOptions(**options))


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The linear regression by two reducers and one sync; a third has nothing to send of so small a gradient."""
    out = tmp_path_factory.mktemp("bench")
    return bench(reducers=f"{INT8},topk", syncs="local_sgd(every=4)", steps=20, seeds=2, out=out), out


@pytest.fixture(scope="module")
def result(measured):
    return json.loads((measured[1] / "communication.json").read_text())


def named(result, name):
    return next(row for row in result["rows"] if row["name"] == name)


def test_json_has_a_row_per_reducer(measured, result):
    assert measured[0] == 0
    assert [row["name"] for row in result["rows"]] == ["sum", INT8, "topk", "local_sgd(every=4)"]
    assert (result["replicas"], result["steps"], result["seeds"], result["loss_is"]) == (4, 20, [0, 1], "evaluation")
    for row in (row for row in result["rows"] if row["name"] != "topk"):
        assert len(row["loss"]) == len(row["loss_more"]) == 2
        assert row["loss_mean"] == pytest.approx(sum(row["loss"]) / 2)
        assert row["step_s"] > 0 and row["time_over_sum"] > 0 and row["curve"][-1][0] == 20
    assert named(result, "sum")["loss_more_mean"] == 0 and named(result, "sum")["time_over_sum"] == 1
    low, high = named(result, INT8)["time_interval"]
    assert low <= named(result, INT8)["time_over_sum"] <= high and named(result, INT8)["time_pairs"] == 2 * 16


@pytest.mark.parametrize(
    ("name", "overrides"), [(INT8, ["reducer=int8"]), ("local_sgd(every=4)", ["sync={local_sgd: {every: 4}}"])]
)
def test_bytes_are_those_of_the_plan(result, name, overrides):
    plan = make_plan(load_config(CONFIG, [*OVERRIDES, *overrides, "checkpoint=null"]))
    expected = plan["wire"].get("on_average", plan["collective_bytes"])
    assert named(result, name)["bytes_per_step"] == expected > 0
    assert named(result, name)["bytes_over_sum"] == expected / named(result, "sum")["bytes_per_step"]


def test_bytes_of_a_sync_and_a_refused_reducer(result):
    row = named(result, "local_sgd(every=4)")
    assert row["most_bytes_in_a_step"] == 4 * row["bytes_per_step"] > row["bytes_per_step"] == row["run_bytes_per_step"]
    int8, plain = (named(result, name)["bytes_per_step"] for name in (INT8, "sum"))
    assert named(result, INT8)["run_bytes_per_step"] == (4 * plain + 16 * int8) / 20
    row = named(result, "topk")
    assert "fewer than 1,024" in row["refused"] and "\n" not in row["refused"] and "loss" not in row


def test_losses_are_those_of_a_run_alone(result):
    import spmdkit as sk

    program = sk.build(
        CONFIG, overrides=[*OVERRIDES, "steps=20", "seed=1", "reducer={int8: {warmup: 4}}", "checkpoint=null"]
    )
    state = program.init()
    for _, batch in program.batches():
        state, _ = program.step(state, batch)
    assert float(program.eval(state)["loss"]) == named(result, INT8)["loss"][1]


def test_page_and_run_report_show_the_comparison(measured, result):
    page, png = (measured[1] / f"communication.{name}" for name in ("html", "png"))
    if importlib.util.find_spec("matplotlib"):
        assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    page = page.read_text()
    assert "local_sgd(every=4)" in page and page.count("<svg") == 2 and "topk: refused" in page
    assert 'aria-label="loss over bytes of a step"' in report_body("run", [], [], None, None, None, result)
    assert communication_section(None) == ""
    for broken in ({}, {"rows": 1}, {"rows": [1]}, {"rows": [{"name": "sum", "refused": None}]}):
        assert "is not as spmdkit bench writes it" in communication_section(broken)
    assert "<script" not in communication_page(result | {"config": "<script>.yaml"})


def test_loss_above_the_bound_exits_with_1(tmp_path, capsys):
    code = bench(reducers="int8", steps=4, within=-1.0, out=tmp_path, as_json=True)  # no loss is that far below
    assert (code, json.loads(capsys.readouterr().out)["above"]) == (1, ["int8"])
    assert figures.above([{"name": "a", "refused": None, "loss_more_mean": 0.02}], 0.01) == ["a"]
    assert figures.above([{"name": "a", "refused": None, "loss_more_mean": None}], 0.01) == ["a"]


@pytest.mark.parametrize(
    ("text", "option", "choices"),
    [
        ("int8, powersgd(rank=2)", "reducers", ["int8", {"powersgd": {"rank": 2}}]),
        ("{topk: {fraction: 0.05}}", "reducers", [{"topk": {"fraction": 0.05}}]),
        ("hierarchical(inner=sum, outer=int8)", "reducers", [{"hierarchical": {"inner": "sum", "outer": "int8"}}]),
        ("mine.py:make(rate=1e-3),int8", "reducers", [{"mine.py:make": {"rate": 1e-3}}, "int8"]),
        ("stale(2)", "syncs", [{"stale": 2}]),
        ("diloco(every=4, optimizer={name: sgd})", "syncs", [{"diloco": {"every": 4, "optimizer": {"name": "sgd"}}}]),
        ("", "syncs", []),
    ],
)
def test_choices_are_read_and_told_alike(text, option, choices):
    assert read(text, option) == choices
    assert read(",".join(map(choice_text, choices)), option) == choices


@pytest.mark.parametrize(
    ("text", "option", "parts"),
    [
        ("intt8", "reducers", ["--reducers intt8", "int8"]),
        ("powersgd(rnk=2)", "reducers", ["--reducers powersgd(rnk=2)", "rank"]),
        ("local_sgd", "syncs", ["--syncs local_sgd", "needs every"]),
        ("local_sgd(every=4", "syncs", ["brackets do not match"]),
        ("16", "syncs", ["--syncs 16", "NAME(OPTION=VALUE)"]),
    ],
)
def test_what_is_no_choice_is_said(text, option, parts):
    with pytest.raises(ConfigError) as error:
        read(text, option)
    assert all(part in str(error.value) for part in parts)


def test_configured_reducer_is_compared_once():
    own = Row("int8", {"local_sgd": {"every": 4}})
    rows = rows_of("sum,int8,int8", "every_step", own)
    assert rows == [BASELINE, Row("int8"), own]
    assert [row.name for row in rows] == ["sum", "int8", "int8, local_sgd(every=4)"]
    with pytest.raises(ConfigError, match="nothing to compare with sum"):
        rows_of("sum", "", BASELINE)


def test_a_block_holds_whole_rounds():
    phases = ({"every": 16, "until": None}, {"every": 24, "until": None}, {"every": 1, "until": 10})
    program = SimpleNamespace(phases=[SimpleNamespace(**phase) for phase in phases])
    assert period(program) == 48
    assert [block_steps(program, steps) for steps in (100, 960, 4800)] == [48, 48, 240]
    assert block_steps(SimpleNamespace(phases=[]), 7) == 1


def test_time_is_the_median_ratio_of_blocks():
    """A machine that gets three times as slow half-way leaves the ratio as it is; blocks that do not count are left
    out."""
    slow = [1, 1, 3, 3]
    plain = SimpleNamespace(blocks=[Block(10, 1.0 * s, i != 3) for i, s in enumerate(slow)])
    other = SimpleNamespace(blocks=[Block(20, (50.0 if i == 0 else 3.0) * s, i > 0) for i, s in enumerate(slow)])
    assert ratios(other, plain) == pytest.approx([1.5, 1.5])


def test_the_interval_is_of_ranks():
    assert figures.interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    low, high = figures.interval([float(n) for n in range(101)])
    assert (low, high) == (40.0, 60.0)


def test_nonfinite_loss_is_reported_and_not_compared():
    program = SimpleNamespace(config=SimpleNamespace(seed=0))
    bad = SimpleNamespace(loss=math.nan, losses=[1.0, math.nan], program=program)
    notes = []
    found = figures._loss([(bad, bad)], notes)
    assert found["loss_mean"] is None and re.search("not finite from step 2", notes[0])
    rows = [{"refused": None, "loss": [1.0]}, {"refused": None, **found}]
    figures.add_loss_increase(rows)
    assert rows[1]["loss_more_mean"] is None and rows[0]["loss_more_mean"] == 0
