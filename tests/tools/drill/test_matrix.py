"""The matrix of faults: its cells, its goals, and a short form of it with real processes."""

import json
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from spmdkit.config import load_config
from spmdkit.errors import ConfigError
from spmdkit.faults.injection.fault import Fault
from spmdkit.foundation.deadline import Deadline
from spmdkit.tools.drill import cells, clock, matrix, network
from spmdkit.tools.drill.cells import Cell
from spmdkit.tools.drill.job import DrillRequest
from spmdkit.tools.drill.timeline import InjectionResult
from tests.support.forks import Process

CHAOS = Path(__file__).parents[3] / "benchmarks/chaos"


@pytest.fixture
def config():
    return load_config(CHAOS / "run.yaml", [])


@pytest.fixture
def everywhere(monkeypatch):
    """A machine on which every fault can be injected."""
    monkeypatch.setattr(cells.clock, "missing_compiler", lambda: "")
    monkeypatch.setattr(cells.network, "missing_support", lambda: "")
    monkeypatch.setattr(cells.object_store, "missing_packages", lambda: "")


def test_more_than_300_cells_exist(config, everywhere):
    possible = [cell for cell in cells.all_cells() if not cells.not_applicable(cell, config)]
    assert len(cells.all_cells()) == len(cells.KINDS) * 7 * 3 and len(possible) >= 300
    assert {cell.kind for cell in possible} == {*cells.KINDS}
    assert {cell.process for cell in possible if cell.num_processes == 4} == {0, 3}
    assert len({str(cell) for cell in possible}) == len(possible)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (("stop", "save", 1), "continues with SIGCONT"),
        (("service", "start", 1), "one process has none"),
        (("partition", "save", 1), "no peer"),
        (("nan", "save", 2), "changes a step"),
        (("hang-save", "restore", 2), "another activity"),
        (("object-store", "save", 2), ""),
        (("kill", "evaluation", 2), ""),
        (("hang-hook", "first-step", 2), ""),
    ],
)
def test_impossible_cells_have_a_reason(name, why, config, everywhere):
    reason = cells.not_applicable(Cell(*name), config)
    assert why in reason and bool(why) == bool(reason)


def test_cells_follow_the_config(everywhere):
    plain = load_config(CHAOS / "run.yaml", ["hooks=[]", "eval.every_steps=null", "replica_check=null"])
    reasons = [cells.not_applicable(Cell(*name), plain) for name in IMPOSSIBLE]
    assert reasons == ["the config has no hooks", "eval.every_steps is null", "replica_check is null"]


def test_store_needs_its_packages(config, monkeypatch):
    monkeypatch.setattr(cells.object_store, "PACKAGES", ("a_package_that_is_not_there",))
    assert "a_package_that_is_not_there" in cells.not_applicable(Cell("object-store", "save", 1), config)
    with pytest.raises(ConfigError, match="--fault object-store: a local object store needs"):
        cells.object_store.object_store_for(["object-store"]).__enter__()


IMPOSSIBLE = (("hang-hook", "first-step", 1), ("kill", "evaluation", 1), ("bit-flip", "first-step", 1))


@pytest.mark.parametrize(
    ("cell", "fault"),
    [
        (Cell("kill", "start", 2), Fault("kill", 1, phase="import")),
        (Cell("kill", "restore", 4), Fault("kill", 0, phase="restore")),
        (Cell("nan", "first-step", 4), Fault("nan", 3, 13)),
        (Cell("service", "steady-state", 2), Fault("service", 0, 16)),
        (Cell("term", "end", 2), Fault("term", 1, phase="end")),
        (Cell("hang-hook", "steady-state", 2), Fault("hang", 0, phase="hook", from_step=16)),
        (Cell("hang-save", "save", 1), Fault("hang", 0, phase="save")),
    ],
)
def test_cell_injects_its_fault_in_its_phase(cell, fault):
    assert cell.fault(12) == fault


def injected(kind="kill", **fields):
    return InjectionResult(Fault(kind, 1, 5, phase=fields.pop("phase", None)), 1, 1, None, fired=1.0, **fields)


ROW = {"final_code": 0, "named_correctly": True, "detection_limit_s": 0.0, "detection_s": 0.2, "bitwise_equal": True}


@pytest.mark.parametrize(
    ("kind", "fields", "others", "missed"),
    [
        ("kill", {}, {}, ""),
        ("kill", {}, {"lost_commits": [(20, 10)]}, "step 20 was committed, and the run resumed from 10"),
        ("kill", {}, {"remaining": [71]}, "processes remained: 71"),
        ("kill", {}, {"hangs": True}, "the run took longer than"),
        ("kill", {"final_code": 75}, {}, "the run exited with 75"),
        ("kill", {"named_correctly": False}, {}, matrix.NOT_NAMED),
        ("kill", {"detection_s": 1.1}, {}, "detected after 1.1 s, limit 0 s"),
        ("kill", {"detection_s": None}, {}, "detected after -, limit 0 s"),
        ("kill", {"bitwise_equal": False}, {}, "state or metrics differ"),
        ("nan", {"bitwise_equal": False, "final_code": 77}, {}, ""),
        ("bit-flip", {"bitwise_equal": False}, {}, ""),
        ("slow", {"detection_limit_s": None, "detection_s": None, "named_correctly": None}, {}, ""),
    ],
)
def test_missed_goal_is_a_reason(kind, fields, others, missed):
    arguments = {"lost_commits": [], "remaining": [], "hangs": False} | others
    reasons = matrix.missed_goals(ROW | fields, injected(kind), **arguments)
    assert (missed in reasons[0] and len(reasons) == 1) if missed else reasons == []


def test_cell_without_its_fault_misses_the_goals():
    assert matrix.missed_goals(ROW, None, [], [], False) == ["not injected: the run finished before"]
    assert matrix.missed_goals(ROW, injected(failed="no checkpoint"), [], [], False) == ["not injected: no checkpoint"]


@pytest.mark.parametrize(
    ("kind", "fields", "named"),
    [
        ("kill", {"named": (1,), "exit_code": 137}, True),
        ("kill", {"named": (0,), "exit_code": 137}, False),
        ("hang", {"named": (0, 1), "exit_code": 76}, False),
        ("partition-peer", {"named": (2,), "exit_code": 76}, True),
        ("service", {"message": "the coordination service has ended", "exit_code": 75}, True),
        ("service", {"message": "process 1 is silent", "exit_code": 75}, False),
        ("object-store", {"message": "s3://drill/a could not be read", "exit_code": 75}, True),
        ("object-store", {"message": "process 0 is silent", "exit_code": 75}, False),
        ("object-store", {}, None),
        ("term", {"named": (0,), "exit_code": 42}, None),
        ("stop", {}, None),
    ],
)
def test_process_at_fault_is_compared_with_the_named_one(kind, fields, named, tmp_path):
    assert matrix.named_correctly(injected(kind, **fields)) is named


def test_detection_limit_is_the_timeout_of_the_phase():
    limits = [matrix.detection_limit_s(injected(kind, phase=phase), TIMEOUTS) for kind, phase in LIMITS]
    assert matrix.detection_limit_s(injected("hang", phase="hook"), TIMEOUTS, 2) == TIMEOUTS.hook_timeout_s
    assert matrix.detection_limit_s(injected("hang", phase="hook"), TIMEOUTS, 1) == TIMEOUTS.evaluation_timeout_s
    names = ("save", "import", "step", "heartbeat")
    assert limits == [*(float(getattr(TIMEOUTS, f"{name}_timeout_s")) for name in names), 0.0, None, None]


TIMEOUTS = SimpleNamespace(**matrix.TIMEOUTS)
LIMITS = (("hang", "save"), ("hang", "import"), ("hang", "data"), ("stop", None))
LIMITS += (("service", None), ("nan", None), ("corrupt", None))


def test_matrix_of_other_settings_is_refused(tmp_path):
    for name in ("run.yaml", "task.py"):
        shutil.copy(CHAOS / name, tmp_path)
    path, folder = tmp_path / "run.yaml", [f"run_dir={tmp_path / 'run'}"]
    request = DrillRequest(path, folder, ())
    matrix.Matrix(request, load_config(path, folder), [])
    with pytest.raises(ConfigError, match="a matrix of other settings"):
        matrix.Matrix(DrillRequest(path, [*folder, "seed=3"], ()), load_config(path, folder), [])
    with pytest.raises(ConfigError, match="no cell matches"):
        matrix.run_matrix(DrillRequest(path, [f"run_dir={tmp_path / 'other'}"], ()), ["kil@*"])
    with pytest.raises(ConfigError, match="at least 24 steps"):
        matrix.run_matrix(DrillRequest(path, [*folder, "steps=8"], ()), [])


SHORT = {
    1: "kill@start hang-import@start hang-data@first-step hang-step@steady-state hang-hook@steady-state hang-save@save "
    "clock@steady-state slow@steady-state memory@first-step kill@restore term@evaluation nan@steady-state "
    "bit-flip@first-step truncate@restore corrupt@save disk-full@restore kill@end",
    2: "stop@steady-state partition@evaluation service@save",
}
FIRST, *OTHERS = ([f"{name}/{num}" for name in text.split()] for num, text in SHORT.items())
FIRST, OTHERS = [FIRST[0], OTHERS[0][0]], [*OTHERS[0][1:], *FIRST[1:]]
"""The short form: twenty cells. The first two make the runs that the others resume; those that wait for a timeout are
next."""
TOGETHER = 7
SHORT_TIMEOUTS = {"heartbeat": 15, "step": 15, "hook": 15, "import": 20, "save": 20, "restore": 60, "evaluation": 15}


def start_cell(forks, folder, names):
    """Starts a matrix of these cells. A process that has compared checkpoints cannot fork (tensorstore), so each cell
    has a command. The clock of a forked process cannot be set."""
    selected = [f"--cells={name}" for name in names]
    selected += [f"watchdog.{name}_timeout_s={seconds}" for name, seconds in SHORT_TIMEOUTS.items()]
    settings = ["run_dir=run", "devices=cpu:2", "eval.every_steps=12"]
    settings.append("optimizer={name: sgd, learning_rate: 0.01}")  # fewer arrays to save
    variables = {"SPMDKIT_COMPILE_CACHE": "off"}  # programs are cached by the fork server
    arguments = ["drill", "run.yaml", "--matrix", *settings, *selected]
    return forks.start(Process(arguments, folder, variables, forks=not names[0].startswith("clock")))


def ended(running, most):
    """Waits until at most `most` commands run; returns how the others ended, by cell."""
    deadline = Deadline(240)
    while len(running) > most:
        for name, child in list(running.items()):
            if child.poll() is not None or deadline.expired:
                child.end()
                yield name, child.returncode, child.text()
                del running[name]
        time.sleep(0.02)


def row_of(folder, name):
    lines = (folder / "run_drill/matrix/cells.jsonl").read_text().splitlines()
    return next(row for row in map(json.loads, lines) if row["cell"] == name)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chaos") / "base"
    folder.mkdir()
    for name in ("run.yaml", "task.py"):
        shutil.copy(CHAOS / name, folder)
    return folder


@pytest.fixture(scope="module")
def short(base, forks):
    """Returns cell -> (exit code, output, folder) of the short form."""
    results = {name: (*end, base) for name, *end in ended({n: start_cell(forks, base, [n]) for n in FIRST}, 0)}
    folders = {name: base.parent / name.replace("/", "-") for name in OTHERS}
    running = {}
    for name, folder in folders.items():
        results |= {n: (*end, folders[n]) for n, *end in ended(running, TOGETHER - 1)}
        shutil.copytree(base, folder, ignore=shutil.ignore_patterns("cells.jsonl", "*@*", "matrix.*"))
        running[name] = start_cell(forks, folder, [name])
    results |= {n: (*end, folders[n]) for n, *end in ended(running, 0)}
    return results


@pytest.mark.processes
@pytest.mark.parametrize("name", [*FIRST, *OTHERS])
def test_cell_meets_its_goals(name, short):
    if name.startswith(("partition", "clock")) and (why := network.missing_support() or clock.missing_compiler()):
        pytest.skip(why)
    _, output, folder = short[name]
    row = row_of(folder, name)
    late = "detected after"  # the time is measured by `make chaos`; other tests share the processors
    assert [text for text in row["missed"] if not text.startswith(late)] == [], output
    assert row["detection_limit_s"] is None or row["detection_s"] is not None, output


@pytest.mark.processes
def test_finished_cells_are_not_repeated(forks, short, base):
    child = start_cell(forks, base, FIRST)
    ((_, code, output),) = ended({"again": child}, 0)
    assert code in (0, 1) and "1 of" not in output, output
    result = json.loads((base / "run_drill/matrix/matrix.json").read_text())
    assert sorted(row["cell"] for row in result["cells"]) == sorted(FIRST)
    assert result["passed"] == (code == 0) and result["named"] == result["num_named"] == 2
    page = (base / "run_drill/matrix/matrix.html").read_text()
    assert "process at fault named" in page and "kill" in page
