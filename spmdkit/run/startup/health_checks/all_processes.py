"""The burn-in of all devices of all processes at the same time. All processes gather the results and reach one
verdict."""

from __future__ import annotations

from spmdkit.cluster import Cluster
from spmdkit.run.startup.health_checks.bandwidth import links
from spmdkit.run.startup.health_checks.burn_in import burn
from spmdkit.run.startup.health_checks.outliers import Verdict, judge_burn


def burn_all(cluster: Cluster, seconds: float) -> tuple[str, Verdict]:
    """Returns (messages, the outlier devices and links), the same on all processes, after all devices have computed the
    same products."""
    mine_links = links(cluster.devices, cluster.process_index)
    mine = {"devices": burn(cluster.devices, cluster.process_index, seconds), "links": mine_links}
    gathered = cluster.gather("burn-in", mine, seconds + 120)
    devices = [one for of_process in gathered for one in of_process["devices"]]
    moved = [one for of_process in gathered for one in of_process["links"]]
    chains = sum(one["chains"] for one in devices)
    rates = sorted(one["gflops"] for one in devices)
    speeds = sorted(one["gb_per_s"] for one in moved)
    verdict = judge_burn(devices, moved)
    result = (
        f"{chains} chains of products on {len(devices)} devices, "
        f"{'DIFFERENT bits' if verdict.wrong else 'the same bits'}"
    )
    result += f", {rates[0]:.3g} to {rates[-1]:.3g} GFLOP/s"
    return result + (f", links {speeds[0]:.3g} to {speeds[-1]:.3g} GB/s" if speeds else ""), verdict
