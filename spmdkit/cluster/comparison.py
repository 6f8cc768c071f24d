"""Texts about processes: differences of their facts, and their names. `Cluster.same_everywhere` compares the facts."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence

Facts = Mapping[str, str]
"""The compared texts: name -> text."""

GIVE_THE_SAME = (
    "Different programs would deadlock or mix their sums. Give every process the same files, versions and variables."
)
MAX_TEXT = 200_000
"""Facts of up to this many characters are published; of longer ones only the digest."""
MAX_SHOWN = 6


def digest(facts: Facts) -> str:
    """Returns the SHA-256 of facts."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def shortened(facts: Facts) -> dict[str, str]:
    """Returns the facts, with a digest instead of each text that is too long to publish."""
    return {
        name: text if len(text) <= MAX_TEXT else f"digest {digest({name: text})[:16]}" for name, text in facts.items()
    }


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
    for number, (a, b) in enumerate(itertools.zip_longest(theirs.splitlines(), ours.splitlines()), start=1):
        if a != b:
            return f"{name}: line {number} is {_quoted(b)} instead of {_quoted(a)}"
    return f"{name}: the line endings differ"


def _quoted(line: str | None) -> str:
    if line is None:
        return "absent"
    line = line.strip()
    return repr(line if len(line) <= 160 else f"{line[:100]} ... {line[-50:]}")


def difference_message(what: str, lines: Sequence[Sequence[str]]) -> str:
    """Returns one sentence for the differences of all processes; processes with the same differences are grouped."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for process, differing in enumerate(lines):
        if differing:
            alike.setdefault(tuple(differing), []).append(process)
    parts = []
    for differing, processes in alike.items():
        differs = "differs" if len(processes) == 1 else "differ"
        parts.append(f"{name_processes(processes)} {differs} from process 0: {_listed(what, differing)}")
    return f"{what} must be the same in all {len(lines)} processes, but {' and '.join(parts)}."


def _listed(what: str, lines: Sequence[str]) -> str:
    shown = [*lines[:MAX_SHOWN], *([f"and {len(lines) - MAX_SHOWN} more"] if len(lines) > MAX_SHOWN else [])]
    return shown[0].removeprefix(f"{what}: ") if len(shown) == 1 else "".join(f"\n  {line}" for line in shown)


def name_processes(processes: Sequence[int]) -> str:
    """Returns `process 3` or `processes 1, 3 and 4`, at most the first eight by number."""
    if len(processes) == 1:
        return f"process {processes[0]}"
    shown = [str(p) for p in processes[:8]]
    rest = len(processes) - len(shown)
    last = f"{rest} more" if rest else shown.pop()
    return f"processes {', '.join(shown)} and {last}"
