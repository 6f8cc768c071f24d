"""What a run leaves: no secret in any file of it, and no file that others may read or that a link of theirs has led
elsewhere."""

import stat
import sys

import pytest

import spmdkit as sk
from spmdkit.checkpoint import run_lock
from spmdkit.cluster import detect_cluster, join
from spmdkit.errors import ConfigError, UserCodeError
from spmdkit.foundation import redact

CANARY = "canary-in-a-coal-mine"
TASK = """
import jax.numpy as jnp, numpy as np, optax, spmdkit as sk
x = np.ones((32, 3), np.float32)

class Rows:
    def __init__(self, api_token, url):
        self.told = f"{url} refused {api_token}"
    def __len__(self):
        return 32
    def __getitem__(self, i):
        if i == 31: raise OSError(self.told)
        return x[i]

@sk.hook
def hook(password):
    return sk.Hook("tells", after_step=lambda run, *_: run.message(f"{password} refused"))

@sk.task
def task(api_token, url, database, wandb_key, storage, width=3):
    return sk.Task(lambda key: {"w": jnp.zeros(width)}, lambda p, b, key: sk.mean(b @ p["w"]), optax.sgd(0.1), train_data=Rows(api_token, url))
"""  # noqa: E501
CONFIG = f"""
task: task.py:task
task_args: {{api_token: {CANARY}-1, url: "https://me:{CANARY}-2@host/x", database: {{password: {CANARY}-3, name: mine}}, wandb_key: {CANARY}-6, storage: "AccountKey={CANARY}-7;a=b"}}
run_dir: run
steps: 8
batch_size: 8
devices: cpu:2
mesh: {{data: 2}}
data: {{shuffle: false}}
hooks: [{{"task.py:hook": {{password: {CANARY}-4}}}}]
checkpoint: {{every_steps: 2}}
log: {{every_steps: 1, progress: plain}}
"""  # noqa: E501


@pytest.fixture
def told(tmp_path, monkeypatch, capfd):
    """A folder whose run has met everything: checkpoints, an error that quotes a secret, a plan, a report."""
    monkeypatch.setattr(redact, "_known", set())
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--a=b --auth_token={CANARY}-5")
    for name in ("AWS_SECRET_ACCESS_KEY", "JAX_HEADER", "SPMDKIT_FOO", "WANDB_API_KEY"):
        monkeypatch.setenv(name, f"Bearer {CANARY}-{name}")
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "run.yaml").write_text(CONFIG)
    config = sk.load_config(tmp_path / "run.yaml")
    with pytest.raises(UserCodeError, match=CANARY):  # in Python it is the user's own exception
        sk.train(config, join(detect_cluster({}), config.devices))
    sys.modules.pop("spmdkit_task_task", None)
    (tmp_path / "task.py").write_text(TASK.replace("i == 31", "i == 99"))
    sk.train(config, join(detect_cluster({}), config.devices))
    printed = capfd.readouterr().out
    assert CANARY not in printed and "*** refused" in printed
    return tmp_path, config


def test_no_file_contains_secrets_or_is_public(told):
    folder, _ = told
    found = [path for path in (folder / "run").rglob("*") if path.is_file()]
    names = {path.name for path in found}
    assert {"config.yaml", "plan.json", "plan.html", "report.html", "record.json", "events.jsonl"} <= names
    assert [path for path in found if CANARY.encode() in path.read_bytes()] == []
    assert b"refused ***" in (folder / "run/events.jsonl").read_bytes()
    loose = {
        path: oct(path.stat().st_mode)
        for path in (folder / "run").rglob("*")
        if stat.S_IMODE(path.stat().st_mode) & (0o027 if path.is_dir() else 0o137)
    }
    assert loose == {}
    with pytest.raises(
        ConfigError,
        match=r"config.yaml:\d+: task_args.api_token: is '\*\*\*', which spmdkit writes in place of a secret",
    ):
        sk.load_config(folder / "run/config.yaml")


def test_links_in_place_of_files_are_refused(tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("precious")
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.lock").symlink_to(mine)
    opened = r"the lock .*run.lock cannot be opened .*plain file, no link"
    with pytest.raises(ConfigError, match=opened), run_lock(run):
        pass
    from spmdkit.foundation.run_status import StepMark
    from spmdkit.metrics import EventLog
    from spmdkit.metrics.trackers.jsonl import JsonlTracker

    for name in ("events.jsonl", "metrics.jsonl", "last_step"):
        (run / name).symlink_to(mine)
    with pytest.raises(ConfigError, match=r"events\.jsonl"):
        EventLog(run / "events.jsonl")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: .*it is a link"):
        JsonlTracker(run / "metrics.jsonl", None)
    StepMark([run / "last_step"]).at(5)
    assert mine.read_text() == "precious"
