"""A folder with a task and a config that work, a run that they left there, and the command line without its
`os._exit`."""

import sys

import pytest

from tests.support.command_line import Folder
from tests.support.command_line import alone as alone


@pytest.fixture
def empty(tmp_path, monkeypatch, capfd, alone):
    """A folder in which nothing has been trained yet."""
    return Folder(tmp_path, monkeypatch, capfd)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The run directory that three steps of the working task leave."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as monkeypatch:
        made = Folder(folder, monkeypatch, None)
        monkeypatch.setattr(sys, "path", list(sys.path))
        made.write()
        assert made.leaves("train", "run.yaml", "steps=2", "log.progress=off") == 0
    return folder / "run"


@pytest.fixture
def folder(empty, trained):
    """A folder whose run has two steps and one checkpoint: what no mistake may touch."""
    empty.copy_run(trained)
    return empty
