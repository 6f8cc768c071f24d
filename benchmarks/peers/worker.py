"""The process of one framework: prints its first losses, then trains a number of steps for each line of its input."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

SIGN = "peer: "
CHECKED_STEPS = 5
LOG_EVERY = 10


def serve(losses: Sequence[float], run: Callable[[int], object], packages: Sequence[str], **figures: Any) -> None:
    """Reports the losses of the first steps, then the seconds of each requested block of steps.

    Args:
        run: trains a number of steps and returns when they are computed.
        packages: distributions to report the versions of.
        figures: reported with the losses.
    """
    versions = {package: metadata.version(package) for package in packages}
    print(SIGN + json.dumps({"losses": list(losses), "versions": versions} | figures), flush=True)
    for line in sys.stdin:
        begun = time.perf_counter()
        run(int(line))
        print(SIGN + json.dumps(time.perf_counter() - begun), flush=True)
