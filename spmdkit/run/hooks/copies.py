"""Compares the replicas of the train state bitwise every `replica_check.every_steps` steps: a device does not report
its own wrong results or memory errors.

If three or more devices have a replica, the outlier is identified by majority. For two, an audit repeats the
computation to find the device with wrong arithmetic. Leaves without replicas are reported at the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spmdkit.cluster.comparison import name_processes
from spmdkit.errors import NonFiniteError
from spmdkit.foundation.formatting import format_bytes
from spmdkit.program.replica_check import Copies, Difference
from spmdkit.run.hooks.base import Action, Hook, ReplaceState, Rollback, RunView, Stop

MAX_LEAVES = 4  # in a message


def make(config: Any) -> Hook | None:
    """Returns the hook that compares replicas; None if the config has no `replica_check`."""
    options = config.replica_check
    if options is None:
        return None
    made: list[Copies] = []
    same = {"step": 0}  # the last step at which all replicas were equal

    def begin(run: RunView, step: int, state: Any) -> None:
        made[:] = [Copies(run.program)]
        _report_single_leaves(run, made[0])

    def after_step(run: RunView, step: int, state: Any, metrics: Any) -> Action | None:
        copies = made[0]
        differences = copies.differences(copies.hashes(state))
        if not differences:
            same["step"] = step
            return None
        is_known = all(d.source is not None for d in differences)
        if not is_known:
            differences = _audited(run, copies, step, state, differences)
            is_known = all(d.source is not None for d in differences)
        bad = sorted({place for d in differences for place in d.outliers})
        paths = list(dict.fromkeys(d.path for d in differences))
        what = f"silent corruption at step {step}: {_names(copies, bad)} {_held(paths, differences[0].num, is_known)}."
        if run.cluster.is_main:
            devices = [copies.device(place).id for place in bad]
            run.events.write("replicas_differ", step=step, leaves=[d.path for d in differences], devices=devices)
        if options.action == "repair" and is_known:
            run.message(f"{what} It has the bits of the others again.")
            return ReplaceState(copies.repaired(state, differences))
        if options.action in ("continue", "rollback"):
            run.message(what)
            return Rollback(same["step"], known=True) if options.action == "rollback" else None
        unknown = " Which of them is right is not known, so nothing can be repaired." * (options.action == "repair")
        return Stop(
            NonFiniteError.exit_code,
            f"{what}{unknown} Copies of the state have to be the same on all devices; one of these computes or "
            f"remembers wrongly. All were the same at step {same['step']}. {run.newest()} Take that device out of the "
            f"job, and continue from a checkpoint of step {same['step']} or before.",
            known=True,
        )

    state, restore = lambda: dict(same), lambda saved: same.update(saved)
    return Hook("copies", 15, options.every_steps, begin=begin, after_step=after_step, state=state, restore=restore)


def _report_single_leaves(run: RunView, copies: Copies) -> None:
    alone, sizes = set(copies.without()), {p.path: p.num_bytes for p in run.program.layout}
    if alone:
        part, total = format_bytes(sum(sizes[path] for path in alone)), format_bytes(sum(sizes.values()))
        run.message(
            f"note: replica_check sees nothing of {len(alone)} of {len(sizes)} leaves of the state, {part} of {total}: "
            "every device holds the only copy of its shard over fsdp and model axes. A mesh with replica: 2 "
            "has two."
        )


def _audited(
    run: RunView, copies: Copies, step: int, state: Any, differences: Sequence[Difference]
) -> list[Difference]:
    """Returns the differences. Those of two replicas include the faulty device if an audit identifies it."""
    ((_, batch),) = run.program.batches(step, step)
    wrong = set(copies.audit(state, batch))
    second = f"{_names(copies, sorted(wrong))} computed other bits the second time" if wrong else ""
    again = second or "every device computed the same bits again"
    run.message(f"an audit of step {step}, the same inputs twice: {again}")
    audited = []
    for d in differences:
        right = [place for place in d.outliers if place not in wrong]
        if d.source is None and wrong & set(d.outliers) and right:
            d = d._replace(outliers=tuple(place for place in d.outliers if place in wrong), source=right[0])
        audited.append(d)
    return audited


def _names(copies: Copies, places: Sequence[int]) -> str:
    """Returns `device 5 (process 1)`."""
    devices = [copies.device(place) for place in places]
    processes = sorted({d.process_index for d in devices})
    ids = ", ".join(str(d.id) for d in devices)
    return f"device{'s' * (len(devices) > 1)} {ids} ({name_processes(processes)})"


def _held(paths: Sequence[str], num: int, is_known: bool) -> str:
    more = f" and {len(paths) - MAX_LEAVES} more" if len(paths) > MAX_LEAVES else ""
    shown = ", ".join(f"'{path}'" for path in paths[:MAX_LEAVES]) + more
    others = "other copy" if num == 2 else f"other {num - 1} copies"
    return f"holds other bits of {shown} than the {others}" if is_known else f"hold different copies of {shown}"
