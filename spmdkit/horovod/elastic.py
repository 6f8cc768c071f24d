"""Recovery from errors: `State` with commit, restore and sync; `ElasticSampler`; `run`, which resumes from the last
commit.

Recoverable errors are mismatched requests and failed operations (`HorovodInternalError` on every rank). A dead process,
or a new number of processes, needs a restart (`spmdkit launch --max-restarts`) and a state on disk.
Source: horovod/common/elastic.py, horovod/torch/elastic (Horovod 0.28.1).
"""

from __future__ import annotations

import copy
import functools
import math
import random
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmdkit.horovod import topology
from spmdkit.horovod.negotiation import HorovodInternalError
from spmdkit.horovod.objects import broadcast_object, broadcast_parameters
from spmdkit.horovod.unsupported import absent_from

MAX_FAILURES = 3
"""Maximum number of restarts of `run` without a commit in between, since an error may repeat indefinitely."""


class HostsUpdatedInterrupt(RuntimeError):
    """Raised by `commit` and `check_host_updates` on every rank after a call of `on_hosts_updated` on one rank.
    `skip_sync`: no host was added."""

    def __init__(self, skip_sync: bool = False):
        super().__init__("the hosts of the job have changed")
        self.skip_sync = skip_sync


class State:
    """The state of training. Each keyword argument becomes an attribute: a pytree of arrays, a Python object that
    `hvd.broadcast_object` supports, or an `ElasticSampler`. A commit is a copy in host memory."""

    def __init__(self, **attributes: Any):
        self._names = tuple(attributes)
        self._reset_callbacks: list[Callable[[], None]] = []
        self._news: list[tuple[float, bool]] = []
        self._last_news, self.num_commits = 0.0, 0
        for name, value in attributes.items():
            setattr(self, name, value)
        self._saved: dict[str, Any] = {}
        self.save()

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Adds functions that `run` calls on a restart."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Resets the samplers and calls the registered functions. Called by `run`."""
        self._news.clear()
        for name in self._names:
            if isinstance(getattr(self, name), ElasticSampler):
                getattr(self, name).reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, removed_only: bool = False) -> None:
        """Records on this rank that hosts were added, or only removed. The next commit raises on all ranks."""
        self._news.append((timestamp, removed_only))

    def commit(self) -> None:
        """Stores the current attributes. Raises HostsUpdatedInterrupt on every rank if one recorded changed hosts."""
        self.save()
        self.num_commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raises HostsUpdatedInterrupt on every rank if the first rank recorded changed hosts."""
        before, updates = self._last_news, [(at, removed) for at, removed in self._news if at > self._last_news]
        self._news.clear()
        update = [max((at for at, _ in updates), default=before), all(removed for _, removed in updates)]
        self._last_news, removed_only = broadcast_object(update)
        if self._last_news > before:
            raise HostsUpdatedInterrupt(skip_sync=removed_only)

    def save(self) -> None:
        """Stores the current attributes in host memory."""
        self._saved = {name: _to_host(self._get(name)) for name in self._names}

    def restore(self) -> None:
        """Sets the attributes to the stored ones."""
        for name, saved in self._saved.items():
            self._set(name, _copy(saved))

    def sync(self) -> None:
        """Sets the attributes of every rank to those of rank 0, and stores them."""
        for name in self._names:
            self._set(name, _synced(self._get(name)))
        self.save()

    def _get(self, name: str) -> Any:
        value = getattr(self, name)
        return value.state_dict() if isinstance(value, ElasticSampler) else value

    def _set(self, name: str, value: Any) -> None:
        if isinstance(sampler := getattr(self, name), ElasticSampler):
            sampler.load_state_dict(value)
        else:
            setattr(self, name, value)


class ElasticSampler:
    """This rank's part of the unprocessed examples of an epoch. The seed gives the same order on all ranks; `reset`
    redistributes the examples. `shuffle`: a new order in each epoch. Source: horovod/torch/elastic/sampler.py."""

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0):
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Starts an epoch. Call it at the end of the previous epoch: an interrupted epoch then repeats no example."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Records a batch of this size as processed on each rank."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Returns the position, for `load_state_dict`."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Restores a position, and redistributes the remaining examples."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Redistributes the remaining examples over the current ranks."""
        self.num_replicas, self.rank = topology.size(), topology.rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        total = self.num_samples * self.num_replicas
        indices = self.remaining_indices + self.remaining_indices[: total - len(self.remaining_indices)]
        return iter(indices[self.rank : total : self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `func(state, ...)`: calls `state.sync()` first, and restarts from the last commit after an error on all
    ranks. Raises HorovodInternalError at the third error without a commit in between."""

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        failures, commits, skip_sync = 0, state.num_commits, False
        while True:
            try:
                if not skip_sync:
                    state.sync()
                return func(state, *args, **kwargs)
            except HorovodInternalError:
                failures, commits = failures + 1 if state.num_commits == commits else 1, state.num_commits
                if failures == MAX_FAILURES:
                    raise
                state.restore()
                skip_sync = False
            except HostsUpdatedInterrupt as update:
                skip_sync = update.skip_sync
            topology.shutdown()
            topology.init()
            state.on_reset()

    return wrapper


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)


def _to_host(value: Any) -> Any:
    """Returns a copy in host memory that later computations can neither change nor donate."""
    leaves, form = jax.tree.flatten(value)
    return form, [(np.array(x), True) if isinstance(x, jax.Array) else (copy.deepcopy(x), False) for x in leaves]


def _copy(kept: Any) -> Any:
    """Returns a new copy of a tree from `_kept`."""
    form, leaves = kept
    return jax.tree.unflatten(form, [jnp.array(x) if is_jax else copy.deepcopy(x) for x, is_jax in leaves])


def _synced(value: Any) -> Any:
    """Returns rank 0's tree. Arrays are sent in one program, other leaves as objects."""
    leaves, form = jax.tree.flatten(value)
    if not any(_is_array(leaf) for leaf in leaves):
        return broadcast_object(value)  # any structure
    arrays = {i for i, leaf in enumerate(leaves) if _is_array(leaf)}
    moved = iter(broadcast_parameters([leaves[i] for i in sorted(arrays)], root_rank=0))
    others = iter(broadcast_object([leaf for i, leaf in enumerate(leaves) if i not in arrays]))
    return jax.tree.unflatten(form, [next(moved) if i in arrays else next(others) for i in range(len(leaves))])


def __getattr__(name: str) -> Any:
    return absent_from("elastic", name)
