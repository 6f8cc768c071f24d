"""`torch.utils.data.DataLoader`, counted, and torchdata's `StatefulDataLoader`, by its state.

A loader cannot be divided: each process opens it and uses its rows. A stream function that returns a loader of
`Subset(data, range(shard, len(data), num_shards))` is read as shards. Epoch 0 is that of the loader in a plain loop;
later epochs reseed its generators.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import numpy as np

from spmdkit.data.streams.base import State
from spmdkit.data.streams.function import IteratorShard
from spmdkit.errors import CheckpointError, ConfigError


class LoaderStream:
    """A loader that is opened once.

    Attributes:
        batched: it collates batches.
        limit: why it has no more shards.
    """

    limit = (
        "a loader cannot be divided. Return DataLoader(Subset(data, range(shard, len(data), num_shards))) from a "
        "function under @sk.stream"
    )

    def __init__(self, loader: Any):
        self._loader = loader
        self.batched = loader.batch_sampler is not None or loader.batch_size is not None
        sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
        if hasattr(sampler, "generator") and sampler.generator is None:
            raise ConfigError(
                f"train_data is a {type(loader).__name__} that shuffles without a generator, so a restarted run would "
                "read other examples. A restart must read the same order. Pass "
                "generator=torch.Generator().manual_seed(0)."
            )

    def most_shards(self) -> int:
        """Returns 1."""
        return 1

    def open(self, shard: int, num_shards: int, seed: int, epoch: int, state: State | None) -> LoaderShard:
        """Returns a copy of the loader, which shares data with an index."""
        loader = self._loader
        shared = {id(getattr(loader, "_iterator", None)): None}
        if not isinstance(loader.dataset, sys.modules["torch"].utils.data.IterableDataset):
            shared[id(loader.dataset)] = loader.dataset
        loader = copy.deepcopy(loader, shared)
        samplers = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
        for each in samplers:
            getattr(each, "set_epoch", lambda _: None)(epoch)
        if epoch:
            for generator in {
                id(x.generator): x.generator for x in (loader, *samplers) if hasattr(x, "generator")
            }.values():
                if generator is not None:
                    words = np.random.SeedSequence((generator.initial_seed(), epoch)).generate_state(1)
                    generator.manual_seed(int(words[0]))
        return LoaderShard(loader, state)


class LoaderShard(IteratorShard):
    """A loader. The state of a `StatefulDataLoader` is stored with the number of its worker processes."""

    def __init__(self, loader: Any, state: State | None):
        self._workers = loader.num_workers
        if state is not None and state["num_workers"] != self._workers:
            raise CheckpointError(
                f"the position in the checkpoint is that of {state['num_workers']} worker processes, and the "
                f"StatefulDataLoader has num_workers={self._workers}. Its state depends on that number. Set "
                f"num_workers={state['num_workers']}, or set run_dir to a new folder."
            )
        super().__init__(loader, None if state is None else state["loader"])

    def state(self) -> State | None:
        """Returns the loader's state and the number of its worker processes; None if it has no state."""
        state = super().state()
        return None if state is None else {"num_workers": self._workers, "loader": state}

    def close(self) -> None:
        """Ends the loader's worker processes."""
        getattr(self._iterator, "_shutdown_workers", lambda: None)()


def open_stream(data: Any) -> LoaderStream | None:
    """Returns the stream of a `DataLoader`."""
    torch = sys.modules.get("torch")
    return LoaderStream(data) if torch is not None and isinstance(data, torch.utils.data.DataLoader) else None
