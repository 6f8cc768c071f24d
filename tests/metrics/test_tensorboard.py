"""TensorBoard: tags by split, and a clear message without the package."""

import sys

import pytest

from spmdkit.errors import ConfigError
from spmdkit.metrics import TensorboardTracker


class Recorded:
    def __init__(self, directory, purge_step, filename_suffix=""):
        self.directory, self.purge_step, self.scalars, self.closed = directory, purge_step, [], 0

    def add_scalar(self, tag, value, step):
        self.scalars.append((tag, value, step))

    def close(self):
        self.closed += 1


@pytest.fixture
def fake(monkeypatch):
    import types

    monkeypatch.setitem(sys.modules, "tensorboardX", types.SimpleNamespace(SummaryWriter=Recorded))


def test_tags_name_the_split_and_throughput_is_apart(fake, tmp_path):
    tracker = TensorboardTracker(tmp_path, keep_through_step=20)
    writer = tracker._writer
    tracker.write({"step": 21, "loss": 2.0, "examples_per_s": 5.0})
    tracker.write({"step": 21, "split": "eval", "loss": 3.0})
    tracker.close()
    tracker.close()
    assert writer.scalars == [("train/loss", 2.0, 21), ("throughput/examples_per_s", 5.0, 21), ("eval/loss", 3.0, 21)]
    assert writer.purge_step == 21 and writer.closed == 1


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ConfigError, match=r"pip install 'spmdkit\[tensorboard\]'"):
        TensorboardTracker(tmp_path)


def test_the_real_package_writes_event_files(tmp_path):
    pytest.importorskip("tensorboardX")
    tracker = TensorboardTracker(tmp_path / "tensorboard")
    tracker.write({"step": 1, "loss": 2.0})
    tracker.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert b"train/loss" in file.read_bytes()
