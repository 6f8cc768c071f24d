"""`health_check: true`: all devices compute the same products before a start, and a device with different bits ends the
run."""

from __future__ import annotations

import sys

from spmdkit.cluster import Cluster
from spmdkit.config import Config
from spmdkit.errors import DeviceError
from spmdkit.foundation.formatting import visible
from spmdkit.foundation.timeouts import BURN_IN_S
from spmdkit.run.startup.health_checks import burn_all


def devices_are_well(cluster: Cluster, config: Config) -> str | None:
    """Returns the result of the health check, if the config requests it. Slow devices are reported and are no error.

    Raises:
        DeviceError: on every process, if a device computes different bits; names it with its process and host.
    """
    if not config.health_check:
        return None
    result, verdict = burn_all(cluster, BURN_IN_S)
    if verdict.wrong:
        raise DeviceError(
            f"health_check: {'; '.join(verdict.wrong)}. All devices received the same products and must compute the "
            "same bits. Exclude that host or device, and test longer with spmdkit doctor --burn-in 5m."
        )
    if cluster.is_main and config.log.progress != "off":
        for line in (f"health_check: {result}", *(f"note: {line}" for line in verdict.slow)):
            print(visible(line), file=sys.stderr, flush=True)
    return result
