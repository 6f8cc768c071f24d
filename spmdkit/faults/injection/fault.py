"""Faults of a drill, specified as `KIND:PROCESS@WHEN`: `kill:2@120`, `stop:0@30s`, `kill:random@random`.
docs/howto/drills.md lists the kinds.

The drill and a process communicate through an unnamed file that both have open:

bytes 0 to 511   the request, as JSON: `number`, `kind`, `at` ("step", "save", "now", "phase"), `moment` (number of the
                 step or save, or the first step of the phase), `phase`, `delay_s`, `seed`
from byte 1024   the result, as JSON: `number`, `time` (the machine's monotonic clock), `step`, `phase`, `failed`
                 (why the fault could not be injected)
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from spmdkit.errors import ConfigError
from spmdkit.foundation.formatting import nearest

NETWORK = ("partition", "delay", "loss", "partition-send", "partition-peer", "rate")
OF_PROCESS = ("kill", "stop", "term", "hang", "slow", "nan", "bit-flip", "truncate", "corrupt", "disk-full")
KINDS = (*OF_PROCESS, *NETWORK, "service", "object-store", "clock", "memory")
PARTITIONS = ("partition", "partition-send", "partition-peer")
ENDS_ATTEMPT = ("kill", "stop", "term", "hang", "truncate", "corrupt", "service", *PARTITIONS)
TEMPORARY = ("slow", "delay", "loss", "rate", "clock", "memory")
"""Faults that last a few seconds and may end no process."""
CHANGES_RESULTS = ("nan", "bit-flip")
"""Faults that may change the results of the run, depending on its config."""
CHECKPOINT_FAULTS = ("truncate", "corrupt")
"""Faults that damage the newest checkpoint after all processes have exited."""
DETECTION_EVENTS = {
    "term": ("preempted",),
    "slow": ("straggler",),
    "nan": ("skipped", "nonfinite", "rolled_back"),
    "bit-flip": ("replicas_differ",),
    "disk-full": ("save_failed", "fault"),
    "object-store": ("save_failed", "fault"),
    "truncate": ("checkpoint_quarantined",),
    "corrupt": ("checkpoint_quarantined",),
}
"""Kind -> events that show that the run has detected a fault of this kind; of all other kinds `fault`."""
DETECTION_CODES: dict[str, tuple[int, ...]] = dict.fromkeys(("bit-flip", "truncate", "corrupt"), ())
DETECTION_CODES |= {"nan": (77,), "disk-full": (74,), "object-store": (74, 75, 76)}
"""Kind -> exit codes of a process that detect a fault of this kind; of all other kinds every exit code."""
INJECTED_BY_DRILL = ("disk-full", "service", "object-store", "clock", "memory", *NETWORK)
"""Faults that a process cannot inject into itself."""

REQUEST_BYTES, RESULT_OFFSET = 512, 1024
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
SIGNALS |= dict.fromkeys(CHECKPOINT_FAULTS, signal.SIGKILL)  # the checkpoint is damaged after all have exited

STEP_DELAY_S, TEMPORARY_FOR_S = 0.25, 5.0
DISK_FULL_BYTES = 2048
"""File size limit of `disk-full`: sufficient for reports to the launcher, too small for a checkpoint."""
CLOCK_STEP_S = 3600
"""`clock` sets the wall clock of a process forward by this."""

PHASES = ("import", "restore", "data", "step", "hook", "evaluation", "save", "end")
"""Phases of a run (foundation/phase.py) at which a process injects a fault."""
FIRST_STEP_OF_PHASE = dict.fromkeys(("data", "step", "hook"), 3)
"""The first step at which a fault in these phases is injected, without a step: the step is compiled by then."""
IN_A_STEP = ("slow", "nan", "bit-flip")
"""Faults that a process injects into a step, so that they need a step."""

RANDOM = "random"
_SPEC = re.compile(
    r"(?P<kind>[a-z-]+):(?P<process>\d{1,6}|random)"
    r"(@(?P<step>\d{1,12})|@(?P<seconds>\d{1,6}(\.\d+)?)s|@(?P<phase>[a-z]+))?"
)


@dataclass(frozen=True)
class Fault:
    """One requested fault. Without `step` and `seconds` it is injected at random moments (tools/drill/timing.py)."""

    kind: str
    process: int | None = None  # None: drawn at random for each injection
    step: int | None = None  # injected before this step, by the process itself
    seconds: float | None = None  # injected this long after the first start, and again after the same interval
    count: int = 1  # number of injections
    phase: str | None = None  # injected when the process enters this phase, at `from_step` or later
    from_step: int = 0

    def __str__(self) -> str:
        when = self.step or self.phase or (RANDOM if self.seconds is None else f"{self.seconds:g}s")
        return f"{self.kind}:{RANDOM if self.process is None else self.process}@{when}"


def parse(text: str, num_processes: int, count: int = 1) -> Fault:
    """Returns the fault of `KIND:PROCESS@STEP`, `KIND:PROCESS@Ts`, `KIND:PROCESS@PHASE` or `KIND:PROCESS@random`;
    PROCESS may be `random`.

    Raises:
        ConfigError: invalid syntax, or an unknown kind or process.
    """
    kind = text.partition(":")[0]
    if kind not in KINDS:
        raise ConfigError(
            f"--fault {text[:60]}: unknown kind {kind[:30]!r}. The kinds are {', '.join(KINDS)}."
            f"{nearest(kind, KINDS)} Try --fault kill:1@20."
        )
    match = _SPEC.fullmatch(text)
    phase = match["phase"] if match and match["phase"] != RANDOM else None
    if match is None or (phase is not None and (phase not in PHASES or kind in IN_A_STEP)):
        raise ConfigError(
            f"--fault {text[:60]}: invalid syntax. It is KIND:PROCESS@WHEN, where WHEN is a step (120), seconds (30s) "
            f"or random, or a phase ({', '.join(PHASES)}; not of {', '.join(IN_A_STEP)}), and PROCESS a number or "
            f"random. Try --fault {kind}:1@20."
        )
    process = None if match["process"] == RANDOM else int(match["process"])
    if process is not None and process >= num_processes:
        raise ConfigError(
            f"--fault {text[:60]}: there is no process {process}. With -n {num_processes} they are 0 to "
            f"{num_processes - 1}. Try --fault {kind}:{num_processes - 1}{text[match.end('process') :]}, or "
            f"-n {process + 1}."
        )
    step = int(match["step"]) if match["step"] else None
    seconds = float(match["seconds"]) if match["seconds"] else None
    if step == 0 or seconds == 0:
        raise ConfigError(
            f"--fault {text[:60]}: the first step is 1, and a time is more than 0 s. Try --fault "
            f"{kind}:{match['process']}@1."
        )
    return Fault(kind, process, step, seconds, count, phase, FIRST_STEP_OF_PHASE.get(phase or "", 0))
