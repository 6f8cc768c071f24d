"""What the checkpoint tests share: a directory, and the folder's own modules on the path."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "checkpoints"
