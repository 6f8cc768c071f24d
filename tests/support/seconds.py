"""A pytest plugin: how much processor time and how many compilations each folder of tests takes, and a limit for each.

Seconds are those of the processor, of the test's process and of those that it has started. On a machine that does much
else they are up to half as many more (caches, threads of one core), where seconds of a clock are many times more. At
the end of a run of everything the limits hold; a folder above its limit fails the run.
"""

import collections
import contextlib
import os
import resource
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.forks import SERVERS

LIMITS_S = {
    "bad_input": 60,
    "checkpoint": 90,
    "cluster": 40,
    "communication": 530,
    "config": 20,
    "core": 60,
    "data": 15,
    "elastic": 60,
    "engines": 35,
    "examples": 270,
    "faults": 130,
    "horovod": 115,
    "launch": 60,
    "metrics": 40,
    "natural": 125,
    "ops": 380,
    "parameter_server": 60,
    "plan": 120,
    "program": 60,
    "reference": 10,
    "run": 210,
    "step": 415,
    "system": 280,
    "tasks": 45,
    "tools": 175,
    "verify": 275,
}
"""Folder of tests -> processor seconds: a third and more above what it took on a busy machine (2026-11-23). A new
folder has to be entered."""

QUICK = "not slow and not wide and not processes"
TOTALS_S = {"not slow": 2 * 1150, QUICK: 2 * 575}
"""Marks -> what all tests with them together may take on a machine that does nothing else: `make test` twenty minutes
of two cores, `make quick` ten."""

EACH = "build/seconds.tsv"
"""Below the suite's folder: seconds of each test of the last run of everything, the longest first."""

ROOM = 1.25
"""A busy machine takes more for the same work; above this many times the total a run fails."""


class Spent(NamedTuple):
    """What some tests have taken."""

    tests: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    compilations: int = 0

    def plus(self, other: "Spent") -> "Spent":
        return Spent(*(a + b for a, b in zip(self, other, strict=True)))


def over_limits(spent: dict[str, Spent], limits_s: dict[str, float], total_s: float) -> list[str]:
    """Returns a sentence for each folder, and for the whole, that took more than its limit."""
    wrong = []
    for folder, found in sorted(spent.items()):
        if folder not in limits_s:
            wrong.append(
                f"tests/{folder} took {found.cpu_s:.0f} s and has no limit. Enter it in tests/support/seconds.py."
            )
        elif found.cpu_s > limits_s[folder]:
            wrong.append(
                f"tests/{folder} took {found.cpu_s:.0f} s of processor time, its limit is {limits_s[folder]:.0f} s. "
                "Compile less, share programs, or mark the long form of a test slow."
            )
    total = sum(found.cpu_s for found in spent.values())
    if total > total_s:
        wrong.append(f"All tests together took {total:.0f} s of processor time, the limit is {total_s:.0f} s.")
    return wrong


def table(spent: dict[str, Spent], clock_s: float) -> list[str]:
    """Returns the lines of a table: folders by seconds, their sum, and the seconds by the clock from start to end, of
    all workers at once."""
    rows = sorted(spent.items(), key=lambda item: -item[1].cpu_s)
    total = Spent()
    for _, found in rows:
        total = total.plus(found)
    lines = [f"{'processor s':>11} {'wall s':>8} {'tests':>6} {'compilations':>13}  folder"]
    for folder, found in [*rows, ("all", total)]:
        lines.append(f"{found.cpu_s:11.1f} {found.wall_s:8.1f} {found.tests:6d} {found.compilations:13d}  {folder}")
    return [*lines, f"{clock_s:20.1f} {total.tests:6d} {'':13}  from start to end, by the clock"]


def cpu_s() -> float:
    """Returns the processor seconds of this process, of its ended children, and of those that fork, with what they have
    waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    ticks = 0
    for pid in SERVERS:
        with contextlib.suppress(OSError):  # no /proc but on Linux
            ticks += sum(map(int, Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[11:15]))
    return sum(u.ru_utime + u.ru_stime for u in used) + ticks / os.sysconf("SC_CLK_TCK")


class Seconds:
    """Measures in the process that runs the tests, adds up and judges in the one that reports."""

    def __init__(self, config: pytest.Config):
        part = config.option.file_or_dir or config.option.keyword
        self._began_s, self._each = time.monotonic(), config.rootpath / EACH
        self._total_s = None if part else TOTALS_S.get(config.option.markexpr)
        self._last_s, self._compilations, self._last_compilations = cpu_s(), 0, 0
        self._by_test: dict[str, Spent] = collections.defaultdict(Spent)
        self._wrong: list[str] = []
        if "PYTEST_XDIST_WORKER" in os.environ or not getattr(config.option, "numprocesses", None):
            self._listen()

    def _listen(self) -> None:
        import jax

        def count(event: str, duration: float, **_: object) -> None:
            self._compilations += event == "/jax/core/compile/backend_compile_duration"

        jax.monitoring.register_event_duration_secs_listener(count)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        self._last_s, self._last_compilations = cpu_s(), self._compilations

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        report = yield
        now_s = cpu_s()
        report.cpu_s, report.compilations = now_s - self._last_s, self._compilations - self._last_compilations
        self._last_s, self._last_compilations = now_s, self._compilations
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        part = Spent(
            report.when == "call", getattr(report, "cpu_s", 0.0), report.duration, getattr(report, "compilations", 0)
        )
        self._by_test[report.nodeid] = self._by_test[report.nodeid].plus(part)

    def _longest(self) -> list[tuple[str, Spent]]:
        return sorted(self._by_test.items(), key=lambda item: -item[1].cpu_s)

    def _by_folder(self) -> dict[str, Spent]:
        spent: dict[str, Spent] = collections.defaultdict(Spent)
        for name, found in self._by_test.items():
            folder = name.split("::")[0].removeprefix("tests/").split("/")[0]
            spent[folder] = spent[folder].plus(found)
        return dict(spent)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._total_s is not None and "PYTEST_XDIST_WORKER" not in os.environ:
            self._wrong = over_limits(self._by_folder(), LIMITS_S, self._total_s * ROOM)
            self._each.parent.mkdir(exist_ok=True)
            self._each.write_text("".join(f"{found.cpu_s:.2f}\t{name}\n" for name, found in self._longest()))
            if self._wrong and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter) -> None:
        spent = self._by_folder()
        if not spent:
            return
        terminalreporter.section("seconds of processor time", sep="-")
        for line in table(spent, time.monotonic() - self._began_s):
            terminalreporter.write_line(line)
        for name, found in self._longest()[:10]:
            terminalreporter.write_line(f"{found.cpu_s:11.1f} {found.wall_s:8.1f}  {name}")
        for line in self._wrong:
            terminalreporter.write_line(line, red=True)
