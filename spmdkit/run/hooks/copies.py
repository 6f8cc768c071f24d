"""Compares the copies of the train state bit by bit every `replica_check.every_steps` steps: a device that computes or
remembers wrongly does not report it.

If three or more devices hold the same part, the outlier is named. Of two, an audit repeats the computation to find the
one with wrong arithmetic. Leaves without a copy are reported at the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spmdkit.cluster.comparison import name_processes
from spmdkit.errors import NonFiniteError
from spmdkit.foundation.formatting import format_bytes
from spmdkit.program.replica_check import Copies, Difference
from spmdkit.run.hooks.base import Action, Hook, ReplaceState, Rollback, RunView, Stop

MOST_LEAVES = 4
"""So many leaves are named."""


def make(config: Any) -> Hook | None:
    """Returns the hook that compares replicas; None if the config has no `replica_check`."""
    options = config.replica_check
    if options is None:
        return None
    made: list[Copies] = []
    same = {"step": 0}  # the last at which all copies were the same

    def begin(run: RunView, step: int, state: Any) -> None:
        made[:] = [Copies(run.program)]
        _say_what_is_alone(run, made[0])

    def after_step(run: RunView, step: int, state: Any, metrics: Any) -> Action | None:
        copies = made[0]
        differences = copies.differences(copies.hashes(state))
        if not differences:
            same["step"] = step
            return None
        differences = _decided(run, copies, step, state, differences)
        what = _said(copies, step, differences)
        if run.cluster.is_main:
            run.events.write(
                "replicas_differ",
                step=step,
                leaves=[d.path for d in differences],
                devices=[copies.device(p).id for p in _odd(differences)],
            )
        if options.action == "continue":
            run.message(what)
            return None
        if options.action == "rollback":
            run.message(what)
            return Rollback(same["step"], known=True)
        if options.action == "repair" and all(d.source is not None for d in differences):
            run.message(f"{what} It has the bits of the others again.")
            return ReplaceState(copies.mended(state, differences))
        unknown = (
            " Which of them is right is not known, so nothing can be repaired." if options.action == "repair" else ""
        )
        return Stop(
            NonFiniteError.exit_code,
            f"{what}{unknown} Copies of the state have to be the same on all devices; one of these computes or "
            f"remembers wrongly. All were the same "
            f"at step {same['step']}. {run.newest()} Take that device out of the job, and go on from a checkpoint of "
            f"step {same['step']} or before.",
            known=True,
        )

    return Hook(
        "copies",
        order=15,
        every=options.every_steps,
        begin=begin,
        after_step=after_step,
        state=lambda: dict(same),
        restore=lambda saved: same.update(saved),
    )


def _say_what_is_alone(run: RunView, copies: Copies) -> None:
    """Reports at the start the leaves that have no copy."""
    alone, sizes = set(copies.without()), {p.path: p.num_bytes for p in run.program.layout}
    if not alone:
        return
    part = format_bytes(sum(sizes[path] for path in alone))
    run.message(
        f"note: replica_check sees nothing of {len(alone)} of {len(sizes)} leaves of the state, {part} of "
        f"{format_bytes(sum(sizes.values()))}: there "
        "every device holds the only copy of its part, which fsdp and model axes cut. A mesh with replica: 2 has two."
    )


def _decided(
    run: RunView, copies: Copies, step: int, state: Any, differences: Sequence[Difference]
) -> list[Difference]:
    """Returns the differences, those of two copies with the device at fault where an audit finds it."""
    if all(d.source is not None for d in differences):
        return list(differences)
    ((_, batch),) = run.program.batches(step, step)
    wrong = set(copies.audit(state, batch))
    run.message(
        f"an audit of step {step}, the same inputs twice: "
        + (
            f"{_names(copies, sorted(wrong))} computed other bits the second time"
            if wrong
            else "every device computed the same bits again"
        )
    )
    found = []
    for d in differences:
        right = [place for place in d.odd if place not in wrong]
        if d.source is None and wrong & set(d.odd) and right:
            d = d._replace(odd=tuple(place for place in d.odd if place in wrong), source=right[0])
        found.append(d)
    return found


def _odd(differences: Sequence[Difference]) -> list[int]:
    return sorted({place for d in differences for place in d.odd})


def _names(copies: Copies, places: Sequence[int]) -> str:
    """Returns `device 5 (process 1)`."""
    devices = [copies.device(place) for place in places]
    processes = sorted({d.process_index for d in devices})
    ids = ", ".join(str(d.id) for d in devices)
    return f"device{'s' * (len(devices) > 1)} {ids} ({name_processes(processes)})"


def _said(copies: Copies, step: int, differences: Sequence[Difference]) -> str:
    paths = [f"'{path}'" for path in dict.fromkeys(d.path for d in differences)]
    more = f" and {len(paths) - MOST_LEAVES} more" if len(paths) > MOST_LEAVES else ""
    odd = _names(copies, _odd(differences))
    shown = f"{', '.join(paths[:MOST_LEAVES])}{more}"
    if all(d.source is not None for d in differences):
        others = "other copy" if differences[0].num == 2 else f"other {differences[0].num - 1} copies"
        return f"silent corruption at step {step}: {odd} holds other bits of {shown} than the {others}."
    return f"silent corruption at step {step}: {odd} hold different copies of {shown}."
