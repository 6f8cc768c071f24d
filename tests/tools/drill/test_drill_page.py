"""The page of a drill: what it holds, and where its bars are."""

import re

from spmdkit.metrics.report.drill import drill_page
from spmdkit.metrics.report.drill_matrix import matrix_page

RESULT = {
    "passed": False,
    "why": ["step 40 was committed, and the run went on from step 30"],
    "config": "configs/<mine>.yaml",
    "processes": 2,
    "steps": 100,
    "seed": 7,
    "requested": 2,
    "fired": 2,
    "attempts": 3,
    "exit_code": 0,
    "same_parameters": True,
    "same_metrics": False,
    "different": ["step 12: loss is 2.0 and not 1.0"],
    "detection_s": {"median": 0.06, "p90": 0.08, "max": 0.1, "count": 2},
    "recovery_s": {"median": 4.5, "p90": 5.0, "max": 5.0, "count": 1},
    "steps_lost": 9,
    "goodput": 0.87,
    "work_s": 23.0,
    "undisturbed_work_s": 20.0,
    "undisturbed_start_s": 3.0,
    "shares": {"start": 0.3, "step": 0.6, "dead": 0.1},
    "faults": [
        {
            "fault": f"kill:{process}@random",
            "process": process,
            "phase": "save",
            "failed": None,
            "at_s": 6.0 + process,
            "step": 39,
            "detection_s": 0.06,
            "detected_by": "the exit of process 1",
            "recovery_s": None if process else 4.5,
            "overtaken": bool(process),
            "steps_lost": 9,
        }
        for process in range(2)
    ],
    "bars": [
        [["start", 0.0, 3.0], ["step", 3.0, 6.0], ["dead", 6.0, 7.0], ["restart", 7.0, 8.0]],
        [["start", 0.0, 8.0]],
    ],
    "undisturbed_bars": [[["start", 0.0, 2.0], ["compile", 2.0, 3.0], ["step", 3.0, 23.0]], [["start", 0.0, 23.0]]],
    "folder": "runs/first_drill/1",
    "time": "2026-11-23T08:00:00Z",
}


def test_a_cell_of_the_matrix_names_its_numbers():
    cell = {"cell": "kill@save/2", "kind": "kill", "phase": "save", "num_processes": 2, "missed": []}
    cell |= {"detection_s": 0.171, "recovery_s": 14.2, "steps_repeated": 16}
    result = {"passed": True, "config": "a.yaml", "date": "", "machine": "", "num_cells": 1, "not_applicable": []}
    result |= {"named": 1, "num_named": 1, "bitwise_equal": 1, "detection_s": None, "recovery_s": None}
    text = matrix_page(result | {"cells": [cell]}).replace("\N{NO-BREAK SPACE}", " ")
    assert "detected 171 ms\nrecovered 14.2 s\nrepeated 16" in text and "1 cell &middot;" in text
    assert "detected" not in matrix_page(result | {"cells": [cell | {"detection_s": None}]}).split("<td")[2]


def test_page_shows_faults_cost_and_failures():
    text = drill_page(RESULT)
    parts = ("failed", "87.0%", "60 ms", "4.5 s", "overtaken", "step 40 was committed", "kill:1@random", "different")
    assert all(part in text for part in parts)
    assert text.count("<rect") == 2 * 9 and text.count('class="fault"') == 2 * 2, "at two widths"
    first, second = text.split("The same job without a fault")
    assert "compiling" not in first and "dead 6%" in first, "each time line has the legend of its own colours"
    assert second.count('class="swatch') == 3 and "compiling 2%" in second and "starting 54%" in second
    assert "&lt;mine&gt;" in text and "<mine>" not in text
    assert "src=" not in text and "<script" not in text


def test_every_bar_is_within_its_chart():
    charts = re.findall(r'<svg class="timeline" viewBox="0 0 (\d+) (.*?)</svg>', drill_page(RESULT))
    assert len(charts) == 4
    for wide, chart in charts:
        bars = re.findall(r' x="([\d.]+)" y="\d+" width="([\d.]+)"', chart)
        assert bars and all(float(w) > 0 and 0 <= float(x) <= float(wide) - float(w) for x, w in bars)
