"""The language of the site: short sentences, short pages, an example that runs on each page that teaches."""

import pytest

from tests.docs.pages import DOCS, blocks, sentences

TEACHING = sorted(path for section in ("tutorial", "howto") for path in (DOCS / section).rglob("*.md"))
READ = sorted(
    path
    for section in ("start", "tutorial", "howto", "coming_from", "reference", "why")
    for path in (DOCS / section).rglob("*.md")
)
MAX_WORDS = 18
MAX_LINES = 150


def name(path):
    return path.relative_to(DOCS).as_posix()


@pytest.mark.parametrize("path", READ, ids=name)
def test_the_mean_sentence_is_short(path):
    counts = sentences(path.read_text())
    assert sum(counts) / max(len(counts), 1) <= MAX_WORDS


@pytest.mark.parametrize("path", TEACHING, ids=name)
def test_a_page_that_teaches_is_short_and_runs(path):
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_LINES
    assert any(block.runs for block in blocks(text))
