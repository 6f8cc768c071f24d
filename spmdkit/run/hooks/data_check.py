"""`data: {check: full}`: a thread reads each row of the data once, and the digests are compared between processes, and
with those of the checkpoint that the run resumes from. A difference ends the run with 78.

The digest is that of the sample (data/fingerprint.py), of up to `BLOCKS` blocks of consecutive rows; the record of a
checkpoint contains it. Blocks with an unreadable row, streams, per-process data and rows that differ when they are read
again are not compared.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from typing import Any, TypeAlias

from spmdkit.cluster import Cluster
from spmdkit.cluster.store import Store
from spmdkit.data import CheckedStream, PerProcess, Source, open_data
from spmdkit.data.fingerprint import block_digests, block_rows, rows_vary
from spmdkit.errors import ConfigError, SpmdkitError
from spmdkit.foundation.timeouts import DATA_CHECK_POLL_S
from spmdkit.run.hooks.base import Hook, RunView, Stop

Digests: TypeAlias = dict[str, dict[str, Any]]
"""Name of a data set -> its number of examples and the digests of its blocks."""


def make(config: Any) -> Hook | None:
    """Returns the hook that reports the result; None without `data.check: full`."""
    if config.data.check != "full":
        return None
    check = DataCheck(config.data.retries)
    calls = {name: getattr(check, name) for name in ("begin", "after_step", "end", "state", "restore")}
    return Hook("data_check", order=43, **calls)


class DataCheck:
    """The thread of one process and its result. `restore` sets the expected digests."""

    def __init__(self, retries: int):
        self._retries = retries
        self._expected: Digests = {}
        self._found: Digests = {}
        self._ended = threading.Event()
        self._problem = ""
        self._notes: list[str] = []
        self._done: dict[str, Any] | None = None

    def begin(self, run: RunView, step: int, state: Any) -> None:
        """Starts the thread."""
        named = run.program.task.named_data().items()
        sources = {name: source for name, x in named if (source := self._comparable(name, x)) is not None}
        arguments = (run.cluster, sources, *run.cluster.board("data check"))
        threading.Thread(target=self._check, args=arguments, name="data-check", daemon=True).start()

    def after_step(self, run: RunView, step: int, *_: Any) -> Stop | None:
        """Reports the result, once."""
        while self._notes:
            run.message(self._notes.pop(0))
        done, self._done = self._done, None
        if done is not None and run.cluster.is_main:
            run.events.write("data_checked", step=step, **done)
        problem, self._problem = self._problem, ""
        return Stop(ConfigError.exit_code, problem) if problem else None

    def end(self, run: RunView, step: int, *_: Any) -> None:
        """Ends the thread, and reports an incomplete check. Raises ConfigError for a difference that was found after
        the last agreement of the processes."""
        if (stop := self.after_step(run, step)) is not None:
            raise ConfigError(stop.why)
        if not self._ended.is_set():
            run.message("note: data.check: the run ended before all rows were read and compared")
        self._ended.set()

    def state(self) -> Digests:
        """Returns the digests for the checkpoint; until all rows are read, the expected ones."""
        return self._expected | self._found

    def restore(self, saved: Digests) -> None:
        """Sets the expected digests."""
        self._expected = saved

    def _check(self, cluster: Cluster, sources: Mapping[str, Source], store: Store, folder: str) -> None:
        start = time.monotonic()
        try:
            found = {name: self._read(source) for name, source in sources.items()}
            store.put(f"{folder}/{cluster.process_index}", json.dumps(found))
            while len(others := store.entries(folder)) < cluster.num_processes:
                if self._ended.wait(DATA_CHECK_POLL_S):
                    return
        except _Ended:
            return
        except SpmdkitError as error:  # of the data or the store, which the training thread reports too
            self._notes.append(f"WARNING: data.check: not all rows were compared ({type(error).__name__}: {error})")
            self._ended.set()
            return
        every = [json.loads(others[str(process)]) for process in range(cluster.num_processes)]
        self._problem = _differing_process(every) or self._changed(found)
        rows = {name: digests["examples"] for name, digests in found.items()}
        self._found, self._done = found, {"rows": rows, "seconds": round(time.monotonic() - start, 1)}
        self._ended.set()

    def _comparable(self, name: str, given: Any) -> Source | None:
        source = open_data(given, name)
        if isinstance(given, PerProcess):
            why = "per-process data"
        elif isinstance(source, CheckedStream):
            why = "a stream"
        elif rows_vary(source, self._retries):
            why = "rows differ each time they are read"
        else:
            return source
        self._notes.append(f"note: data.check: {name} is not compared ({why})")
        return None

    def _read(self, source: Source) -> dict[str, Any]:
        digests = []
        for digest in block_digests(source, self._retries):
            if self._ended.is_set():
                raise _Ended
            digests.append(digest)
        return {"examples": len(source), "in_memory": source.in_memory, "blocks": digests}

    def _changed(self, found: Digests) -> str:
        if rows := _differing_rows(self._expected.get("train_data"), found.get("train_data")):
            return (
                f"train_data has changed: {rows} have other contents than when the checkpoint was saved. Restore the "
                "data, or set run_dir to a new folder. To continue anyway: --allow-change train_data."
            )
        for name in found:
            if rows := _differing_rows(self._expected.get(name), found[name]):
                self._notes.append(f"WARNING: {name} has changed: {rows} have other contents than before the restart")
        return ""


class _Ended(Exception):
    """The run has ended."""


def _differing_process(every: list[Digests]) -> str:
    for process, theirs in enumerate(every):
        for name in every[0]:
            if rows := _differing_rows(every[0][name], theirs.get(name)):
                return (
                    f"{name}: {rows} differ between process 0 and process {process}. Every process reads its rows of "
                    "one global batch, so data[i] has to be the same example everywhere. Give all processes the same "
                    "data, or declare per-process data: Task(train_data=sk.per_process(source))."
                )
    return ""


def _differing_rows(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> str:
    """Returns `rows 64 to 127` of the first differing block, or an empty text. Without digests nothing differs."""
    if one is None or other is None or one["in_memory"] != other["in_memory"]:
        return ""
    blocks = list(block_rows(one["examples"]))
    for rows, a, b in zip(blocks, one["blocks"], other["blocks"], strict=False):
        if None not in (a, b) and a != b:
            return f"rows {rows.start} to {rows.stop - 1}" if len(rows) > 1 else f"row {rows.start}"
    return ""
