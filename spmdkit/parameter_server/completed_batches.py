"""The batches that a server has completed: applied, or dropped permanently. Two servers differ if a push reached only
one of them, because the worker died during the push or a snapshot was taken in between.

Such a batch is assigned again. A server that has already completed it does not apply it again, so each leaf receives
each batch once. If a run resumes with a different number of servers, each leaf carries the batches that its previous
server completed (`LeafGroup`), until all leaves of the new server have the same set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class BatchSet:
    """A set of batch numbers: all below `low` and a few above. Batches complete roughly in numerical order."""

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
        """Returns the constructor's arguments, for a record."""
        return self.low, sorted(self.above)


@dataclass
class LeafGroup:
    """Leaves of one server with the same completed batches.

    Attributes:
        paths: paths of the leaves.
        settled: the completed batches.
        applied: the number of applied updates.
    """

    paths: frozenset[str]
    completed: BatchSet
    applied: int

    def row(self) -> tuple[list[str], tuple[int, list[int]], int]:
        """Returns the record that `group_from_row` reads."""
        return sorted(self.paths), self.completed.table(), self.applied


def group_from_row(row: Sequence[Any]) -> LeafGroup:
    """Returns the agreement from a row of a table."""
    paths, completed, applied = row
    return LeafGroup(frozenset(paths), BatchSet(*completed), applied)


def merge(parts: Iterable[LeafGroup]) -> list[LeafGroup]:
    """Returns the agreements, with equal ones merged."""
    agreements: list[LeafGroup] = []
    for part in parts:
        same = [x for x in agreements if (x.applied, x.completed.table()) == (part.applied, part.completed.table())]
        if same:
            same[0].paths |= part.paths
        elif part.paths:
            agreements.append(part)
    return agreements


def redistribute(tables: Sequence[Mapping[str, Any]], owned: Mapping[str, int], servers: int) -> list[dict[str, Any]]:
    """Returns the table of each server from the tables of a snapshot, which may assign leaves to servers differently.

    The first server assigns again each batch that only some leaves have completed. Batches from `next_batch` on are
    assigned in any case.

    Args:
        owned: path of a leaf -> its server.
    """
    rows = [row for table in tables for row in table["parts"]]
    kinds = [part.completed for part in merge(group_from_row(row) for row in rows)]
    begun = range(min(kind.low for kind in kinds), tables[0]["next_batch"])
    lacking = [batch for batch in begun if 0 < sum(batch in kind for kind in kinds) < len(kinds)]
    again = {*tables[0]["again"], *lacking}
    result = []
    for server in range(servers):
        of: Callable[..., list[str]] = lambda paths, server=server: [path for path in paths if owned[path] == server]
        parts = merge(group_from_row((of(paths), *history)) for paths, *history in rows)
        table = tables[server] if server < len(tables) else tables[0]
        changed = {"parts": [part.row() for part in parts], "again": sorted(again) if server == 0 else []}
        result.append({**table, **changed, "applied": min(part.applied for part in parts)})
    return result
