"""`health_check: true`: a device that computes other bits ends the start before anything is written; otherwise the run
says that all was well."""

import numpy as np
import pytest

from spmdkit.errors import DeviceError
from spmdkit.run.startup.health_checks import all_processes, burn_in
from tests.support.small_runs import events, train


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(all_processes, "BURN_IN_S", 0.05)


def test_health_check_reports_only_if_requested(tmp_path, capfd):
    train(tmp_path, health_check=True, steps=2)
    (event,) = events(tmp_path, "health_check")
    assert "2 devices, the same bits" in event["why"]
    assert "health_check:" in capfd.readouterr().err
    train(tmp_path / "other", steps=2)
    assert events(tmp_path / "other", "health_check") == []


def test_wrong_device_is_named_before_training(tmp_path, monkeypatch):
    right = burn_in.operands

    def operands(size, device):
        a, b = right(size, device)
        return (a, b + np.float32(1e-6)) if device.id == 1 else (a, b)

    monkeypatch.setattr(burn_in, "operands", operands)
    with pytest.raises(DeviceError, match=r"health_check: .*device 1 .*Exclude that host or device") as told:
        train(tmp_path, health_check=True, steps=2)
    assert told.value.exit_code == 1 and not (tmp_path / "run").exists()
