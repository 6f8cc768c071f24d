"""Each question of `questions.md` is resolved by the page next to it."""

from pathlib import Path

import pytest

from tests.docs.pages import DOCS

LINES = Path(__file__).with_name("questions.md").read_text().splitlines()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in LINES if line.startswith("| ")][2:]


def test_there_are_fifty_questions():
    assert len({question for question, *_ in ROWS}) == 50


@pytest.mark.parametrize("question, _, page, words", ROWS, ids=lambda cell: cell[:40])
def test_the_page_has_the_words(question, _, page, words):
    assert words in (DOCS / f"{page}.md").read_text()
