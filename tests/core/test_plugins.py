"""Plug-ins of other distributions: found by entry points, made and checked like built-in ones."""

import numpy as np
import pytest

import spmdkit as sk
from spmdkit.data.source import ArraySource, open_source
from spmdkit.errors import ConfigError
from spmdkit.foundation import plugins
from tests.support.distributions import install

REDUCER = """
from spmdkit.communication.reducers import sum


def make(scale: float = 1.0):
    return sum.make()
"""

TRACKER = """
import json

import spmdkit as sk


def open(run, last_step, file="copy.jsonl"):
    def write(kind, record):
        with (run.directory / file).open("a") as lines:
            lines.write(json.dumps({"step": record["step"]}) + "\\n")

    return sk.Tracker(write)
"""

HOOK = """
import spmdkit as sk


def make(step):
    return sk.Hook("stopper", after_step=lambda run, at, state, metrics: sk.Stop(0, "done") if at == step else None)
"""

TASK = """
import jax.numpy as jnp, numpy as np, optax
import spmdkit as sk

x = np.ones((16, 2), np.float32)
loss = lambda params, batch, key: sk.mean(((batch @ params) ** 2))
task = sk.Task(lambda key: jnp.zeros(2), loss, optax.sgd(0.1), train_data=x)
"""


def test_every_group_finds_its_plugins():
    assert {"sum", "int8"} <= set(plugins.names("reducers")) and "base" not in plugins.names("reducers")
    for group in plugins.GROUPS:
        assert plugins.names(group) == sorted(plugins.names(group))
        assert plugins.load_all(group).keys() == set(plugins.names(group))
        assert bool(plugins.names(group)) == (plugins.GROUPS[group].folder is not None)


def test_a_reducer_of_another_distribution_is_checked(tmp_path, monkeypatch):
    install(monkeypatch, tmp_path, "reducers", "theirs", REDUCER)
    assert plugins.make("reducers", {"theirs": {"scale": 2}}).exact
    with pytest.raises(ConfigError, match=r"theirs has no option 'scall'\. Did you mean 'scale'"):
        sk.Config(task="t.py:t", reducer={"theirs": {"scall": 2}})


def test_trackers_and_hooks_of_other_distributions_run(tmp_path, monkeypatch):
    install(monkeypatch, tmp_path, "trackers", "copy", TRACKER)
    install(monkeypatch, tmp_path, "hooks", "stopper", HOOK)
    (tmp_path / "my_task.py").write_text(TASK)
    (tmp_path / "run.yaml").write_text(
        "task: my_task.py:task\nrun_dir: run\nsteps: 9\nbatch_size: 4\ndevices: cpu:1\nhooks: [{stopper: 3}]\n"
        "log: {every_steps: 1, progress: plain, trackers: [{copy: {file: c.jsonl}}]}\n"
    )
    result = sk.train(tmp_path / "run.yaml")
    assert int(result.state.step) == 3
    assert (tmp_path / "run/c.jsonl").read_text().splitlines() == [f'{{"step": {step}}}' for step in (1, 2, 3)]


def test_a_data_source_of_another_distribution_is_read(tmp_path, monkeypatch):
    class Table:
        rows = np.arange(6.0, dtype=np.float32)

    text = "from spmdkit.data.source import ArraySource\n\n\ndef open_source(data, what, access):\n"
    text += "    return ArraySource(data.rows, what) if hasattr(data, 'rows') else None\n"
    install(monkeypatch, tmp_path, "data_sources", "tables", text)
    source = open_source(Table())
    assert isinstance(source, ArraySource) and len(source) == 6
    assert isinstance(open_source(np.ones(3, np.float32)), ArraySource)


def test_a_name_used_twice_is_rejected(tmp_path, monkeypatch):
    install(monkeypatch, tmp_path, "reducers", "sum", REDUCER)
    with pytest.raises(ConfigError, match=r"spmdkit\.reducers: sum-plugin 1\.0 declares 'sum'.* unique"):
        plugins.find("reducers")


def test_a_distribution_that_cannot_be_imported(tmp_path, monkeypatch):
    install(monkeypatch, tmp_path, "reducers", "theirs", "import not_installed_anywhere\n")
    assert "theirs" in plugins.names("reducers")
    with pytest.raises(
        ConfigError, match=r"'theirs' of theirs-plugin 1\.0 .*not_installed_anywhere.* Update or uninstall"
    ):
        plugins.make("reducers", "theirs")


def test_a_hook_that_no_distribution_has():
    with pytest.raises(ConfigError, match=r"hooks\[0\]: needs one of early_stopping, .*, found 'my_hook'"):
        sk.Config(task="t.py:t", hooks=["my_hook"])
