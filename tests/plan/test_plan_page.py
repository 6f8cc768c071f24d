"""The page of a plan: what it holds, and how a browser shows it."""

import shutil
import subprocess

import pytest

from spmdkit.metrics.report.drawing import group_numbers
from spmdkit.metrics.report.plan import plan_page, write_page
from spmdkit.metrics.report.run import plan_section
from spmdkit.plan.command import make_plan
from tests.support.plan_files import config

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--hide-scrollbars",
    "--window-size=1000,1400",
    "--virtual-time-budget=2000",
]


@pytest.fixture(scope="module")
def plan():
    return make_plan(config(), "gpu:h100:2x4")


def test_the_page_holds_every_part_and_loads_nothing(plan):
    text = plan_page(plan)
    sections = ("Memory per device", "Predicted step time", "Communication", "Mesh", "Layout of", "Findings")
    assert all(part in text for part in (*sections, "params/layers", "fits"))
    for row in plan["collectives"]:
        assert row["cause"] in text
    assert "default-src 'none'" in text
    assert "<script" not in text and "http" not in text.replace("http-equiv", "")


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
def test_a_browser_shows_the_page(plan, tmp_path):
    page = write_page(plan, tmp_path / "plan.html")
    # A probe is put into a copy: the page itself runs nothing.
    count = "document.querySelectorAll('{}').length"
    counts = f"{count.format('svg.mesh rect')}, {count.format('.stack.memory i')}"
    title = f"[document.documentElement.scrollWidth, innerWidth, {counts}].join(' ')"
    probe = f"<script>document.title = {title}</script></body>"
    text = page.read_text().replace("default-src 'none'", "default-src 'none'; script-src 'unsafe-inline'")
    probed = tmp_path / "probed.html"
    probed.write_text(text.replace("</body>", probe))
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", f"file://{probed}"]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    width, window, rects, parts = map(int, dom.split("<title>")[1].split("</title>")[0].split())
    assert width <= window
    assert rects == 8 * len(plan["wire"]["by_axes"])
    assert parts == len(plan["memory"]["parts"])


def test_a_report_compares_plan_and_measurement(plan):
    text = plan_section(plan, [0.002, 0.004, 0.003])
    assert all(part in text for part in ("memory per device", "predicted step time", "3 ms", "bound by"))
    assert plan_section({"memory": 3}, []) == ""
    assert "unknown" in plan_section({"memory": {"peak_bytes": 1, "limit_bytes": 2}, "time": [], "findings": 7}, [])
