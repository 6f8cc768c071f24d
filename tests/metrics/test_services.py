"""Weights & Biases, MLflow and TensorBoard: what a reader of each sees after a restart and a rollback. The substitutes
of tests/support/services.py run always, the real packages where they are installed (`make extras`)."""

import importlib
import json
import sys
import time
import types

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.errors import ConfigError
from spmdkit.metrics import trackers
from spmdkit.metrics.trackers.queue import Trackers
from spmdkit.metrics.trackers.service_run import ServiceRun, flat, pixels
from tests.metrics.test_tracker_contract import check_contract
from tests.support import small_runs
from tests.support.services import SERVICES, installed, read, shown

CASES = [
    pytest.param(
        name,
        is_real,
        marks=[pytest.mark.trackers] * is_real,
        id=f"{name}{'' * is_real or '-substitute' * (not is_real)}",
    )
    for name in SERVICES
    for is_real in (False, True)
]
pytestmark = pytest.mark.filterwarnings("ignore")  # mlflow-skinny 3.17 uses deprecated functions of SQLAlchemy
X = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)


def opened(name, folder, last_step=0, **options):
    run = types.SimpleNamespace(directory=folder, best_checkpoint=lambda: None)
    return importlib.import_module(f"spmdkit.metrics.trackers.{name}").open(run, last_step, **SERVICES[name], **options)


@pytest.mark.parametrize(("name", "is_real"), CASES)
def test_a_service_has_each_step_once(name, is_real, tmp_path, monkeypatch):
    installed(name, is_real, monkeypatch)
    folder = tmp_path / "run"
    folder.mkdir()
    check_contract(
        lambda last_step: opened(name, folder, last_step),
        lambda _: sorted(read(name, is_real, folder), key=lambda row: row[1]),
        folder,
        keeps_first=True,
    )
    if is_real:
        next_second()
    first = json.loads((folder / "trackers" / f"{name}.json").read_text())["id"]
    tracker = opened(name, folder, 5)
    tracker.write("scalars", {"step": 6, "loss": 0.5})
    tracker.close()
    assert ("train/loss", 6, 0.5) in read(name, is_real, folder)
    assert json.loads((folder / "trackers" / f"{name}.json").read_text())["id"] == first


def next_second():
    """Waits for the next second: W&B names the folder of an offline run by the second of its start."""
    begun = int(time.time())
    while int(time.time()) == begun:
        time.sleep(0.02)


def loss_fn(params, batch, key):
    return sk.mean((batch @ params["w"] - batch.sum(-1)) ** 2)


def train(folder, name, steps, **changes):
    def write(run, step, state, metrics):
        run.write({"step": step, "note": f"step <{step}>"}, "text")
        run.write({"step": step, "picture": jnp.ones((4, 5)) / 2}, "image")
        run.write({"step": step, "weights": state.params["w"]}, "histogram")

    back = [0]

    def go_back(run, step, state, metrics):
        if step == 7 and not back[0]:
            back[0] = 1
            return sk.Rollback(4, skip_batches=1)

    hooks = [sk.Hook("write", every=4, after_step=write), sk.Hook("back", after_step=go_back)]
    task = sk.Task(lambda key: {"w": jnp.zeros(3)}, loss_fn, optax.sgd(0.05), X, X[:16], hooks=hooks)
    options = {**SERVICES[name], "best_checkpoint": True}
    values = {
        "batch_size": 16,
        "checkpoint": {"every_steps": 4, "best": {"metric": "loss"}},
        "eval": {"every_steps": 4},
    }
    log = {"every_steps": 1, "progress": "plain", "trackers": [{name: options}]}
    return small_runs.train(folder, task, steps=steps, log=log, **values, **changes)


@pytest.mark.parametrize(("name", "is_real"), CASES)
def test_a_run_continues_in_its_service(name, is_real, tmp_path, monkeypatch, capfd):
    installed(name, is_real, monkeypatch)
    monkeypatch.setattr("spmdkit.metrics.trackers.queue.TRACKER_CLOSE_S", 120.0)
    for steps in (4, 9):
        train(tmp_path, name, steps)
        if is_real:
            next_second()
    folder = tmp_path / "run"
    losses = [step for key, step, _ in sorted(read(name, is_real, folder)) if key == "train/loss"]
    assert losses == [*range(1, 10)]
    evaluations = [step for key, step, _ in sorted(read(name, is_real, folder)) if key == "eval/loss"]
    assert evaluations == [4, 8, 9]
    names = " ".join(sorted(shown(name, is_real, folder)))
    assert "note" in names and "picture" in names and ("weights" in names) == (name != "mlflow")
    if name != "wandb" or not is_real:
        assert "best_checkpoint" in names or "artifact model" in names
        assert ("param optimizer" in names or "param batch_size" in names) or "config batch_size" in names
    else:
        assert b"batch_size" in b"".join(path.read_bytes() for path in folder.glob("wandb/*/run-*.wandb"))
    out = capfd.readouterr().out
    assert out.count("tracker mlflow does not show records of the kind histogram: weights.") == 2 * (name == "mlflow")


@pytest.mark.parametrize("name", [*SERVICES, "tensorboard"])
def test_a_missing_package_is_named_with_its_extra(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, {"tensorboard": "tensorboardX", "comet": "comet_ml"}.get(name, name), None)
    (tracker,) = [t for t in trackers.chosen([name], tmp_path) if t.name == name]
    run = types.SimpleNamespace(directory=tmp_path)
    with pytest.raises(ConfigError, match=rf"pip install 'spmdkit\[{name}\]'"):
        tracker.open(run, 0)


def test_a_service_that_does_not_connect_costs_one_warning(tmp_path, monkeypatch):
    installed("wandb", False, monkeypatch)

    def refuse(**_):
        raise ConnectionError("refused")

    monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
    warnings = []
    pipe = Trackers(warnings.append)
    pipe.add("wandb", lambda: opened("wandb", tmp_path))
    for step in range(5):
        pipe.write({"step": step, "loss": 1.0})
    pipe.close()
    assert warnings == ["tracker wandb: ConnectionError: refused. Nothing more is written there, training continues."]


def test_kinds_that_no_tracker_shows_are_reported_once():
    warnings = []
    pipe = Trackers(warnings.append)
    for step in (1, 2):
        pipe.write({"step": step, "picture": np.ones((2, 2))}, "image")
    assert warnings == [
        "no tracker shows records of the kind image: picture. tensorboard, wandb, mlflow and comet show more kinds."
    ]


def test_the_first_value_of_a_step_is_sent(tmp_path):
    state = ServiceRun(tmp_path, "x")
    train_3, eval_3 = {"step": 3, "loss": 1}, {"step": 3, "split": "eval", "loss": 1}
    assert [state.is_new("scalars", r) for r in (train_3, eval_3, train_3, {"step": 2}, {"step": 4})] == [
        True, True, False, False, True,
    ]  # fmt: skip
    assert state.is_new("text", {"step": 1, "a": "x"}) and state.is_new("text", {"step": 1, "b": "x"})
    again = ServiceRun(tmp_path, "x")
    assert not again.is_new("scalars", {"step": 4}) and again.is_new("scalars", {"step": 5})


def test_hyperparameters_are_flat_and_images_are_bytes():
    config = {"steps": 3, "optimizer": {"name": "adam", "b1": 0.9}, "hooks": ["a"], "ema": None}
    assert flat(config) == {"steps": 3, "optimizer.name": "adam", "optimizer.b1": 0.9, "hooks": "['a']"}
    assert pixels(np.array([[0.0, 0.5, 2.0]])).tolist() == [[0, 128, 255]]
    assert pixels(np.uint8([[7]])).tolist() == [[7]]


@pytest.mark.trackers
def test_tensorboard_shows_every_kind(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tmp_path / "config.yaml").write_text("steps: 5\n")
    run = types.SimpleNamespace(directory=tmp_path)
    tracker = importlib.import_module("spmdkit.metrics.trackers.tensorboard").open(run, 0)
    records = {"text": "a note", "image": np.ones((3, 4)), "histogram": np.arange(9.0), "scalars": 2.0}
    for kind, value in records.items():
        tracker.write(kind, {"step": 7, kind: value})
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    tags = events.Tags()
    assert tags["scalars"] == ["train/scalars"] and tags["images"] == ["train/image"]
    assert tags["histograms"] == ["train/histogram"]
    assert {"train/text/text_summary", "config/text_summary"} <= set(tags["tensors"])
    assert b"steps" in events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert events.Histograms("train/histogram")[0].histogram_value.num == 9


def sounds(name, folder):
    """Returns the names of the sounds that a reader sees."""
    if name != "tensorboard":
        return {row for row in shown(name, True, folder) if "sound" in row}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert [(sound.sample_rate, sound.step) for sound in events.Audio("train/sound")] == [(8000, 3)]
    return set(events.Tags()["audio"])


@pytest.mark.trackers
@pytest.mark.parametrize("name", ["tensorboard", "wandb", "comet"])
def test_audio_is_shown(name, tmp_path, monkeypatch):
    pytest.importorskip("soundfile")
    pytest.importorskip("tensorboard")
    if name in SERVICES:
        installed(name, True, monkeypatch)
    run = types.SimpleNamespace(directory=tmp_path, best_checkpoint=lambda: None)
    tracker = importlib.import_module(f"spmdkit.metrics.trackers.{name}").open(run, 0, **SERVICES.get(name, {}))
    assert "audio" in tracker.accepts
    tracker.write("audio", {"step": 3, "sound": np.sin(np.arange(800) / 10), "rate": 8000})
    tracker.close()
    (found,) = sounds(name, tmp_path)
    assert "train/sound" in found


@pytest.mark.parametrize(
    ("name", "lacks"), [("wandb", {"image", "audio"}), ("comet", {"image"}), ("mlflow", {"image"})]
)
def test_kinds_without_their_package_are_not_accepted(name, lacks, tmp_path, monkeypatch):
    installed(name, False, monkeypatch)
    kinds = importlib.import_module(f"spmdkit.metrics.trackers.{name}").KINDS
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    assert opened(name, tmp_path).accepts == kinds - lacks


def test_comet_needs_a_key(tmp_path, monkeypatch):
    installed("comet", False, monkeypatch)
    run = types.SimpleNamespace(directory=tmp_path)
    with pytest.raises(ConfigError, match="Set COMET_API_KEY, or mode: offline"):
        importlib.import_module("spmdkit.metrics.trackers.comet").open(run, 0)


BLOCKED = """
import threading
import spmdkit as sk

gate, taken = threading.Event(), []

@sk.tracker
def open(run, last_step):
    return sk.Tracker(lambda kind, record: taken.append((record["step"], gate.wait(20))))
"""


def test_a_tracker_that_blocks_delays_no_step(tmp_path, monkeypatch):
    """The tracker returns only after the last step has ended."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "blocked.py").write_text(BLOCKED)

    def after_step(run, step, state, metrics):
        if step == 6:
            sys.modules["spmdkit_task_blocked"].gate.set()

    hook = sk.Hook("last", after_step=after_step)
    task = sk.Task(lambda key: {"w": jnp.zeros(3)}, loss_fn, optax.sgd(0.05), X, hooks=[hook])
    log = {"every_steps": 1, "progress": "off", "trackers": ["blocked.py:open"]}
    small_runs.train(tmp_path, task, steps=6, batch_size=16, log=log, eval={})
    assert sys.modules.pop("spmdkit_task_blocked").taken == [(step, True) for step in range(1, 7)]
