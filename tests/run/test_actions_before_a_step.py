"""Actions that a hook requests in `begin` or `before_step` take effect before the next step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit import checkpoint
from spmdkit.errors import ConfigError, Preempted
from tests.support import small_runs

X = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)


def loss_fn(params, batch, key):
    return sk.mean((batch @ params["w"] - batch.sum(-1)) ** 2)


def train(folder, *hooks, optimizer=None, **changes):
    optimizer = optimizer or optax.sgd(0.05, momentum=0.9)
    task = sk.Task(lambda key: {"w": jnp.zeros(3)}, loss_fn, optimizer, X, X[:16], hooks=hooks)
    values = {"steps": 4, "batch_size": 16, "checkpoint": {}, "log": {"every_steps": 1, "progress": "off"}}
    return small_runs.train(folder, task, **{**values, **changes})


def saved(folder):
    return [row["step"] for row in checkpoint.ls(folder / "run" / "checkpoints")]


def lines(folder, split=None):
    return {m["step"]: m["loss"] for m in small_runs.lines(folder, "metrics.jsonl") if m.get("split") == split}


def at(wanted, action):
    return lambda run, step, state: action if step == wanted else None


def solved(run, step, state):
    """Replaces the parameters with those of loss 0, at the start and before step 3."""
    if step in (0, 3):
        return sk.ReplaceState(state.replace(params=jax.tree.map(jnp.ones_like, state.params)))


@pytest.mark.parametrize(("when", "first"), [("begin", 1), ("before_step", 3)])
def test_replaced_state_is_used_by_the_next_step(tmp_path, when, first):
    train(tmp_path, sk.Hook("solved", **{when: solved}))
    losses = lines(tmp_path)
    assert losses[first] == 0 and all(losses[step] > 0 for step in range(1, first))


@pytest.mark.parametrize("when", ["begin", "before_step"])
def test_save_and_evaluation_precede_the_next_step(tmp_path, when):
    step = {"begin": 0, "before_step": 3}[when]
    hooks = [sk.Hook(n, **{when: at(step, a)}) for n, a in (("s", sk.Save()), ("e", sk.Evaluate()), ("t", sk.Save()))]
    train(tmp_path, *hooks, eval={"every_steps": 4}, checkpoint={"keep": 9})
    before = 0 if when == "begin" else 2
    assert saved(tmp_path) == [before, 4] and list(lines(tmp_path, "eval")) == [before, 4]


def test_stop_before_a_step_saves_the_state_before_it(tmp_path):
    result = train(tmp_path, sk.Hook("enough", before_step=at(3, sk.Stop(why="enough"))))
    assert int(result.state.step) == 2 and saved(tmp_path) == [2] and list(lines(tmp_path)) == [1, 2]


def test_stop_at_the_start_continues_there(tmp_path):
    once = [sk.Stop(42)]
    hook = sk.Hook("later", begin=lambda run, step, state: once.pop() if once else None)
    with pytest.raises(Preempted):
        train(tmp_path, hook)
    assert saved(tmp_path) == [0]
    train(tmp_path, hook)
    train(tmp_path / "b")
    assert lines(tmp_path) == lines(tmp_path / "b")


def test_rollback_before_a_step_repeats_the_batches(tmp_path):
    once = [sk.Rollback(to_step=2)]
    hook = sk.Hook("back", before_step=lambda run, step, state: once.pop() if step == 4 and once else None)
    train(tmp_path, hook, checkpoint={"every_steps": 2, "keep": 9})
    train(tmp_path / "b")
    assert not once and lines(tmp_path) == lines(tmp_path / "b")


def test_state_replaced_after_an_evaluation_is_saved(tmp_path):
    halved = lambda state: state.replace(params=jax.tree.map(lambda x: x / 2, state.params))
    seen = {}

    def after_step(run, step, state, metrics):
        seen["state"] = state

    hooks = (
        sk.Hook("see", after_step=after_step),
        sk.Hook("halve", after_eval=lambda run, step, values: sk.ReplaceState(halved(seen["state"]))),
    )
    result = train(tmp_path, *hooks, eval={"every_steps": 4})
    assert saved(tmp_path) == [4]
    np.testing.assert_array_equal(result.state.params["w"] * 2, seen["state"].params["w"])


def swapped(**fields):
    return lambda run, step, state, *_: sk.ReplaceState(
        state.replace(**{name: getattr(state, other) for name, other in fields.items()})
    )


@pytest.mark.forms(6)
@pytest.mark.parametrize("fields", [{"params": "ema"}, {"ema": "params"}])
@pytest.mark.parametrize("mesh", [{}, {"data": 2}, {"fsdp": 2}], ids=str)
@pytest.mark.parametrize("when", ["begin", "after_step"])
def test_state_with_one_array_in_two_leaves_is_replaced(tmp_path, fields, mesh, when):
    layout = {"layout": {"min_shard_bytes": 1}} if "fsdp" in mesh else {}
    hook = sk.Hook("swap", **{when: swapped(**fields)})
    result = train(tmp_path, hook, optimizer=optax.adam(0.1), ema=0.5, mesh=mesh, checkpoint=None, **layout)
    assert int(result.state.step) == 4 and np.isfinite(result.state.params["w"]).all()


def test_donated_state_is_no_replacement(tmp_path):
    kept = []
    hook = sk.Hook(
        "old",
        before_step=lambda run, step, state: kept.append(state),
        after_step=lambda run, step, *_: sk.ReplaceState(kept[0]) if step == 2 else None,
    )
    with pytest.raises(ConfigError, match=r"sk\.ReplaceState at step 2: the state was donated"):
        train(tmp_path, hook)
