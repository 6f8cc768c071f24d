"""optax by name: what can be named is what optax has, and what is built is what optax builds."""

import inspect

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spmdkit.config import Config, build_optimizer, build_schedule, choose_optimizer
from spmdkit.config.optimizer import optimizers, schedules
from spmdkit.errors import ConfigError
from tests.support.forms import slow_except


def chosen(config, task_optimizer):
    return choose_optimizer(config.optimizer, config.learning_rate, task_optimizer, config.where)


def updates(transformation, steps=3):
    params = {"w": jnp.arange(4.0), "b": jnp.ones(2)}
    transformation = optax.with_extra_args_support(transformation)
    state = transformation.init(params)
    value_fn = lambda p: (p["w"] ** 2 / 4 + p["w"]).sum() + (p["b"] ** 2).sum() / 2
    for _ in range(steps):
        grads = {"w": params["w"] * 0.5 + 1, "b": params["b"]}
        given = {"value": value_fn(params), "grad": grads, "value_fn": value_fn}
        update, state = transformation.update(grads, state, params, **given)
        params = optax.apply_updates(params, update)
    return np.concatenate([params["w"], params["b"]])


def test_usual_names_exist_and_unusable_do_not():
    assert {"adam", "adamw", "sgd", "lion", "adafactor", "lamb", "rmsprop"} <= set(optimizers())
    assert not {"noisy_sgd", "scale_by_learning_rate", "chain", "inject_hyperparams"} & set(optimizers())
    assert {"constant_schedule", "linear_schedule", "exponential_decay", "join_schedules"} <= set(schedules())
    assert not {"scale_by_schedule", "inject_hyperparams"} & set(schedules())


@pytest.mark.parametrize("name", slow_except(["adamw", "adafactor", "lion"], sorted(optimizers())))
def test_every_named_optimizer_is_built_and_updates(name):
    config = Config(task="a.py:t", optimizer={"name": name}, learning_rate=1e-2)
    after = updates(build_optimizer(config.optimizer, config.learning_rate))
    assert np.isfinite(after).all()
    np.testing.assert_array_equal(after, updates(getattr(optax, name)(1e-2)))


def test_arguments_reach_optax():
    built = build_optimizer({"name": "adamw", "b2": 0.5, "weight_decay": 0.3, "nesterov": True}, 0.1)
    np.testing.assert_array_equal(updates(built), updates(optax.adamw(0.1, b2=0.5, weight_decay=0.3, nesterov=True)))
    own = build_optimizer({"name": "sgd", "learning_rate": 0.1, "momentum": 0.9, "accumulator_dtype": "bfloat16"})
    np.testing.assert_array_equal(updates(own), updates(optax.sgd(0.1, momentum=0.9, accumulator_dtype="bfloat16")))


def test_schedules_are_built_with_and_without_the_suffix():
    arguments = {"init_value": 0.0, "peak_value": 1e-3, "warmup_steps": 2, "decay_steps": 10}
    for name in ("warmup_cosine_decay_schedule", "warmup_cosine_decay"):
        value = Config(task="a.py:t", learning_rate={"name": name, **arguments}).learning_rate
        built, expected = build_schedule(value), optax.warmup_cosine_decay_schedule(**arguments)
        assert [float(built(s)) for s in range(12)] == [float(expected(s)) for s in range(12)]
    assert build_schedule(None) is None
    assert build_schedule(0.5) == 0.5
    assert (
        float(build_schedule({"name": "piecewise_constant", "init_value": 1, "boundaries_and_scales": {5: 0.1}})(6)) < 1
    )


def test_schedules_are_joined():
    rise = {"name": "linear", "init_value": 0.0, "end_value": 0.5, "transition_steps": 4}
    inverse = {"name": "power", "init_value": 1.0, "transition_steps": 2, "growth": 3.0, "offset": 2}
    joined = {"name": "join_schedules", "schedules": [rise, 0.25, inverse], "boundaries": [3, 5]}
    built = build_schedule(Config(task="a.py:t", learning_rate=joined).learning_rate)
    expected = [0, 0.125, 0.25, 0.25, 0.25, 1 / 4, 1 / 5.5]
    np.testing.assert_allclose([built(step) for step in range(7)], expected, rtol=1e-6)
    np.testing.assert_allclose([build_schedule({**joined, "offset": 4})(step) for step in range(3)], expected[4:])
    stairs = {"name": "power_schedule", "init_value": 1.0, "transition_steps": 2, "power": 1.0, "staircase": True}
    assert [float(build_schedule(stairs)(step)) for step in range(5)] == [1, 1, 2, 2, 3]
    log = build_schedule({"name": "log_warmup", "init_value": 1.0, "peak_value": 3.0, "warmup_steps": 16})
    np.testing.assert_allclose([log(step) for step in (0, 1, 4, 16, 99)], [1, 1, 2, 3, 3], rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"boundaries": []}, "boundaries: needs rising steps at which the next of 2 schedules begins, 1, found []"),
        ({"boundaries": 3}, "boundaries: needs rising steps"),
        ({"boundaries": [0]}, "boundaries: needs rising steps"),
        ({"schedules": [1.0, 1.0, 1.0], "boundaries": [4, 3]}, "boundaries: needs rising steps"),
        ({"schedules": []}, "schedules: needs a list of schedules, found []"),
        ({"schedules": [1.0, "linear"]}, "schedules[1]: needs a schedule or a number, found 'linear'"),
        ({"schedules": [1.0, {"name": "linaer"}]}, "schedules[1].name: needs an optax schedule, found 'linaer'"),
        (
            {"schedules": [1.0, {"name": "log_warmup"}]},
            "schedules[1]: log_warmup_schedule: missing a required argument",
        ),
        ({"schedules": [1.0, {"name": "power", "init_value": 1.0, "transition_steps": 0}]}, "is positive, found 0"),
        ({"offset": "2"}, "offset: needs a whole number of steps, found '2'"),
    ],
)
def test_a_wrong_joined_schedule_is_refused(changes, expected):
    joined = {"name": "join_schedules", "schedules": [0.1, 0.2], "boundaries": [3]} | changes
    with pytest.raises(ConfigError) as refused:
        Config(task="a.py:t", learning_rate=joined)
    assert expected in str(refused.value)


def test_decayed_weights_are_an_l2_penalty():
    built = build_optimizer({"name": "sgd", "momentum": 0.9, "add_decayed_weights": 0.1}, 0.1)
    expected = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1, momentum=0.9))
    np.testing.assert_array_equal(updates(built), updates(expected))
    with pytest.raises(ConfigError, match=r"^optimizer.add_decayed_weights: needs a number of at least 0, found -1"):
        build_optimizer({"name": "sgd", "add_decayed_weights": -1}, 0.1)


def test_a_schedule_may_stand_in_the_optimizer():
    rate = {"name": "linear", "init_value": 1.0, "end_value": 0.0, "transition_steps": 4}
    built = build_optimizer({"name": "sgd", "learning_rate": rate})
    np.testing.assert_array_equal(updates(built), updates(optax.sgd(optax.linear_schedule(1.0, 0.0, 4))))
    with pytest.raises(
        ConfigError, match=r"^optimizer.learning_rate: needs a number of at least 0, found .*\(a mapping\)"
    ):
        build_optimizer({"name": "rprop", "learning_rate": rate})
    with pytest.raises(
        ConfigError, match=r"^optimizer.learning_rate.transition_step: unknown argument of optax.linear"
    ):
        build_optimizer({"name": "sgd", "learning_rate": {"name": "linear", "transition_step": 1}})


def test_building_refuses_what_the_check_refuses():
    with pytest.raises(ConfigError, match=r"optimizer.name: needs an optax optimizer, found '__import__'"):
        build_optimizer({"name": "__import__"}, 1e-3)
    with pytest.raises(ConfigError, match=r"learning_rate.name: needs an optax schedule, found 'Schedule'"):
        build_schedule({"name": "Schedule"})
    for name in ("chain", "apply_if_finite", "contrib", "_src", "os.system", "tree_utils"):
        with pytest.raises(ConfigError, match="needs an optax optimizer"):
            build_optimizer({"name": name}, 1e-3)


def test_the_configs_optimizer_wins_over_the_tasks():
    config = Config(task="a.py:t", optimizer={"name": "sgd", "learning_rate": 0.1})
    np.testing.assert_array_equal(updates(chosen(config, optax.adam(1.0))), updates(optax.sgd(0.1)))


def test_the_tasks_optimizer_is_used():
    whole = optax.adam(1e-3)
    assert chosen(Config(task="a.py:t"), whole) is whole
    config = Config(task="a.py:t", learning_rate=0.5)
    np.testing.assert_array_equal(updates(chosen(config, optax.sgd)), updates(optax.sgd(0.5)))
    with_default = chosen(Config(task="a.py:t"), lambda learning_rate=0.2: optax.sgd(learning_rate))
    np.testing.assert_array_equal(updates(with_default), updates(optax.sgd(0.2)))


@pytest.mark.parametrize(
    ("rate", "optimizer", "expected"),
    [
        (None, None, "optimizer: is null, and the task has no optimizer."),
        (0.1, optax.sgd(1.0), "learning_rate: is given, and the task's optimizer is complete, so it has no effect."),
        (None, optax.sgd, "learning_rate: is null, and the task's optimizer is a function of it."),
        (
            0.1,
            "adamw",
            "Task.optimizer needs an optax optimizer or a function of the learning rate, found 'adamw' (text)",
        ),
        (0.1, lambda rate: None, "Task.optimizer returned null. It returns an optax transformation."),
    ],
)
def test_an_optimizer_that_cannot_be_chosen_is_told(rate, optimizer, expected):
    with pytest.raises(ConfigError) as caught:
        chosen(Config(task="a.py:t", learning_rate=rate), optimizer)
    assert str(caught.value).startswith(expected)


def test_an_argument_that_optax_rejects_is_reported():
    for name in ("adamw", "sgd", "adafactor", "rmsprop"):
        known = {"b1", "decay", "momentum"} & set(inspect.signature(optimizers()[name]).parameters)
        for argument in known:
            with pytest.raises(ConfigError, match=f"'{argument}': 'high'.*Change them"):
                build_optimizer({"name": name, argument: "high"}, 1e-3)
