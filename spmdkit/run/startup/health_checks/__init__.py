"""Health checks of devices and hosts: `spmdkit doctor`, and `health_check: true` of a config."""

from spmdkit.run.startup.health_checks.all_processes import burn_all, devices_are_well
from spmdkit.run.startup.health_checks.bandwidth import bandwidths, links
from spmdkit.run.startup.health_checks.burn_in import burn
from spmdkit.run.startup.health_checks.hosts import meet, same_versions, write_test
from spmdkit.run.startup.health_checks.outliers import Verdict, judge_burn, judge_hosts

__all__ = [
    "Verdict",
    "bandwidths",
    "burn",
    "burn_all",
    "devices_are_well",
    "judge_burn",
    "judge_hosts",
    "links",
    "meet",
    "same_versions",
    "write_test",
]
