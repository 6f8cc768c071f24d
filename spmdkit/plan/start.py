"""`check_start`: the plan of the step that `train` has just compiled. Written beside the run; what cannot work is not begun.

Costs no second compilation: the text of the compiled step is read. Process 0 decides and all do the same.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax

from spmdkit.cluster import Cluster
from spmdkit.errors import ConfigError
from spmdkit.files import write_json
from spmdkit.plan.calibrate import with_measured
from spmdkit.plan.document import Document, NotAllowed, layout_rows, plan_program, refuse
from spmdkit.plan.target import Target, target_of
from spmdkit.program import Program
from spmdkit.words import format_bytes


def check_state(program: Program, cluster: Cluster) -> None:
    """Refuses a state that is larger than a device, before any of its arrays is made.

    Raises:
        ConfigError: exit code 78.
    """
    target = target_of(cluster.devices)
    state = sum(row["device_bytes"] for row in layout_rows(program) if row["memory_kind"] == "device")
    if state > target.memory_limit_bytes:
        raise ConfigError(
            f"the train state needs {format_bytes(state)} of each device, {target.chip.name} has "
            f"{format_bytes(target.memory_limit_bytes)}. Parameters and optimizer state have to fit before a step can. Cut them over "
            f"more devices (mesh.fsdp, mesh.tensor), or set placement: {{optimizer: host}}. spmdkit plan says what is largest."
        )


def check_start(program: Program, cluster: Cluster, directory: Path) -> None:
    """Compiles the step, plans it, writes `plan.json` and refuses what does not fit or exceeds the budget.

    Raises:
        ConfigError: exit code 78, on every process, with the nearest change that fits.
    """
    said = ""
    if cluster.is_main:
        target = target_of(cluster.devices)
        document = _plan(program, target)
        if document is not None:
            write_json(directory / "plan.json", document)
            said = _refusal(program, target, document, cluster)
    else:
        program.compiled  # noqa: B018
    if cluster.num_processes > 1:
        if cluster.is_main:
            cluster.put("plan", json.dumps(said))
        said = json.loads(cluster.get("plan"))
    if said:
        raise NotAllowed(said)


def _plan(program: Program, target: Target) -> Document | None:
    """Returns the plan, or None where the program's text cannot be read: no reason not to train, unless there is a budget."""
    try:
        target, call_s = with_measured(target)
        return plan_program(program, target, call_s)
    except (ValueError, KeyError, IndexError, AssertionError) as error:
        if program.config.budget is not None:
            raise ConfigError(
                f"the compiled step could not be read ({type(error).__name__}: {error}), and budget asks what it costs. Remove budget, "
                "and report this with the config."
            ) from error
        program.compiled  # noqa: B018
        return None


def _refusal(program: Program, target: Target, document: Document, cluster: Cluster) -> str:
    try:
        refuse(document, "train does not begin")
    except NotAllowed as error:
        found = None
        if not document["fits"] and cluster.num_processes == 1:
            found = nearest_that_fits(program, target)
        if found is None:
            return f"{error} A step has to fit and to keep to its budget. spmdkit plan CONFIG shows the plan, --search looks for one."
        return f"{error} A step has to fit. Try {found}."
    return ""


def nearest_that_fits(program: Program, target: Target, most: int = 5) -> str | None:
    """Returns the smallest change of the config whose compiled step fits, as overrides, or None among the first `most`."""
    from spmdkit.plan.variants import smaller_steps

    for changes in smaller_steps(program.config, program.batch_shards)[:most]:
        try:
            other = program.with_config(changes)
            peak = plan_program(other, target)["memory"]["peak_bytes"]
        except (ConfigError, jax.errors.JaxRuntimeError):
            continue
        if peak <= target.memory_limit_bytes:
            text = ", ".join(f"{key}: {value}" for key, value in changes.items())
            return f"{text} ({format_bytes(peak)})"
    return None
