"""Assertions about the communication of a step, for user tests.

    def test_my_model_reduces_once():
        program = sk.build("my_task.yaml")
        sk.testing.assert_collectives(program, all_reduce=1, in_loop=0)

They count operations of the compiled program, as `spmdkit plan` does. The step is compiled if needed, and is not run.
"""

from __future__ import annotations

from collections import Counter

from spmdkit.errors import ConfigError
from spmdkit.foundation.formatting import format_bytes, nearest, shown_axes
from spmdkit.plan.collectives_bill import OPS, Bill
from spmdkit.plan.compiled_step import read_program
from spmdkit.program.program import Program


def bill_of(program: Program) -> Bill:
    """Returns the collectives of a program's compiled step."""
    return read_program(program).bill


def assert_collectives(
    program: Program,
    *,
    in_loop: int | None = None,
    total: int | None = None,
    max_bytes: int | None = None,
    axes: tuple[str, ...] | None = None,
    **ops: int,
) -> None:
    """Asserts the number of collectives in the step of a program.

    Args:
        in_loop: number of operations inside loops.
        total: number of all operations.
        max_bytes: upper bound on the bytes that one device sends per step; also fails if a trip count is unknown.
        axes: count only operations that connect devices along one of these mesh axes.
        ops: number of operations by name (`all_reduce=1`, `all_gather=0`); operations not listed are not checked.

    Raises:
        AssertionError: a number differs; the message lists every operation with its line.
        ConfigError: a name is not a collective, or an axis is not a mesh axis.
    """
    for name in ops:
        if name not in OPS:
            raise ConfigError(
                f"assert_collectives: '{name}' is no collective. Known: {', '.join(OPS)}.{nearest(name, OPS)}"
            )
    known = list(program.sizes)
    for axis in set(axes or ()) - {*known}:
        raise ConfigError(
            f"assert_collectives: '{axis}' is not a mesh axis. Known: {', '.join(known)}.{nearest(axis, known)}"
        )
    bill = bill_of(program)
    chosen = [c for c in bill.collectives if axes is None or set(axes) & set(c.axes)]
    count = Counter(c.op for c in chosen)
    wrong = [f"{name} {count[name]} times, expected {number}" for name, number in ops.items() if count[name] != number]
    inside = sum(c.in_loop for c in chosen)
    if in_loop is not None and inside != in_loop:
        wrong.append(f"{inside} inside loops, expected {in_loop}")
    if total is not None and len(chosen) != total:
        wrong.append(f"{len(chosen)} in all, expected {total}")
    if max_bytes is not None:
        sent = sum(c.bytes_at_least for c in chosen if c.counted)
        if any(c.bytes is None for c in chosen if c.counted):
            wrong.append(f"an unknown number of bytes (at least {sent}), expected at most {max_bytes}")
        elif sent > max_bytes:
            wrong.append(f"{sent} bytes ({format_bytes(sent)}) sent per device in a step, expected at most {max_bytes}")
    if wrong:
        rows = [
            f"  {c.op} over {shown_axes(c.axes)}, {c.dtype}, {c.bytes if c.bytes is not None else 'unknown'} bytes, "
            f"{'in a loop, ' if c.in_loop else ''}{c.cause}, {c.source or 'no line'}"
            for c in chosen
        ]
        raise AssertionError("\n".join([f"the step has {'; '.join(wrong)}. It holds:", *(rows or ["  nothing"])]))
