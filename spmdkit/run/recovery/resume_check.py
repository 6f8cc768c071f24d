"""The differences between the run of a checkpoint and the run that resumes it: settings, source text, data, versions
and environment variables, in one table.

Differences are reported and written to events.jsonl. A difference that changes the examples of a step is rejected
unless the user allows it by name (`train --allow-change KEY`).
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from spmdkit.config import Config
from spmdkit.data import BatchSchedule, PerProcess, open_data, open_source
from spmdkit.data.fingerprint import fingerprint, structure
from spmdkit.errors import ConfigError
from spmdkit.foundation.formatting import nearest
from spmdkit.metrics.environment import numeric_variables, package_versions
from spmdkit.program import source_digest
from spmdkit.program.program import Program
from spmdkit.run.recovery import skipped_batches

ANOTHER_RUN = (
    *("task", "seed", "batch_size", "data.shuffle", "data.drop_remainder"),
    *("data.bucket_boundaries", "data.bucket_by", "train_data"),
)
"""Settings that determine the examples of a step and must not change during a run."""
CHECKPOINTS = "checkpoints"
"""Allows a run to continue from an older step, or step 0, if none of the steps that it has saved is left."""
NOT_COMPARED = ("run_dir",)
MAX_CHARS = 60  # characters of a value in the table


class Change(NamedTuple):
    """One difference between the saved and the current run, as text for the user."""

    key: str
    before: str
    now: str


def described(config: Config, program: Program) -> dict[str, Any]:
    """Returns the description of a run for the record of a checkpoint, in addition to its config: digests of source
    text and data, versions, variables. A task without a file (of a notebook) is described by the text of its step."""
    samples, given = config.data.check != "off", program.task.named_data()
    data = {name: _data(each, name, config.data.retries, samples) for name, each in given.items()}
    text = source_digest.digests(config) or {"the step of the task": source_digest.digest(program.lowered.as_text())}
    package = source_digest.digest(json.dumps(source_digest.package_digests()))
    return {
        "text": text | {"spmdkit's own files": package},
        "data": data,
        "versions": {"python": platform.python_version()} | package_versions(),
        "variables": numeric_variables(os.environ),
    }


def _data(given: Any, name: str, retries: int, samples: bool) -> dict[str, Any]:
    """Returns a fingerprint of the data, with digests of rows if it `samples` them. Rows that are read separately,
    which may fail, are hashed separately."""
    if isinstance(given, PerProcess) and given.lengths:  # identical on all processes although their rows differ
        example = structure(open_source(given, name))
        return {"examples": sum(given.lengths), "example": example, "rows": {"each process": str(given.lengths)}}
    found = fingerprint(open_data(given, name), retries, reads_rows=samples)
    digest = hashlib.sha256(json.dumps(found.rows, sort_keys=True).encode()).hexdigest()[:16]
    return {
        "examples": found.examples,
        "example": found.example,
        "rows": {"all": digest} if found.in_memory else found.rows,
    }


def _data_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Change]:
    """Yields the data sets with different lengths, structures, or contents of a row that was readable both times."""
    for name in sorted({*old, *new}):
        was, now = old.get(name), new.get(name)
        if was is None or now is None:
            yield Change(name, _text_of(was), _text_of(now))
            continue
        rows = [row for row in now["rows"] if row in was["rows"] and was["rows"][row] != now["rows"][row]]
        if rows or any(was[key] != now[key] for key in ("examples", "example")):
            other = f" with other contents{'' if rows == ['all'] else f' of {rows[0]}'}" if rows else ""
            yield Change(name, _text_of(was), f"{_text_of(now)}{other}")


def _text_of(data: Mapping[str, Any] | None) -> str:
    return "not there" if data is None else f"{data['examples']} of {data['example']}"


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Returns the differences between two records of a run, by `config` (YAML text) and `described`."""
    old, new = (dict(_settings(record["config"])) for record in (before, now))
    shown: Callable[[Any], str] = lambda value: value if isinstance(value, str) else json.dumps(value, default=str)
    found = [
        Change(key, shown(old.get(key)), shown(new.get(key)))
        for key in [*old, *(key for key in new if key not in old)]
        if old.get(key) != new.get(key) and key not in NOT_COMPARED
    ]
    was = before["described"]
    found += _data_changes(was["data"], now["described"]["data"])
    for kind, name, text in (
        ("text", "{}", lambda digest: f"text {digest[:8]}"),
        ("versions", "version of {}", str),
        ("variables", "{}", str),
    ):
        old, new = was[kind], now["described"][kind]
        there: Callable[..., str] = lambda value, text=text: "not there" if value is None else text(value)
        found += [
            Change(name.format(key), there(old.get(key)), there(new.get(key)))
            for key in sorted({*old, *new})
            if old.get(key) != new.get(key)
        ]
    return found


def _settings(text: str) -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) of every setting. The task is identified by the names of its file and function."""
    for key, value in _flat("", yaml.safe_load(text)):
        yield key, ":".join(Path(part).name for part in str(value).rsplit(":", 1)) if key == "task" else value


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value and path != "batch_size":
        for key, inner in value.items():
            yield from _flat(f"{path}.{key}" if path else str(key), inner)
    elif value != {}:
        yield path, value


def table(found: Sequence[Change]) -> str:
    """Returns one line per change."""
    wide = max(len(change.key) for change in found)
    return "\n".join(f"  {c.key:{wide}}  {_shorten(c.before)} -> {_shorten(c.now)}" for c in found)


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_CHARS else f"{line[: MAX_CHARS // 2]} ... {line[-MAX_CHARS // 2 + 5 :]}"


def check_allowed(allow_change: Sequence[str]) -> None:
    """Raises ConfigError for a key that `--allow-change` does not accept."""
    for key in allow_change:
        if key not in (accepted := (*ANOTHER_RUN, CHECKPOINTS)):
            raise ConfigError(
                f"--allow-change {key}: no such key. It accepts the settings that must not change during a run: "
                f"{', '.join(ANOTHER_RUN)}; all others may change. {CHECKPOINTS}: the saved steps may be missing."
                f"{nearest(key, accepted)}"
            )


def check(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    step: int,
    schedule: BatchSchedule,
    directory: Path,
    allow_change: Sequence[str] = (),
) -> list[Change]:
    """Returns the differences between the record of `step` and the current run. Raises ConfigError if it is a different
    run and this is not allowed."""
    found = changes(before, now)
    another = {change.key for change in found if change.key in ANOTHER_RUN}
    why = refusal(found, allow_change, directory, step)
    if another <= {"train_data"} - set(allow_change):  # the message about the batch names the cause
        why = other_examples(before["next_batch"], skipped_batches.as_saved(schedule, before), step) or why
    if why is not None:
        raise ConfigError(why)
    return found


def refusal(found: Sequence[Change], allow_change: Sequence[str], directory: Path, step: int) -> str | None:
    """Returns the reason why a run cannot be resumed with the current settings, or None."""
    another = [change for change in found if change.key in ANOTHER_RUN and change.key not in allow_change]
    if not another:
        return None
    first, flags = another[0], " ".join(f"--allow-change {change.key}" for change in another)
    others = ", ".join(f"{c.key} ({c.before} -> {c.now})" for c in another[1:])
    more = f" Also changed: {others}." if others else ""
    return (
        f"{directory} holds a run with {first.key}: {first.before}, saved at step {step}; now {first.key} is "
        f"{first.now}.{more} {', '.join(ANOTHER_RUN)} must not change during a run, because its examples would "
        f"differ. Restore {first.key}, or set run_dir to a new folder. To continue anyway: {flags}."
    )


def other_examples(digest: str, schedule: BatchSchedule, step: int) -> str | None:
    """Returns the reason why the next batch of a resumed run would contain different examples, or None.

    Args:
        digest: of the batch after `step`, computed when `step` was saved.
    """
    if digest == schedule.digest(step + 1):
        return None
    return (
        f"train_data has changed: batch {step + 1} has different examples than when step {step} was saved "
        f"({schedule.num_examples} examples now). Restore the data, or set run_dir to a new folder. To continue "
        "anyway: --allow-change train_data."
    )
