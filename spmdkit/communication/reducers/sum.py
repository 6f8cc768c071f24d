"""The plain sum over the replica axes, `g = sum_r g_r`, as `lax.psum`.

Forward: one all-reduce over the replica axes for the complete tree (XLA combines the leaves). Backward: none.
Use it by default. Wire: a ring all-reduce sends `2 (N-1)/N * 4 bytes` per value, device and step.
Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).
"""

from __future__ import annotations

from jax import lax

from spmdkit.communication.reducers.base import LeafState, Leaves, ReduceGroup, Reducer


def make() -> Reducer:
    """Returns the reducer."""

    def apply(leaves: Leaves, states: list[LeafState], over: ReduceGroup) -> tuple[Leaves, list[LeafState]]:
        return lax.psum(leaves, over.axes), states

    return Reducer(exact=True, apply=apply, wire=lambda values, num: 2 * (num - 1) / num * 4 * values)
