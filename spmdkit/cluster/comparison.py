"""Checks that all processes have the same facts. A difference is an error on every process.

Each process sends process 0 the digest of its facts. If all are equal, this costs two small messages per process.
Otherwise process 0 publishes its facts, each process that differs reports the differences, and all raise the same
ConfigError. Process 0 holds the store, so it stays until the others have read the result. Otherwise they would exit
with a lost connection (75) instead of the error (78).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from spmdkit.cluster.store import Store
from spmdkit.errors import ConfigError, RendezvousError
from spmdkit.foundation import phase
from spmdkit.foundation.deadline import Deadline
from spmdkit.foundation.timeouts import COMPARISON_END_S, COMPARISON_LINGER_S, COMPARISON_REPLY_S

Facts = Mapping[str, str]
"""What is compared: name -> text."""

GIVE_THE_SAME = (
    "Different programs would deadlock or mix their sums. Give every process the same files, versions and variables."
)
MOST_TEXT = 200_000
"""Facts of up to this many characters are published; of a longer one the digest."""
SHOWN = 6


class Comparison:
    """One comparison among all processes of a cluster. Every process uses the same folder of the store."""

    def __init__(self, store: Store, folder: str, process_index: int, num_processes: int, timeout_s: float):
        self._store, self._folder = store, folder
        self._me, self._num, self._timeout_s = process_index, num_processes, timeout_s

    def run(self, what: str, facts: Callable[[], Facts], repair: str = GIVE_THE_SAME) -> None:
        """Returns when all processes have equal facts.

        Args:
            repair: the rule and the change that repairs it, for the end of the message.

        Raises:
            ConfigError: the same on every process, with the processes that differ from process 0 and their differences.
            RendezvousError: `facts` raised on another process, or a process did not come. On the process on which it
                raised, the exception propagates.
        """
        try:
            mine = dict(facts())
        except BaseException as error:
            self._end_with_failure(what, error)
            raise
        verdict = self._verdict(what, _digest(json.dumps(mine, sort_keys=True)))
        if failed := verdict.get("failed"):
            self._confirm()
            raise RendezvousError(failed)
        if differing := verdict.get("differ"):
            message = self._explain(what, mine, differing, repair)
            self._confirm()
            raise ConfigError(message)

    # ---- the verdict -------------------------------------------------------------------------------------------------

    def _verdict(self, what: str, digest: str) -> dict[str, Any]:
        if self._me:
            self._put(f"digest/{self._me}", {"digest": digest})
            return self._get("verdict", self._timeout_s + COMPARISON_REPLY_S, 0, what)
        return self._judge(what, digest)

    def _judge(self, what: str, digest: str) -> dict[str, Any]:
        """Process 0: publishes and returns the result of comparing all digests."""
        deadline, differing = Deadline(self._timeout_s), []
        verdict: dict[str, Any] = {}
        for process in range(1, self._num):
            try:
                reply = self._get(f"digest/{process}", deadline.remaining_s, process, what)
            except RendezvousError as error:
                reply = {"failed": str(error)}
            if "failed" in reply:
                verdict = {"failed": reply["failed"]}
                break
            if reply["digest"] != digest:
                differing.append(process)
        verdict = verdict or ({"differ": differing} if differing else {})
        self._put("verdict", verdict)
        return verdict

    def _end_with_failure(self, what: str, error: BaseException) -> None:
        """Reports to the others why this process fails."""
        first = (str(error).strip().splitlines() or [""])[0][:300]
        message = (
            f"process {self._me} failed in the comparison of {what} ({type(error).__name__}: {first}). All processes "
            "start "
            "together. See its output, and start all again."
        )
        with contextlib.suppress(RendezvousError):
            self._put("verdict" if self._me == 0 else f"digest/{self._me}", {"failed": message})
            self._confirm()

    # ---- a difference ------------------------------------------------------------------------------------------------

    def _explain(self, what: str, mine: dict[str, str], differing: Sequence[int], repair: str) -> str:
        """Returns the message, the same text on every process."""
        if self._me == 0:
            self._put("reference", _shortened(mine))
            lines = {p: self._get(f"difference/{p}", COMPARISON_REPLY_S, p, what)["lines"] for p in differing}
            self._put("message", {"text": f"{_message(what, self._num, lines)} {repair}"})
        elif self._me in differing:
            theirs = self._get("reference", COMPARISON_REPLY_S, 0, what)
            self._put(f"difference/{self._me}", {"lines": differences(theirs, _shortened(mine))})
        return str(self._get("message", 2 * COMPARISON_REPLY_S, 0, what)["text"])

    def _confirm(self) -> None:
        """Records that this process has the result. Process 0 waits, for a bounded time, until all others have it."""
        phase.mark_ending()
        with contextlib.suppress(RendezvousError):
            if self._me:
                self._put(f"confirmed/{self._me}", {})
                return
            all_have_it = lambda: len(self._store.entries(f"{self._folder}/confirmed")) == self._num - 1
            Deadline(COMPARISON_END_S).wait_for(all_have_it, 0.01)
            time.sleep(COMPARISON_LINGER_S)

    # ---- the store ---------------------------------------------------------------------------------------------------

    def _put(self, key: str, value: dict[str, Any]) -> None:
        self._store.put(f"{self._folder}/{key}", json.dumps(value))

    def _get(self, key: str, timeout_s: float, process: int, what: str) -> dict[str, Any]:
        with _named(process, what, timeout_s):
            found: dict[str, Any] = json.loads(self._store.get(f"{self._folder}/{key}", timeout_s))
        return found


@contextmanager
def _named(process: int, what: str, timeout_s: float) -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise RendezvousError(
            f"process {process} did not report {what} within {timeout_s:g} s. All processes must reach the same point "
            "before the first step. See its output, and start all again."
        ) from None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()


def _shortened(facts: Facts) -> dict[str, str]:
    return {name: text if len(text) <= MOST_TEXT else f"digest {_digest(text)[:16]}" for name, text in facts.items()}


def differences(theirs: Facts, ours: Facts) -> list[str]:
    """Returns a line for each fact that differs."""
    names = [*theirs, *(name for name in ours if name not in theirs)]
    return [_difference(n, theirs.get(n), ours.get(n)) for n in names if theirs.get(n) != ours.get(n)]


def _difference(name: str, theirs: str | None, ours: str | None) -> str:
    if theirs is None or ours is None:
        there = ours if theirs is None else theirs
        shown = "" if there is None or "\n" in there else f", {_quoted(there)}"
        return f"{name}: {'absent in process 0' if theirs is None else 'only in process 0'}{shown}"
    if "\n" not in theirs and "\n" not in ours:
        return f"{name}: {_quoted(ours)} instead of {_quoted(theirs)}"
    return f"{name}: {first_difference(theirs, ours)}"


def first_difference(theirs: str, ours: str) -> str:
    """Returns a description of the first line in which two texts differ."""
    for number, (a, b) in enumerate(itertools.zip_longest(theirs.splitlines(), ours.splitlines()), start=1):
        if a != b:
            return f"line {number} is {_quoted(b)} instead of {_quoted(a)}"
    return "the line endings differ"


def _quoted(line: str | None) -> str:
    """Returns a line for a message; of a long line both ends, since numbers are at the end."""
    if line is None:
        return "absent"
    line = line.strip()
    return repr(line if len(line) <= 160 else f"{line[:100]} ... {line[-50:]}")


def _message(what: str, num: int, lines: Mapping[int, Sequence[str]]) -> str:
    """Returns one text for all differences; processes with the same differences are named together."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for process, found in lines.items():
        alike.setdefault(tuple(found), []).append(process)
    parts = []
    for found, processes in alike.items():
        differs = "differs" if len(processes) == 1 else "differ"
        parts.append(f"{name_processes(processes)} {differs} from process 0: {_listed(what, found)}")
    return f"{what} must be the same in all {num} processes, but {' and '.join(parts)}."


def _listed(what: str, lines: Sequence[str]) -> str:
    """Returns the differences for a sentence; several are listed one per line."""
    shown = [*lines[:SHOWN], *([f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else [])]
    return shown[0].removeprefix(f"{what}: ") if len(shown) == 1 else "".join(f"\n  {line}" for line in shown)


def name_processes(processes: Sequence[int]) -> str:
    """Returns `process 3` or `processes 1, 3 and 4`, at most the first eight by number."""
    if len(processes) == 1:
        return f"process {processes[0]}"
    shown = [str(p) for p in processes[:8]]
    rest = len(processes) - len(shown)
    last = f"{rest} more" if rest else shown.pop()
    return f"processes {', '.join(shown)} and {last}"
