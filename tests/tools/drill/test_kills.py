"""SIGKILLs of any process in any phase, with restarts: bitwise equal results, no committed step lost. Three for
each stream, and in slow forms one of two processes, a hundred (`make kills`, with seeds by SEED) and forty."""

import json
import os

import pytest

from tests.support.forms import slow_except
from tests.support.libraries import LIBRARIES

pytestmark = pytest.mark.processes

KILLS = int(os.environ.get("KILLS", "100"))
SEED = int(os.environ.get("SEED", "1"))
NUM = int(os.environ.get("PROCESSES", "4"))
MINUTES = float(os.environ.get("MINUTES", "75"))


def counted(result, key):
    values = [str(fault[key]) for fault in result["faults"]]
    return ", ".join(f"{values.count(value)} in {value}" for value in sorted(set(values)))


def figures(result):
    return (
        f"{result['fired']} kills in {result['attempts']} starts: phases {counted(result, 'phase')}; drawn "
        f"{counted(result, 'drawn_at')}; processes {counted(result, 'process')}; "
        f"{sum(f['unfinished'] is not None for f in result['faults'])} left a save half written; detection "
        f"{result['detection_s']}; recovery {result['recovery_s']}; steps repeated {result['steps_lost']}; goodput "
        f"{result['goodput']:.1%}"
    )


@pytest.mark.slow
def test_random_kill_ends_bitwise_equal(drills):
    options = ["--fault", "kill:random", "--seed", "5"]
    code, output = drills.run("-n", "2", "steps=30", *options, cache=str(drills.path / "cache"))
    assert code == 0, output
    result = drills.result()
    print(figures(result))
    assert result["fired"] == 1 and result["same_parameters"] and result["same_metrics"]
    assert result["attempts"] == 2 and drills.leftover_files() == []


STREAM_TASK = """
from pathlib import Path
import jax.numpy as jnp
import optax
import spmdkit as sk
from tests.support.libraries import LIBRARIES, NUM

@sk.task
def task(kind):
    def loss_fn(params, batch, key):
        errors = (batch["x"] @ params["w"] / NUM - 1) ** 2
        return sk.mean(errors), {"ids": sk.sum(batch["id"]), "squares": sk.sum((batch["id"] % 97) ** 2)}

    data = LIBRARIES[kind][1](Path(__file__).parent / "data")
    return sk.Task(lambda key: {"w": jnp.ones(3) / 9}, loss_fn, optax.adam(1e-2), train_data=data)
"""


@pytest.mark.streams
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata 0.11 on torch 2.13
@pytest.mark.parametrize(("kills", "workers"), slow_except([(1, 0)], [(1, 0), (40, 0), (10, 2)]))
@pytest.mark.parametrize("kind", ["grain, mix and filter", "hf, map and filter", "torchdata"])
def test_random_kills_of_a_stream_end_bitwise_equal(drills, kind, kills, workers):
    pytest.importorskip(LIBRARIES[kind][0])
    (drills.path / "data").mkdir()
    LIBRARIES[kind][1](drills.path / "data")  # writes the files
    (drills.path / "task.py").write_text(STREAM_TASK)
    size = [f"task_args.kind={kind!r}", f"steps={6 * kills + 12}", "log.every_steps=1", "data.prefetch=4"]
    size.append(f"data.workers={workers}")
    options = ["--fault", "kill:random", "--count", str(kills), "--seed", "5"]
    code, output = drills.run("-n", "1", *size, *options, timeout_s=60 * kills, cache=str(drills.path / "cache"))
    assert code == 0, output
    result = drills.result()
    print(figures(result))
    assert result["fired"] == kills and result["same_parameters"] and result["same_metrics"]


@pytest.mark.slow
def test_hundred_random_kills_end_bitwise_equal(drills):
    """KILLS, MINUTES, PROCESSES and SEED are environment variables."""
    options = ["--fault", "kill:random", "--count", str(KILLS), "--seed", str(SEED)]
    size = ("-n", str(NUM), f"devices=cpu:{max(NUM, 2)}", f"steps={6 * KILLS}")
    code, output = drills.run(*size, *options, timeout_s=60 * MINUTES, cache=str(drills.path / "cache"))
    assert code == 0, output
    result = drills.result()
    print(figures(result))
    assert result["fired"] == KILLS and result["same_parameters"] and result["same_metrics"]
    assert drills.leftover_files() == []
    if KILLS >= 20:
        drawn = [fault["drawn_at"] for fault in result["faults"]]
        assert all(drawn.count(at) >= KILLS / 10 for at in ("start", "save", "step")), drawn
        assert any(fault["unfinished"] for fault in result["faults"]), "no kill interrupted a save"


@pytest.mark.slow
def test_restart_takes_about_as_long_as_a_start(drills):
    """Each process starts its own Python, with the compile cache that a user has."""
    options = ["--fault", "kill:random@random", "--count", "6", "--seed", "2", "--json"]
    done = drills.by_command("-n", "4", "devices=cpu:4", "steps=200", *options, timeout_s=900)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    print(figures(result))
    assert result["recovery_s"]["median"] < 3 * result["undisturbed_start_s"]
    assert drills.leftover_files() == []


@pytest.mark.slow
def test_goodput_with_a_kill_each_minute(drills):
    """Five minutes of work; forked, so without the time of imports, with the compile cache that a user has."""
    minutes = 5
    work = [f"steps={minutes * 600}", "task_args.pause_s=0.1", "checkpoint.every_steps=20", "log.every_steps=100"]
    options = ["--fault", "kill:random@60s", "--count", str(minutes), "--seed", "3"]
    size = ("-n", "4", "devices=cpu:4")
    code, output = drills.run(*size, *work, *options, timeout_s=1500, cache=str(drills.path / "cache"))
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
def test_kills_preserve_state_carried_between_steps(drills, changes):
    code, output = drills.run("-n", "2", changes, "--fault", "kill:random", "--count", "2", "--seed", "3")
    assert code == 0, output
    result = drills.result()
    assert result["fired"] == 2 and result["same_parameters"] and result["same_metrics"]
