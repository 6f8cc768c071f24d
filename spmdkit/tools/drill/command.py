"""`spmdkit drill`: runs the user's job without faults and with the requested faults, and reports the cost of the faults
and whether both runs end the same. Both run under the launcher, in `<run_dir>_drill/1/undisturbed` and `.../disturbed`.

A drill passes if every fault was injected, the run exited with 0, no committed step was lost, and state and metrics
are bitwise equal to those of the undisturbed run, unless the config allows a fault to change them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from spmdkit.config import Config, load_config
from spmdkit.errors import ConfigError, ExitCode, outcome
from spmdkit.faults.injection.fault import CHANGES_RESULTS, CHECKPOINT_FAULTS, DETECTION_CODES, NETWORK, Fault, parse
from spmdkit.foundation.constants import is_step_name
from spmdkit.foundation.files import write_json, write_text
from spmdkit.foundation.formatting import counted, format_seconds, visible
from spmdkit.foundation.json_output import print_json
from spmdkit.metrics.report.drill import drill_page
from spmdkit.tools.drill import compare, figures
from spmdkit.tools.drill.driver import Driver
from spmdkit.tools.drill.job import SPARE_RESTARTS, DrillRequest, report, run_job
from spmdkit.tools.drill.network import Network, network_for
from spmdkit.tools.drill.object_store import ObjectStore, object_store_for
from spmdkit.tools.drill.timeline import Bars


def run_drill(request: DrillRequest) -> int:
    """Runs a drill and prints its result. Returns 0 if it passed, 1 if it failed, and the exit code of the undisturbed
    run if that run failed.

    Raises:
        ConfigError: the config or the request is invalid.
    """
    config = load_config(request.config, list(request.overrides))
    faults = _checked(request, config)
    if config.checkpoint is not None and (bucket := config.checkpoint.directory) is not None:
        report(f"note: the drill saves its checkpoints on this machine and does not touch {bucket}")
        request = dataclasses.replace(request, overrides=[*request.overrides, "checkpoint.directory=null"])
    kinds = [fault.kind for fault in faults]
    with network_for(faults, request.num_processes) as network, object_store_for(kinds) as store:
        return _run_both(request, config, faults, network, store)


def _run_both(
    request: DrillRequest, config: Config, faults: Sequence[Fault], network: Network | None, store: ObjectStore | None
) -> int:
    """Runs the job without and with the faults, and prints the result."""
    folder = _new_folder(config)
    report(f"without faults, in {folder / 'undisturbed'}")
    clean = Driver(folder / "undisturbed", request.num_processes, network=network)
    code = run_job(request, config, folder / "undisturbed", clean, 0)
    if code != 0:
        report(f"the drill ends: the run without faults failed (exit code {code}, {outcome(code)})")
        return code
    pace = figures.pace_of(clean.attempts, config.num_steps, clean.num_saves)
    report(f"with {', '.join(map(str, faults))}{f' (each {request.count} times)' if request.count > 1 else ''}")
    run_dir, checkpoints, settings = folder / "disturbed", None, list(request.overrides)
    if store is not None:
        checkpoints = store.folder(run_dir.name)
        settings.append(f"checkpoint.directory={checkpoints}")
    disturbed = Driver(
        *(run_dir, request.num_processes, faults, request.seed, pace, config.num_steps),
        network=network,
        checkpoints=checkpoints,
        store=store,
    )
    in_store = dataclasses.replace(request, overrides=settings)
    code = run_job(in_store, config, run_dir, disturbed, disturbed.num_requested + SPARE_RESTARTS)
    if store is not None:
        store.download_newest(run_dir.name, run_dir)
    if disturbed.stop_signal is not None:
        return code
    result = _result(request, config, folder, clean, disturbed, code)
    write_json(folder / "drill.json", result)
    write_text(folder / "drill.html", drill_page(result))
    if request.as_json:
        print_json(result)
    else:
        for line in summary_lines(result):
            print(visible(line))
    return 0 if result["passed"] else int(ExitCode.CHECK_FAILED)


def _checked(request: DrillRequest, config: Config) -> list[Fault]:
    """Returns the faults. Raises ConfigError if a drill with them tests nothing."""
    if not request.faults:
        raise ConfigError(
            "drill: no fault is requested. A drill injects faults. Try --fault kill:1@20, or --fault kill:random "
            "--count 5."
        )
    if request.count < 1 or request.num_processes < 1:
        raise ConfigError(
            f"drill -n {request.num_processes} --count {request.count}: both are at least 1. Try -n 2 --count 1."
        )
    if config.checkpoint is None:
        raise ConfigError(
            f"{config.where('checkpoint')} is null: without checkpoints no fault can be survived. "
            "Set checkpoint: {every_steps: 20}."
        )
    faults = [parse(text, request.num_processes, request.count) for text in request.faults]
    for fault in faults:
        if fault.step is not None and fault.step > config.num_steps:
            raise ConfigError(
                f"--fault {fault}: the run has {config.num_steps} steps, so the fault would never be injected. "
                f"Try a smaller step, or steps={2 * fault.step}."
            )
        if config.elastic.in_process and fault.kind in (*CHECKPOINT_FAULTS, *NETWORK):
            what = (
                "a checkpoint is damaged while no process runs"
                if fault.kind in CHECKPOINT_FAULTS
                else "memberships change on one host"
            )
            raise ConfigError(
                f"--fault {fault} and {config.where('elastic.in_process')}: {what}, and this job continues in the "
                "remaining processes. Add elastic.in_process=false to the drill."
            )
        if fault.kind in NETWORK and any(each.kind == "object-store" for each in faults):
            raise ConfigError(
                f"--fault {fault} and --fault object-store: the local object store cannot be reached from the network "
                "namespaces of network faults. Run two drills."
            )
        if fault.kind == "bit-flip" and config.replica_check is None:
            report("note: replica_check is null in the config, so nothing detects a flipped bit")
    return faults


def _new_folder(config: Config) -> Path:
    parent = config.resolved_run_dir()
    parent = parent.with_name(f"{parent.name}_drill")
    numbers = [int(path.name) for path in parent.glob("*") if is_step_name(path.name)]
    folder = parent / str(max(numbers, default=0) + 1)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be created ({error.strerror}). A drill writes next to the run directory. "
            "Set run_dir to a folder that can be written."
        ) from None
    return folder


def _result(
    request: DrillRequest, config: Config, folder: Path, clean: Driver, disturbed: Driver, code: int
) -> dict[str, Any]:
    """Returns the result, as `--json` prints it and the page shows it."""
    begin, leaf, runs = (
        disturbed.attempts[0].begin,
        "the run did not finish",
        (folder / "undisturbed", folder / "disturbed"),
    )
    record = leaf
    if code == 0:
        leaf, record = compare.different_leaf(*runs), compare.different_record(*runs)
    why = _failures(disturbed, code, leaf, record)
    return {
        "passed": not why,
        "why": why,
        "config": str(request.config),
        "processes": request.num_processes,
        "steps": config.num_steps,
        "seed": request.seed,
        "requested": disturbed.num_requested,
        "fired": len([injection for injection in disturbed.injections if not injection.failed]),
        "attempts": len(disturbed.attempts),
        "exit_code": code,
        "same_parameters": not leaf,
        "same_metrics": not record,
        "different": [text for text in (leaf, record) if text],
        **figures.summary(disturbed.injections, disturbed.attempts, clean.attempts, finished=code == 0),
        "shares": figures.shares(disturbed.bars),
        "faults": [figures.injection_row(injection, begin) for injection in disturbed.injections],
        "bars": [_bars(bars, begin) for bars in disturbed.bars],
        "undisturbed_bars": [_bars(bars, clean.attempts[0].begin) for bars in clean.bars],
        "folder": str(folder),
        "page": str(folder / "drill.html"),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _failures(disturbed: Driver, code: int, leaf: str, record: str) -> list[str]:
    """Returns why a drill failed; an empty list if it passed."""
    failed = [each for each in disturbed.injections if each.failed]
    why = [f"fault {each.number}, {each.fault}, could not be injected: {each.failed}" for each in failed]
    missing = disturbed.num_requested - len(disturbed.injections)
    if missing:
        why.append(
            f"{missing} of {disturbed.num_requested} faults were not injected before the run finished, so the drill "
            "proves nothing. Set more steps (steps=...), or request fewer or earlier faults."
        )
    if code != 0:
        why.append(f"the run exited with {code} ({outcome(code)}), not with 0")
    why += [
        f"step {newest} was committed, and the run resumed from step {step}" for newest, step in disturbed.lost_commits
    ]
    if code == 0 and not any(injection.fault.kind in CHANGES_RESULTS for injection in disturbed.injections):
        why += [
            f"{what} not bitwise equal to the run without faults: {text}"
            for what, text in (("the state is", leaf), ("metrics are", record))
            if text
        ]
    settings = {"bit-flip": ": set replica_check", "nan": ": set on_nonfinite"}
    why += [
        f"fault {injection.number}, {injection.fault}, was never detected{settings.get(injection.fault.kind, '')}"
        for injection in disturbed.injections
        if injection.fault.kind in DETECTION_CODES and injection.detected is None and not injection.failed
    ]
    return why


def _bars(bars: Bars, begin: float) -> list[list[Any]]:
    return [[bar.kind, round(bar.begin - begin, 3), round(bar.end - begin, 3)] for bar in bars.bars]


def summary_lines(result: dict[str, Any]) -> list[str]:
    """Returns the lines for the terminal."""
    seconds: Callable[[float | None], str] = lambda x: "-" if x is None else format_seconds(x)
    lines = ["fault             process  at        phase       detected after  recovered after  steps repeated"]
    for fault in result["faults"][:40]:
        lost = "-" if fault["steps_lost"] is None else fault["steps_lost"]
        after = "overtaken" if fault["overtaken"] else seconds(fault["recovery_s"])
        lines.append(
            f"{fault['fault'][:16]:16}  {fault['process']:7}  {'step ' + str(fault['step']):8}  {fault['phase'][:10]:10}  {seconds(fault['detection_s']):>14}  {after:>15}  {lost:>14}"  # noqa: E501
        )
    if len(result["faults"]) > 40:
        lines.append(f"... and {len(result['faults']) - 40} more")
    figures_line = [f"goodput {result['goodput']:.1%}"] if result["goodput"] is not None else []
    for name, word in (("detection_s", "detected"), ("recovery_s", "recovered")):
        if result[name]:
            figures_line.append(
                f"{word} after {format_seconds(result[name]['median'])} (median), {format_seconds(result[name]['max'])} (longest)"  # noqa: E501
            )
    figures_line.append(f"{counted(result['steps_lost'], 'step')} repeated")
    injected = f"{result['fired']} of {counted(result['requested'], 'fault')} injected"
    lines += ["; ".join(figures_line), f"{injected}, {counted(result['attempts'], 'start')}"]
    same = "; ".join(result["different"]) or "bitwise equal to the run without faults"
    lines += [f"state and metrics: {same}", *(f"FAILED: {text}" for text in result["why"])]
    return [*lines, *(["passed"] if result["passed"] else []), f"page {result['page']}"]
