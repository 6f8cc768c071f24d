"""The simultaneous burn-in of all devices of all processes, with one verdict: for `spmdkit doctor`, and before training
with `health_check: true`."""

from __future__ import annotations

import sys

from spmdkit.cluster import Cluster
from spmdkit.config import Config
from spmdkit.errors import DeviceError
from spmdkit.foundation.formatting import visible
from spmdkit.foundation.timeouts import BURN_IN_S
from spmdkit.run.startup.health_checks.bandwidth import links
from spmdkit.run.startup.health_checks.burn_in import burn_in_devices
from spmdkit.run.startup.health_checks.outliers import Verdict, judge_burn_in


def burn_in_cluster(cluster: Cluster, seconds: float) -> tuple[str, Verdict]:
    """Computes the same products on all devices. Returns (messages, the outlier devices and links), the same on all
    processes."""
    mine_links = links(cluster.devices, cluster.process_index)
    mine = {"devices": burn_in_devices(cluster.devices, cluster.process_index, seconds), "links": mine_links}
    gathered = cluster.gather("burn-in", mine, seconds + 120)
    devices = [one for of_process in gathered for one in of_process["devices"]]
    moved = [one for of_process in gathered for one in of_process["links"]]
    chains = sum(one["chains"] for one in devices)
    rates = sorted(one["gflops"] for one in devices)
    speeds = sorted(one["gb_per_s"] for one in moved)
    verdict = judge_burn_in(devices, moved)
    bits = "DIFFERENT bits" if verdict.wrong else "the same bits"
    result = f"{chains} chains of products on {len(devices)} devices, {bits}, {rates[0]:.3g} to {rates[-1]:.3g} GFLOP/s"
    return result + (f", links {speeds[0]:.3g} to {speeds[-1]:.3g} GB/s" if speeds else ""), verdict


def run_health_check(cluster: Cluster, config: Config) -> str | None:
    """Returns the result of the health check if the config enables it. Slow devices are only reported. Raises
    DeviceError on every process if a device has different bits; names its process and host."""
    if not config.health_check:
        return None
    result, verdict = burn_in_cluster(cluster, BURN_IN_S)
    if verdict.wrong:
        raise DeviceError(
            f"health_check: {'; '.join(verdict.wrong)}. All devices received the same products and must compute the "
            "same bits. Exclude that host or device, and test longer with spmdkit doctor --burn-in 5m."
        )
    if cluster.is_main and config.log.progress != "off":
        for line in (f"health_check: {result}", *(f"note: {line}" for line in verdict.slow)):
            print(visible(line), file=sys.stderr, flush=True)
    return result
