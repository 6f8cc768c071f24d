"""Tells of rows of the data that were read again or left out: an event of each process, and a line of process 0."""

from __future__ import annotations

from typing import Any

from spmdkit.data import row_errors
from spmdkit.run.hooks.base import Hook, RunView


def make(config: Any) -> Hook | None:
    """Returns the hook that tells what had to be done about the data, None where nothing may be."""
    if not config.data.retries and not config.data.max_bad_examples:
        return None

    def tell(run: RunView, step: int, *_: Any) -> None:
        for ledger in run.program.skipped_rows:
            for news in ledger.take_events():
                run.events.write("unreadable_row", step=step, **news)
                run.message(row_errors.describe_event(news, run.cluster.process_index))

    return Hook("data", order=42, after_step=tell, after_eval=tell, end=tell)
