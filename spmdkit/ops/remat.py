"""Rematerialisation policies by name: the values that are saved for the backward pass; all others are recomputed.

    none              save everything                                     most memory, no recomputation
    dots              save the results of matrix products
    dots_no_batch     save products without batch dims (weights x activations, not attention scores)
    full              save only the inputs of each wrapped block           least memory, about one more forward pass
    minimal           save the products of the weights: query_proj, key_proj, value_proj, out_proj, hidden, mlpwo
    minimal_flash     the same, and the results of the attention (context, attention)
    save_dot_except_mlp    save the products of the weights of the attention
    save_qkv_proj     save its queries, keys and values
    offload_layer_inputs   only the inputs of each wrapped block, in host memory
    {save: [names]}   save the values that `jax.ad_checkpoint.checkpoint_name` marks with one of these names
    {offload: [...]}  the same in host memory: written when the forward pass computes the value, read back for the
                      backward pass

The policies by names of values (`POLICIES`) save those of their names that the model marks. `sk.remat` marks the first
argument of each block as `decoder_layer_input`. Names inside `sk.manual` count too; there, `none` saves everything
except gathered arrays. On XLA's CPU backend host memory is device memory: the program is the same and offloading moves
nothing.

Wire: only the collectives of recomputed values, sent again. Offloaded values are copied to the host and back.
Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016); `jax.checkpoint_policies`; the names of
policies and values are those of MaxText (`remat_policy`, configs/base.yml).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from spmdkit.errors import ConfigError
from spmdkit.foundation.formatting import nearest
from spmdkit.step import trace_context

LAYER_INPUT = "decoder_layer_input"
"""The mark of the first argument of each block under `sk.remat`."""
_QKV = ("query_proj", "key_proj", "value_proj", "kv_proj", "qkv_proj")
_PRODUCTS = (*_QKV, "out_proj", "hidden", "mlpwi", "mlpwi_0", "mlpwi_1", "mlpwo")


class SavedNames(NamedTuple):
    """Names of values: saved on the device, and in host memory."""

    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()


POLICIES: Mapping[str, SavedNames] = {
    "minimal": SavedNames(_PRODUCTS),
    "minimal_flash": SavedNames((*_PRODUCTS, "context", "attention")),
    "save_dot_except_mlp": SavedNames((*_QKV, "out_proj")),
    "save_qkv_proj": SavedNames(_QKV),
    "offload_layer_inputs": SavedNames(offload=(LAYER_INPUT,)),
}
"""Policy -> the values that it saves."""
NAMES = ("none", "full", "dots", "dots_no_batch", *POLICIES)
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
    if remat in POLICIES:
        return policy_of_names(*POLICIES[remat])
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


def check_policy(name: str, marks: Collection[str], what: str) -> None:
    """Raises ConfigError if no rematerialised part of `what` marks a value that the policy saves."""
    names = [*POLICIES[name].save, *POLICIES[name].offload]
    if not set(names) & set(marks):
        found = f"the marks there are {', '.join(sorted(marks))}" if marks else "there are no marks"
        raise ConfigError(
            f"remat: {name} saves {', '.join(names)}, and no rematerialised part of {what} marks them ({found}). "
            "It is the same as full. Write jax.ad_checkpoint.checkpoint_name(x, name) inside sk.remat, or remat: "
            "full."
        )


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

    Wrap the repeated block of a model: `x = sk.remat(block)(x, layer_params)`; its input is the first argument. If a
    task wraps no block, the policy applies to its full loss. With `remat: none` this calls `fn` directly.
    """

    @functools.wraps(fn)
    def wrapped(*args: Any) -> Any:
        context = trace_context.current()
        context.usage.record_call("remat")
        if context.options.remat is None:
            return fn(*args)
        marked = lambda first, *rest: fn(jax.tree.map(lambda x: checkpoint_name(x, LAYER_INPUT), first), *rest)
        return jax.checkpoint(marked, policy=context.options.remat.of_block)(*args)

    return wrapped
