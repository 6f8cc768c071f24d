"""`train_only` and `groups`: parameters that are not trained, and settings of the optimizer per parameter."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.errors import ConfigError
from spmdkit.plan.collectives_bill import read_bill
from spmdkit.plan.flops import count
from spmdkit.plan.hlo.text import parse
from tests.support.fixed_numbers import normal
from tests.support.natural_runs import BATCH, STEPS, by_hand, leaf_errors, program_of

random = np.random.default_rng(0)
DATA = {"x": random.normal(size=(BATCH * STEPS, 8)).astype(np.float32)}
DATA["y"] = random.normal(size=BATCH * STEPS).astype(np.float32)
MESHES = [{}, {"data": 4}, {"fsdp": 4}, {"data": 2, "tensor": 2}]
ADAMW = {"name": "adamw", "learning_rate": 1e-2, "weight_decay": 0.1}
GROUPS = [{"match": ".*bias", "weight_decay": 0.0}, {"match": "base/.*", "learning_rate_scale": 0.1}]
ids = lambda mesh: " x ".join(f"{axis} {size}" for axis, size in mesh.items()) or "one"


def init(key):
    draw = lambda seed, *shape: normal(seed, *shape) / 4
    return {
        "base": {"w": draw(0, 8, 8), "bias": draw(1, 8)},
        "lora": {"a": draw(2, 8, 4), "b": draw(3, 4, 8)},
        "head": {"w": draw(4, 8), "bias": jnp.zeros(())},
    }


def losses(params, batch):
    base, lora, head = params["base"], params["lora"], params["head"]
    hidden = jnp.tanh(batch["x"] @ (base["w"] + lora["a"] @ lora["b"]) + base["bias"])
    return (hidden @ head["w"] + head["bias"] - batch["y"]) ** 2


def task(optimizer=None, **more):
    rules = [("base/w", [None, "tensor"]), ("lora/b", [None, "tensor"])]
    loss = lambda params, batch, key: sk.mean(losses(params, batch))
    return sk.Task(init, loss, optimizer, train_data=DATA, rules=rules, **more)


def assert_equal(program, optimizer):
    """Asserts that the losses and parameters are those of plain JAX."""
    expected = by_hand(lambda p, b: (jnp.mean(losses(p, b)), {}), init(jax.random.key(0)), DATA, optimizer)
    state, found = program.init(), []
    for _, batch in program.batches():
        state, metrics = program.step(state, batch)
        found.append(float(metrics["loss"]))
    np.testing.assert_allclose(found, expected.losses, rtol=1e-5)
    errors = leaf_errors(jax.device_get(state.params), expected.params)
    assert max(errors.values()) <= 1e-5, errors
    return state


def labels(label):
    return lambda params: jax.tree.map_with_path(lambda path, _: label(*(key.key for key in path)), params)


@pytest.mark.forms(2)
@pytest.mark.parametrize("mesh", MESHES, ids=ids)
def test_groups_equal_optax_partition(mesh):
    name = lambda part, leaf: ("slow" if part == "base" else "") + ("bias" if leaf == "bias" else "w")
    rate = optax.linear_schedule(1e-2, 1e-3, STEPS)
    scaled = lambda step: rate(step) * 0.1
    parts = {"w": optax.adamw(rate, weight_decay=0.1), "bias": optax.adamw(rate, weight_decay=0.0)}
    parts |= {"sloww": optax.adamw(scaled, weight_decay=0.1), "slowbias": optax.adamw(scaled, weight_decay=0.0)}
    hand = optax.chain(optax.clip_by_global_norm(0.5), optax.partition(parts, labels(name)))
    schedule = {"name": "linear", "init_value": 1e-2, "end_value": 1e-3, "transition_steps": STEPS}
    optimizer = {"name": "adamw", "weight_decay": 0.1}
    settings = {"optimizer": optimizer, "learning_rate": schedule, "clip_norm": 0.5, "groups": GROUPS}
    program = program_of(task(), mesh, **settings)
    assert_equal(program, hand)
    assert program.leaf_notes["base/bias"] == "weight_decay 0, learning_rate_scale 0.1"
    assert " ".join(program.explain().split()).count("groups[1] base/bias, base/w: learning_rate_scale 0.1") == 1


@pytest.mark.parametrize(("mesh", "how"), [*((mesh, "train_only") for mesh in MESHES), (MESHES[-1], "groups")])
def test_the_rest_is_not_trained(mesh, how):
    rest = [{"match": "base/.*", "frozen": True}]
    settings = {"train_only": ["lora/.*", "head/.*"]} if how == "train_only" else {"groups": rest}
    frozen = labels(lambda part, leaf: "stop" if part == "base" else "train")
    hand = optax.partition({"train": optax.adamw(1e-2, weight_decay=0.1), "stop": optax.set_to_zero()}, frozen)
    program = program_of(task(), mesh, optimizer=ADAMW, **settings)
    state = assert_equal(program, hand)
    np.testing.assert_array_equal(state.params["base"]["w"], init(jax.random.key(0))["base"]["w"])
    assert not [leaf.path for leaf in program.layout if leaf.path.startswith("opt_state") and "base" in leaf.path]
    if mesh == {}:
        declared = program_of(task(frozen=["base/.*"]), mesh, optimizer=ADAMW)
        assert count(program.traced.jaxpr).products == count(declared.traced.jaxpr).products
    if mesh == {"data": 4}:  # an all-reduce sends 2 x 3/4 of its operand: the trained leaves and the loss
        bill = read_bill(parse(program.compiled.as_text()), program.sizes)
        assert sum(line.bytes for line in bill.collectives) == 2 * 3 * 4 * (2 * 8 * 4 + 8 + 1 + 1) // 4


def test_a_group_of_an_optimizer_of_the_task():
    program = program_of(task(lambda rate: optax.sgd(rate)), learning_rate=0.1, groups=GROUPS[1:])
    scale = labels(lambda part, leaf: "slow" if part == "base" else "default")
    assert_equal(program, optax.partition({"slow": optax.sgd(0.01), "default": optax.sgd(0.1)}, scale))


def test_weight_decay_of_an_optimizer_without_it_is_an_l2_penalty():
    sgd = {"name": "sgd", "learning_rate": 0.1, "add_decayed_weights": 0.1}
    program = program_of(task(), optimizer=sgd, groups=GROUPS[:1])
    penalty = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1))
    kind = labels(lambda part, leaf: "bias" if leaf == "bias" else "w")
    assert_equal(program, optax.partition({"w": penalty, "bias": optax.sgd(0.1)}, kind))


@pytest.mark.parametrize(
    ("settings", "more", "match"),
    [
        ({"train_only": ["lora/.*", "encoder/.*"]}, {}, "train_only: 'encoder/.*' matches no parameter"),
        ({"groups": [{"match": "bse/.*", "frozen": True}]}, {}, r"groups\[0\]: 'bse/.*' matches no parameter"),
        ({"groups": [{"match": ".*", "frozen": True}]}, {}, "match all 6 parameters"),
        (
            {"train_only": ["lora/.*"], "groups": [{"match": "lora/a", "frozen": True}]},
            {},
            r"'lora/a' is frozen by groups\[0\] and trained by train_only",
        ),
        ({"train_only": ["lora/.*"]}, {"frozen": ["lora/a"]}, "'lora/a' is frozen by Task.frozen and trained by train"),
        (
            {"train_only": ["lora/.*"], "groups": [{"match": "head/w", "frozen": False}]},
            {},
            r"'head/w' is frozen by train_only and trained by groups\[0\]",
        ),
        ({"train_only": ["lora/.*"]}, {"overwritten": ["head/w"]}, "frozen by train_only and overwritten by"),
        ({"train_only": ["lora/.*"], "groups": GROUPS[1:]}, {}, r"groups\[0\]: 'base/.*' matches only parameters that"),
        (
            {"groups": [*GROUPS, {"match": "head/.*", "weight_decay": 0.5}]},
            {},
            "'head/bias' has weight_decay: 0 and weight_decay: 0.5 of two groups",
        ),
        ({"groups": [{"match": "base/.*"}]}, {}, "sets nothing"),
        ({"groups": [{"match": "base/.*", "weight_decay": 0.1, "frozen": True}]}, {}, "without an effect"),
        ({"groups": GROUPS[:1], "optimizer": None}, {}, "needs an optimizer in the config"),
        ({"groups": GROUPS[1:], "optimizer": None}, {"optimizer": optax.sgd(0.1)}, "the task's optimizer is complete"),
        ({"groups": GROUPS[1:], "optimizer": {"name": "adafactor"}}, {}, "needs a learning rate, found none"),
        ({"groups": GROUPS[1:], "optimizer": {"name": "lbfgs"}}, {}, "lbfgs searches along one line"),
    ],
)
def test_bad_groups_are_refused(settings, more, match):
    with pytest.raises(ConfigError, match=match):
        program_of(task(**more), **({"optimizer": ADAMW} | settings))
