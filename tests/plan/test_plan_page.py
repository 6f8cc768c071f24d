"""The page of a plan: what it holds, and how a browser shows it."""

import io
import shutil
import subprocess
from html import escape

import pytest
from rich.console import Console

from spmdkit.metrics.report.drawing import group_numbers
from spmdkit.metrics.report.plan import plan_page, write_page
from spmdkit.metrics.report.run import plan_section
from spmdkit.plan.command import make_plan
from spmdkit.plan.error_bars import ERROR_BARS, error_bar
from spmdkit.plan.machine.target import parse_target
from spmdkit.plan.table import show
from tests.support.plan_files import config

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--hide-scrollbars",
    "--virtual-time-budget=2000",
]


@pytest.fixture(scope="module")
def plan():
    return make_plan(config(), "gpu:h100:2x4")


def test_the_page_holds_every_part_and_loads_nothing(plan):
    text = plan_page(plan)
    sections = ("Memory per device", "Predicted step time", "Time by line", "Timeline of one layer", "Communication")
    sections += ("Mesh", "Layout of", "Findings")
    assert all(part in text for part in (*sections, "params/layers", "fits"))
    for row in plan["collectives"]:
        assert row["cause"] in text
    for row in plan["lines"]:
        assert escape(row["text"]) in text
    assert text.count("<rect class=") == len(plan["timeline"]["spans"]) > 5
    assert "default-src 'none'" in text
    assert "<script" not in text and "http" not in text.replace("http-equiv", "")


def test_page_and_text_show_the_error_bar(plan):
    assert plan["time"]["error_bar"] is None  # the substitute of the GPU compiler
    assert error_bar(parse_target("tpu:v5e:4x4")) == ERROR_BARS["tpu"]
    shown = plan | {"time": plan["time"] | {"error_bar": {"relative": 0.17, "runs": 23}}}
    assert "error bar, from 23 published runs" in plan_page(shown) and "17%" in plan_page(shown)
    out = Console(width=120, record=True, file=io.StringIO())
    show(shown, out)
    assert "error bar ±17%: 8 of 10 of 23 published step times are within it" in out.export_text()


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
@pytest.mark.parametrize("pixels", [1400, 420])
def test_a_browser_shows_the_page(plan, tmp_path, pixels):
    long = {"severity": "note", "code": "code", "message": "a" * 90, "source": "b" * 90, "fix": "c" * 90}
    page = write_page(plan | {"findings": [long]}, tmp_path / "plan.html")
    # A probe is put into a copy: the page itself runs nothing.
    count = "document.querySelectorAll('{}').length"
    counts = f"{count.format('svg.mesh rect')}, {count.format('.stack.memory i')}"
    inside = "[...document.querySelectorAll('main *')].filter(x => !x.closest('.scroll, svg'))"
    right = f"Math.max(...{inside}.map(x => x.getBoundingClientRect().right))"
    bars = "Math.round(Math.min(...[...document.querySelectorAll('.stack + .line b')].map(x => x.clientWidth)))"
    sizes = f"document.documentElement.scrollWidth, Math.round({right}), {bars}, innerWidth"
    title = f"[{sizes}, {counts}].join(' ')"
    probe = f"<script>parent.postMessage({title}, '*')</script></body>"
    text = page.read_text().replace("default-src 'none'", "default-src 'none'; script-src 'unsafe-inline'")
    probed = tmp_path / "probed.html"
    probed.write_text(text.replace("</body>", probe))
    frame = tmp_path / "frame.html"  # a window has at least 500 pixels
    style = f'style="width: {pixels}px; height: 1400px; border: 0"'
    script = "<script>onmessage = event => document.title = event.data</script>"
    frame.write_text(f'<title></title>{script}<iframe src="probed.html" {style}></iframe>')
    options = [*FLAGS, f"--window-size={pixels + 200},1500", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [CHROMIUM, *options, "--dump-dom", f"file://{frame}"]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    width, right, bar, window, rects, parts = map(int, dom.split("<title>")[1].split("</title>")[0].split())
    assert window == pixels
    assert max(width, right) <= pixels
    assert bar > pixels / 20, "the largest part of the memory and of the step has a bar"
    assert rects == 8 * len(plan["wire"]["by_axes"])
    assert parts == len(plan["memory"]["parts"])


def test_a_report_compares_plan_and_measurement(plan):
    text = plan_section(plan, [0.002, 0.004, 0.003])
    assert all(part in text for part in ("memory per device", "predicted step time", "3 ms", "bound by"))
    assert plan_section({"memory": 3}, []) == ""
    assert "unknown" in plan_section({"memory": {"peak_bytes": 1, "limit_bytes": 2}, "time": [], "findings": 7}, [])
