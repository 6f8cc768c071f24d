"""Reports data rows that were retried or skipped, as an event of each process and a message."""

from __future__ import annotations

from typing import Any

from spmdkit.data import row_errors
from spmdkit.run.hooks.base import Hook, RunView


def make(config: Any) -> Hook | None:
    """Returns the hook that reports bad rows; None if the config permits neither retries nor bad rows."""
    if not config.data.retries and not config.data.max_bad_examples:
        return None

    def report(run: RunView, step: int, *_: Any) -> None:
        for ledger in run.program.skipped_rows:
            for news in ledger.take_events():
                run.events.write("unreadable_row", step=step, **news)
                run.message(row_errors.describe_event(news, run.cluster.process_index))

    return Hook("data", order=42, after_step=report, after_eval=report, end=report)
