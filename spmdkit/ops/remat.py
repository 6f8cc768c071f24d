"""Rematerialisation by name: which intermediate values the backward pass keeps, and which it computes again.

    none            keep everything                                     most memory, no recomputation
    dots            keep the results of matrix products
    dots_no_batch   keep products without batch dims (weights x activations, not attention scores)
    full            keep only the inputs of each wrapped block           least memory, about one more forward pass
    save: [names]   keep what `jax.ad_checkpoint.checkpoint_name` marks with one of these names

Wire: what a block sends that is computed again is sent again, once more in the backward pass.
Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016); `jax.checkpoint_policies`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from spmdkit import scope

NAMES = ("none", "full", "dots", "dots_no_batch")


def policy(remat: str | Sequence[str]) -> Any:
    """Returns the `jax.checkpoint` policy of a name or of a list of saved names; None for `none`."""
    if not isinstance(remat, str):
        return jax.checkpoint_policies.save_only_these_names(*remat)
    return {
        "none": None,
        "full": jax.checkpoint_policies.nothing_saveable,
        "dots": jax.checkpoint_policies.dots_saveable,
        "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    }[remat]


def remat(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fn` wrapped in `jax.checkpoint` under the policy that the config's `remat` names.

    Wrap the block that a model repeats: `x = sk.remat(block)(x, layer_params)`. A task that wraps nothing gets the policy
    around its whole loss. With `remat: none` this returns `fn` itself.
    """

    @functools.wraps(fn)
    def wrapped(*args: Any) -> Any:
        step = scope.current_step()
        step.uses.add("remat")
        if step.remat is None:
            return fn(*args)
        return jax.checkpoint(fn, policy=step.remat)(*args)

    return wrapped
