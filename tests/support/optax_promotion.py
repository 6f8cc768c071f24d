"""Runs optax under JAX's standard dtype promotion, since it counts steps in int32 and multiplies them with floats.

Only its optimizers and schedules are wrapped, so that all other code in a test runs under strict promotion.
"""

import functools
import inspect

import jax
import optax


def let_optax_promote():
    """Replaces every optax function that creates an optimizer or a schedule by one with a result that promotes."""
    for module in (optax, optax.schedules, optax.contrib, optax.transforms):
        for name, function in vars(module).copy().items():
            if inspect.isfunction(function) and function.__module__.startswith("optax."):
                setattr(module, name, _promoting(function))


def _promoting(fn):
    """Returns `fn` under standard promotion. Results that are functions or transformations are wrapped too."""

    @functools.wraps(fn)
    def call(*args, **kwargs):
        with jax.numpy_dtype_promotion("standard"):
            made = fn(*args, **kwargs)
            return made if any(made is arg for arg in args) else _result(made)

    return call


def _result(made):
    if isinstance(made, optax.GradientTransformation):
        return type(made)(*map(_promoting, made))
    return _promoting(made) if inspect.isfunction(made) else made
