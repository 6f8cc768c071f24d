"""Checks before training that the state and the step fit, and writes the plan of the step into the run directory.

Whether a step fits depends only on the compiler's report (`Program.step_bytes`). During training, a thread of process 0
reads the text of the compiled step and writes `plan.json` and `plan.html`; an exception in it is one log line and an
event. The run waits for its plan only with a `budget`. A rejection on one process is a rejection on all
(`Cluster.first_problem`). Modules of a plan are imported lazily, so that the first step does not wait for them.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from spmdkit.cluster import Cluster
from spmdkit.config import Config
from spmdkit.errors import ConfigError
from spmdkit.faults.error_mapping import exhausted_memory
from spmdkit.foundation.constants import PLAN_THREAD
from spmdkit.foundation.files import write_json, write_text
from spmdkit.foundation.formatting import format_bytes, shown_source
from spmdkit.foundation.timeouts import PLAN_CLOSE_S
from spmdkit.plan.machine.target import target_of
from spmdkit.program.auto import REMATS, microbatch_counts
from spmdkit.program.memory import memory_limit
from spmdkit.program.program import Program

GIVE_WAY_S = 0.0002
"""Switch interval of the interpreter while the plan is written. With Python's 5 ms a step of 0.7 ms took 5.7 ms, with
this 0.9 ms (jitted product of 256 x 256, two busy CPU cores, 2026-11-22)."""
LESS = 0.75
"""After exhausted memory: the largest share of the step's bytes that a suggested change needs."""


def common_limit(cluster: Cluster) -> int | None:
    """Returns the bytes of one device that a program may use on every process: the smallest limit that any process
    knows, or None."""
    local_limit = memory_limit(cluster.devices)
    limits = cluster.gather("memory limit", local_limit)
    return min((limit for limit in limits if limit is not None), default=None)


def check_state(program: Program, cluster: Cluster, limit_bytes: int | None) -> None:
    """Rejects a state that is larger than a device, before any of its arrays is allocated.

    Raises:
        ConfigError: exit code 78, on every process.
    """

    def refusal() -> str:
        state = program.input_bytes.state_bytes
        if limit_bytes is None or state <= limit_bytes:
            return ""
        return (
            f"the train state needs {format_bytes(state)} of each device, {_name(cluster)} has "
            f"{format_bytes(limit_bytes)}. Parameters and optimizer state have to fit before a step can. Shard them "
            "over more devices (mesh.fsdp, mesh.tensor), or set offload: [optimizer]. spmdkit plan lists the largest "
            "arrays."
        )

    if problem := cluster.first_problem("state", refusal):
        raise ConfigError(problem)


def check_start(program: Program, cluster: Cluster, directory: Path, limit_bytes: int | None) -> None:
    """Compiles the step, and rejects it if it does not fit or exceeds the budget.

    Raises:
        ConfigError: exit code 78, on every process; a single process also suggests the nearest change that fits.
    """

    def refusal() -> str:
        needed = program.step_bytes
        if needed.fits(limit_bytes):
            return ""
        least = "more than " * bool(needed.refused) + format_bytes(needed.peak_bytes)
        has = "less" if limit_bytes is None else format_bytes(limit_bytes)
        return (
            f"train does not begin: a step needs {least} of each device, {_name(cluster)} has {has}. A step has to fit."
        )

    if problem := cluster.first_problem("memory", refusal):
        nearest = nearest_that_fits(program, limit_bytes) if cluster.num_processes == 1 else None
        hint = f"Try {nearest}." if nearest else "spmdkit plan CONFIG shows the plan, --search looks for one."
        raise ConfigError(f"{problem} {hint}")
    over_budget = lambda: _over_budget(program, cluster, directory) if cluster.is_main else ""
    if program.config.budget is not None and (problem := cluster.first_problem("budget", over_budget)):
        raise ConfigError(problem)


def out_of_memory(program: Program, error: BaseException, is_alone: bool) -> str:
    """Returns the message for a run that exhausts its memory: the required bytes, the largest buffers with their lines,
    and for a single process the nearest change that lowers the requirement to `LESS`.

    The check of the start has accepted the step, so the limit is unknown: another process uses the device, its memory
    is fragmented, or another program (an evaluation, a hook) runs as well.
    """
    from spmdkit.plan.hlo.source import text_of
    from spmdkit.plan.hlo.text import parse
    from spmdkit.plan.memory import read_memory

    memory = read_memory(program, parse(program.compiled.as_text() or ""))
    parts = sorted(memory.parts.items(), key=lambda part: -part[1])[:3]
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts)
    buffers = [
        f"  {format_bytes(b.bytes)} {b.shape}  {shown_source(b.source)}  {text_of(b.source)[:80]}".rstrip()
        for b in memory.live[:3]
    ]
    nearest = nearest_that_fits(program, int(memory.peak_bytes * LESS)) if is_alone else None
    hint = f"Try {nearest}" if nearest else "Lower batch_size, or shard over more devices (mesh.fsdp)"
    return "\n".join(
        [
            exhausted_memory(error),
            f"A training step needs {format_bytes(memory.peak_bytes)} of each device: {listed}. The largest buffers:",
            *buffers,
            f"{hint}. spmdkit plan CONFIG lists what a step needs.",
        ]
    )


def nearest_that_fits(program: Program, limit_bytes: int | None, most: int = 5) -> str | None:
    """Returns the smallest change of the config with a compiled step that fits, as overrides; None if none of the first
    `most` fits."""
    for changes in _smaller_steps(program.config, program.batch_shards)[:most]:
        try:
            needed = program.with_step(changes).step_bytes
        except (ConfigError, jax.errors.JaxRuntimeError):
            continue
        if needed.fits(limit_bytes):
            text = ", ".join(f"{key}: {value}" for key, value in changes.items())
            return f"{text} ({format_bytes(needed.peak_bytes)})"
    return None


def _smaller_steps(config: Config, batch_shards: int) -> list[dict[str, Any]]:
    """Returns changes that reduce memory, the mildest first: microbatches, then remat, then both."""
    now = config.microbatches if isinstance(config.microbatches, int) else 1
    more = [m for m in microbatch_counts(config, batch_shards) if m > now]
    leaner: Sequence[str] = REMATS[REMATS.index(config.remat) + 1 :] if config.remat in REMATS else ()
    changes: list[dict[str, Any]] = [{"microbatches": m} for m in more[:2]]
    changes += [{"remat": remat} for remat in leaner[-1:]]
    changes += [{"microbatches": m, "remat": leaner[-1]} for m in more[:4] if leaner]
    changes += [{"microbatches": m} for m in more[2:]]
    return changes


def _over_budget(program: Program, cluster: Cluster, directory: Path) -> str:
    """Writes the plan, and returns which limits of the budget it exceeds.

    Raises:
        ConfigError: the step cannot be read.
    """
    try:
        problem = _write_plan(program, cluster, directory)
    except Exception as error:
        raise ConfigError(
            f"the compiled step could not be read ({type(error).__name__}: {error}), and budget needs its cost. "
            "Remove budget, and report this with the config."
        ) from error
    repair = "A step has to keep to its budget. spmdkit plan CONFIG shows the plan, --search looks for one."
    return f"train does not begin: {problem}. {repair}" if problem else ""


def _name(cluster: Cluster) -> str:
    return target_of(cluster.devices).chip.name


# ---- the plan --------------------------------------------------------------------------------------------------------


def start_plan_thread(
    program: Program, cluster: Cluster, directory: Path, print_line: Callable[[str], None], note: Callable[..., None]
) -> Callable[[], None]:
    """Starts a thread that writes the plan of a compiled step into the run directory. Returns a function that waits for
    the thread with a timeout.

    Args:
        print_line: called with one line if the thread fails.
        note: called with the event, `note("plan_failed", error=...)`.
    """
    if not cluster.is_main or program.config.budget is not None:  # with a budget the plan is already written
        return lambda: None

    def write() -> None:
        before = sys.getswitchinterval()
        try:
            sys.setswitchinterval(min(before, GIVE_WAY_S))
            _write_plan(program, cluster, directory)
        except BaseException as error:  # noqa: BLE001 - an error in this thread does not stop the run
            text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            with contextlib.suppress(Exception):
                note("plan_failed", error=text)
                print_line(f"note: the plan of this run could not be written ({text}); the run continues without it")
        finally:
            sys.setswitchinterval(before)

    thread = threading.Thread(target=write, name=PLAN_THREAD, daemon=True)
    thread.start()
    return lambda: thread.join(PLAN_CLOSE_S)


def _write_plan(program: Program, cluster: Cluster, directory: Path) -> str:
    """Writes the plan as `plan.json` and `plan.html`. Returns why it must not be run; empty if it may be run."""
    from spmdkit.metrics.report.plan import plan_page
    from spmdkit.plan import document as plan
    from spmdkit.plan.machine.calibrate import with_measured

    target, call_s = with_measured(target_of(cluster.devices))
    document = plan.plan_program(program, target, call_s)
    write_json(directory / "plan.json", document)
    write_text(directory / "plan.html", plan_page(document))
    if (time := document["time"]) is not None and (target.calibrated or cluster.devices[0].platform != "cpu"):
        program.seconds_at_peak = time["mfu"] * document["predicted_step_s"]
    return plan.problem_of(document)
