"""A folder for the program of a user."""

import pytest

from tests.support.command_line import alone as alone
from tests.support.common_tasks import UserFolder


@pytest.fixture
def user(tmp_path, monkeypatch, capfd, alone):
    return UserFolder(tmp_path, monkeypatch, capfd)
