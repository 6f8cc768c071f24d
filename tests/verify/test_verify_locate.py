"""`locate`: the first value that differs between one device and a mesh, with its line; no line where more than one
would do."""

import inspect

import numpy as np
import pytest

from spmdkit.verify import locate, mutations
from spmdkit.verify.sharding_relation import FAR, FLOOR, difference, find_relation, noise_of
from spmdkit.verify.task_runner import Setting
from tests.support import verify_tasks as tasks

pytestmark = pytest.mark.promotes("tasks as users write them: masks of bools times numbers")

SETTING = Setting({"data": 4})
AXES = {"data": 4}


def located(loss_fn):
    """Returns what `verify` tells of a user's loss on data 4."""
    task_runner = tasks.case_runner(loss_fn).task_runner
    program = task_runner.program(SETTING)
    return locate.Locator(task_runner)(SETTING, program, "gradient", 0)


def is_in(line, function):
    """Returns whether `file.py:12 (name)` is a line of a function's text."""
    file, _, number = line.partition(" ")[0].rpartition(":")
    lines, first = inspect.getsourcelines(function)
    return inspect.getsourcefile(function).endswith(file) and first <= int(number) < first + len(lines)


@pytest.mark.forms(3)
@pytest.mark.parametrize(
    ("loss_fn", "says"),
    [
        (tasks.own_statistics, "each shard's local mean, not reduced over data"),
        (tasks.mean_of_means, "is a per-shard value that differs along"),
        (tasks.divided_twice, "is 1/4 of the value on one device: the size of data"),
        (tasks.summed_twice, "local mean, summed over data, not averaged: 4 times too large"),
        (tasks.plain_key, "random_bits"),
        (tasks.rows_of_the_next_replica, "has the rows of one device in a different order"),
        (tasks.one_leaf, ""),
        (tasks.cut_off, ""),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_line_of_a_user_mistake_is_located(loss_fn, says):
    found = located(loss_fn)
    assert found is not None and is_in(found.line, loss_fn), found
    assert says in found.text and found.axis == "data"


@pytest.mark.slow
def test_a_right_task_has_no_line():
    assert located(tasks.right) is None


def test_line_of_a_toolkit_mistake_is_located(monkeypatch):
    case_runner = tasks.case_runner(tasks.metric_of_a_replica)
    monkeypatch.setattr(case_runner, "locate", "all")
    found = case_runner.mutant("reduction_dropped", 4)
    assert found["caught"] and is_in(found["located"]["line"], mutations._first_only), found


# ---- how a value is made of that of one device

RIGHT = np.random.default_rng(0).normal(size=(8, 3))
PARTS = np.random.default_rng(1).normal(size=(4, 3))


def relation(found, right, stacked=AXES, reordered=False):
    return find_relation(found, right, stacked, AXES, lambda least: noise_of(right, [], least), reordered)


@pytest.mark.parametrize(
    ("found", "right", "kind", "axes"),
    [
        (RIGHT.reshape(4, 2, 3), RIGHT, "same", ""),
        (np.stack([RIGHT] * 4), RIGHT, "same", "data"),
        (RIGHT[::-1].reshape(4, 2, 3), RIGHT, "differs", ""),
        (np.moveaxis(RIGHT.reshape(2, 4, 3), 1, 0), RIGHT.reshape(2, 4, 3), "same", ""),
        (PARTS, PARTS.max(0), "maximum", "data"),
        (PARTS, PARTS.sum(0), "sum", "data"),
        (PARTS, PARTS.mean(0), "mean", "data"),
        (PARTS, PARTS[0], "differs", ""),
        (RIGHT.reshape(4, 2, 3) * (1 + 1e-4), RIGHT, "open", ""),
        (np.stack([PARTS * 2] * 4), PARTS, "differs", ""),
    ],
)
def test_value_is_whole_a_part_or_another(found, right, kind, axes):
    assert FLOOR < 1e-4 < FAR
    assert tuple(relation(found, right))[: 1 if not axes else 2] == ((kind, axes) if axes else (kind,))


def test_reordered_rows_are_right_where_meshes_reorder():
    assert relation(RIGHT[::-1].reshape(4, 2, 3), RIGHT, reordered=True) == ("same", "")
    chosen = np.eye(4)[[0, 1, 2, 0, 1, 3, 2, 2]]
    assert relation(chosen[::-1].reshape(4, 2, 4), chosen, reordered=True) is None
    assert relation(chosen[::-1].reshape(4, 2, 4), chosen).kind == "differs"
    assert relation(np.arange(4), np.array(0)).kind == "differs"  # a device's number has no smallest


def test_equal_numbers_of_choices_differ():
    many_axes = {"replica": 1, "data": 4, "fsdp": 1, "expert": 1, "context": 1, "tensor": 1}
    right = np.arange(24).reshape(8, 3) % 5 > 0
    assert relation(right.reshape(4, 2, 3), right, many_axes) == ("same", "")
    assert relation(np.roll(right, 1).reshape(4, 2, 3), right, many_axes).kind == "differs"


def test_equal_non_finite_values_are_the_same():
    masked = np.where(RIGHT > 0, RIGHT, -np.inf)
    assert relation(masked.reshape(4, 2, 3), masked).kind == "same"
    assert relation((2 * masked).reshape(4, 2, 3), masked).kind == "differs"


def test_sum_over_one_axis_is_a_part():
    stacked = {"replica": 2, "data": 2}
    parts = np.repeat(PARTS[:2], 2, axis=0)
    assert find_relation(parts, PARTS[:2].sum(0), stacked, stacked, lambda least: least) == ("sum", "replica")


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (np.stack([RIGHT * 4] * 4), "4 times the value on one device: the size of data"),
        (np.stack([RIGHT / 4] * 4), "1/4 of the value on one device: the size of data"),
        (np.random.default_rng(2).normal(size=(4, 8, 3)), "is a per-shard value that differs along data"),
        (np.random.default_rng(2).normal(size=(4, 2, 3)), "differs from the value on one device (relative error"),
    ],
)
def test_difference_is_described(found, text):
    how, axis = difference(found, RIGHT, AXES, AXES)
    assert text in how and axis == "data"
