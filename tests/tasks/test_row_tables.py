"""docs/development/rows.md has the present table of every task and example, and no loss or metric in it is mixed across
rows."""

import pytest

from tests.support import tasks
from tests.support.row_tables import EXAMPLES, PAGE, page

pytestmark = pytest.mark.promotes("natural code of people who have their own models")

FEW = ["cnn_linen", "moco", "simclr", "tagging"]


def cells():
    lines = [line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if len(line) > 4]


def test_page_has_every_task_and_no_mixed_loss():
    names = {line[0] for line in cells()}
    with_loss = {name.replace("_", " ") for name in tasks.task_names()} - {"dp sgd", "pinn", "ppo"}
    assert with_loss | {name.replace("_", " ") for name in EXAMPLES} <= names
    assert [line for line in cells() if line[2] == "mixed across rows" and not line[1].startswith("state")] == []


@pytest.mark.parametrize(
    ("names", "examples"),
    [(FEW, ("contrastive",)), pytest.param(tasks.task_names(), EXAMPLES, marks=pytest.mark.slow)],
    ids=["few", "all"],
)
def test_rows_of_the_page_are_current(names, examples):
    written = set(PAGE.read_text(encoding="utf-8").splitlines())
    assert [line for line in page(names, examples).splitlines() if line not in written] == []
