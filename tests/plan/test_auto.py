"""`microbatches: auto` and `remat: auto`: the mildest step that fits, by what the compiler says."""

from pathlib import Path

import pytest

import spmdkit as sk
from spmdkit.config import parse_config
from spmdkit.errors import ConfigError
from spmdkit.program.auto import microbatch_counts
from spmdkit.program.opening import open_program, task_of

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
