"""FIFOs, devices, links and huge files in a run's directory: no command waits for them or reads them whole."""

import os

import pytest

from tests.support.blocked import fails_if_blocked
from tests.support.messages import Parts

REFUSED = ("metrics.jsonl", "events.jsonl", "counts.jsonl", "run.lock", "skipped_batches.json")
REPLACED = ("attempt.json", "last_step", "config.yaml", "environment.json", "plan.json")
"""Files of a run: a run that finds something else in their path ends, or replaces it."""


@pytest.fixture
def hurried(folder):
    """A command that blocks is interrupted."""
    folder.write()
    with fails_if_blocked():
        yield folder


@pytest.mark.parametrize("names", [*((name,) for name in REFUSED), REPLACED], ids=lambda names: names[0])
def test_no_command_waits_for_a_fifo(hurried, names):
    for name in names:
        path = hurried.path / "run" / name
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    assert hurried.leaves("watch", "run", "--once") in (0, 78)
    train = hurried.leaves("train", "run.yaml", "log.progress=off")
    assert train == (0 if names == REPLACED else 78)
    if names not in (REPLACED, ("run.lock",)):  # a finished run has replaced the other files
        assert hurried.leaves("report", "run") in (0, 78)
        assert hurried.leaves("checkpoint", "ls", "run") == 0
        assert hurried.leaves("eval", "run.yaml") in (0, 78)


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_link_to_a_device_is_refused(hurried, name):
    path = hurried.path / "run" / name
    path.unlink()
    path.symlink_to("/dev/zero")
    hurried.fails(78, Parts(f"run/{name}"))
    assert hurried.leaves("report", "run") in (0, 78)
    assert hurried.leaves("checkpoint", "ls", "run") == 0


def test_size_of_metrics_is_bounded(hurried, capfd):
    os.truncate(hurried.path / "run/metrics.jsonl", 2**40)
    for command in (("train", "run.yaml"), ("report", "run")):
        assert hurried.leaves(*command) == 78
        err = capfd.readouterr().err
        assert "run/metrics.jsonl: cannot be" in err and "it has 1099511627776 bytes" in err
