"""A drill of a config with checkpoints in a bucket writes to this machine only."""

from spmdkit.config import load_config
from spmdkit.tools.drill import command


def test_drill_writes_nothing_into_the_bucket(tmp_path, monkeypatch):
    config = tmp_path / "run.yaml"
    config.write_text(
        "task: t.py:task\nsteps: 9\nbatch_size: 8\ncheckpoint: {every_steps: 2, directory: gs://bucket-one/run}\n"
    )
    started = []
    monkeypatch.setattr(command, "launch", lambda command, *_, **__: started.append(command) or 5)
    assert (
        command.run_drill(command.DrillRequest(config=config, overrides=[], faults=["kill:0@3"], num_processes=1)) == 5
    )
    (words,) = started
    overrides = words[words.index(str(config)) + 1 :]
    loaded = load_config(config, overrides)
    assert loaded.checkpoint.directory is None and loaded.checkpoint.every_steps == 2
