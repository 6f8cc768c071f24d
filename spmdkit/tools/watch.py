"""`spmdkit watch RUN`: a run in the terminal, from the files of its directory. It writes nothing, and the run does not
notice it: the directory may be on a shared disk, and the run on another machine."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from spmdkit.errors import ConfigError
from spmdkit.foundation.constants import MEASURED
from spmdkit.foundation.files import read_regular
from spmdkit.foundation.formatting import format_duration, format_rate, format_value, visible
from spmdkit.foundation.run_status import ENDS, LAST_STEP, last_step, newest_saved, unfinished
from spmdkit.metrics import read_lines

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 40
NUM_EVENTS = 4
_QUIET = ("saved", "running", "compiled", "checkpoint_removed")

Record = Mapping[str, Any]


def watch(run_dir: Path, every_s: float = 1.0, once: bool = False) -> None:
    """Shows a run until it ends, or once; redraws a terminal, and otherwise prints each change.

    Raises:
        ConfigError: the folder is no run's directory.
    """
    if not (run_dir / "events.jsonl").is_file():
        raise ConfigError(
            f"watch {run_dir}: no events.jsonl there. A run's directory has one. Pass the run_dir of the "
            "config (by default runs/<config name> in the config's folder)."
        )
    redraws, shown, text = sys.stdout.isatty() and not once, 0, ""
    while True:
        now, is_active = frame(run_dir)
        if now != text:
            print(f"\x1b[{shown}F\x1b[J" * bool(redraws and shown) + visible(now), flush=True)
            text, shown = now, now.count("\n") + 1
        if once or not is_active:
            return
        time.sleep(every_s)


def frame(run_dir: Path) -> tuple[str, bool]:
    """Returns the text about a run, and whether the run may still be active."""
    events = [event for event in read_lines(run_dir / "events.jsonl") if "event" in event]
    records = [record for record in read_lines(run_dir / "metrics.jsonl") if isinstance(record.get("step"), int)]
    train = [record for record in records if "split" not in record]
    status, is_active = _status(run_dir, events)
    step = max(last_step(run_dir / LAST_STEP) or 0, *(record["step"] for record in train), 0)
    lines = [f"{run_dir}: {status}", _position(run_dir, step, train)]
    if train:
        lines += [_curve(train), _metrics(f"step {train[-1]['step']}", train[-1])]
    lines += [_metrics(f"step {r['step']} {r['split']}", r) for r in records if "split" in r][-1:]
    saved = newest_saved(run_dir)
    lines.append(f"saved: {'nothing yet' if saved is None else f'step {saved}'}")
    reported = [event for event in events if event["event"] not in _QUIET][-NUM_EVENTS:]
    lines += [f"  {str(e.get('time', ''))[11:19]} {e['event']} at step {e.get('step')}{_reason(e)}" for e in reported]
    return "\n".join(line for line in lines if line), is_active


def _status(run_dir: Path, events: Sequence[Record]) -> tuple[str, bool]:
    attempt = unfinished(run_dir)
    if attempt is not None:
        where = f"process {attempt.pid} on {attempt.host}"
        if attempt.alive is False:
            return "ended without an exit event (killed, or the machine lost power)", False
        return f"running{' or ended' if attempt.alive is None else ''}, {where}", True
    ends = [event for event in events if event["event"] in ENDS]
    if not ends:
        return "starting", True
    last = ends[-1]
    is_finished = last["event"] == "stopped" and last.get("code") == 0
    return f"{'finished' if is_finished else last['event']}{_reason(last)}", False


def _reason(event: Record) -> str:
    why = event.get("error") or event.get("why") or event.get("signal") or ""
    return f": {str(why).splitlines()[0][:100]}" if why else ""


def _position(run_dir: Path, step: int, train: Sequence[Record]) -> str:
    last = train[-1] if train else {}
    step_s, rate = last.get("step_time_s"), last.get("examples_per_s")
    speed = f"  {format_rate(rate)} examples/s" if isinstance(rate, float) else ""
    steps = _steps(run_dir)
    if steps is None:
        return f"step {step}{speed}"
    left = f"  left {format_duration(max(steps - step, 0) * step_s)}" if isinstance(step_s, float) else ""
    done = min(step / max(steps, 1), 1.0)
    bar = "█" * int(done * WIDTH)
    return f"step {step} of {steps}  {bar:·<{WIDTH}} {done:.0%}{speed}{left}"


def _steps(run_dir: Path) -> int | None:
    try:
        steps = yaml.safe_load(read_regular(run_dir / "config.yaml")).get("steps")
    except (OSError, AttributeError, yaml.YAMLError):
        return None
    return steps if isinstance(steps, int) else None


def _curve(train: Sequence[Record]) -> str:
    """Returns the loss as blocks, from the lowest to the highest, and its first and last value."""
    losses = [x for record in train if isinstance(x := record.get("loss"), float) and abs(x) < float("inf")]
    if len(losses) < 2:
        return ""
    picked = [losses[i * (len(losses) - 1) // (WIDTH - 1)] for i in range(WIDTH)] if len(losses) > WIDTH else losses
    low, high = min(picked), max(picked)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0
    return f"loss {''.join(BLOCKS[int((x - low) * scale)] for x in picked)}  {losses[0]:.4f} to {losses[-1]:.4f}"


def _metrics(start: str, record: Record) -> str:
    named = {k: v for k, v in record.items() if isinstance(v, int | float) and k not in ("step", *MEASURED)}
    return f"{start}:  " + "  ".join(f"{name} {format_value(value)}" for name, value in named.items())
