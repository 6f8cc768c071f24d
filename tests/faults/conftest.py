"""Jobs with a fault, in a folder of their own; nothing of them is left."""

import pytest

from tests.support.jobs import Job


@pytest.fixture
def job(tmp_path, forks):
    started = Job(tmp_path.resolve(), forks)
    yield started
    left = started.left() if all(popen.poll() is not None for popen in started.started) else []
    started.close()
    assert left == [], "an ended job has left something behind"
