"""Damage in a checkpoint of several processes: what one of them finds is damage to all, and nobody waits for the
others."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.processes


def test_a_flipped_bit_that_one_of_two_processes_reads_makes_both_go_back_to_the_checkpoint_before(folder):
    wide = ["task_args={width: 8192}", "mesh={fsdp: -1}"]
    code, output = folder.train(*wide, "steps=20")
    assert code == 0, output
    data = max((folder.path / "run/checkpoints/20/state").rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    assert len(content) > 2**17, "a file of this size is read by the processes alone, not by process 0 before them"
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    code, output = folder.train(*wide, "steps=30", processes=2)
    assert code == 0, output
    assert "checkpoint 20 is damaged" in output and "continuing at step 11" in output, output
    assert (folder.path / "run/checkpoints/20.damaged").is_dir()
    events = [json.loads(line) for line in (folder.path / "run/events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "restored"] == [10, 10]  # one of each process
