"""Health checks of devices and hosts: `spmdkit doctor`, and `health_check: true` of a config."""

from spmdkit.run.startup.health_checks.all_processes import burn_in_cluster, run_health_check
from spmdkit.run.startup.health_checks.bandwidth import bandwidths, links
from spmdkit.run.startup.health_checks.burn_in import burn_in_devices
from spmdkit.run.startup.health_checks.hosts import probe_hosts, same_versions, write_test
from spmdkit.run.startup.health_checks.outliers import Verdict, judge_burn_in, judge_hosts

__all__ = [
    "Verdict",
    "bandwidths",
    "burn_in_cluster",
    "burn_in_devices",
    "judge_burn_in",
    "judge_hosts",
    "links",
    "probe_hosts",
    "run_health_check",
    "same_versions",
    "write_test",
]
