"""Common tasks about the log, trackers and hooks: each with at most one line more than the shortest form in Accelerate,
Lightning, Keras or Levanter."""

import numpy as np
import pytest

from tests.support.services import installed, read

OFFLINE = {"wandb": "{project: digits, mode: offline}", "mlflow": "{experiment: digits}"}
EVALUATED = {"eval_data": "data"}
RATE = {"learning_rate": "0.1"}
BY_RATE = {"optimizer": "lambda rate: optax.sgd(rate)"}


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_25_and_26_wandb_and_mlflow(user, name, monkeypatch):
    installed(name, False, monkeypatch)
    user.with_lines(1 + 1, config=f"log: {{every_steps: 1, trackers: [{{{name}: {OFFLINE[name]}}}]}}\n")
    losses = user.train()
    found = [value for key, _, value in sorted(read(name, False, user.path / "run")) if key == "train/loss"]
    np.testing.assert_allclose(found, losses)


SAMPLES = """
    import jax.numpy as jnp
    show = sk.samples(lambda program, state: {"note": "n", "picture": jnp.ones((4, 4)), "w": state.params["w"][:, 0]})
"""


def test_27_tensorboard_image_text_histogram(user):
    pytest.importorskip("tensorboardX")
    config = "hooks: [{samples: {fn: task.py:show, every: 2}}]\nlog: {trackers: [tensorboard]}\n"
    user.with_lines(3 + 1, SAMPLES, config=config)
    user.train()
    written = b"".join(path.read_bytes() for path in (user.path / "run/tensorboard").iterdir())
    assert all(name in written for name in (b"train/note", b"train/picture", b"train/w"))


def test_28_learning_rate_and_gradient_norm(user):
    user.with_lines(0, base=RATE, plain_task=BY_RATE)
    user.train()
    assert all(line["learning_rate"] == 0.1 and line["gradient_norm"] > 0 for line in user.records())


def test_29_early_stopping(user):
    config = "hooks: [{early_stopping: {mode: max, patience: 2}}]\neval: {every_steps: 1}\n"
    user.with_lines(1 + 1, config=config, plain_task=EVALUATED)
    assert len(user.train()) == 3


def test_30_reduce_on_plateau(user):
    config = "hooks: [{reduce_on_plateau: {mode: max, patience: 1, factor: 0.5}}]\neval: {every_steps: 1}\n"
    user.with_lines(1 + 1, config=config, base=RATE, plain_task=BY_RATE | EVALUATED)
    user.train()
    rates = [line["learning_rate"] for line in user.records() if "split" not in line]
    np.testing.assert_allclose(rates, [0.1, 0.1, 0.05, 0.025])


def test_32_samples(user):
    code = """
        show = sk.samples(lambda program, state: {"note": f"b0 = {float(state.params['b'][0]):.3f}"})
    """
    user.with_lines(1 + 1, code, config="hooks: [{samples: {fn: task.py:show, every: 2}}]\n")
    user.train()
    text = (user.path / "run/text.jsonl").read_text()
    assert text.count("b0 = ") == 2
