"""The outliers among devices, links and hosts: a pure function of the measurements."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SLOW_DEVICE, SLOW_LINK = 0.7, 0.5
"""Share of the median below which a device or a link is slow. Links within and between hosts are judged separately."""
MAX_CLOCK_S = 1.0  # between the clocks of two hosts


@dataclass(frozen=True)
class Verdict:
    """`wrong`: must not take part in a run. `slow`: costs time, but does not change results."""

    wrong: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)

    def __add__(self, other: Verdict) -> Verdict:
        return Verdict(self.wrong + other.wrong, self.slow + other.slow)


def judge_burn_in(devices: Sequence[Mapping[str, Any]], links: Sequence[Mapping[str, Any]]) -> Verdict:
    """Returns the outliers by bits (within one kind of device), by rate and by link bandwidth. Arguments: the results
    of burn_in.py and bandwidth.py on all processes."""
    verdict = Verdict()
    kinds = collections.defaultdict(list)
    for one in devices:
        kinds[one["kind"]].append(one)
    for of_kind in kinds.values():
        verdict += _by_bits(of_kind)
        timed = [one for one in of_kind if not _shares_cores(one, devices)]
        median = statistics.median(one["gflops"] for one in timed) if timed else 0.0
        for one in timed:
            if one["gflops"] < SLOW_DEVICE * median:
                verdict.slow.append(f"{_name(one)} is slow: {one['gflops']:.3g} GFLOP/s, the median is {median:.3g}")
    return verdict + _by_links(devices, links)


def _shares_cores(device: Mapping[str, Any], devices: Sequence[Mapping[str, Any]]) -> bool:
    # With several devices on one CPU, speed differs by chance.
    num_here = sum(one["host"] == device["host"] for one in devices)
    return bool(device["platform"] == "cpu") and num_here > 1


def _by_bits(devices: Sequence[Mapping[str, Any]]) -> Verdict:
    wrong, steady = list[str](), list[Mapping[str, Any]]()
    for one in devices:
        if (num := len(one["digests"])) > 1:
            wrong.append(f"{_name(one)} computes other bits from time to time: {num} results of the same product")
        else:
            steady.append(one)
    ranked = collections.Counter(one["digests"][0] for one in steady).most_common()
    if len(ranked) < 2:
        return Verdict(wrong)
    (right, num), (_, second) = ranked[:2]
    if num == second:
        who = "; ".join(map(_name, steady))
        return Verdict([*wrong, f"devices of one kind compute different bits, and there is no majority: {who}"])
    outliers = [one for one in steady if one["digests"][0] != right]
    rule = f"computes other bits than the {num} others of its kind"
    return Verdict([*wrong, *(f"{_name(one)} {rule}: {one['digests'][0]} and not {right}" for one in outliers)])


def _by_links(devices: Sequence[Mapping[str, Any]], links: Sequence[Mapping[str, Any]]) -> Verdict:
    by_index = {one["device"]: one for one in devices}
    kinds = collections.defaultdict(list)
    for link in links:
        begin, end = by_index[link["from"]], by_index[link["to"]]
        inside = begin["host"] == end["host"]
        if not (inside and _shares_cores(begin, devices)):
            kinds[inside].append(link)
    slow = []
    for of_kind in kinds.values():
        median = statistics.median(link["gb_per_s"] for link in of_kind)
        for link in of_kind:
            if link["gb_per_s"] < SLOW_LINK * median:
                ends = f"{_name(by_index[link['from']])} and {_name(by_index[link['to']])}"
                slow.append(f"the link between {ends} is slow: {link['gb_per_s']:.3g} GB/s, the median is {median:.3g}")
    return Verdict(slow=slow)


def judge_hosts(hosts: Sequence[Mapping[str, Any]]) -> Verdict:
    """Returns the processes that cannot reach each other, that advertise an unreachable address, or with a wrong clock.
    `hosts`: the result of `probe_hosts` in hosts.py."""
    verdict = Verdict()
    num_hosts = len({one["host"] for one in hosts})
    for me, one in enumerate(hosts):
        who = f"process {me} on {one['host']}"
        if num_hosts > 1 and one["address"].startswith("127."):
            verdict.wrong.append(
                f"{who} would advertise {one['address']} to Gloo: its hosts file maps its name to that address, and "
                "no other host reaches it. Set cluster: {interface: eth0}, with the interface of its network, or "
                "let the name resolve to the address there"
            )
        for peer, error in one["unreached"].items():
            verdict.wrong.append(
                f"{who} does not reach process {peer} on {hosts[int(peer)]['host']} at {hosts[int(peer)]['address']}: "
                f"{error}"
            )
        if abs(one["clock_s"] or 0.0) > MAX_CLOCK_S:
            verdict.wrong.append(f"the clock of {who} is {one['clock_s']:+.1f} s off that of process 0")
    return verdict


def _name(device: Mapping[str, Any]) -> str:
    return f"device {device['device']} (process {device['process']} on {device['host']})"
