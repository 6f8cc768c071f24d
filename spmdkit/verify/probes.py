"""Probes around a task: the optimizer's input gradient and its update, the count of the loss, and an input moved by one
ulp.

The recording probes wrap the user's code and do not change its results.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spmdkit.config import Config
from spmdkit.foundation.jaxprs import equations
from spmdkit.foundation.trees import is_key
from spmdkit.foundation.user_code import call_user
from spmdkit.program.init_state import init_on_one_device
from spmdkit.program.program import Program
from spmdkit.program.task import Task
from spmdkit.step import trace_context
from spmdkit.step.leaf_roles import differentiated
from spmdkit.step.metrics.mean import Mean
from spmdkit.step.state import Initial, TrainState, Variables
from spmdkit.verify.dtypes import is_inexact
from spmdkit.verify.unpadded_reference import Unpadded

NARROW = (np.float32, jnp.bfloat16, np.float16, np.complex64)
"""Dtypes to which the author of a task may round in a 64-bit program."""

COUNT = "verify_count"
"""Name of the metric that carries the count of the loss; removed from all reports."""


class RecordingState(NamedTuple):
    """The user's optimizer state, with the last input gradient and the last update."""

    gradient: Any
    inner: Any
    update: Any

    def __getitem__(self, key: Any) -> Any:
        """Raises, since an index would return a different item than in the user's run."""
        raise TypeError(f"verify records the optimizer's state, which has no item {key!r}")


def recording_optimizer(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Returns `optimizer` with its last gradient and last update recorded in its state."""
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> RecordingState:
        zeros = jax.tree.map(jnp.zeros_like, differentiated(params))
        return RecordingState(zeros, inner.init(params), jax.tree.map(jnp.zeros_like, params))

    def update(grads: Any, state: RecordingState, params: Any = None, **extra: Any) -> tuple[Any, RecordingState]:
        updates, inner_state = inner.update(grads, state.inner, params, **extra)
        return updates, RecordingState(grads, inner_state, updates)

    return optax.GradientTransformationExtraArgs(init, update)


def with_count_metric(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the loss function with one more metric: the loss's count, summed over replicas and microbatches."""

    @functools.wraps(loss_fn)
    def counted(*args: Any) -> Any:
        out = loss_fn(*args)
        loss, metrics, *state = out if isinstance(out, tuple) and not isinstance(out, Mean) else (out, {})
        if not isinstance(loss, Mean) or not isinstance(metrics, dict):
            return out  # spmdkit reports the invalid return value
        return (loss, metrics | {COUNT: Mean(jnp.asarray(loss.count), jnp.zeros((), jnp.float32))}, *state)

    return counted


def with_constant_init(task: Task, config: Config, dtype: str = "float32") -> Task:
    """Returns the task with the arrays of `init` as constants, and the model state in 64 bits if requested.

    A model with casts (flax's `BatchNorm` computes in the wider of its input's dtype and float32) returns its state in
    another dtype than `init` creates. With a 64-bit state the dtype is the same in every step.
    """
    with jax.default_device(jax.devices()[0]):
        _, init, rules = init_on_one_device(task, config)
        constants = call_user(lambda: jax.device_get(jax.jit(init)(jax.random.key(config.seed))), "init")
    if dtype == "float64":
        task = _with_wide_state(task)
        if isinstance(constants, Variables):
            constants = constants._replace(state=jax.tree.map(_widened, constants.state))
        elif isinstance(constants, Initial):
            constants = jax.tree.map(_widened, constants)

    def constant_init(key: jax.Array) -> Any:
        trace_context.current().usage.flax_rules.update(rules)  # the layout reads them
        return jax.tree.map(jnp.asarray, constants)

    return dataclasses.replace(task, init=constant_init)


def _widened(x: Any) -> Any:
    if is_key(x) or not is_inexact(x):
        return x
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


def _with_wide_state(task: Task) -> Task:
    def widened(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def wide(*args: Any) -> Any:
            out = fn(*args)
            if isinstance(out, tuple) and not isinstance(out, Mean) and len(out) == 3:  # returned by a loss
                return (*out[:2], jax.tree.map(_widened, out[2]))
            if isinstance(out, tuple) and len(out) == 2 and isinstance(out[0], TrainState):
                return out[0].replace(model_state=jax.tree.map(_widened, out[0].model_state)), out[1]
            return out

        return wide

    loss_fn, train_step = task.loss_fn, task.train_step
    return dataclasses.replace(
        task, loss_fn=loss_fn and widened(loss_fn), train_step=train_step and widened(train_step)
    )


def one_ulp(random: np.random.Generator, dtype: str = "float32") -> Callable[[Any], Any]:
    """Returns a function that moves every floating point number of a tree by one ulp of `dtype`, up or down at random.

    Numbers of a narrower dtype are unchanged. They are widened exactly, so one of their ulps is a larger change.
    """

    def move(x: Any) -> Any:
        x = np.asarray(x)
        if x.dtype.kind == "c":
            return (move(x.real) + 1j * move(x.imag)).astype(x.dtype)
        if x.dtype not in (np.float32, np.float64) or x.dtype.itemsize < np.dtype(dtype).itemsize:
            return x
        towards = np.where(random.random(x.shape) < 0.5, -np.inf, np.inf).astype(dtype)
        return np.nextafter(x.astype(dtype), towards).astype(x.dtype)

    return lambda tree: jax.tree.map(move, tree)


def working_dtype(program: Program | Unpadded) -> str:
    """Returns the coarsest dtype to which a float64 program rounds: `float32` if the program casts to it or to a
    narrower dtype, else `float64`."""

    def rounds(eqn: Any) -> bool:
        narrows = eqn.primitive.name == "convert_element_type" and eqn.params["new_dtype"] in NARROW
        return bool(narrows and eqn.invars[0].aval.dtype in (np.float64, np.complex128))

    return "float32" if any(map(rounds, equations(program.traced.jaxpr))) else "float64"
