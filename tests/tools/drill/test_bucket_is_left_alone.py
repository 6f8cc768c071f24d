"""A drill of a config whose checkpoints are in a bucket writes to this machine alone."""

from spmdkit.config import load_config
from spmdkit.tools.drill import command


def test_a_drill_writes_nothing_into_the_bucket_of_the_run(tmp_path, monkeypatch):
    config = tmp_path / "run.yaml"
    config.write_text(
        "task: t.py:task\nsteps: 9\nbatch_size: 8\ncheckpoint: {every_steps: 2, directory: gs://bucket-one/run}\n"
    )
    started = []
    monkeypatch.setattr(command, "launch", lambda command, *_, **__: started.append(command) or 5)
    assert command.run_drill(command.Drill(config=config, overrides=[], faults=["kill:0@3"], num_processes=1)) == 5
    (words,) = started
    overrides = words[words.index(str(config)) + 1 :]
    asked = load_config(config, overrides)
    assert asked.checkpoint.directory is None and asked.checkpoint.every_steps == 2
