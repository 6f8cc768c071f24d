"""optax under JAX's own rules of promotion: it counts steps in int32 and multiplies them with floats, and is nobody's
here to change.

What it makes (optimizers, schedules) is wrapped, so that all other code in a test, ours and the test's, runs under the
strict rule.
"""

import functools
import inspect

import jax
import optax


def let_optax_promote():
    """Replaces every function of optax's own that makes an optimizer or a schedule by one whose result promotes."""
    for module in (optax, optax.schedules, optax.contrib, optax.transforms):
        for name, function in vars(module).copy().items():
            if inspect.isfunction(function) and function.__module__.startswith("optax."):
                setattr(module, name, _promoting(function))


def _promoting(fn):
    """Returns `fn`, under the standard rule, whose results are so too where they are functions or transformations."""

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
