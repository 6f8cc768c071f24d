"""report.html: self-contained, escaped, and made from whatever files there are."""

import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from spmdkit.errors import ConfigError
from spmdkit.foundation.files import write_json
from spmdkit.metrics import EventLog, JsonlTracker
from spmdkit.metrics.report.chart import Series, downsample, line_chart, linear_ticks
from spmdkit.metrics.report.run import write_report

EVIL = "<script>alert('x')</script><img src=http://example.com/a.png onerror=alert(1)>\"&"
VOID = {"meta", "br", "img", "link"}


class Page(HTMLParser):
    """Collects tags, attributes and text; holds that every element is closed."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.text, self.open = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "first"
    folder.mkdir()
    tracker = JsonlTracker(folder / "metrics.jsonl", 0)
    for step in range(10, 1010, 10):
        speed = {"examples_per_s": 1000.0 + step % 30, "step_time_s": 0.032, "input_wait_s": 0.0016}
        tracker.write({"step": step, "loss": 5 - step / 300, "grad_norm": 1.0, **speed})
        if step % 250 == 0:
            tracker.write({"step": step, "split": "eval", "loss": abs(step - 500) / 1000 + 2, "accuracy": step / 2000})
    tracker.close()
    log = EventLog(folder / "events.jsonl", 0, clock=iter([1738324800.0, 1738324880.0, 1738324900.0]).__next__)
    log.write("started", steps=1000)
    log.write("saved", step=500)
    log.write("stopped", code=0)
    log.close()
    (folder / "config.yaml").write_text("steps: 1000\n")
    device = {"platform": "cpu", "kind": "cpu", "count": 8}
    write_json(folder / "environment.json", {"python": "3.11.7", "versions": {"jax": "0.10.2"}, "devices": [device]})
    return folder


def report(folder):
    path = write_report(folder)
    assert path == folder / "report.html"
    text = path.read_text()
    return text, Page(text)


def test_a_report_tells_all_of_a_run(run_dir):
    text, page = report(run_dir)
    words = " ".join(page.text)
    shown = ["first", "1000 steps", "final training loss", "1.6667", "best evaluation loss, step 500", "2.0000", "eval"]
    shown += ["accuracy", "grad_norm", "0.2500", "median", "5.0% of the step time", "steps: 1000", "3.11.7"]
    shown += ["jax 0.10.2", "8 x cpu", "2025-01-31 12:00:00", "+1m20s", "stopped", "step: 500"]
    for word in (*shown, "1m40s between the first and the last event"):
        assert word in words, word
    assert text.count("<svg") == 6 and text.count('class="best"') == 1
    assert "prefers-color-scheme: dark" in text


def test_nothing_is_loaded_and_nothing_runs(run_dir):
    text, page = report(run_dir)
    assert not {"script", "link", "img", "iframe", "object", "image", "use", "foreignobject"} & set(page.tags)
    assert not [n for n, _ in page.attributes if n.startswith("on") or n in ("src", "href", "xlink:href", "srcset")]
    assert not re.search(r"https?://|url\(|@import", text)
    assert "default-src 'none'" in text


def test_text_from_every_file_is_escaped(tmp_path):
    folder = tmp_path / "<b>run & co"
    folder.mkdir()
    lines = [{"step": 1, "loss": 2.0, EVIL: 1.0}, {"step": 1, "split": EVIL, "loss": 2.0, EVIL: 3.0, "note": EVIL}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    event = {"event": EVIL, "time": EVIL, "process": EVIL, EVIL: {"x": EVIL}}
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
    (folder / "config.yaml").write_text(EVIL)
    (folder / "environment.json").write_text(json.dumps({EVIL: EVIL, "devices": [EVIL, {"kind": EVIL}], "git": EVIL}))
    text, page = report(folder)
    assert not {"script", "img"} & set(page.tags)
    assert "<b>run" not in text and not [n for n, _ in page.attributes if n.startswith("on")]
    assert "".join(page.text).count(EVIL) >= 8


def test_missing_and_damaged_files_leave_a_sentence(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2}\n{"step": null}\n[1]\n{"step": 3, "lo')
    words = " ".join(report(tmp_path)[1].text)
    for word in ("No evaluation", "No config.yaml", "No environment.json", "No events.jsonl", "No throughput"):
        assert word in words
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "environment.json").write_text("[1")
    (tmp_path / "config.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "events.jsonl").write_text('{"time": 5}\n{"event": null, "time": "2025"}\nx')
    assert "No finite value of loss" in " ".join(report(tmp_path)[1].text)


def test_values_of_odd_kinds_do_no_harm(tmp_path):
    odd = ["NaN", "Infinity", None, True, "x", [1], {"a": 1}, 10**400, -(10**30), 1e308, -1e308, 5e-324, 0]
    lines = [{"step": i, "loss": v, "m": v, "examples_per_s": v, "step_time_s": v} for i, v in enumerate(odd)]
    lines += [{**line, "split": 7} for line in lines]
    lines += [{"step": 10**400, "loss": 1.0}, {"step": True, "loss": 1.0}, {"step": 2.5, "loss": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report(tmp_path)


def test_a_folder_without_metrics_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"no metrics.jsonl there, found 0 other entries.*Pass the run_dir"):
        write_report(tmp_path)
    with pytest.raises(ConfigError, match="no such folder"):
        write_report(tmp_path / "gone")


def test_a_chart_has_ticks_and_a_gap():
    nan = float("nan")
    points = [(1, 3.0), (2, 2.0), (3, nan), (4, 1.0), (5, 1.5)]
    root = ElementTree.fromstring(
        line_chart([Series("train", points), Series("eval", [(5, 1.2)], 1, has_dots=True)], "loss")
    )
    lines = [e.get("points") for e in root.iter("polyline")]
    assert [len(line.split()) for line in lines] == [2, 2]
    assert [e.get("class") for e in root.iter("circle")] == ["c1"]
    texts = [e.text for e in root.iter("text")]
    assert {"step", "loss", "1.0", "2.0", "3.0", "4"} <= set(texts)
    assert [e.find("title").text for e in root.iter("line") if e.get("class") == "bad"] == ["train at step 3: nan"]
    (x1, y1), (x2, y2) = (map(float, p.split(",")) for p in lines[0].split())
    assert x2 > x1 and y2 > y1  # later is right, lower is down


def test_a_wide_range_has_a_log_scale():
    text = line_chart([Series("train", [(1, 1000.0), (2, 10.0), (3, 0.1)])], "loss")
    assert "loss (log scale)" in text and ">100<" in text and ">1<" in text
    assert "log scale" not in line_chart([Series("train", [(1, 1000.0), (2, -1.0)])], "loss")


@pytest.mark.parametrize(
    "points", [[(5, 2.0)], [(1, 0.0), (2, 0.0)], [(1, -3.0), (9, -3.0)], [(1, 1e-300), (2, 2e-300)]]
)
def test_flat_and_single_points_are_drawn(points):
    ElementTree.fromstring(line_chart([Series("train", points)], "loss"))


def test_ticks_are_round_and_inside():
    assert linear_ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert linear_ticks(-0.13, 0.12) == pytest.approx([-0.1, -0.05, 0, 0.05, 0.1])


def test_thinning_keeps_every_spike():
    points = [(i, 1.0) for i in range(100_000)]
    points[31_415] = (31_415, 50.0)
    points[77_777] = (77_777, float("nan"))
    kept = downsample(points, 800)
    assert len(kept) <= 810 and (31_415, 50.0) in kept and any(v != v for _, v in kept)
    assert [s for s, _ in kept] == sorted(s for s, _ in kept)


def test_the_state_of_a_run_is_shown(run_dir):
    assert 'class="pill mark good">finished' in report(run_dir)[0]
    EventLog(run_dir / "events.jsonl", 0).write("restored", step=500)
    EventLog(run_dir / "events.jsonl", 0).write("saved", step=700)
    assert 'class="pill mark open">restored' in report(run_dir)[0]
    EventLog(run_dir / "events.jsonl", 0).write("stopped", code=77)
    assert 'class="pill mark bad">stopped' in report(run_dir)[0]
