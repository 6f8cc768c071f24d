"""The message with which the watchdog ends a job: the observation, the rule, the next step. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from spmdkit.errors import ExitCode
from spmdkit.faults.heartbeat import Beat, stand


def in_order(processes: Iterable[int], first: list[int]) -> list[int]:
    """Returns the processes, those in `first` before the others."""
    return sorted(processes, key=lambda p: (p not in first, p))


def words(verdict: Mapping[str, Any], beats: Mapping[int, Beat], newest: str) -> str:
    """Returns why the job ends: what was seen, the rule, what to do."""
    blamed = verdict["processes"]
    who = " and ".join(f"process {p}" for p in blamed)
    last = beats.get(blamed[0])
    if verdict["why"] == "left":
        left = "is gone" if verdict["exit"] is None else f"has left with exit code {verdict['exit']}"
        return (
            f"{who} {left}: {verdict['message']}\nNo step is possible without it, so this process ends too; the "
            "cause is in that one's own output."
        )
    seen = "" if last is None else f"was last seen {last.does} at step {last.step}."
    if verdict["why"] == "unreachable":
        return (
            "the coordination service has not responded for longer than watchdog.heartbeat_timeout_s: the machine that "
            "holds it (process 0's, or that of "
            f"the launcher) is gone, or the network to it. {f'Process 0 {seen}' if seen else ''} No step is possible "
            f"without it. {newest} See to "
            "it, and start all processes again.".replace("  ", " ")
        )
    if verdict["why"] == "silent":
        one = len(blamed) == 1
        where = (
            f" It {seen}"
            if one and seen
            else ""
            if one
            else " Several at the same time: check the network between the machines first."
        )
        return (
            f"{who} {'is' if one else 'are'} silent: no sign of life for longer than "
            f"watchdog.heartbeat_timeout_s.{where} "
            f"{'It is' if one else 'They are'} stopped, {'its machine is' if one else 'their machines are'} gone or "
            "cut off, or "
            f"{'its interpreter is' if one else 'their interpreters are'} held, and no step is possible without "
            f"{'it' if one else 'them'}. {newest} See to it, and start all processes again.".replace("  ", " ")
        )
    key, limit = (
        KEYS.get(last.phase, "evaluation_timeout_s") if last else "step_timeout_s",
        last.limit_s if last else None,
    )
    most = "" if limit is None else f" It may take {limit:.0f} s (watchdog.{key})."
    return (
        f"no progress: {stand(beats, blamed)}.{most} {newest} Look at the stacks, and start the same command again; "
        f"raise watchdog.{key} where "
        "that was no hang.".replace("  ", " ")
    )


KEYS = {
    "begin": "import_timeout_s",
    "import": "import_timeout_s",
    "compile": "compile_timeout_s",
    "init": "compile_timeout_s",
    "restore": "restore_timeout_s",
    "save": "save_timeout_s",
    "end": "save_timeout_s",
    "data": "step_timeout_s",
    "step": "step_timeout_s",
}
"""Phase -> its key in the section `watchdog`; what is not here is a hook's, or the evaluation."""


def code_after(report: Mapping[str, Any]) -> int:
    """Returns the exit code of those that another one left behind."""
    return int(ExitCode.PREEMPTED if report["exit"] == ExitCode.PREEMPTED else ExitCode.PEER_LOST)
