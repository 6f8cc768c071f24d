"""Which batches a server has completed: applied, or dropped permanently. Two servers differ by a push that reached only
one of them: a worker died while it pushed, or a snapshot was taken meanwhile.

Such a batch is handed out again, and a server that has completed it does not apply it again: each leaf gets each batch
once. If a run continues with other servers, a leaf carries the batches that its previous server has completed
(`Agreement`), until all leaves of its new server have the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class Settled:
    """A set of batch numbers: all below `low`, and a few above, since batches complete roughly in the order of their
    numbers."""

    def __init__(self, low: int, above: Iterable[int] = ()):
        self.low, self.above = low, set(above)

    def __contains__(self, batch: int) -> bool:
        return batch < self.low or batch in self.above

    def add(self, batch: int) -> None:
        if batch >= self.low:
            self.above.add(batch)
        while self.low in self.above:
            self.above.remove(self.low)
            self.low += 1

    def table(self) -> tuple[int, list[int]]:
        """Returns the arguments of the constructor, for a record."""
        return self.low, sorted(self.above)


@dataclass
class Agreement:
    """Leaves of one server with the same history.

    Attributes:
        paths: of the leaves.
        settled: their batches.
        applied: their updates.
    """

    paths: frozenset[str]
    settled: Settled
    applied: int

    def row(self) -> tuple[list[str], tuple[int, list[int]], int]:
        """Returns the argument of `of_row`, for a record."""
        return sorted(self.paths), self.settled.table(), self.applied


def of_row(row: Sequence[Any]) -> Agreement:
    """Returns the part of a row of a table."""
    paths, settled, applied = row
    return Agreement(frozenset(paths), Settled(*settled), applied)


def merged(parts: Iterable[Agreement]) -> list[Agreement]:
    """Returns the parts, merging equal ones."""
    found: list[Agreement] = []
    for part in parts:
        same = [x for x in found if (x.applied, x.settled.table()) == (part.applied, part.settled.table())]
        if same:
            same[0].paths |= part.paths
        elif part.paths:
            found.append(part)
    return found


def dealt(tables: Sequence[Mapping[str, Any]], owned: Mapping[str, int], servers: int) -> list[dict[str, Any]]:
    """Returns the table of each server from those of a snapshot, in which leaves may have been on other servers.

    The first server hands out again the batches that some leaves have completed and others lack; it hands out batches
    from `next_batch` on anyway.

    Args:
        owned: path of a leaf -> its server.
    """
    rows = [row for table in tables for row in table["parts"]]
    kinds = [part.settled for part in merged(of_row(row) for row in rows)]
    begun = range(min(kind.low for kind in kinds), tables[0]["next_batch"])
    lacking = [batch for batch in begun if 0 < sum(batch in kind for kind in kinds) < len(kinds)]
    again = {*tables[0]["again"], *lacking}
    found = []
    for server in range(servers):
        of = lambda paths, server=server: [path for path in paths if owned[path] == server]
        parts = merged(of_row((of(paths), *rest)) for paths, *rest in rows)
        table = tables[server] if server < len(tables) else tables[0]
        own = {"parts": [part.row() for part in parts], "again": sorted(again) if server == 0 else []}
        found.append({**table, **own, "applied": min(part.applied for part in parts)})
    return found
