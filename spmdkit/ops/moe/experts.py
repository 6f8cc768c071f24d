"""Experts: the interface of one expert, the sharding of its weights, and their execution on sorted tokens.

An expert is a function `(weights of one expert, tokens [N, D]) -> [N, D]` that processes each token separately. If a
dim of its weights is sharded (`mlp`), it returns a partial sum. With an optional third argument `product` for its
matrix products, all experts of a device run as one grouped product on TPUs (`jax.lax.ragged_dot`; elsewhere that is E
times the work). Otherwise experts run in a loop over blocks of rows (blocks.py).

Source: Gale et al., "MegaBlocks" (2022); Shazeer, "GLU Variants Improve Transformer" (2020).

Shape suffixes: E experts of this device, N and R rows, D width, F hidden width.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
from jax import lax

from spmdkit import compat
from spmdkit.errors import ConfigError
from spmdkit.ops.moe.blocks import by_blocks

Expert = Callable[..., jax.Array]

MLP_DIMS = {
    "gate": ("expert", "expert_embed", "mlp"),
    "up": ("expert", "expert_embed", "mlp"),
    "down": ("expert", "mlp", "expert_embed"),
}
"""Names of the dims of the default expert's weights."""

MAX_BLOCK = 512


def mlp(
    weights: Mapping[str, jax.Array],
    x_ND: jax.Array,
    product: Callable[[jax.Array, jax.Array], jax.Array] = jnp.matmul,
    activation: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """Returns the MLP of one expert: `down(act(x gate) * (x up))` with a gate (SiLU), else `down(act(x up))` (GELU)."""
    if "gate" in weights:
        h_NF = (activation or jax.nn.silu)(product(x_ND, weights["gate"])) * product(x_ND, weights["up"])
    else:
        h_NF = (activation or jax.nn.gelu)(product(x_ND, weights["up"]))
    return product(h_NF, weights["down"])


def dims_of(experts: Any, dims: Any) -> Any:
    """Returns the dim names of the weights, a tree like them. Raises ConfigError if a first dim is not `expert`."""
    if dims is None:
        if not isinstance(experts, Mapping) or set(experts) - set(MLP_DIMS) or {"up", "down"} - set(experts):
            found = sorted(experts) if isinstance(experts, Mapping) else type(experts).__name__
            raise ConfigError(
                f"sk.moe: experts hold {found} and dims is not given. The default holds for up, down and gate only; "
                "other weights have to say how their dims are cut. Give dims, a tree like experts, e.g. "
                "{'w': ('expert', 'embed', 'mlp')}."
            )
        dims = {name: MLP_DIMS[name] for name in experts}
    full_dims = jax.tree.map(lambda d, sub: jax.tree.map(lambda _: d, sub), dims, experts, is_leaf=is_dims)
    for d in jax.tree.leaves(full_dims, is_leaf=is_dims):
        if not d or d[0] != "expert":
            raise ConfigError(
                f"sk.moe: dims {d} of a weight of experts. The first dim is the experts'. Write ('expert', ...)."
            )
    return full_dims


def is_dims(x: Any) -> bool:
    """Returns whether `x` is the tuple of dim names of one array: a leaf of a tree of dims."""
    return isinstance(x, tuple) and all(n is None or isinstance(n, str) for n in x)


def run_sorted(expert: Expert, weights: Any, rows_RD: jax.Array, sizes_E: jax.Array, platform: str) -> jax.Array:
    """Returns [R, D]: expert 0 applied to the first `sizes[0]` rows, and so on. Rows after those of the last expert are
    undefined."""
    if platform == "tpu" and "product" in inspect.signature(expert).parameters:
        product = lambda x, w: lax.ragged_dot(x, w, sizes_E)
        return expert(weights, rows_RD, product=product)
    return _run_blocks(expert, weights, rows_RD, sizes_E)


# ---- blocks


def _run_blocks(expert: Expert, weights: Any, rows_RD: jax.Array, sizes_E: jax.Array) -> jax.Array:
    num_rows, num_experts = rows_RD.shape[0], sizes_E.shape[0]
    block = min(MAX_BLOCK, max(8, 2 ** math.ceil(math.log2(max(1, num_rows / num_experts / 4)))))
    varying = sorted(frozenset().union(*map(compat.varying_axes, (rows_RD, sizes_E, *jax.tree.leaves(weights)))))
    weights, rows_RD, sizes_E = compat.as_varying((weights, rows_RD, sizes_E), varying)
    # The last block may extend past the end of the rows: pad with one block of zeros.
    padded_RD = jnp.concatenate([rows_RD, jnp.zeros_like(rows_RD, shape=(block, rows_RD.shape[1]))])
    padded_RD = compat.as_varying(padded_RD, varying)
    opened, closed_over = _opened(expert, jax.tree.map(lambda w: w[0], weights), padded_RD[:block])
    return by_blocks(opened, block, closed_over, weights, padded_RD, sizes_E)[:num_rows]


def _opened(expert: Expert, expert_weights: Any, x_ND: jax.Array) -> tuple[Callable[..., jax.Array], list[jax.Array]]:
    """Returns (`fn(closed_over, own, x_ND)`, the arrays that `expert` closes over): a custom gradient needs them as
    arguments."""
    closed = jax.make_jaxpr(expert)(expert_weights, x_ND)
    if not closed.consts:
        return lambda _, expert_weights, x_ND: expert(expert_weights, x_ND), []

    def expert_with(closed_over: Sequence[jax.Array], expert_weights: Any, x_ND: jax.Array) -> jax.Array:
        flat = jax.extend.core.jaxpr_as_fun(jax.extend.core.ClosedJaxpr(closed.jaxpr, list(closed_over)))
        y_ND: jax.Array = flat(*jax.tree.leaves((expert_weights, x_ND)))[0]
        return y_ND

    return expert_with, closed.consts
