"""One page of every kind, with long names and paths."""

from pathlib import Path
from types import SimpleNamespace

from spmdkit.metrics.report.communication import communication_page
from spmdkit.metrics.report.drill import KINDS, drill_page
from spmdkit.metrics.report.drill_matrix import matrix_page
from spmdkit.metrics.report.page import page
from spmdkit.metrics.report.plan import plan_page
from spmdkit.metrics.report.run import report_body
from spmdkit.metrics.report.sweep import Chart, write_rows
from spmdkit.tools.sweep import sweep_page
from spmdkit.verify.page import verify_page

PATH = "/home/someone/projects/a_project_with_a_long_name/configs/a_run_with_a_long_name.yaml"
SENTENCE = f"{PATH}: cannot be written. Free space, or set run_dir to another folder and start the same command again."
SECONDS = {"median": 0.171, "p90": 0.2, "max": 0.3, "count": 2}


def sample_pages(plan, folder):
    """Returns kind -> HTML.

    Args:
        plan: of two devices or more.
        folder: for the page of several plans.
    """
    return {
        "report": _report(plan),
        "empty report": page("empty", [report_body("empty", [], [], None, None)], "the files of the run directory"),
        "plan": _plan(plan),
        "many devices": _many_devices(plan),
        "plans": _plans(folder),
        "drill": drill_page(_drill()),
        "matrix": matrix_page(_matrix()),
        "communication": communication_page(_communication()),
        "verify": verify_page(_verify()),
        "sweep": _sweep(folder),
    }


def _report(plan):
    records = []
    for step in range(10, 2010, 10):
        speed = {"examples_per_s": 12072.8 + step % 70, "step_time_s": 0.0053, "input_wait_s": 7e-5}
        records.append({"step": step, "loss": 5000 / step, "gradient_norm": 0.7, "a_long_name_of_a_metric": 3, **speed})
    records += [
        {"step": step, "split": split, "loss": 6000 / step, "accuracy": step / 2000, "seconds": 3.25}
        for step in range(500, 2001, 500)
        for split in ("eval", "held_out_documents")
    ]
    events = [
        {"event": "started", "time": "2025-01-31T12:00:00Z", "process": 0, "config": PATH},
        {"event": "saved", "time": "2025-01-31T12:02:00Z", "process": 0, "step": 500, "path": PATH},
        {"event": "stopped", "time": "2025-01-31T13:05:00Z", "process": 0, "code": 0},
    ]
    environment = {"python": "3.11.7", "run_dir": PATH, "devices": [{"kind": "TPU v5p", "platform": "tpu", "count": 8}]}
    environment["variables"] = {"JAX_COMPILATION_CACHE_EXPECT_PGLE_AND_MORE": PATH}
    text = f"task: {PATH}:task\nsteps: 2000\n"
    body = report_body("a_run_with_a_long_name", records, events, text, environment, plan, _communication())
    return page("a run", [body], "the files of the run directory")


def _plan(plan):
    long = {"severity": "note", "code": "code", "message": "a" * 90, "source": "b" * 90, "fix": "c" * 90}
    candidate = {"name": "mesh.data=2 mesh.fsdp=4", "predicted_step_s": 0.003, "peak_bytes": 3e9, "reason": ""}
    rows = [candidate | {"status": "best"}, candidate | {"status": "does not fit", "reason": SENTENCE}]
    time = plan["time"] | {"error_bar": {"relative": 0.17, "runs": 23}}
    return plan_page(plan | {"findings": [long], "candidates": rows, "time": time})


def _many_devices(plan):
    places = [{"coords": None, "part": n // 8} for n in range(512)]
    wire = plan["wire"] | {"by_axes": {"data": 4e6, "tensor": 9e6}}
    return plan_page(plan | {"num_devices": 512, "mesh": {"data": 64, "tensor": 8}, "places": places, "wire": wire})


def _plans(folder):
    rows = [[str(n), "yes", "3.1 ms", "410k", "45.1%", "13.2 GiB", "1.5 GiB", "0.31"] for n in (32, 64, 128, 256)]
    head = ["batch_size", "fits", "step time", "tokens/s", "MFU", "memory", "sent", "USD per 1B tokens"]
    lines = {name: [(n, n * factor) for n in (32, 64, 128, 256)] for name, factor in (("strong", 3), ("weak", 4))}
    ticks = {n: str(n) for n in (32, 64, 128, 256)}
    charts = [
        Chart(label, "batch_size", lines, ticks) for label in ("tokens per second", "step time (s)", "memory (GiB)")
    ]
    file = folder / "plans.html"
    write_rows("a_run, batch_size", head, rows, charts, [SENTENCE], file)
    return file.read_text()


def _drill():
    kinds = [*KINDS, *("step", "save") * 20]
    bars = [[[kind, n * 1.4, (n + 1) * 1.4] for n, kind in enumerate(kinds)] for _ in range(4)]
    fault = {"failed": None, "phase": "hook 'pause'", "detection_s": 0.06, "detected_by": "the exit of process 1"}
    fault |= {"recovery_s": 14.5, "overtaken": False, "steps_lost": 9, "step": 39}
    faults = [fault | {"fault": f"disk-full:{n}@random", "process": n, "at_s": 16.0 + 20 * n} for n in range(3)]
    return {
        "passed": False,
        "why": [SENTENCE],
        "config": PATH,
        "processes": 4,
        "steps": 100,
        "seed": 7,
        "requested": 3,
        "fired": 3,
        "attempts": 3,
        "exit_code": 0,
        "same_parameters": True,
        "same_metrics": True,
        "different": [],
        "steps_lost": 9,
        "goodput": 0.583,
        "detection_s": SECONDS,
        "recovery_s": SECONDS,
        "work_s": 58.8,
        "undisturbed_work_s": 34.3,
        "undisturbed_start_s": 7.7,
        "bars": bars,
        "undisturbed_bars": bars,
        "faults": faults,
        "folder": PATH,
        "time": "2026-11-23T08:00:00Z",
    }


def _matrix():
    phases = ("start", "restore", "first-step", "steady-state", "checkpoint-save", "evaluation", "end")
    cell = {"detection_s": 0.171, "recovery_s": 14.2, "steps_repeated": 16, "missed": []}
    cells = [
        cell | {"cell": f"{kind}@{phase}/2", "kind": kind, "phase": phase, "num_processes": 2}
        for kind in ("kill", "partition-send", "disk-full")
        for phase in phases
    ]
    cells[3] |= {"missed": [SENTENCE]}
    return {
        "passed": False,
        "config": PATH,
        "date": "2026-11-28",
        "machine": "2 cores, x86_64, Linux, jax 0.10.2",
        "num_cells": 21,
        "named": 20,
        "num_named": 20,
        "bitwise_equal": 20,
        "detection_s": SECONDS,
        "recovery_s": SECONDS,
        "cells": cells,
        "not_applicable": [{"cell": "kill@end/1", "why": SENTENCE}],
    }


def _communication():
    names = ("sum", "int8(warmup=4)", "powersgd(rank=4)", "local_sgd(every=16)", "bfloat16")
    rows = []
    for n, name in enumerate(names):
        row = {"name": name, "refused": None, "bytes_per_step": 3.4e6 / 4**n, "bytes_over_sum": 0.25**n, "step_s": 0.02}
        row |= {"time_over_sum": 1.02, "time_interval": [0.98, 1.07], "loss": [0.010543 + n / 9e5, 0.010544 + n / 9e5]}
        rows.append(row | {"loss_mean": 0.0105435 + n / 9e5, "loss_more_mean": 0.01 * n})
    rows.append({"name": "topk", "refused": SENTENCE})
    return {
        "config": PATH,
        "seeds": [0, 1],
        "devices": 4,
        "replicas": 4,
        "batch_size": 64,
        "steps": 200,
        "rows": rows,
        "loss_is": "evaluation",
        "device": "cpu",
        "processes": 1,
        "jax": "0.10.2",
        "time": "2026-11-23T08:00:00Z",
        "mesh": {"data": 4},
    }


def _verify():
    errors = ("loss", "gradient", "update", "parameter", "metric", "eval", "restore")
    case = {f"{name}_error": 8.3e-07 for name in errors} | {"microbatches": 2, "passed": True}
    meshes = [{"data": 2, "fsdp": 2, "tensor": 2}, {"data": 8}, {"context": 2, "expert": 2, "pipeline": 2}]
    cases = [case | {"mesh": mesh} for mesh in meshes]
    cases[1] |= {"passed": False, "diagnosis": {"kind": "gradient", "found": SENTENCE, "repair": "Use sk.mean."}}
    mutant = {"mesh": {"data": 8}, "microbatches": 1, "description": "The gradient is reduced over the wrong axis."}
    return {
        "passed": False,
        "task": f"{Path(PATH).with_suffix('.py')}:task",
        "dtype": "float32",
        "seconds": 61.0,
        "cases": cases,
        "skipped": [{"mesh": {"tensor": 8}, "microbatches": 1, "reason": SENTENCE}],
        "notes": [],
        "mutants": [
            mutant | {"name": "reduction_dropped", "caught": True, "by": "gradient 4.0e+00"},
            mutant | {"name": "reduction_over_wrong_axis", "caught": False, "by": "-"},
        ],
        "not_applicable": [{"name": "key_folded_by_device", "reason": "the task does not use sk.example_keys"}],
        "tolerances": {"gradient": 2.1e-05, "loss": 1e-6},
        "one_ulp_moves": {"gradient": 3e-7},
    }


def _sweep(folder):
    rows, runs = [], []
    for n in range(3):
        directory = folder / f"learning_rate=0.00{n},seed=0"
        directory.mkdir()
        lines = [f'{{"step": {step}, "loss": {(n + 1) / step}}}\n' for step in range(1, 200)]
        (directory / "metrics.jsonl").write_text("".join(lines))
        row = {"learning_rate": n / 1000, "seed": 0, "run_dir": f"{PATH}/{directory.name}", "exit_code": 0, "step": 199}
        rows.append(row | {"loss": 0.1281062, "eval/loss": 0.1336644, "eval/a_long_name_of_a_metric": None})
        runs.append(SimpleNamespace(directory=directory))
    return sweep_page("train_sweep", runs, rows)
