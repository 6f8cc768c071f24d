"""Whether devices and hosts are well, before a run is trusted to them: `spmdkit doctor`, and `preflight: true` of a config.

products.py  the same products on every device, their bits and their rates
links.py     what each link between neighbours moves, and collectives over each axis
hosts.py     what the hosts tell and see of each other: versions, addresses, ports, clocks, the run's directory
together.py  all of that on all processes
judge.py     which device, link or host is the odd one
"""

from spmdkit.health.hosts import meet, same_versions, write_test
from spmdkit.health.judge import Verdict, judge_burn, judge_hosts
from spmdkit.health.links import bandwidths, links
from spmdkit.health.products import burn
from spmdkit.health.together import burn_all

__all__ = [
    "Verdict",
    "bandwidths",
    "burn",
    "burn_all",
    "judge_burn",
    "judge_hosts",
    "links",
    "meet",
    "same_versions",
    "write_test",
]
