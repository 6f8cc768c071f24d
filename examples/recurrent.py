"""A byte-level language model without attention: gated linear recurrences, sharded over every axis of a mesh.

    spmdkit train configs/recurrent.yaml

It shows what a custom layer needs: logical names for the dims of its weights (`BLOCK_DIMS`) and activations (`STREAM`),
`sk.manual` around a block, inside of which arrays are one device's shards, `sk.column_row_parallel` for products with a
sharded hidden dim, and one collective (`state_before`). The mesh decides which of it is used.

    h[t] = (1 - z[t]) h[t-1] + z[t] v[t]    z = sigmoid(x W_update + bias), v = x W_value, y = (silu(x W_gate) h) W_out

A recurrence that is linear in h is a prefix sum of pairs (decay, state). Every device of `context` scans its own
positions, gathers the pairs of all parts, and adds the state before its part. Channels are independent over `tensor`.

Expected: 2.08 nats per byte of text that was not trained on. 0.5 minutes on two CPU cores.

Source: Martin and Cundy, "Parallelizing Linear Recurrent Neural Nets Over Sequence Length" (2018); Feng et al., "Were
RNNs All We Needed?" (2024), section 3.1 (minGRU); De et al., "Griffin" (2024), section 2 (two branches, output gate).

Shape suffixes: B examples, T positions, D width, F hidden channels, V the 256 bytes, L layers, C devices along T.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from stdlib_text import VOCAB, read_files, windows

import spmdkit as sk
from spmdkit.ops.collectives import all_gather, axis_index

Params = dict[str, Any]

STREAM = ("batch", "norm_sequence", None)
BLOCK_DIMS = {
    "recurrent_norm": (None,),
    "value": ("embed", "mlp"),
    "update": ("embed", "mlp"),
    "output_gate": ("embed", "mlp"),
    "bias": ("mlp",),
    "out": ("mlp", "embed"),
    "mlp_norm": (None,),
    "gate": ("embed", "mlp"),
    "up": ("embed", "mlp"),
    "down": ("mlp", "embed"),
}
"""Weight of a block -> logical name of each dim: `embed` is sharded over fsdp, `mlp` over tensor."""


@sk.task
def task(width=128, layers=4, hidden=None, context=128, document_masks=False, train_bytes=4_000_000, eval_bytes=65_536):
    """Returns the task; the arguments are the config's `task_args`, as in gpt.py. `hidden` is F, by default 2 D."""
    hidden = hidden or 2 * width

    def loss_fn(params: Params, batch: dict[str, jax.Array], key: Any) -> tuple[sk.Mean, dict[str, sk.Mean]]:
        tokens_BT = batch["tokens"].astype(jnp.int32)
        where_BT = jnp.arange(context) < batch["num_targets"][:, None]
        rows = {"inputs": tokens_BT[:, :-1], "targets": tokens_BT[:, 1:], "where": where_BT}
        ends = {name: params[name] for name in ("norm", "head")}
        loss = sk.pipeline(embed, block, losses, head_per_token=True)(params["embed"], params["blocks"], ends, rows)
        return loss, {"bits_per_byte": loss * (1 / math.log(2))}

    train_files, eval_files = read_files(train_bytes, eval_bytes)
    blocks = [(f"blocks/{name}", ["layers", *dims]) for name, dims in BLOCK_DIMS.items()]
    return sk.Task(
        init=lambda key: init_params(key, width, layers, hidden, context),
        loss_fn=loss_fn,
        optimizer=lambda learning_rate: optax.adamw(learning_rate, b2=0.95, weight_decay=0.01),
        train_data=windows(train_files, context, document_masks),
        eval_data=windows(eval_files, context, document_masks),
        rules=[("embed", ["vocab", "embed"]), *blocks, ("head", ["embed", "vocab"])],
    )


def init_params(key: jax.Array, width: int, layers: int, hidden: int, context: int) -> Params:
    """Returns the parameters, blocks stacked, [L, ...]. Channels start with memories of 1 to `context` positions."""
    D, F = width, hidden
    keys = dict(zip(("embed", "head", *BLOCK_DIMS), jax.random.split(key, 2 + len(BLOCK_DIMS)), strict=True))

    def normal(name: str, shape: tuple[int, ...], fan_in: int) -> jax.Array:
        return jax.random.normal(keys[name], shape) / math.sqrt(fan_in)

    blocks = {name: normal(name, (layers, D, F), D) for name in ("value", "update", "output_gate", "gate", "up")}
    blocks |= {name: normal(name, (layers, F, D), F * 2 * layers) for name in ("out", "down")}  # 2 L branches add up
    blocks |= {name: jnp.ones((layers, D)) for name in ("recurrent_norm", "mlp_norm")}
    blocks["bias"] = jnp.tile(-jnp.log(jnp.geomspace(1.0, context, F)), (layers, 1))
    ends = {"embed": normal("embed", (VOCAB, D), 1), "norm": jnp.ones(D), "head": normal("head", (D, VOCAB), D)}
    return ends | {"blocks": blocks}


def embed(embed_VD: jax.Array, rows: Params) -> jax.Array:
    return sk.embed(rows["inputs"], embed_VD, dims=STREAM)


def block(x_BTD: jax.Array, weights: Params, rows: Params) -> jax.Array:
    """Returns the stream after a recurrence and an MLP."""
    return sk.manual(block_part, in_dims=[STREAM, BLOCK_DIMS], out_dims=STREAM)(x_BTD, weights)


def block_part(x_BTD: jax.Array, w: Params) -> jax.Array:
    """Returns the same on the shards of one device."""
    columns = [w["value"], w["update"], w["output_gate"]]
    bias = {"extra": [w["bias"]], "extra_dims": [BLOCK_DIMS["bias"]]}
    h_BTD = rms_norm(x_BTD, w["recurrent_norm"])
    x_BTD += sk.column_row_parallel(h_BTD, columns, recurrence, w["out"], dims=STREAM, **bias)
    h_BTD = rms_norm(x_BTD, w["mlp_norm"])
    return x_BTD + sk.column_row_parallel(h_BTD, [w["gate"], w["up"]], gated, w["down"], dims=STREAM)


def losses(x_BTD: jax.Array, ends: Params, rows: Params) -> sk.Mean:
    h_BTD = rms_norm(x_BTD, ends["norm"])
    losses_BT = sk.cross_entropy(h_BTD, ends["head"], rows["targets"], where=rows["where"], dims=STREAM)
    return sk.mean(losses_BT, where=rows["where"])


def gated(gate_BTF: jax.Array, up_BTF: jax.Array) -> jax.Array:
    return jax.nn.silu(gate_BTF) * up_BTF


def recurrence(value_BTF: jax.Array, update_BTF: jax.Array, gate_BTF: jax.Array, bias_F: jax.Array) -> jax.Array:
    """Returns the gated states, [B, T, F], of this device's channels and positions. States are in float32."""
    z_BTF = jax.nn.sigmoid((update_BTF + bias_F).astype(jnp.float32))
    decay_BTF, state_BTF = jax.lax.associative_scan(then, (1 - z_BTF, z_BTF * value_BTF.astype(jnp.float32)), axis=1)
    state_BTF += decay_BTF * state_before(decay_BTF[:, -1], state_BTF[:, -1])[:, None]
    return jax.nn.silu(gate_BTF) * state_BTF.astype(gate_BTF.dtype)


def then(first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns the pair (decay, state) of two consecutive spans."""
    return second[0] * first[0], second[0] * first[1] + second[1]


def state_before(decay_BF: jax.Array, state_BF: jax.Array) -> jax.Array:
    """Returns the state before this device's part of the sequence, [B, F], from the pair of each part.

    Wire: all_gather of the pairs over `sequence`, 8 (C - 1) B F bytes, and their reduce_scatter in the backward pass.
    """
    pairs_C2BF = all_gather(jnp.stack([decay_BF, state_BF])[None], "sequence", dim=0)
    _, after_CBF = jax.lax.associative_scan(then, (pairs_C2BF[:, 0], pairs_C2BF[:, 1]))
    before_CBF = jnp.concatenate([jnp.zeros_like(after_CBF[:1]), after_CBF[:-1]])
    return jax.lax.dynamic_index_in_dim(before_CBF, axis_index("sequence"), keepdims=False)


def rms_norm(x_BTD: jax.Array, scale_D: jax.Array) -> jax.Array:
    mean_square = jnp.mean(jnp.square(x_BTD.astype(jnp.float32)), axis=-1, keepdims=True)
    return x_BTD * jax.lax.rsqrt(mean_square + 1e-6).astype(x_BTD.dtype) * scale_D
