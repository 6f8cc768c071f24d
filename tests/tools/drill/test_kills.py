"""SIGKILLs of any process in any phase, with restarts: the same bits, no committed step lost. Eight of them, and in a
slow form a hundred (`make soak`)."""

import json
import os

import pytest

pytestmark = pytest.mark.processes

KILLS = int(os.environ.get("KILLS", "100"))
SEED = int(os.environ.get("SEED", "1"))
NUM = int(os.environ.get("PROCESSES", "4"))
MINUTES = float(os.environ.get("MINUTES", "75"))


def counted(result, key):
    told = [str(fault[key]) for fault in result["faults"]]
    return ", ".join(f"{told.count(value)} in {value}" for value in sorted(set(told)))


def figures(result):
    return (
        f"{result['fired']} kills in {result['attempts']} starts: phases {counted(result, 'phase')}; drawn {counted(result, 'drawn_at')}; processes "
        f"{counted(result, 'process')}; {sum(f['unfinished'] is not None for f in result['faults'])} left a save half written; noticed {result['detection_s']}; "
        f"recovery {result['recovery_s']}; steps done again {result['steps_lost']}; goodput {result['goodput']:.1%}"
    )


def test_eight_kills_of_four_processes_in_any_phase_leave_the_same_bits(drills):
    code, output = drills.run(
        "-n",
        "4",
        "devices=cpu:4",
        "steps=120",
        "--fault",
        "kill:random",
        "--count",
        "8",
        "--seed",
        "1",
        timeout_s=280,
    )
    assert code == 0, output
    result = drills.result()
    print(figures(result))
    assert result["fired"] == 8 and result["same_parameters"] and result["same_metrics"]
    assert drills.left_behind() == []


@pytest.mark.slow
def test_a_hundred_kills_of_one_or_four_processes_in_any_phase_leave_the_same_bits(drills):
    """KILLS and MINUTES bound it, PROCESSES are 4 or as said; with other SEEDs the kills of several runs add up."""
    told = ["--fault", "kill:random", "--count", str(KILLS), "--seed", str(SEED)]
    cache = str(drills.path / "cache")
    code, output = drills.run(
        "-n", str(NUM), f"devices=cpu:{max(NUM, 2)}", f"steps={6 * KILLS}", *told, timeout_s=60 * MINUTES, cache=cache
    )
    assert code == 0, output
    result = drills.result()
    print(figures(result))
    assert result["fired"] == KILLS and result["same_parameters"] and result["same_metrics"]
    assert drills.left_behind() == []
    if KILLS >= 20:
        drawn = [fault["drawn_at"] for fault in result["faults"]]
        assert all(drawn.count(at) >= KILLS / 10 for at in ("start", "save", "step")), drawn
        assert any(fault["unfinished"] for fault in result["faults"]), "no kill has cut a save in two"


@pytest.mark.slow
def test_restarts_of_processes_that_a_person_has_started_take_less_than_15_s(drills):
    """Each with a Python of its own, and the compile cache that a user has."""
    told = ["--fault", "kill:random@random", "--count", "6", "--seed", "2", "--json"]
    done = drills.by_hand("-n", "4", "devices=cpu:4", "steps=200", *told, timeout_s=900)
    assert done.returncode == 0, done.stdout + done.stderr
    print(figures(json.loads(done.stdout)))
    assert json.loads(done.stdout)["recovery_s"]["median"] < 15
    assert drills.left_behind() == []


@pytest.mark.slow
def test_with_a_kill_each_minute_and_restarts_most_of_the_time_is_work(drills):
    """Five minutes of work; forked, so without the seconds of imports, with the compile cache that a user has."""
    minutes = 5
    work = [f"steps={minutes * 600}", "task_args.pause_s=0.1", "checkpoint.every_steps=20", "log.every_steps=100"]
    told = ["--fault", "kill:random@60s", "--count", str(minutes), "--seed", "3"]
    cache = str(drills.path / "cache")
    code, output = drills.run("-n", "4", "devices=cpu:4", *work, *told, timeout_s=1500, cache=cache)
    assert code == 0, output
    print(figures(drills.result()))
    assert drills.result()["goodput"] > 0.6


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        "reducer=int8",
        "reducer={powersgd: {rank: 2}}",
        "reducer={topk: {fraction: 0.5, most: null}}",
        "reducer={sign: {warmup: 10}}",
        "sync={diloco: {every: 5, reducer: int8}}",
    ],
)
def test_kills_leave_the_bits_of_a_run_that_owes_something_from_step_to_step(drills, changes):
    code, output = drills.run(
        "-n", "2", "devices=cpu:2", changes, "--fault", "kill:random", "--count", "2", "--seed", "3"
    )
    assert code == 0, output
    result = drills.result()
    assert result["fired"] == 2 and result["same_parameters"] and result["same_metrics"]
