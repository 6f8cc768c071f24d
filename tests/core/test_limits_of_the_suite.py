"""The suite's own limits: a test that hangs ends, a folder that takes too long fails the run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import wide
from tests.support.seconds import EACH, LIMITS_S, QUICK, TOTALS_S, Spent, over_limits, table

ROOT = Path(__file__).parents[2]


def test_folders_within_their_limits_are_no_failure():
    assert over_limits({"core": Spent(3, 10.0), "ops": Spent(2, 5.0)}, {"core": 10.0, "ops": 6.0}, 15.0) == []


@pytest.mark.parametrize(
    ("spent", "said"),
    [
        ({"core": Spent(cpu_s=11.0)}, r"tests/core took 11 s of processor time, its limit is 10 s\. Compile less"),
        ({"new": Spent(cpu_s=1.0)}, r"tests/new took 1 s and has no limit\. Enter it in tests/support/seconds\.py"),
        ({"core": Spent(cpu_s=9.0), "ops": Spent(cpu_s=9.0)}, "All tests together took 18 s .* the limit is 15 s"),
    ],
)
def test_what_takes_too_long_is_told(spent, said):
    (line,) = over_limits(spent, {"core": 10.0, "ops": 10.0}, 15.0)
    assert re.search(said, line), line


def test_the_table_has_a_line_for_each_folder_one_for_all_and_at_last_the_clock():
    lines = table({"ops": Spent(2, 5.0, 6.0, 7), "core": Spent(3, 10.0, 11.0, 12)}, 9.5)
    assert [line.split() for line in lines[1:]] == [
        ["10.0", "11.0", "3", "12", "core"],
        ["5.0", "6.0", "2", "7", "ops"],
        ["15.0", "17.0", "5", "19", "all"],
        ["9.5", "5", "from", "start", "to", "end,", "by", "the", "clock"],
    ]


def test_every_folder_has_a_limit_and_the_suite_twenty_minutes_of_two_cores():
    folders = {path.parent.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").rglob("*/test_*.py")}
    assert set(LIMITS_S) == folders
    recipes = (ROOT / "Makefile").read_text()
    assert re.findall(r"pytest -m '(not slow[^']*)'", recipes) == [QUICK]
    assert TOTALS_S == {"not slow": 2 * 1150, QUICK: 2 * 575}


def test_a_test_that_hangs_in_native_code_ends_with_the_traceback_of_its_threads(tmp_path):
    """`pause` is called with the interpreter's lock held: nothing written in Python could end it."""
    (tmp_path / "test_stuck.py").write_text("import ctypes\ndef test_stuck():\n    ctypes.PyDLL(None).pause()\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        ROOT / "pyproject.toml",
        "-o",
        "faulthandler_timeout=0.5",
        tmp_path,
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert ended.returncode == 1, ended.stdout
    assert "Timeout (0:00:00.5" in ended.stderr and "in test_stuck" in ended.stderr


def test_every_test_has_a_limit(pytestconfig):
    assert 0 < float(pytestconfig.getini("faulthandler_timeout")) <= 600
    assert pytestconfig.getini("faulthandler_exit_on_timeout") is True


CONFTEST = """
from tests.support.seconds import Seconds
def pytest_configure(config):
    config.pluginmanager.register(Seconds(config))
"""


@pytest.mark.parametrize(("arguments", "code"), [((), 1), (("tests/new",), 0)], ids=["the whole suite", "a part"])
def test_a_run_of_everything_with_a_folder_above_its_limit_fails(arguments, code, tmp_path):
    """A folder without a limit is above it."""
    (tmp_path / "tests" / "new").mkdir(parents=True)
    (tmp_path / "tests" / "new" / "test_new.py").write_text("def test_nothing():\n    pass\n")
    (tmp_path / "tests" / "conftest.py").write_text(CONFTEST)
    options = f'testpaths = ["tests"]\npythonpath = ["{ROOT}"]\naddopts = "-m \'not slow\'"\nmarkers = ["slow"]\n'
    (tmp_path / "pyproject.toml").write_text(f"[tool.pytest.ini_options]\n{options}")
    command = [sys.executable, "-m", "pytest", "-q", "--numprocesses", "1", *arguments]
    env = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
    }  # not a worker of this run
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=env)
    assert ended.returncode == code, ended.stdout + ended.stderr
    assert ("tests/new took 0 s and has no limit" in ended.stdout) == bool(code)
    assert "1 passed" in ended.stdout and "compilations  folder" in ended.stdout
    assert re.search(r"^ +\d+\.\d +1 +from start to end, by the clock$", ended.stdout, re.MULTILINE)
    assert (tmp_path / EACH).exists() == bool(code)


def test_what_is_measured_is_written_where_git_does_not_look():
    assert f"{EACH.partition('/')[0]}/" in (ROOT / ".gitignore").read_text().split()


@pytest.mark.parametrize("name", sorted({*wide.NONE, *(form.partition("[")[0] for form in wide.THOROUGH)}))
def test_what_is_left_out_of_make_quick_or_make_test_is_a_test(name):
    path, _, function = name.partition("::")
    assert f"\ndef {function}(" in (ROOT / "tests" / path).read_text()
