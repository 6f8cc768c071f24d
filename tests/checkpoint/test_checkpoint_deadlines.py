"""A clock that is set during a save ends it on no process: orbax's deadlines are ours, by a steady clock."""

import time

import jax.numpy as jnp
import pytest

from spmdkit.checkpoint import Checkpoints, orbax_backend


@pytest.mark.parametrize("shift_s", [86400, -86400])
def test_clock_changes_do_not_end_a_save(directory, monkeypatch, shift_s):
    checkpoints, real, asked = Checkpoints(directory, timeout_s=60), time.time, []

    def set_clock():
        asked.append(None)
        return real() + shift_s * len(asked)

    monkeypatch.setattr(time, "time", set_clock)
    checkpoints.save(1, {"w": jnp.arange(4.0)}, {})
    checkpoints.wait()
    monkeypatch.undo()
    assert len(asked) > 3, "the clock was not set during the save"
    assert checkpoints.latest() == 1
    checkpoints.close()


def test_remaining_time_counts_from_the_first_call(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(orbax_backend.time, "monotonic", lambda: now[0])
    assert orbax_backend._remaining_s(1e9, None) is None
    assert orbax_backend._remaining_s(1e9, 5.0) == 5.0
    now[0] += 3
    assert orbax_backend._remaining_s(1e9, 5.0) == 2.0
    now[0] += 3
    with pytest.raises(TimeoutError, match="after 6"):
        orbax_backend._remaining_s(1e9, 5.0)
    for start in range(200):
        orbax_backend._remaining_s(float(start), 5.0)
    assert len(orbax_backend._begun) == orbax_backend.MAX_DEADLINES
