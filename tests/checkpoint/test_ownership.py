"""Who was in a run's directory before the attempt that it belongs to now writes nothing more."""

import pytest

from spmdkit.checkpoint.checkpoints import Checkpoints
from spmdkit.checkpoint.ownership import Fence, claim, wait_for_claim
from spmdkit.errors import CheckpointWriteError, ConfigError
from spmdkit.metrics import EventLog


def test_superseded_attempt_writes_no_event(tmp_path):
    first = claim(tmp_path)
    log = EventLog(tmp_path / "events.jsonl", 1, is_owner=first.is_owner)
    log.write("before")
    first.check()
    second = claim(tmp_path)
    log.write("after")
    assert [line.split('"')[3] for line in (tmp_path / "events.jsonl").read_text().splitlines()] == ["before"]
    with pytest.raises(ConfigError, match=r"belongs to another run now, of process \d+ on .* since"):
        first.check()
    second.check()
    log.close()


def test_recent_ownership_check_holds_until_the_process_stops(tmp_path):
    first = claim(tmp_path)
    first.check(every_s=60)
    claim(tmp_path)
    first.check(every_s=60)
    content, looked = first.seen
    first.seen = (content, looked - 61)
    with pytest.raises(ConfigError, match="belongs to another run now"):
        first.check(every_s=60)
    with pytest.raises(ConfigError, match="belongs to another run now"):
        first.check(every_s=60)  # that it is not ours does not hold for a moment alone


def test_save_of_superseded_attempt_is_not_committed(tmp_path):
    first = claim(tmp_path)
    checkpoints = Checkpoints(tmp_path / "checkpoints", is_owner=first.is_owner)
    claim(tmp_path)
    theirs = tmp_path / "checkpoints" / "1.orbax-checkpoint-tmp" / "theirs"
    import jax.numpy as jnp

    checkpoints.save(1, {"w": jnp.zeros(2)}, {})
    theirs.parent.mkdir(exist_ok=True)
    theirs.touch()
    with pytest.raises(CheckpointWriteError, match="belongs to another run"):
        checkpoints.wait()
    assert checkpoints.steps() == [] and theirs.exists()
    checkpoints.close()


def test_claim_of_process_0_is_visible_or_not(tmp_path):
    fence = claim(tmp_path)
    assert wait_for_claim(tmp_path, fence.attempt, 0.0)
    assert not wait_for_claim(tmp_path / "elsewhere", fence.attempt, 0.1)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"attempt": null}'[:-1]])
def test_unreadable_record_is_not_another_run(tmp_path, content):
    (tmp_path / "attempt.json").write_text(content)
    Fence(tmp_path, "mine").check()
