"""Writes docs/measured/chaos.md and benchmarks/results/chaos.json from the result of `spmdkit drill --matrix`."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE, RESULT = ROOT / "docs/measured/chaos.md", ROOT / "benchmarks/results/chaos.json"
HEAD = """# Faults in every phase

`make chaos` runs `spmdkit drill benchmarks/chaos/run.yaml --matrix`: one run per kind of fault, phase and number of
processes. Each resumes a run that was killed halfway. This page is generated from benchmarks/results/chaos.json.

A cell of the table: detected after, training has passed the step of the fault after (both in seconds, the longest of
the numbers of processes), and the largest number of repeated steps. A dash: nothing had to be detected, or nothing
ended. An empty cell is not applicable, or not measured. For `service` and `object-store` no process is at fault: the
message has to name the service or the store.
"""


def main(path: Path, note: str = "") -> None:
    """Writes both files. `note`: how the runs were made."""
    result = json.loads(path.read_text()) | ({"note": note} if note else {})
    for row in result["cells"]:
        if not row["missed"]:
            row.pop("message", None)
    lines = {key: json.dumps(value) for key, value in result.items()}
    for key in ("cells", "not_applicable"):
        lines[key] = "[\n  " + ",\n  ".join(map(json.dumps, result[key])) + "\n ]"
    RESULT.write_text("{\n" + ",\n".join(f" {json.dumps(key)}: {text}" for key, text in lines.items()) + "\n}\n")
    PAGE.write_text(
        "\n".join([HEAD, *facts(result), "", *table(result["cells"]), "", *missed(result), "", *impossible(result), ""])
    )


def facts(result: dict) -> list[str]:
    rows = result["cells"]
    counts = {num: sum(row["num_processes"] == num for row in rows) for num in (1, 2, 4)}
    sizes = ", ".join(f"{count} with {num}" for num, count in counts.items() if count)
    lost = sum(any("was committed" in text for text in row["missed"]) for row in rows)
    late = sum(any("detected after" in text for text in row["missed"]) for row in rows)
    hung = sum(any("took longer" in text or "remained" in text for text in row["missed"]) for row in rows)
    promised = [row["bitwise_equal"] for row in rows if row["kind"] not in ("nan", "bit-flip")]
    return [
        "| goal | result |",
        "| --- | --- |",
        f"| cells | {len(rows)} ({sizes} processes); {len(result['not_applicable'])} are not applicable |",
        f"| the process at fault is named (98 %) | {result['named']} of {result['num_named']} |",
        f"| no committed step is lost | {lost} lost |",
        f"| no hang, no process remains | {hung} |",
        f"| detected within the timeout + 1 s | {len(rows) - late} of {len(rows)} |",
        f"| bitwise as without faults, where promised | {sum(map(bool, promised))} of {len(promised)} |",
        f"| machine | {result['machine']}, {result['date']} |",
        *([f"| runs | {result['note']} |"] if "note" in result else []),
    ]


def table(rows: list[dict]) -> list[str]:
    phases = list(dict.fromkeys(row["phase"] for row in sorted(rows, key=lambda row: ORDER.index(row["phase"]))))
    lines = [f"| fault | {' | '.join(phases)} |", f"| --- |{' --- |' * len(phases)}"]
    for kind in dict.fromkeys(row["kind"] for row in rows):
        of_kind = [row for row in rows if row["kind"] == kind]
        texts = [cell([row for row in of_kind if row["phase"] == phase]) for phase in phases]
        lines.append(f"| `{kind}` | {' | '.join(texts)} |")
    return lines


ORDER = ("start", "restore", "first-step", "steady-state", "save", "evaluation", "end")


def cell(rows: list[dict]) -> str:
    if not rows:
        return ""
    longest = lambda key: max((row[key] for row in rows if row[key] is not None), default=None)
    times = [
        "-" if value is None else f"{max(0.0, value):.1f}" for value in map(longest, ("detection_s", "recovery_s"))
    ]
    text = " / ".join([*times, str(longest("steps_repeated"))])
    return f"{text} (missed)" if any(row["missed"] for row in rows) else text


def missed(result: dict) -> list[str]:
    rows = [row for row in result["cells"] if row["missed"]]
    if not rows:
        return ["Every cell meets its goals."]
    return ["Cells that miss a goal:", "", *(f"- `{row['cell']}`: {'; '.join(row['missed'])}" for row in rows)]


def impossible(result: dict) -> list[str]:
    counts = Counter(each["why"] for each in result["not_applicable"])
    return ["Cells that are not applicable:", "", *(f"- {count}: {why}" for why, count in counts.most_common())]


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
