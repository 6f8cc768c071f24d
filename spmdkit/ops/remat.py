"""Rematerialisation policies by name: the values that are saved for the backward pass; all others are recomputed.

    none              save everything                                     most memory, no recomputation
    dots              save the results of matrix products
    dots_no_batch     save products without batch dims (weights x activations, not attention scores)
    full              save only the inputs of each wrapped block           least memory, about one more forward pass
    {save: [names]}   save the values that `jax.ad_checkpoint.checkpoint_name` marks with one of these names
    {offload: [...]}  the same in host memory: written when the forward pass computes the value, read back for the
                      backward pass

Names inside `sk.manual` count too; there, `none` saves everything except gathered arrays. On XLA's CPU backend host
memory is device memory: the program is the same and offloading moves nothing.

Wire: only the collectives of recomputed values, sent again. Offloaded values are copied to the host and back.
Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016); `jax.checkpoint_policies`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax

from spmdkit.errors import ConfigError
from spmdkit.foundation.formatting import nearest
from spmdkit.step import trace_context

NAMES = ("none", "full", "dots", "dots_no_batch")
RESIDUAL_NAME = "spmdkit: kept by sk.manual"
"""The mark of unnamed residuals of a manual part."""


class Remat(NamedTuple):
    """`jax.checkpoint` policies: for a block, in which marks identify the residuals of parts, and inside parts."""

    of_block: Any
    in_parts: Any


def policy(remat: str) -> Remat | None:
    """Returns the policies of a name; None for `none`."""
    if remat == "none":
        return None
    in_parts = {
        "full": jax.checkpoint_policies.nothing_saveable,
        "dots": jax.checkpoint_policies.dots_saveable,
        "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    }[remat]
    return Remat(_or_kept(in_parts), in_parts)


def save_all_but_gathered(prim: Any, *args: Any, **params: Any) -> bool:
    """The policy of parts without remat: a gathered array is N times its shard, so it is not saved; neither are layout
    changes."""
    return prim.name not in _GATHERED


_GATHERED = {
    *("all_gather", "all_gather_invariant", "optimization_barrier"),
    *("pvary", "pcast", "transpose", "reshape", "broadcast_in_dim", "squeeze"),
}


def _or_kept(chosen: Any) -> Any:
    return lambda prim, *args, **params: (
        (prim.name == "name" and params["name"] == RESIDUAL_NAME) or chosen(prim, *args, **params)
    )


def policy_of_names(save: Sequence[str], offload: Sequence[str]) -> Remat:
    """Returns the policies that save the values with these names, on the device or on the host.

    Tracing a step records all names of its values, for `check_names`.
    """
    chosen = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(save),
        names_which_can_be_offloaded=list(offload),
        offload_src="device",
        offload_dst="pinned_host",
    )

    def noting(policy: Any, prim: Any, *args: Any, **params: Any) -> Any:
        if prim.name == "name" and params["name"] != RESIDUAL_NAME:
            trace_context.current().usage.marks.add(params["name"])
        return policy(prim, *args, **params)

    in_parts = jax.checkpoint_policies.save_only_these_names(*save, *offload)
    return Remat(functools.partial(noting, _or_kept(chosen)), functools.partial(noting, in_parts))


def check_names(key: str, names: Sequence[str], marks: Collection[str], what: str) -> None:
    """Raises ConfigError for a name that no rematerialised part of `what` marks: it would have no effect."""
    marked = sorted(marks)
    for name in names:
        if name not in marked:
            found = f"the marks there are {', '.join(marked)}" if marked else "there are no marks"
            raise ConfigError(
                f"remat.{key} names '{name}', and no rematerialised part of {what} marks it ({found}), so it has no "
                f"effect.{nearest(name, marked)} Write jax.ad_checkpoint.checkpoint_name(x, '{name}') inside "
                "sk.remat, or remove the name."
            )


def remat(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fn` wrapped in `jax.checkpoint` with the policy of the config's `remat`.

    Wrap the repeated block of a model: `x = sk.remat(block)(x, layer_params)`. If a task wraps no block, the policy
    applies to its full loss. With `remat: none` this calls `fn` directly.
    """

    @functools.wraps(fn)
    def wrapped(*args: Any) -> Any:
        context = trace_context.current()
        context.usage.record_call("remat")
        if context.options.remat is None:
            return fn(*args)
        return jax.checkpoint(fn, policy=context.options.remat.of_block)(*args)

    return wrapped
