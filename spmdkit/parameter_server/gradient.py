"""The worker's compiled step: the task's step on the worker's mesh, with an optimizer that stores the gradient and
leaves the parameters unchanged.

Masks, `sk.mean`, keys, microbatches, precision, clipping and the reducer therefore work as in synchronous training, on
any mesh of a worker. Batch b is the batch of step b, with the keys of step b, so one worker without staleness computes
the same as one device.

Wire: inside a worker, that of a step on its mesh.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spmdkit.config import Config, replace_keys
from spmdkit.data import CheckedStream
from spmdkit.errors import ConfigError
from spmdkit.foundation.trees import is_key, named_leaves
from spmdkit.parameter_server.partition import Arrays, to_arrays, to_tree
from spmdkit.program.init_state import abstract_init, make_optimizer
from spmdkit.program.program import Program
from spmdkit.program.task import Task
from spmdkit.step.gradient import means_and_grad
from spmdkit.step.metrics.mean import Mean
from spmdkit.step.state import TrainState

OWN = "parameter_server/"
"""Prefix of the worker's internal metrics."""


def synchronous(config: Config) -> Config:
    """Returns the config of the same run without servers, for evaluation, saving, and a worker's computation."""
    return replace_keys(config, {"sync": "every_step"})


def server_optimizer(config: Config, task: Task) -> Any:
    """Returns the optimizer of a server. It does not clip, since workers do."""
    return make_optimizer(replace_keys(config, {"clip_norm": None}), task)


def check_task(config: Config, task: Task) -> None:
    """Raises ConfigError for features of a task that a parameter server does not support."""
    if task.train_step is not None or task.loss_fn is None:
        raise ConfigError(
            "sync: parameter_server: the task has a train_step. Workers send the gradient of loss_fn, and servers "
            "update. Pass loss_fn only, or use sync: every_step."
        )
    if isinstance(task.train_data, CheckedStream):
        raise ConfigError(
            "sync: parameter_server: train_data is a stream. Each worker reads the next batch by its number, and the "
            "examples of a stream have no numbers. Use data with an index, or sync: every_step."
        )
    for name in ("frozen", "overwritten"):
        if getattr(task, name):
            raise ConfigError(
                f"sync: parameter_server: the task has {name} parameters. Servers update all parameters from the "
                f"gradients of workers. Remove Task.{name}, or use sync: every_step."
            )
    if any(getattr(hook, "name", "") for hook in task.hooks):
        raise ConfigError(
            f"sync: parameter_server: the task or the config has hooks ({task.hooks[0].name}). They run around the "
            "steps of one program, and here each worker has its own. Remove them, or use sync: every_step."
        )
    state = abstract_init(task, config).state
    if keys := [path for path, leaf in named_leaves(state) if is_key(leaf)]:
        raise ConfigError(
            f"sync: parameter_server: the model state has typed random keys ('{keys[0]}'), which cannot be sent. Use "
            "the key argument of loss_fn."
        )


class Gradient(NamedTuple):
    """The result of a worker. `weight` is the count of the loss; `not_finite` names the non-finite value."""

    arrays: Arrays
    loss: float
    weight: float
    metrics: dict[str, float]
    not_finite: tuple[str, ...]
    model_state: Arrays | None


class GradientStep:
    """Computes gradients of a task at the current parameters, one batch at a time. `turn`: a lock for the computation.
    Without it, two multi-device programs started by two threads can deadlock."""

    def __init__(
        self,
        config: Config,
        task: Task,
        devices: Sequence[jax.Device],
        turn: AbstractContextManager[Any] = contextlib.nullcontext(),  # noqa: B008  stateless
    ):
        self._turn = turn
        unused: dict[str, Any] = dict.fromkeys(("optimizer", "learning_rate", "ema", "checkpoint", "init_from"))
        config = replace_keys(synchronous(config), unused | {"eval": {}, "on_nonfinite": "continue"})
        changes: dict[str, Any] = dict.fromkeys(("loss_fn", "eval_data", "eval_fn")) | {"hooks": ()}
        changes |= {"train_step": _gradient_step(task), "optimizer": _gradient_recorder()}
        self.program = Program(config, dataclasses.replace(task, **changes), devices)
        with turn:
            self._state = jax.block_until_ready(_without_variables(self.program))
        self._params = self.program.state_sharding.params
        self._of_state = self.program.state_sharding.model_state

    def batch(self, number: int) -> Any:
        """Returns batch `number` on the devices. It computes nothing, and may run concurrently with a step."""
        read = self.program.feed.read(number)
        return self.program.put(read.examples, read.mask)

    def place(self, params: Arrays, model_state: Arrays | None) -> tuple[Any, Any]:
        """Returns parameters and model state on the devices."""
        state = self._state
        placed = jax.device_put(to_tree(state.params, params), self._params)
        if model_state is None:
            return placed, state.model_state
        return placed, jax.device_put(to_tree(state.model_state, model_state), self._of_state)

    def __call__(self, params: Any, model_state: Any, number: int, batch: Any) -> Gradient:
        """Returns the gradient of batch `number`. Waits for the devices, and donates the parameters."""
        before = self._state.replace(
            params=params, model_state=model_state, step=jnp.full_like(self._state.step, number - 1)
        )
        with self._turn:
            self._state, values = jax.block_until_ready(self.program.step(before, batch))
            norm = self.program.gradient_norm()
        # Copies: on the CPU `device_get` returns the memory of the state, which the next step reuses.
        arrays = {path: np.array(x) for path, x in to_arrays(self._state.opt_state["gradient"]).items()}
        numbers = jax.device_get(dict(self.program.metrics(values)))
        metrics = {name: float(x) for name, x in numbers.items() if not np.ndim(x)}
        finite = {name: metrics.pop(f"{OWN}{name}") for name in ("loss", "gradient")}
        weight, loss = metrics.pop(f"{OWN}weight"), metrics.pop("loss")
        wrong = [name for name, ok in finite.items() if not ok]
        wrong += ["metrics"] * any(not np.isfinite(x) for x in metrics.values())
        if norm is not None:
            metrics.setdefault("gradient_norm", norm)
        state = self._state.model_state
        state = None if state is None else {path: np.array(x) for path, x in to_arrays(state).items()}
        return Gradient(arrays, loss, weight, metrics, tuple(wrong), state)


def _gradient_recorder() -> optax.GradientTransformation:
    """Returns an optimizer that stores the last gradient as its state, with updates of zero."""
    zeros: Callable[[Any], Any] = lambda tree: jax.tree.map(jnp.zeros_like, tree)
    return optax.GradientTransformation(
        lambda params: {"gradient": zeros(params)},
        lambda grads, state, params=None: (zeros(grads), {"gradient": grads}),
    )


def _without_variables(program: Program) -> Any:
    """Returns the state before step 1. Parameters and model state, which servers send, are abstract."""
    leaves = named_leaves(program.abstract_state)
    made = program.initial.leaves([path for path, _ in leaves if path.split("/")[0] not in ("params", "model_state")])
    return jax.tree.unflatten(jax.tree.structure(program.abstract_state), [made.get(path, x) for path, x in leaves])


def _gradient_step(task: Task) -> Any:
    loss_fn = task.loss_fn
    assert loss_fn is not None

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        model_state = () if state.model_state is None else (state.model_state,)
        (loss, metrics, *new_state), grads = means_and_grad(loss_fn)(state.params, *model_state, batch, state.key)
        finite: Callable[[Any], jax.Array] = lambda tree: jnp.stack(
            [jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]
        ).all()
        rows = jax.tree.leaves(batch)[0].shape[0]
        weight = loss.count if isinstance(loss, Mean) else jnp.float32(rows)
        internal = {"loss": finite(loss.value), "gradient": finite(grads), "weight": jnp.asarray(weight, jnp.float32)}
        internal = {f"{OWN}{name}": jnp.asarray(value, jnp.float32) for name, value in internal.items()}
        return state.apply_gradients(grads, *new_state), {"loss": loss, **metrics, **internal}

    return train_step
