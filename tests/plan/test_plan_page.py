"""The page of a plan: what it holds, and how a browser shows it."""

import io
from html import escape

import pytest
from rich.console import Console

from spmdkit.metrics.report.drawing import group_numbers
from spmdkit.metrics.report.plan import plan_page
from spmdkit.metrics.report.run import plan_section
from spmdkit.plan.command import make_plan
from spmdkit.plan.error_bars import ERROR_BARS, error_bar
from spmdkit.plan.machine.target import parse_target
from spmdkit.plan.table import show
from tests.support.browser import CHROMIUM, problems
from tests.support.plan_files import config
from tests.support.sample_pages import sample_pages


@pytest.fixture(scope="module")
def plan():
    return make_plan(config(), "gpu:h100:2x4")


def test_the_page_holds_every_part_and_loads_nothing(plan):
    text = plan_page(plan)
    sections = ("Memory per device", "Predicted step time", "Time by line", "Timeline of one iteration")
    sections += ("Communication", "Mesh", "Layout of", "Findings")
    assert all(part in text for part in (*sections, "params/layers", "fits"))
    for row in plan["collectives"]:
        assert row["cause"] in text
    for row in plan["lines"]:
        assert escape(row["text"]) in text
    assert text.count('height="20"><title>') == len(plan["timeline"]["spans"]) > 5
    assert text.count(" rx=") == 8 * len(plan["wire"]["by_axes"]), "a square per device"
    assert text.count("<i class=") == len(plan["memory"]["parts"]) + len(plan["time"]["parts"])
    assert "default-src 'none'" in text
    assert "<script" not in text and "http" not in text.replace("http-equiv", "")


def test_title_of_the_timeline_follows_its_text(plan):
    assert plan["timeline"]["iterations"] > 1 and "Timeline of one iteration" in plan_page(plan)
    step = plan["timeline"] | {"iterations": 1, "title": "The step"}
    assert "Timeline of the step" in plan_page(plan | {"timeline": step})


def test_page_and_text_show_the_error_bar(plan):
    assert plan["time"]["error_bar"] is None  # the substitute of the GPU compiler
    assert error_bar(parse_target("tpu:v5e:4x4")) == ERROR_BARS["tpu"]
    shown = plan | {"time": plan["time"] | {"error_bar": {"relative": 0.17, "runs": 23}}}
    assert "error bar, from 23 published runs" in plan_page(shown) and "17%" in plan_page(shown)
    out = Console(width=120, record=True, file=io.StringIO())
    show(shown, out)
    assert "error bar ±17%: it covers 80 % of the step times of 23 published runs" in out.export_text()


def test_what_a_user_wrote_is_escaped(plan):
    finding = {"severity": "note", "code": "<b>", "message": "<script>", "source": "a<b", "fix": "&"}
    text = plan_page(plan | {"findings": [finding]})
    assert "<script>" not in text and "&lt;script&gt;" in text


def test_devices_of_a_group_share_a_number():
    mesh = {"data": 2, "fsdp": 2, "tensor": 2}
    assert group_numbers(mesh, ["tensor"]) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert group_numbers(mesh, ["data"]) == [0, 1, 2, 3, 0, 1, 2, 3]
    assert group_numbers(mesh, ["data", "tensor"]) == [0, 0, 1, 1, 0, 0, 1, 1]


def test_a_step_without_a_program_has_a_page(plan):
    refused = plan | {"fits": False, "time": None, "predicted_step_s": None, "collectives": []}
    refused["wire"] = {"by_axes": {}, "by_cause": {}, "least": {}}
    assert "does not fit" in plan_page(refused)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium (make test tries)")
def test_a_browser_shows_every_kind_of_page_without_a_fault(plan, tmp_path):
    pages = sample_pages(plan, tmp_path)
    mutants = {
        "no wrap": ("overflow-wrap: anywhere;", "white-space: nowrap;", "the body scrolls"),
        "pale": ("--soft: #566173", "--soft: #99a0aa", "contrast"),
        "orphan": ("--middle-first)", "--wide-first)", "a row of tiles is not filled"),
        "dense": ("line-height: 1.25", "line-height: 0.5", "overlap"),
        "tiny": ("max-width: max(100%, ", "max-width: min(100%, ", "small text"),
        "narrow tiles": (".card b { font-size: 18px; }", ".card { width: 40px; white-space: nowrap; }", "cut off"),
    }
    for name, (rule, change, _) in mutants.items():
        original = pages["many devices" if name == "tiny" else "drill"]
        assert rule in original
        pages[name] = original.replace(rule, change)
    found = problems(pages, (1400, 420, 768, 1600), tmp_path)
    for name, (*_, problem) in mutants.items():
        views = [view for view in found if view.startswith(name)]
        texts = [text for view in views for text in found.pop(view)]
        assert any(text.startswith(problem) for text in texts), name
    assert found == {}


def test_a_report_compares_plan_and_measurement(plan):
    text = plan_section(plan, [0.002, 0.004, 0.003])
    assert all(part in text for part in ("memory per device", "predicted step time", "3 ms", "bound by"))
    assert plan_section({"memory": 3}, []) == ""
    assert "unknown" in plan_section({"memory": {"peak_bytes": 1, "limit_bytes": 2}, "time": [], "findings": 7}, [])
