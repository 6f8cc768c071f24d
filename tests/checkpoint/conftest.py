"""What the checkpoint tests share: a directory."""

import pytest


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "checkpoints"
