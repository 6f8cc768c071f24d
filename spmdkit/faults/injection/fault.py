"""What is ordered: `KIND:PROCESS@WHEN`, as `kill:2@120`, `stop:0@30s`, `kill:random@random`. Pure.

| kind | what is done | how it is meant to go on |
| --- | --- | --- |
| kill | SIGKILL | a restart from the newest checkpoint |
| stop | SIGSTOP: it lives, and gives no sign | the others end with 75 after `watchdog.heartbeat_timeout_s`, a restart |
| term | SIGTERM to this one alone | all save at one step and leave with 42, a restart that loses nothing |
| hang | its training thread sleeps for ever before a step, as in data that do not come | 76 after `watchdog.step_timeout_s`, a
restart |
| slow | each of its steps takes 0.25 s longer, for 5 s | no restart: all go on, slowly |
| nan | a NaN in its rows of one batch | what `on_nonfinite` says; `stop` ends the run |
| bit-flip | one bit of its copy of the largest parameter | `replica_check` finds it; without that, or a copy, nothing
does |
| truncate | killed, and a file of the newest checkpoint is cut in half | a restart from the checkpoint before |
| corrupt | killed, and one bit of the newest checkpoint is flipped | a restart from the checkpoint before |
| disk-full | no file of any process can grow beyond 2 KiB until that is noticed: they share a disk | told, and made up
for at the next interval |
| partition | its host neither sends nor gets a frame until all have ended | 75 after `watchdog.heartbeat_timeout_s`, a restart |
| partition-send | what its host sends is lost until all have ended; what is sent to it comes | as partition |
| partition-peer | nothing passes between its host and that of the next process; both reach the coordination service,
until all have ended | 76 after `watchdog.step_timeout_s`, a restart |
| delay | what its host sends and gets comes 50 ms later, for 5 s | no restart |
| loss | 2 % of what its host sends and gets is lost, for 5 s | no restart |
| rate | between its host and each other 1 MB/s pass each way, for 5 s | no restart |

The last six put each process into a network namespace of its own (tools/drill/network.py): Linux, as root.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from spmdkit.errors import ConfigError
from spmdkit.foundation.formatting import nearest

NETWORK = ("partition", "delay", "loss", "partition-send", "partition-peer", "rate")
KINDS = ("kill", "stop", "term", "hang", "slow", "nan", "bit-flip", "truncate", "corrupt", "disk-full", *NETWORK)
ENDS = ("kill", "stop", "term", "hang", "truncate", "corrupt", "partition", "partition-send", "partition-peer")
"""What ends the attempt in which it comes."""
LASTS = ("slow", "delay", "loss", "rate")
"""What lasts for a while, and ends nothing."""
BY_POLICY = ("nan", "bit-flip")
"""What may change the numbers, as the config says."""

OF_CHECKPOINTS = ("truncate", "corrupt")
"""What comes to the newest checkpoint, when all have ended."""

FROM_HERE = ("disk-full", *NETWORK)
"""What no process can do to itself: the drill does it."""

RANDOM = "random"
_SPEC = re.compile(
    r"(?P<kind>[a-z-]+):(?P<process>\d{1,6}|random)(@(?P<step>\d{1,12})|@(?P<seconds>\d{1,6}(\.\d+)?)s|@random)?"
)


@dataclass(frozen=True)
class Fault:
    """One order.

    Attributes:
        process: which; None: any, drawn each time.
        step: comes before this step is begun, in the process itself.
        seconds: comes so long after the first process was started, and again each time after as long.
        count: how often. With neither `step` nor `seconds` at a random moment; see tools/drill/timing.py.
    """

    kind: str
    process: int | None = None
    step: int | None = None
    seconds: float | None = None
    count: int = 1

    def __str__(self) -> str:
        when = (
            RANDOM if self.step is None and self.seconds is None else self.step if self.step else f"{self.seconds:g}s"
        )
        return f"{self.kind}:{RANDOM if self.process is None else self.process}@{when}"


def parse(text: str, num_processes: int, count: int = 1) -> Fault:
    """Returns the fault of `KIND:PROCESS@STEP`, `KIND:PROCESS@Ts` or `KIND:PROCESS@random`; the process may be `random`
    too.

    Raises:
        ConfigError: it is none, or there is no such process or kind.
    """
    kind = text.partition(":")[0]
    if kind not in KINDS:
        raise ConfigError(
            f"--fault {text[:60]}: {kind[:30]!r} is no kind of fault. There are {', '.join(KINDS)}.{nearest(kind, KINDS)} Try --fault kill:1@20."
        )
    found = _SPEC.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"--fault {text[:60]}: not understood. It is KIND:PROCESS@WHEN, where WHEN is a step (120), seconds (30s) or random, and PROCESS a number or "
            f"random. Try --fault {kind}:1@20."
        )
    process = None if found["process"] == RANDOM else int(found["process"])
    if process is not None and process >= num_processes:
        raise ConfigError(
            f"--fault {text[:60]}: there is no process {process}. With -n {num_processes} they are 0 to {num_processes - 1}. Try --fault {kind}:"
            f"{num_processes - 1}{text[found.end('process') :]}, or -n {process + 1}."
        )
    step = int(found["step"]) if found["step"] else None
    seconds = float(found["seconds"]) if found["seconds"] else None
    if step == 0 or seconds == 0:
        raise ConfigError(
            f"--fault {text[:60]}: the first step is 1, and a time is more than 0 s. Try --fault {kind}:{found['process']}@1."
        )
    return Fault(kind, process, step, seconds, count)
