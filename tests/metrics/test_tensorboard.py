"""TensorBoard: tags by split, and a clear message without the package."""

import sys

import pytest

from spmdkit.errors import ConfigError
from spmdkit.metrics import TensorboardTracker


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ConfigError, match=r"pip install 'spmdkit\[tensorboard\]'"):
        TensorboardTracker(tmp_path)


def test_the_real_package_writes_event_files(tmp_path):
    pytest.importorskip("tensorboardX")
    tracker = TensorboardTracker(tmp_path / "tensorboard")
    tracker.write("scalars", {"step": 1, "loss": 2.0, "examples_per_s": 5.0})
    tracker.write("scalars", {"step": 1, "split": "eval", "loss": 3.0})
    tracker.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    for tag in (b"train/loss", b"eval/loss", b"throughput/examples_per_s"):
        assert tag in file.read_bytes()
