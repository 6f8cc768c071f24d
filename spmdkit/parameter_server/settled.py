"""Which batches are settled at a server: applied, or dropped for good. Two servers can differ by a push that reached one of them alone.

That happens when a worker dies while it pushes, and when a snapshot is made meanwhile. Such a batch is given out again, and whoever has it settled
takes it no second time, whichever worker sends it: so each leaf gets each batch once.
"""

from __future__ import annotations

from collections.abc import Iterable


class Settled:
    """A set of batch numbers: all below `low`, and a few above, since batches are settled about in the order of their numbers."""

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

    def beyond(self, other: Settled) -> set[int]:
        """Returns what is settled here and not there."""
        return {batch for batch in [*range(other.low, self.low), *self.above] if batch not in other}

    def table(self) -> tuple[int, list[int]]:
        """Returns what the constructor takes, for a record."""
        return self.low, sorted(self.above)
