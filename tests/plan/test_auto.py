"""`microbatches: auto` and `remat: auto`: the mildest step that fits, by what the compiler reports."""

import jax
import pytest

import spmdkit as sk
from spmdkit.errors import ConfigError
from spmdkit.plan.command import make_plan
from spmdkit.program import auto
from spmdkit.program.opening import open_program, task_of
from spmdkit.program.program import Program
from spmdkit.run.loop import train
from tests.support.plan_files import config as base_config


def config(**changes):
    base = {"task_args": {"layers": 16}, "batch_size": 4096, "steps": 1, "mesh": {"data": 8}, "microbatches": "auto"}
    return base_config(**base | changes)


def opened(limit, log=None, **changes):
    requested = config(**changes)
    return open_program(requested, task_of(requested), jax.devices(), limit, *([log] if log else []))


@pytest.fixture(scope="module")
def alone():
    return {m: opened(None, microbatches=m) for m in (1, 2)}


@pytest.fixture(scope="module")
def bytes_of(alone):
    return {m: program.step_bytes.peak_bytes for m, program in alone.items()}


def test_the_fewest_microbatches_that_fit(alone, bytes_of):
    """Traces the step again for each number, and builds one program."""
    assert opened(bytes_of[1]).config.microbatches == 1
    made, lines, init = [], [], Program.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Program, "__init__", lambda self, *args: made.append(args[0]) or init(self, *args))
        chosen = opened(bytes_of[2], lines.append, remat="auto")
    assert len(made) == 1 and (chosen.config.microbatches, chosen.config.remat) == (2, "none")
    assert any("auto chose microbatches 2" in note for note in chosen.notes)
    assert [(line.split(": ")[1], line.rsplit(", ", 1)[1]) for line in lines] == [
        ("microbatches 1, remat none", "does not fit"),
        ("microbatches 64, remat none", "fits"),
        ("microbatches 8, remat none", "fits"),
        ("microbatches 2, remat none", "fits"),
    ]
    two = alone[2]
    assert (chosen.form, chosen.layout, chosen.step_bytes) == (two.form, two.layout, two.step_bytes)
    state, batch = chosen.init(), next(iter(chosen.batches()))[1]
    assert float(chosen.step(state, batch)[1]["loss"]) == float(two.step(two.init(), batch)[1]["loss"])


def test_remat_only_where_microbatches_do_not_suffice(bytes_of):
    assert opened(bytes_of[1], microbatches=1, remat="auto").config.remat == "none"
    assert opened(bytes_of[1] - 1, microbatches=1, remat="auto").config.remat in ("dots", "full")
    with pytest.raises(ConfigError, match=r"microbatches: auto found no step that fits.*the limit is 1000 B"):
        opened(1000)


def test_choices_in_order():
    assert auto.choices(config(batch_size=64, remat="auto"), 8) == [
        [{"microbatches": m, "remat": remat} for m in (1, 2, 4, 8)] for remat in ("none", "dots", "full")
    ]
    assert auto.microbatch_counts(config(batch_size=96), 8) == [1, 2, 4]


def test_build_chooses_by_the_memory_of_the_devices():
    assert sk.build(config(task_args={"layers": 1}, batch_size=64)).config.microbatches == 1


def test_other_microbatches_keep_the_reducers_state():
    made = opened(None, microbatches=1, reducer="bfloat16")
    other = made.with_step({"microbatches": 2})
    assert [leaf.path for leaf in other.layout] == [leaf.path for leaf in made.layout]
    assert jax.tree.structure(other.abstract_state) == jax.tree.structure(made.abstract_state)


def test_plan_and_training_log_what_auto_tries(tmp_path, capsys):
    small = {"batch_size": 64, "task_args": {"layers": 1}}
    runs = [lambda: make_plan(config(**small), "cpu:8")]
    for progress in ("plain", "off"):
        requested = config(**small, log={"progress": progress}, run_dir=str(tmp_path / progress))
        runs.append(lambda requested=requested: train(requested))
    for run, number in zip(runs, (1, 1, 0), strict=True):
        run()
        output, errors = capsys.readouterr()
        assert errors.count("auto: microbatches 1: a step needs") == number and "auto: " not in output
