"""Tables of the work of each stage in each tick, in numpy, for any number of stages, chunks and microbatches.

P stages in a ring, M microbatches, v chunks of layers per stage; chunk c of stage s is virtual stage c P + s. In a tick
every stage runs the forward pass of one microbatch through one chunk, or the backward pass, or both. Stage s + 1
(backward: s - 1) uses the output of stage s of tick t in tick t + 1.

    forward   of microbatch g P + i through chunk c at stage s:  tick g v P + c P + i + s
    backward  of the same:                                       tick g v P + (v - 1 - c) P + i + (P - 1 - s) + v P - 1

At the last virtual stage the backward pass of a microbatch runs in the same tick as its forward pass. The schedule has
v P - 1 ticks that are forward only, then ticks with both, then v P - 1 ticks that are backward only:

    ticks with a forward pass = ticks with a backward pass = v M + P - 1            (P divides M, or v = 1)
    bubble = idle / all stage executions = (P - 1) / (v M + P - 1)

A stage's input is stored from its forward to its backward tick: 2 v P - 1 in flight, for any number of microbatches.

Source: Huang et al., "GPipe" (2019); Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters
Using Megatron-LM" (2021), section 2.2, with fewer microbatches in flight in the warm-up.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import numpy as np


class Work(NamedTuple):
    """The work of every stage in every tick; arrays [ticks, stages].

    Attributes:
        valid: False if a stage is idle; its results are then discarded.
        microbatch: index of the microbatch; arbitrary if not valid.
        chunk: index of the chunk of the stage's layers.
        slot: index in the ring buffer of stored inputs (backward only).
    """

    valid: np.ndarray
    microbatch: np.ndarray
    chunk: np.ndarray
    slot: np.ndarray

    def between(self, start: int, stop: int) -> Work:
        """Returns the ticks from `start` to `stop`."""
        return Work(*(x[start:stop] for x in self))


@dataclasses.dataclass(frozen=True)
class StageSchedule:
    """The tables of one pipeline."""

    num_stages: int
    num_microbatches: int
    num_chunks: int = 1

    @functools.cached_property
    def forward(self) -> Work:
        """The forward passes, from tick 0 to the last one."""
        microbatch, chunk = self._item(self._ticks - np.arange(self.num_stages))
        valid = (microbatch >= 0) & (microbatch < self.num_microbatches)
        return self._work(valid, microbatch, chunk, np.broadcast_to(self._ticks % self.num_slots, valid.shape))

    @functools.cached_property
    def backward(self) -> Work:
        """The backward passes, from tick 0 to the last one; all invalid before `first_backward`."""
        stage = np.arange(self.num_stages)
        microbatch, chunk = self._item(self._ticks - self.first_backward - (self.num_stages - 1 - stage))
        chunk = self.num_chunks - 1 - chunk
        valid = (microbatch >= 0) & (microbatch < self.num_microbatches)
        return self._work(valid, microbatch, chunk, self._forward_tick(microbatch, chunk, stage) % self.num_slots)

    @property
    def first_backward(self) -> int:
        """The tick in which the first microbatch leaves the last virtual stage and starts its backward pass."""
        return self.num_chunks * self.num_stages - 1

    @property
    def num_slots(self) -> int:
        """The number of inputs of a stage that are stored at a time."""
        return 2 * self.num_chunks * self.num_stages - 1

    @property
    def head(self) -> tuple[np.ndarray, np.ndarray]:
        """For each forward tick: whether a microbatch leaves the last virtual stage, and which; arrays [ticks]."""
        work = self.forward
        return work.valid[:, -1] & (work.chunk[:, -1] == self.num_chunks - 1), work.microbatch[:, -1]

    @property
    def _ticks(self) -> np.ndarray:
        num_groups = -(-self.num_microbatches // self.num_stages)
        return np.arange((num_groups + 3) * self.num_chunks * self.num_stages + self.num_stages)[:, None]

    def _item(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (microbatch, chunk) of work item `index` of a stage; negative before the first item."""
        group, rest = np.divmod(index, self.num_chunks * self.num_stages)
        chunk, member = np.divmod(rest, self.num_stages)
        return group * self.num_stages + member, chunk

    def _forward_tick(self, microbatch: np.ndarray, chunk: np.ndarray, stage: np.ndarray) -> np.ndarray:
        group, member = np.divmod(microbatch, self.num_stages)
        tick: np.ndarray = (group * self.num_chunks + chunk) * self.num_stages + member + stage
        return tick

    def _work(self, valid: np.ndarray, microbatch: np.ndarray, chunk: np.ndarray, slot: np.ndarray) -> Work:
        num_ticks = int(np.flatnonzero(valid.any(1))[-1]) + 1
        clipped = np.clip(microbatch, 0, self.num_microbatches - 1)
        return Work(valid, *(x.astype(np.int32) for x in (clipped, chunk, slot))).between(0, num_ticks)
