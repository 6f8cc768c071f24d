"""A task of spmdkit is at most ten lines longer than the plain script of one device, and the page of tasks is what the
files say."""

import pytest

from tests.support.tasks import PAGE, all_counted, page


@pytest.mark.parametrize("counted", all_counted(), ids=lambda c: c.name)
def test_a_task_is_at_most_ten_lines_longer_than_plain_jax(counted):
    assert 0 < counted.task <= counted.plain + 10, counted


def test_the_page_of_tasks_is_written_from_the_files():
    assert PAGE.read_text() == page(), "python -m tests.support.tasks --write"
