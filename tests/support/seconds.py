"""A pytest plugin: a table of the processor seconds and compilations of each folder of tests.

Processor seconds include the processes that tests start. Wall time depends on the load of the machine. The seconds of
each test are written to `build/seconds.tsv`.
"""

import collections
import contextlib
import os
import resource
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.forks import ENDED_CPU_S, SERVERS

SECONDS_FILE = "build/seconds.tsv"


class Spent(NamedTuple):
    """Totals over some tests. `cached`: programs loaded from the session's compile cache."""

    tests: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    compilations: int = 0
    cached: int = 0

    def plus(self, other: "Spent") -> "Spent":
        return Spent(*(a + b for a, b in zip(self, other, strict=True)))


def table(by_folder: dict[str, Spent]) -> list[str]:
    """Returns the lines of a table: folders sorted by seconds, then the total."""
    rows = sorted(by_folder.items(), key=lambda item: -item[1].cpu_s)
    total = Spent()
    for _, spent in rows:
        total = total.plus(spent)
    lines = [f"{'processor s':>11} {'wall s':>8} {'tests':>6} {'compiled':>9} {'cached':>7}  folder"]
    for folder, spent in [*rows, ("all", total)]:
        numbers = f"{spent.cpu_s:11.1f} {spent.wall_s:8.1f} {spent.tests:6d} {spent.compilations:9d} {spent.cached:7d}"
        lines.append(f"{numbers}  {folder}")
    return lines


def cpu_s() -> float:
    """Returns the processor seconds of this process, its ended children, the ended processes that it has forked by a
    fork server, and the servers of a test with their children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    ticks = 0
    for pid in SERVERS:
        with contextlib.suppress(OSError):  # /proc exists on Linux only
            ticks += sum(map(int, Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[11:15]))
    return sum(u.ru_utime + u.ru_stime for u in used) + ENDED_CPU_S[0] + ticks / os.sysconf("SC_CLK_TCK")


class Seconds:
    """Measures in the processes that run tests, and sums in the reporting process."""

    def __init__(self, config: pytest.Config):
        self._file = config.rootpath / SECONDS_FILE
        self._compilations = self._cached = 0
        self._last = self._now()
        self._by_test: dict[str, Spent] = collections.defaultdict(Spent)
        if "PYTEST_XDIST_WORKER" in os.environ or not getattr(config.option, "numprocesses", None):
            self._listen()

    def _listen(self) -> None:
        import jax

        def count_request(event: str, duration: float, **_: object) -> None:
            self._compilations += event == "/jax/core/compile/backend_compile_duration"

        def count_hit(event: str, **_: object) -> None:
            is_hit = event == "/jax/compilation_cache/cache_hits"
            self._cached += is_hit
            self._compilations -= is_hit

        jax.monitoring.register_event_duration_secs_listener(count_request)
        jax.monitoring.register_event_listener(count_hit)

    def _now(self) -> tuple[float, int, int]:
        return cpu_s(), self._compilations, self._cached

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        self._last = self._now()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        report = yield
        now = self._now()
        report.spent = tuple(a - b for a, b in zip(now, self._last, strict=True))
        self._last = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        cpu_s, compilations, cached = getattr(report, "spent", (0.0, 0, 0))
        part = Spent(report.when == "call", cpu_s, report.duration, compilations, cached)
        self._by_test[report.nodeid] = self._by_test[report.nodeid].plus(part)

    def pytest_terminal_summary(self, terminalreporter) -> None:
        by_folder: dict[str, Spent] = collections.defaultdict(Spent)
        for name, spent in self._by_test.items():
            folder = name.split("::")[0].removeprefix("tests/").split("/")[0]
            by_folder[folder] = by_folder[folder].plus(spent)
        if not by_folder:
            return
        longest = sorted(self._by_test.items(), key=lambda item: -item[1].cpu_s)
        terminalreporter.section("seconds of processor time", sep="-")
        for line in table(by_folder):
            terminalreporter.write_line(line)
        for name, spent in longest[:10]:
            terminalreporter.write_line(f"{spent.cpu_s:11.1f} {spent.wall_s:8.1f}  {name}")
        self._file.parent.mkdir(exist_ok=True)
        self._file.write_text("".join(f"{spent.cpu_s:.2f}\t{name}\n" for name, spent in longest))
