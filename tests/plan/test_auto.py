"""`microbatches: auto` and `remat: auto`: the mildest step that fits, by what the compiler says."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import spmdkit as sk
from spmdkit.config import parse_config
from spmdkit.errors import ConfigError
from spmdkit.program.auto import microbatch_counts
from spmdkit.program.opening import open_program, task_of
from tests.support.environment import environment_of_a_user
from tests.support.plan_files import write

TASK = f"{Path(__file__).parents[1] / 'support' / 'plan_tasks.py'}:task"


def config(**changes):
    base = {"task": TASK, "task_args": {"layers": 16}, "batch_size": 4096, "steps": 1, "devices": "cpu:8"}
    return parse_config(base | {"mesh": {"data": 8}, "microbatches": "auto"} | changes)


def opened(limit, **changes):
    import jax

    return open_program(config(**changes), task_of(config()), jax.devices(), limit)


def needs(**changes):
    stats = opened(None, **changes).compiled.memory_analysis()
    new = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return stats.argument_size_in_bytes + new + stats.temp_size_in_bytes + stats.generated_code_size_in_bytes


@pytest.fixture(scope="module")
def bytes_of():
    return {m: needs(microbatches=m) for m in (1, 2, 4)}


def test_the_fewest_microbatches_that_fit_are_chosen(bytes_of):
    assert bytes_of[4] < bytes_of[2] < bytes_of[1]
    assert opened(bytes_of[1]).config.microbatches == 1
    chosen = opened(bytes_of[2])
    assert chosen.config.microbatches == 2
    assert any("auto chose microbatches 2" in note for note in chosen.notes)


def test_remat_comes_only_where_it_has_to(bytes_of):
    assert opened(bytes_of[1], microbatches=1, remat="auto").config.remat == "none"
    assert opened(bytes_of[1] - 1, microbatches=1, remat="auto").config.remat in ("dots", "full")


def test_where_nothing_fits_it_says_what_the_smallest_needs():
    with pytest.raises(ConfigError, match=r"microbatches: auto found no step that fits.*the limit is 1000 B"):
        opened(1000)


def test_counts_are_powers_of_two_that_cut_the_batch_evenly():
    assert microbatch_counts(config(batch_size=96), 8) == [1, 2, 4]
    assert microbatch_counts(config(batch_size=8), 8) == [1]


def test_build_settles_auto_by_the_memory_of_the_devices():
    assert sk.build(config(task_args={"layers": 1}, batch_size=64)).config.microbatches == 1


def test_a_word_that_is_not_auto_is_refused():
    with pytest.raises(ConfigError, match=r"microbatches: should be a whole number .* or auto"):
        config(microbatches="automatic")


def test_another_number_of_microbatches_keeps_the_place_of_what_the_reducer_keeps():
    import jax

    made = opened(None, microbatches=1, reducer="bfloat16")
    other = made.with_step({"microbatches": 2})
    assert [leaf.path for leaf in other.layout] == [leaf.path for leaf in made.layout]
    assert jax.tree.structure(other.abstract_state) == jax.tree.structure(made.abstract_state)


# ---- on the terminal
# ------------------------------------------------------------------------------------------------------


def typed(folder, *command):
    """Returns (standard output, the lines of standard error that are auto's) of a command in a process of its own."""
    root, command = Path(__file__).parents[2], [sys.executable, "-m", "spmdkit", *command]
    environment = environment_of_a_user() | {"PYTHONPATH": str(root)}
    ended = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout, [line for line in ended.stderr.splitlines() if line.startswith("auto: ")]


@pytest.mark.processes
def test_a_plan_says_on_the_terminal_what_auto_tries_and_what_it_needs(tmp_path):
    """Activations of half a million layers, of which nothing is ever allocated."""
    write(tmp_path, batch_size=4096, remat="auto", task_args={"layers": 500_000})
    output, said = typed(tmp_path, "plan", "config.yaml", "--target", "gpu:h100:8", "--json")
    tried = [
        re.fullmatch(r"auto: (.*): a step needs ([\d.]+) GiB of 78\.0 GiB per device, (.*)", line) for line in said
    ]
    assert [match[1] for match in tried] == ["remat none", "remat dots", "remat full"]
    assert [match[3] for match in tried] == ["does not fit", "does not fit", "fits"]
    assert [float(match[2]) for match in tried] == sorted((float(match[2]) for match in tried), reverse=True)
    assert f"{json.loads(output)['memory']['peak_bytes'] / 2**30:.1f}" == tried[-1][2], "standard output is one object"


@pytest.mark.processes
@pytest.mark.parametrize("progress, number", [("plain", 1), pytest.param("off", 0, marks=pytest.mark.slow)])
def test_training_says_on_the_terminal_what_auto_tries_unless_it_is_to_be_quiet(progress, number, tmp_path):
    write(tmp_path, microbatches="auto", log={"progress": progress}, run_dir=str(tmp_path / "run"))
    output, said = typed(tmp_path, "train", "config.yaml")
    assert len(said) == number and "auto: " not in output
    assert all(re.search(r"^auto: microbatches 1: a step needs .* per device, fits$", line) for line in said)
