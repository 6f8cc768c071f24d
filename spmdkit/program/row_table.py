"""The table of how rows enter a task: for the loss, each metric and each leaf of the model state, what happens over
replicas, microbatches and padding, and why. Printed by `spmdkit explain`, part of `plan` and of the plan of a run.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from spmdkit.errors import ConfigError
from spmdkit.foundation.formatting import columns
from spmdkit.step.dataflow.analysis import Usage
from spmdkit.step.model_state.agreement import Kinds, reduction_of

RowMixing = Literal["warn", "error", "allow"]

_ACROSS = {
    "not at all": "the same on every replica",
    "row by row": "reduced by the metric",
    "as a sum": "added",
    "as a mean": "sums and counts added",
    "by their number": "added",
    "mixed across rows": "differs from one device",
    "unknown": "unknown",
}


@dataclass(frozen=True)
class Row:
    """One line of the table. All fields are text: `name` of the leaf or metric, `rows`: how rows enter, `keys`: how a
    loss uses its keys, `old`: how the old value of a leaf enters, `replicas`, `microbatches`, `padding`: what happens
    over them, `why`."""

    name: str
    rows: str
    keys: str
    old: str
    replicas: str
    microbatches: str
    padding: str
    why: str


COLUMNS = (
    "leaf or metric",
    "rows enter",
    "keys",
    "old value",
    "over replicas",
    "over microbatches",
    "padding rows",
    "why",
)


def row_table(usages: Sequence[Usage], declared: Kinds, microbatches: int, padded: bool) -> list[Row]:
    """Returns the table.

    Args:
        declared: path of a model state leaf -> its declared reduction.
        microbatches: number of microbatches of a step.
        padded: whether a batch can have padding rows.
    """
    return [_row(usage, declared, microbatches, padded) for usage in usages]


def _row(usage: Usage, declared: Kinds, microbatches: int, padded: bool) -> Row:
    is_state = usage.what == "model state"
    why = f"mixed at {usage.mixed}" if usage.mixed else ""
    if usage.unknown is not None:
        why = f"no rule for {usage.unknown[0]}{f' at {usage.unknown[1]}' if usage.unknown[1] else ''}"
    elif usage.whole and not usage.mixed:
        why = f"rows of all replicas are read at {usage.whole}"
    if usage.what == "evaluation metric":
        microbatches, padded = 1, True
    over = "one microbatch" if microbatches == 1 else "passed on in sequence" if is_state else _ACROSS[usage.rows]
    padding = "none" if not padded else "checked by a second run" if is_state else "excluded"
    if not is_state:
        name = usage.what if usage.what == "loss" else f"{usage.what} {usage.name}"
        return Row(name, usage.rows, usage.keys, "", _ACROSS[usage.rows], over, padding, why)
    reduction = "unchanged" if usage.unchanged else declared.get(usage.name) or reduction_of(usage)
    over_replicas = reduction or "not defined: needs Task(state_reduction=...)"
    why = "declared in Task.state_reduction" if usage.name in declared else why or _why(over_replicas)
    return Row(f"state {usage.name}", usage.rows, "", usage.old, over_replicas, over, padding, why)


def _why(reduction: str) -> str:
    return {
        "unchanged": "the loss returns it as it was, and nothing is sent",
        "identical": "it depends on values that all replicas share",
        "mean": "it is linear in its old value and in a mean over rows",
        "sum": "a sum over rows is added to its old value",
    }.get(reduction, "")


def table_lines(rows: Sequence[Row]) -> list[str]:
    """Returns the table as text; nothing without a loss."""
    if not rows:
        return []
    return columns([COLUMNS, *(tuple(vars(row).values()) for row in rows)])


def row_warnings(
    usages: Sequence[Usage], what: str, mixing: RowMixing, microbatches: int, replicas: int, roles: Collection[str]
) -> list[str]:
    """Returns a warning for each line that mixes rows or draws the same numbers for the rows of every replica, and for
    each operation without a rule.

    Args:
        what: name of the loss function.
        mixing: `error` raises for these lines; `allow` does not report them.
        replicas: number of replicas that reduce one model state.
        roles: paths of frozen and overwritten parameters.

    Raises:
        ConfigError: there is such a line and `mixing` is `error`.
    """
    by_cause: dict[tuple[str, str, str | None], list[str]] = {}
    for usage in usages:
        name = usage.what if usage.what == "loss" else f"{usage.what} '{usage.name}'"
        function = "eval_fn" if usage.what == "evaluation metric" else what
        if usage.rows == "mixed across rows" and usage.what != "model state":
            by_cause.setdefault((function, "mixed", usage.mixed), []).append(name)
        elif usage.whole and microbatches > 1 and function == what:
            by_cause.setdefault((function, "whole", usage.whole), []).append(name)
        if usage.same_draws is not None:
            by_cause.setdefault((function, "drawn", usage.same_draws), []).append(name)
        if usage.unknown is not None and usage.rows == "unknown":
            by_cause.setdefault((function, *usage.unknown), []).append(name)
    texts = [] if mixing == "allow" or 1 in (microbatches, replicas) else _read_between(usages, what)
    texts += _fixed_gradients(usages, what, roles)
    for (function, cause, line), names in by_cause.items():
        at, results = f"{line}: " if line else "", ", ".join(names)
        if cause not in ("mixed", "whole", "drawn"):
            texts.append(
                f"{at}{function} computes {results} with {cause}, for which the analysis has no rule. How rows enter "
                "is unknown. `spmdkit verify` compares the meshes."
            )
        elif mixing != "allow":
            does = "draws random numbers for the rows" if cause == "drawn" else "mixes rows"
            text = f"{at}{function} {does} in {results}. {_mixed_text(cause, microbatches)}"
            if mixing == "error":
                raise ConfigError(f"row_mixing is error. {text}")
            texts.append(text)
    return texts


def plain_draws(usages: Sequence[Usage], what: str) -> list[str]:
    """Returns a warning if a loss draws from its plain key."""
    lines = dict.fromkeys(usage.plain_draw for usage in usages if usage.plain_draw)
    return [
        f"{line}: {what} draws from its plain key, which differs by replica and microbatch, and the task has no "
        "train_data: another mesh trains on other examples. Draw from sk.example_keys(): one key per "
        "example, equal on every mesh."
        for line in lines
    ]


def _fixed_gradients(usages: Sequence[Usage], what: str, roles: Collection[str]) -> list[str]:
    """Returns the warning about parameters for which a backward rule returns another value than a derivative."""
    paths = [path for usage in usages for path in usage.fixed_gradients if path not in roles]
    if not paths:
        return []
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    text = (
        f"{what}: the gradient of {', '.join(paths[:3])}{more} does not depend on the cotangent: a custom_vjp returns "
        "another value. It is averaged over replicas, and the optimizer updates the parameter with it. If it is the "
        f"new value of the leaf, declare such leaves: Task(overwritten=['{paths[0]}']). If it is a derivative, "
        "multiply it by the cotangent."
    )
    return [text]


def _read_between(usages: Sequence[Usage], what: str) -> list[str]:
    """Returns the warning about model state that the loss reads before the replicas have reduced it."""
    leaves = [f"'{u.name}'" for u in usages if u.read and not u.unchanged and (u.per_replica or u.counted)]
    return [
        f"{what} reads model state {leaf}, which replicas reduce after the last microbatch: until then a replica reads "
        "what it has added itself. So with microbatches the result differs from one device. Reduce what the loss adds "
        "(sk.psum, sk.pmean, sk.all_gather), set microbatches: 1, or accept it with Task(row_mixing='allow')."
        for leaf in leaves
    ]


def _mixed_text(cause: str, microbatches: int) -> str:
    if cause == "whole":
        return (
            f"The rows of all replicas are read, but only those of one of {microbatches} microbatches. So the result "
            "differs from microbatches: 1. If this is intended, set Task(row_mixing='allow')."
        )
    if cause == "drawn":
        return (
            "Their key is the same on every replica and in every microbatch, so all of them draw the same numbers, and "
            "the result differs from one device. Draw from sk.example_keys() or from the key that the loss receives. "
            "If it is intended, set Task(row_mixing='allow')."
        )
    return (
        "A replica and a microbatch hold a part of the batch, so with more than one of them the result differs from "
        "one device. Read the rows of all replicas with sk.all_gather(x), add statistics with sk.psum(x), or name the "
        "replica axes (axis_name=('replica', 'data')). If it is intended, set Task(row_mixing='allow')."
    )
