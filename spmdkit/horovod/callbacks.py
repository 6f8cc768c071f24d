"""Horovod's Keras callbacks for a custom loop: learning-rate schedules, warm-up with momentum correction, averaged
metrics.

The learning rate and the momentum are numbers in the optimizer's state, stored there by `optax.inject_hyperparams`. A
callback receives the state and returns a new one. Source: horovod/_keras/callbacks.py (0.28.1); Goyal et al.,
"Accurate, Large Minibatch SGD" (2017), sections 2.2 and 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax

from spmdkit.horovod import topology
from spmdkit.horovod.operations import Average, grouped_allreduce_async
from spmdkit.horovod.queue import synchronize
from spmdkit.horovod.unsupported import absent_from


class LearningRateScheduleCallback:
    """Sets the learning rate to `initial_lr * multiplier(epoch)` between two epochs.

    Args:
        multiplier: a function of the epoch, which is fractional unless `staircase`; or a number, raised to the number
            of epochs since `start_epoch`.
        end_epoch: the first epoch after the schedule; None: no end.
        staircase: True changes the rate at the first batch of an epoch, False at each batch, which needs
            `steps_per_epoch`.
        momentum_correction: True scales the momentum by new / old rate for the batch at which the rate changes, since
            the velocity contains steps with the old rate.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ):
        if not staircase and not steps_per_epoch:
            raise ValueError(
                "Could not autodetect the number of steps per epoch. Please specify the steps_per_epoch parameter."
            )
        self.initial_lr, self.staircase, self.momentum_correction = initial_lr, staircase, momentum_correction
        self.start_epoch, self.end_epoch, self.steps_per_epoch = start_epoch, end_epoch, steps_per_epoch
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        self._epoch, self._momentum = 0, None

    def on_epoch_begin(self, epoch: int) -> None:
        """Starts an epoch, counted from 0."""
        self._epoch = epoch

    def on_batch_begin(self, batch: int, opt_state: Any) -> Any:
        """Returns the optimizer's state for a batch, counted from 0 in each epoch."""
        if self._epoch < self.start_epoch or (self.end_epoch is not None and self._epoch >= self.end_epoch):
            return opt_state
        if self.staircase:
            return self._adjusted(self._epoch, opt_state) if batch == 0 else opt_state
        return self._adjusted(self._epoch + batch / float(self.steps_per_epoch or 1), opt_state)

    def on_batch_end(self, batch: int, opt_state: Any) -> Any:
        """Returns the state after a batch, with the original momentum."""
        if self._momentum is None:
            return opt_state
        opt_state, self._momentum = set_hyperparameter(opt_state, "momentum", self._momentum), None
        return opt_state

    def on_epoch_end(self, epoch: int, opt_state: Any, logs: dict[str, Any] | None = None) -> None:
        """Writes the learning rate to `logs` as `lr`."""
        if logs is not None:
            logs["lr"] = float(hyperparameter(opt_state, "learning_rate"))

    def _adjusted(self, epoch: float, opt_state: Any) -> Any:
        old = hyperparameter(opt_state, "learning_rate")
        new = self.initial_lr * self.multiplier(epoch)
        opt_state = set_hyperparameter(opt_state, "learning_rate", new)
        momentum = optax.tree_utils.tree_get(opt_state, "momentum") if self.momentum_correction else None
        if momentum is not None:
            self._momentum = momentum
            opt_state = set_hyperparameter(opt_state, "momentum", float(momentum) * new / float(old))
        return opt_state


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Increases the learning rate at each batch of the first epochs, from `initial_lr / size` to `initial_lr`, the rate
    for all ranks together. `verbose`: rank 0 prints a line at the end of the warm-up."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ):
        def multiplier(epoch: float) -> float:
            epoch += 1.0 / float(steps_per_epoch or 1)  # so that an epoch ends at an integer
            return 1.0 / topology.size() * (epoch * (topology.size() - 1) / warmup_epochs + 1)

        super().__init__(initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, opt_state: Any, logs: dict[str, Any] | None = None) -> None:
        """Writes the learning rate to `logs`, and prints when the warm-up is done."""
        logs = {} if logs is None else logs
        super().on_epoch_end(epoch, opt_state, logs)
        if epoch + 1 == self.end_epoch and self.verbose > 0 and topology.rank() == 0:
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {logs['lr']:g}.")


class MetricAverageCallback:
    """Replaces the numbers in `logs` by their means over ranks, with equal weights."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Averages in place."""
        if not logs:
            return
        names = sorted(logs)
        values = [jnp.asarray(logs[name], float) for name in names]
        means = synchronize(grouped_allreduce_async(values, op=Average, leaves=names))
        logs.update({name: float(mean) for name, mean in zip(names, means, strict=True)})


def scaled_learning_rate(learning_rate: float, backward_passes_per_step: int = 1, op: Any = Average) -> float:
    """Returns the rate of one device times the number of ranks and passes that a step averages; unchanged with
    Adasum."""
    return learning_rate * (topology.size() if op == Average else 1) * backward_passes_per_step


def hyperparameter(opt_state: Any, name: str) -> Any:
    """Returns a hyperparameter of `optax.inject_hyperparams`. Raises ValueError if the state has none."""
    value = optax.tree_utils.tree_get(opt_state, name)
    if value is None:
        raise ValueError(
            f"the optimizer's state has no {name!r}: it is fixed in the program. Use "
            "optax.inject_hyperparams(optax.sgd)(learning_rate=0.01, momentum=0.9)."
        )
    return value


def set_hyperparameter(opt_state: Any, name: str, value: Any) -> Any:
    """Returns the state with a new value of a hyperparameter, in the same dtype."""
    return optax.tree_utils.tree_set(
        opt_state, **{name: jnp.asarray(value, jnp.result_type(hyperparameter(opt_state, name)))}
    )


def __getattr__(name: str) -> Any:
    return absent_from("callbacks", name)
