"""`spmdkit drill`: the user's job without a fault, and again with the faults that were asked for; what they cost, and
whether the end is the same.

Both are runs of our launcher on this machine, in a folder beside the run's own, which is not touched:
`<run_dir>_drill/1/undisturbed` and `.../disturbed`.

A drill passes where every fault came, the run ended with 0, no committed step was lost, and state and metrics are those
of the undisturbed run, bit for bit.
What the config decides is told and no failure: a batch that `on_nonfinite` leaves out makes other numbers.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spmdkit.config import Config, load_config
from spmdkit.elastic.sizes import Elastic
from spmdkit.errors import ConfigError, ExitCode, outcome
from spmdkit.faults.injection.fault import BY_POLICY, NETWORK, OF_CHECKPOINTS, Fault, parse
from spmdkit.foundation.constants import is_step_name
from spmdkit.foundation.files import write_json, write_text
from spmdkit.foundation.formatting import format_seconds, visible
from spmdkit.launch import launch
from spmdkit.metrics.report.drill import drill_page
from spmdkit.tools.drill import compare, figures
from spmdkit.tools.drill.driver import Driver
from spmdkit.tools.drill.network import Network, network_for
from spmdkit.tools.drill.timeline import Bars

SPARE_RESTARTS = 3


@dataclasses.dataclass(frozen=True)
class Drill:
    """What is asked: `spmdkit drill CONFIG ...`."""

    config: Path
    overrides: Sequence[str]
    faults: Sequence[str]
    num_processes: int = 2
    devices_per_process: int | None = None
    seed: int = 0
    count: int = 1
    as_json: bool = False


def run_drill(asked: Drill) -> int:
    """Runs a drill and says how it went. Returns 0 where it passed, 1 where not, and the run's own code where that
    cannot even run undisturbed.

    Raises:
        ConfigError: the config, or what is asked, cannot work.
    """
    config = load_config(asked.config, list(asked.overrides))
    faults = _checked(asked, config)
    if (
        config.checkpoint is not None and config.checkpoint.directory is not None
    ):  # the run's own, which is not disturbed
        _say(f"note: the drill's checkpoints stay on this machine; {config.checkpoint.directory} is left alone")
        asked = dataclasses.replace(asked, overrides=[*asked.overrides, "checkpoint.directory=null"])
    with network_for(faults, asked.num_processes) as network:
        return _run_both(asked, config, faults, network)


def _run_both(asked: Drill, config: Config, faults: Sequence[Fault], network: Network | None) -> int:
    """Runs the job without and with its faults, and says how that went."""
    folder = _new_folder(config)
    _say(f"without a fault, in {folder / 'undisturbed'}")
    clean = Driver(folder / "undisturbed", asked.num_processes, network=network)
    code = _run(asked, config, folder / "undisturbed", clean, 0)
    if code != 0:
        _say(f"the drill ends: the run does not get to its end undisturbed (exit code {code}, {outcome(code)})")
        return code
    pace = figures.pace_of(clean.attempts, config.steps, clean.num_saves)
    _say(f"with {', '.join(map(str, faults))}{f' (each {asked.count} times)' if asked.count > 1 else ''}")
    disturbed = Driver(
        folder / "disturbed", asked.num_processes, faults, asked.seed, pace, config.steps, network=network
    )
    code = _run(asked, config, folder / "disturbed", disturbed, disturbed.num_asked + SPARE_RESTARTS)
    if disturbed.asked is not None:
        return code
    result = _result(asked, config, folder, clean, disturbed, code)
    write_json(folder / "drill.json", result)
    write_text(folder / "drill.html", drill_page(result))
    if asked.as_json:
        print(json.dumps(result))
    else:
        for line in summary_lines(result):
            print(visible(line))
    return 0 if result["passed"] else int(ExitCode.CHECK_FAILED)


def _checked(asked: Drill, config: Config) -> list[Fault]:
    """Returns the faults. Raises ConfigError where a drill with them can show nothing."""
    if not asked.faults:
        raise ConfigError(
            "drill: nothing is to happen. A drill is of faults. Try --fault kill:1@20, or --fault kill:random --count 5."
        )
    if asked.count < 1 or asked.num_processes < 1:
        raise ConfigError(
            f"drill -n {asked.num_processes} --count {asked.count}: both are at least 1. Try -n 2 --count 1."
        )
    if config.checkpoint is None:
        raise ConfigError(
            f"{config.where('checkpoint')} is null: nothing is saved, so no fault can be survived. Set checkpoint: {{every_steps: 20}}."
        )
    faults = [parse(text, asked.num_processes, asked.count) for text in asked.faults]
    for fault in faults:
        if fault.step is not None and fault.step > config.steps:
            raise ConfigError(
                f"--fault {fault}: the run has {config.steps} steps, and the fault would never come. Try a smaller step, or steps={2 * fault.step}."
            )
        if config.elastic.in_process and fault.kind in (*OF_CHECKPOINTS, *NETWORK):
            what = (
                "a checkpoint is damaged while no process lives"
                if fault.kind in OF_CHECKPOINTS
                else "epochs begin on one host"
            )
            raise ConfigError(
                f"--fault {fault} and {config.where('elastic.in_process')}: {what}, and this job goes on in the processes that are left. Add elastic.in_process=false to the drill."
            )
        if fault.kind == "bit-flip" and config.replica_check is None:
            _say("note: replica_check is null in the config, so that nothing will notice a flipped bit")
    return faults


def _new_folder(config: Config) -> Path:
    parent = config.resolved_run_dir()
    parent = parent.with_name(f"{parent.name}_drill")
    taken = [int(path.name) for path in parent.glob("*") if is_step_name(path.name)]
    folder = parent / str(max(taken, default=0) + 1)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be made ({error.strerror}). A drill writes beside the run's directory. Set run_dir to a folder that can be written."
        ) from None
    return folder


def _run(asked: Drill, config: Config, folder: Path, driver: Driver, max_restarts: int) -> int:
    """Returns how the job ended under our launcher, with `driver` looking on. A job that goes on in process has the
    dead replaced, so that there are as many again."""
    num, devices = asked.num_processes, asked.devices_per_process
    train, more = ["train", str(asked.config), *asked.overrides, f"run_dir={folder}"], dict[str, Any]()
    if config.elastic.in_process:
        sizes = Elastic(train, f"{num}:{num}", num, devices)
        devices, more = (
            sizes.devices_per_process,
            {"resize": sizes.resize, "wanted": sizes.wanted, "standby": sizes.standby},
        )
    command = [sys.executable, "-m", "spmdkit", *train]
    try:
        return launch(command, num, devices, max_restarts=max_restarts, observer=driver, **more)
    finally:
        driver.close()


def _result(asked: Drill, config: Config, folder: Path, clean: Driver, disturbed: Driver, code: int) -> dict[str, Any]:
    """Returns what `--json` prints; also what the page is made of."""
    begin = disturbed.attempts[0].begin
    leaf = (
        compare.different_leaf(folder / "undisturbed", folder / "disturbed")
        if code == 0
        else "the run did not come to its end"
    )
    record = compare.different_record(folder / "undisturbed", folder / "disturbed") if code == 0 else leaf
    why = _failures(disturbed, code, leaf, record)
    return {
        "passed": not why,
        "why": why,
        "config": str(asked.config),
        "processes": asked.num_processes,
        "steps": config.steps,
        "seed": asked.seed,
        "asked": disturbed.num_asked,
        "fired": len([injection for injection in disturbed.injections if not injection.failed]),
        "attempts": len(disturbed.attempts),
        "exit_code": code,
        "same_parameters": not leaf,
        "same_metrics": not record,
        "different": [text for text in (leaf, record) if text],
        **figures.summary(disturbed.injections, disturbed.attempts, clean.attempts),
        "shares": figures.shares(disturbed.bars),
        "faults": [figures.injection_row(injection, begin) for injection in disturbed.injections],
        "bars": [_bars(bars, begin) for bars in disturbed.bars],
        "undisturbed_bars": [_bars(bars, clean.attempts[0].begin) for bars in clean.bars],
        "folder": str(folder),
        "page": str(folder / "drill.html"),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _failures(disturbed: Driver, code: int, leaf: str, record: str) -> list[str]:
    """Returns why a drill has not passed, () where it has."""
    why = [
        f"fault {injection.number}, {injection.fault}, could not be done: {injection.failed}"
        for injection in disturbed.injections
        if injection.failed
    ]
    missing = disturbed.num_asked - len(disturbed.injections)
    if missing:
        why.append(
            f"{missing} of {disturbed.num_asked} faults did not come before the run was over: that proves nothing. Give the run more steps (steps=...), or ask "
            "for fewer or earlier faults."
        )
    if code != 0:
        why.append(f"the run ended with exit code {code} ({outcome(code)}), and not with 0")
    why += [f"step {newest} was committed, and the run went on from step {step}" for newest, step in disturbed.gone]
    if code == 0 and not any(injection.fault.kind in BY_POLICY for injection in disturbed.injections):
        why += [
            f"{what} not the same as without a fault: {text}"
            for what, text in (("the state is", leaf), ("metrics are", record))
            if text
        ]
    why += [
        f"fault {injection.number}, {injection.fault}, was never noticed"
        + (": set replica_check" if injection.fault.kind == "bit-flip" else "")
        for injection in disturbed.injections
        if injection.fault.kind in ("bit-flip", "disk-full") and injection.detected is None and not injection.failed
    ]
    return why


def _bars(bars: Bars, begin: float) -> list[list[Any]]:
    return [[bar.kind, round(bar.begin - begin, 3), round(bar.end - begin, 3)] for bar in bars.bars]


def summary_lines(result: dict[str, Any]) -> list[str]:
    """Returns what a person reads in the terminal."""
    seconds = lambda x: "-" if x is None else format_seconds(x)
    lines = ["fault             process  at        phase       noticed after  goes on after  lost steps"]
    for fault in result["faults"][:40]:
        lost = "-" if fault["steps_lost"] is None else fault["steps_lost"]
        after = "overtaken" if fault["overtaken"] else seconds(fault["recovery_s"])
        lines.append(
            f"{fault['asked'][:16]:16}  {fault['process']:7}  {'step ' + str(fault['step']):8}  {fault['phase'][:10]:10}  {seconds(fault['detection_s']):>13}  {after:>13}  {lost:>10}"
        )
    if len(result["faults"]) > 40:
        lines.append(f"... and {len(result['faults']) - 40} more")
    told = [f"goodput {result['goodput']:.1%}"] if result["goodput"] is not None else []
    for name, word in (("detection_s", "noticed"), ("recovery_s", "goes on")):
        if result[name]:
            told.append(
                f"{word} after {format_seconds(result[name]['median'])} (median), {format_seconds(result[name]['max'])} (longest)"
            )
    told.append(f"{result['steps_lost']} steps done again")
    lines += ["; ".join(told), f"{result['fired']} of {result['asked']} faults came, {result['attempts']} starts"]
    same = (
        "the same bits as without a fault"
        if result["same_parameters"] and result["same_metrics"]
        else "; ".join(result["different"])
    )
    lines += [
        f"state and metrics: {same}",
        *(f"FAILED: {text}" for text in result["why"]),
        *(["passed"] if result["passed"] else []),
    ]
    return [*lines, f"page {result['page']}"]


def _say(line: str) -> None:
    print(visible(f"drill: {line}"), file=sys.stderr, flush=True)
