"""How a drill and a process speak to each other, through a file without a name: numbers that both sides know.

bytes 0 to 511   the order, as JSON: `number`, `kind`, `at` ("step", "save", "now"), `moment` (number of the step or
                 save), `delay_s`, `seed`
from byte 1024   what has come, as JSON: `number`, `time` (the machine's monotonic clock), `step`, `phase`, `failed`
                 (why it could not be)
"""

from __future__ import annotations

import signal

ORDER_BYTES, SAID_AT = 512, 1024

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
SIGNALS |= dict.fromkeys(("truncate", "corrupt"), signal.SIGKILL)  # the rest is done once all are gone

SLOWER_S, SLOW_FOR_S = 0.25, 5.0
FULL_BYTES = 2048
"""What a file may grow to on a disk that is full: enough for the notes to the launcher, and not for a checkpoint."""
