"""Creates servers and workers from a config and a task, the same way in every process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax

from spmdkit.config import Config
from spmdkit.config.parameter_server import options
from spmdkit.parameter_server.gradient import GradientStep, check_task, server_optimizer
from spmdkit.parameter_server.messages import Rules
from spmdkit.parameter_server.partition import check_separable, owners, shard
from spmdkit.parameter_server.server import Server
from spmdkit.parameter_server.transport import Endpoint
from spmdkit.parameter_server.worker import Worker
from spmdkit.program.init_state import abstract_init
from spmdkit.program.task import Task


class Roles:
    """The servers and workers of one config. Raises ConfigError if they cannot train the task or its optimizer.

    Attributes:
        options: the options of `sync: {parameter_server: ...}`.
        owned: path of a leaf -> its server.
        turn: a lock for programs on devices that other threads of this process also use.
    """

    def __init__(self, config: Config, task: Task):
        check_task(config, task)
        self.config, self.task, self.options = config, task, options(config)
        self._params = abstract_init(task, config).params
        self.optimizer = server_optimizer(config, task)
        partition = self.options.partition
        rules = partition if isinstance(partition, str) else partition.rules
        self.owned: Mapping[str, int] = owners(self._params, self.options.servers, rules)
        check_separable(self.optimizer, self._params, self.owned)
        self.turn: AbstractContextManager[Any] = (
            threading.Lock() if self.options.transport == "threads" else nullcontext()
        )

    def server(self, number: int, donate: bool) -> Server:
        """Returns a server without a state. `donate`: no worker shares the memory of its parameters."""
        options = self.options
        rules = Rules(
            self.config.num_steps, options.aggregate, options.max_staleness, options.scale_by_staleness, self.config.ema
        )
        return Server(self.optimizer, shard(self._params, self.owned, number), rules, donate)

    def worker(
        self,
        devices: Sequence[jax.Device],
        number: int,
        incarnation: int,
        endpoints: Sequence[Endpoint],
        stopped: Callable[[], bool] = lambda: False,
    ) -> Worker:
        """Returns a worker on some devices. Its step is compiled at the first gradient."""
        paths = [[path for path, owner in self.owned.items() if owner == i] for i in range(self.options.servers)]
        policies: dict[str, Any] = dict(self.config.policies())
        gradient_fn = GradientStep(self.config, self.task, devices, self.turn)
        return Worker(number, incarnation, endpoints, paths, gradient_fn, policies, self.options.overlaps, stopped)
