"""`make verify`: every legal mesh of 8 devices with axes up to 4, and of 16 with four axes, for every config in
configs/verify.

    python benchmarks/verify_examples.py [NAME[/DEVICES] ...]      # gpt, or gpt/8; gpt/mutants: these alone, in a few
                                                                   minutes

Each config is run with 1, 2 and 4 microbatches, and with every applicable mutant. Finished cases are stored in
build/verify, so that an interrupted run continues. They are valid only for the same code of package, task and config.
The results replace those of the same config and number of devices in docs/measured/verify.json, and
docs/measured/verify.md is the table.
"""

import datetime
import json
import os
import platform
import subprocess
import sys
from collections import Counter
from pathlib import Path

from spmdkit.verify.mutants import MUTANTS

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs/verify"
CASES = ROOT / "build/verify"
SUMMARY = ROOT / "docs/measured/verify.json"
PAGE = ROOT / "docs/measured/verify.md"
SWEEPS = {
    "8": ("8 devices, axes up to 4", ["--devices", "8", "--max-axis", "4"]),
    "16": ("16 devices, four axes", ["--devices", "16", "--max-axis", "2", "--no-mutants"]),
}
QUANTITIES = ("loss", "gradient", "update", "parameter", "metric", "state", "eval", "restore")


def sweep(name, title, options):
    """Returns the report of one sweep over the meshes of one config."""
    print(f"{name}: {title}", file=sys.stderr, flush=True)
    return report_of(
        name, "--all", "--microbatches", "1,2,4", "--resume", str(CASES / f"{name}-{options[1]}.jsonl"), *options
    )


def report_of(name, *options):
    """Returns the report of `verify` on one config."""
    command = [sys.executable, "-m", "spmdkit", "verify", str(CONFIGS / f"{name}.yaml"), "--json", *options]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, 1):
        sys.exit(done.returncode)
    return json.loads(done.stdout)


def summary(report):
    """Returns the summary of a report: counts, the worst errors with their cases, and the reasons of illegal cases."""
    worst = {}
    for quantity in QUANTITIES:
        found = [case for case in report["cases"] if case.get(f"{quantity}_error") is not None]
        if found:
            case = max(found, key=lambda case: case[f"{quantity}_error"])
            error = case[f"{quantity}_error"]
            worst[quantity] = {"error": error, "mesh": case["mesh"], "microbatches": case["microbatches"]}
    return {
        "passed": report["passed"],
        "date": datetime.date.today().isoformat(),
        "num_cases": len(report["cases"]),
        "num_equal": sum(case["passed"] for case in report["cases"]),
        "num_meshes": len({json.dumps(case["mesh"]) for case in report["cases"] if case["mesh"]}),
        "different": [case for case in report["cases"] if not case["passed"]],
        "not_legal": dict(Counter(case["reason"] for case in report["skipped"])),
        "worst": worst,
        "tolerances": report["tolerances"],
        "one_ulp_moves": report["one_ulp_moves"],
        **mutants(report),
        "batch_size": report["batch_size"],
        "task_digest": report["task_digest"],
    }


def mutants(report):
    """Returns the summary of a report's mutants."""
    return {
        "mutants": {mutant["name"]: mutant["by"] if mutant["caught"] else "NOT CAUGHT" for mutant in report["mutants"]},
        "not_applicable": {mutant["name"]: mutant["reason"] for mutant in report["not_applicable"]},
        "mutants_date": datetime.date.today().isoformat(),
    }


def page(results):
    """Returns docs/measured/verify.md."""
    lines = [
        "# Every mesh against one device",
        "",
        f"`make verify`, {results['machine']}; jax {results['jax']}.",
        "",
        (
            "Each case compares the loss, every gradient leaf on two batches (the second one short), the update, the "
            "optimizer state, the parameters after three steps and the metrics."
        ),
        (
            "Once for each mesh it also compares an evaluation, and the state restored from a checkpoint on one device."
            " Errors are relative 2-norms, the maximum of all cases."
        ),
        "",
        "| config | meshes | cases | equal | gradient | tolerance | parameters | loss | date |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, sweeps in results["configs"].items():
        for title, s in sweeps.items():
            errors = [f"{s['worst'][q]['error']:.1e}" for q in ("gradient", "parameter", "loss")]
            lines.append(
                f"| {name} | {s['num_meshes']} of {title} | {s['num_cases']} | {s['num_equal']} | {errors[0]} | "
                f"{s['tolerances']['gradient']:.1e} | {errors[1]} | {errors[2]} | {s['date']} |"
            )
    lines += ["", "## Illegal cases, not run", ""]
    for name, sweeps in results["configs"].items():
        for title, s in sweeps.items():
            lines += [f"- {name}, {title}: {count} cases: {reason}" for reason, count in s["not_legal"].items()]
    names = list(results["configs"])
    first = {name: next(iter(sweeps.values())) for name, sweeps in results["configs"].items()}
    dates = sorted({s.get("mutants_date", s["date"]) for s in first.values()})
    lines += [
        "",
        "## Mutants",
        "",
        (
            f"Tried on {', '.join(dates)}. A test compares the reasons of inapplicable mutants with the messages of "
            "the program. `-`: not tried in this run. `tests/verify/test_verify_mutants.py` catches every mutant. "
            "[mutants.md](../development/mutants.md) has the results of forty tasks."
        ),
        "",
    ]
    lines += [f"| mutant | {' | '.join(names)} |", "| --- " * (len(names) + 1) + "|"]
    for mutant in (m.name for m in MUTANTS):
        lines.append(f"| {mutant} | {' | '.join(of_mutant(s, mutant) for s in first.values())} |")
    return "\n".join(lines) + "\n"


def of_mutant(sweep, name):
    """Returns a cell of the table of mutants: the check that caught it, or why it is not applicable."""
    if reason := sweep["not_applicable"].get(name):
        return f"not applicable: {reason}"
    return sweep["mutants"].get(name, "-")


def write(results):
    results["configs"] = dict(sorted(results["configs"].items()))
    SUMMARY.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(page(results))


def main(names):
    import jax

    results = json.loads(SUMMARY.read_text()) if SUMMARY.exists() else {"configs": {}}
    results |= {"machine": f"{os.cpu_count()} CPU cores, {platform.machine()}", "jax": jax.__version__}
    requested = [name.partition("/") for name in names or sorted(path.stem for path in CONFIGS.glob("*.yaml"))]
    for name, _, devices in requested:
        of_config = results["configs"].setdefault(name, {})
        if devices == "mutants":
            resume = str(CASES / f"{name}-mutants.jsonl")
            report = report_of(name, "--devices", "8", "--microbatches", "1", "--resume", resume)
            of_config[SWEEPS["8"][0]] |= mutants(report)
            write(results)
            continue
        for title, options in [SWEEPS[devices]] if devices else SWEEPS.values():
            of_config[title] = summary(sweep(name, title, options))
            write(results)
    failed = [name for name, sweeps in results["configs"].items() if not all(s["passed"] for s in sweeps.values())]
    print(f"{PAGE.relative_to(ROOT)} is written; {', '.join(failed) or 'nothing'} failed", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
