"""The message with which the watchdog ends a job: the observation, the rule, the next step. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spmdkit.faults.heartbeat import LIMIT_OF, Beat, stand


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
            "holds it (process 0's, or that of the launcher) is gone, or the network to it. "
            f"{f'Process 0 {seen}' if seen else ''} No step is possible without it. {newest} See to it, and start all "
            "processes again.".replace("  ", " ")
        )
    if verdict["why"] == "silent":
        one = len(blamed) == 1
        hint = f"It {seen}" if one and seen else "" if one else "Check the network between the machines first."
        return (
            f"{who} {'is' if one else 'are'} silent: no sign of life for longer than watchdog.heartbeat_timeout_s. "
            f"{hint} A silent process is stopped, its machine is gone or cut off, or its interpreter is held, and no "
            f"step is possible without it. {newest} See to it, and start all processes again.".replace("  ", " ")
        )
    key = LIMIT_OF.get(last.phase, "evaluation_timeout_s") if last else "step_timeout_s"
    limit = last.limit_s if last else None
    most = "" if limit is None else f" It may take {limit:.0f} s (watchdog.{key})."
    return (
        f"no progress: {stand(beats, blamed)}.{most} {newest} Look at the stacks, and start the same command again; "
        f"raise watchdog.{key} where that was no hang.".replace("  ", " ")
    )
