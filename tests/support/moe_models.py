"""A small mixture of experts as a user-defined task, and as a NumPy reference, token by token."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdkit as sk
from tests.support.core_models import keep_gradient
from tests.support.fixed_numbers import normal

D, F, T, E, LAYERS, CLASSES = 8, 16, 8, 8, 2, 4
TOKENS = ("batch", "norm_sequence", None)
RULES = [
    (".*/router", [None, "embed", None]),
    (".*/experts/(gate|up)", [None, "expert", "expert_embed", "mlp"]),
    (".*/experts/down", [None, "expert", "mlp", "expert_embed"]),
]


def task(num_experts=E, noise=0.0, remat=False, order=None, padded=False, **options):
    """Returns a classifier of sequences: LAYERS residual mixtures of experts, both auxiliary losses, all statistics as
    metrics.

    Args:
        order: a permutation of T: the order of tokens in the array, declared by `positions`. Or "context_order": the
            mesh's order, undeclared.
        padded: tokens at positions beyond each example's length are padding.
    """
    options = {"top_k": 2, "capacity": 1.0} | options

    def init(key):
        shape = (LAYERS, num_experts, D, F)
        return {
            "layers": {
                "router": normal(0, LAYERS, D, num_experts),
                "experts": {
                    "gate": normal(1, *shape) / 3,
                    "up": normal(2, *shape) / 3,
                    "down": normal(3, LAYERS, num_experts, F, D) / 4,
                },
            },
            "head": normal(4, D, CLASSES),
        }

    def loss_fn(params, batch, key):
        drawn = noise > 0 and key is not None
        keys_B = sk.example_keys() if drawn else None
        by_mesh = order == "context_order"
        positions_T = sk.context_positions(T) if by_mesh else jnp.arange(T) if order is None else jnp.asarray(order)

        def block(x_BTD, layer):
            y_BTD, load = sk.moe(
                x_BTD,
                layer["router"],
                layer["experts"],
                positions=None if order is None or by_mesh else positions_T,
                where_BT=positions_T < batch["length"][:, None] if padded else None,
                noise=noise if drawn else 0.0,
                keys_B=keys_B,
                **options,
            )
            return sk.shard(x_BTD + y_BTD, *TOKENS), load

        one = jax.checkpoint(block) if remat else block
        x_BTD = sk.context_order(batch["x"]) if by_mesh else batch["x"] if order is None else batch["x"][:, positions_T]
        x_BTD, load = jax.lax.scan(one, sk.shard(x_BTD.astype(params["head"].dtype), *TOKENS), params["layers"])
        logits_BC = (x_BTD.mean(1) @ params["head"]).astype(jnp.float32)
        losses_B = optax.softmax_cross_entropy_with_integer_labels(logits_BC, batch["y"])
        aux_B = (0.1 * load.balance_B + 0.01 * load.z_B).sum(0)
        metrics = {
            "dropped": sk.mean(load.dropped_B.mean(0)),
            "balance": sk.mean(load.balance_B.mean(0)),
            "z": sk.mean(load.z_B.mean(0)),
            "max_over_mean": sk.mean(load.max_over_mean_B.mean(0)),
            "first_expert": sk.mean(load.fraction_BE[0, :, 0]),
        }
        return sk.mean(losses_B + aux_B), metrics

    return sk.Task(init, loss_fn, keep_gradient(optax.sgd(0.1)), train_data=data(), rules=RULES)


def data(num=64):
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(num, T, D)).astype(np.float32),
        "y": rng.integers(0, CLASSES, num).astype(np.int32),
        "length": rng.integers(2, T + 1, num).astype(np.int32),
    }


def moe_by_hand(
    x, router, experts, *, top_k=2, capacity=1.0, score="softmax", normalise=True, priority="position", where=None
):
    """Returns (y, dropped, balance, z, fraction) in float64, one token and one choice at a time."""
    x, router = np.asarray(x, np.float64), np.asarray(router, np.float64)
    experts = {name: np.asarray(w, np.float64) for name, w in experts.items()}
    num, length, num_experts = x.shape[0], x.shape[1], router.shape[1]
    where = np.ones((num, length), bool) if where is None else where
    slots = None if capacity is None else min(length, max(1, math.ceil(capacity * top_k * length / num_experts)))
    y, stats = np.zeros_like(x), []
    for b in range(num):
        logits = x[b] @ router
        scores = np.exp(logits - logits.max(-1, keepdims=True)) if score == "softmax" else 1 / (1 + np.exp(-logits))
        scores = scores / scores.sum(-1, keepdims=True) if score == "softmax" else scores
        chosen = np.argsort(-scores, axis=-1, kind="stable")[:, :top_k]
        weights = np.take_along_axis(scores, chosen, -1)
        weights = weights / weights.sum(-1, keepdims=True) if normalise else weights
        choices = [(k, t) for k in range(top_k) for t in range(length) if where[b, t]]
        if priority == "weight":
            choices.sort(key=lambda c: (c[0], -weights[c[1], c[0]], c[1]))
        taken, wanted, dropped = np.zeros(num_experts), np.zeros(num_experts), 0
        for k, t in choices:
            e = chosen[t, k]
            wanted[e] += 1
            if slots is not None and taken[e] == slots:
                dropped += 1
                continue
            taken[e] += 1
            y[b, t] += weights[t, k] * mlp_by_hand(x[b, t], {name: w[e] for name, w in experts.items()})
        share = (scores / scores.sum(-1, keepdims=True))[where[b]].mean(0)
        fraction = wanted / len(choices)
        lse = np.log(np.exp(logits).sum(-1))[where[b]]
        stats.append((dropped / len(choices), num_experts * (fraction * share).sum(), (lse**2).mean(), fraction))
    return (y, *(np.array(s) for s in zip(*stats, strict=True)))


def dense(x_BTD, router_DE, experts, top_k, slots):
    """Returns (y, balance): every expert for every token, with a mask and GShard's cumulative sum. Differentiable by
    JAX."""
    probs_BTE = jax.nn.softmax(x_BTD @ router_DE)
    weights_BTK, chosen_BTK = jax.lax.top_k(probs_BTE, top_k)
    chosen_BKTE = jax.nn.one_hot(chosen_BTK, router_DE.shape[1]).swapaxes(1, 2)
    rank_BKTE = jnp.cumsum(chosen_BKTE.reshape(len(x_BTD), -1, router_DE.shape[1]), 1).reshape(chosen_BKTE.shape)
    kept_BKTE = chosen_BKTE if slots is None else jnp.where(rank_BKTE <= slots, chosen_BKTE, 0)
    weights_BTK /= weights_BTK.sum(-1, keepdims=True)
    gates_BTE = jnp.einsum("BKTE,BTK->BTE", kept_BKTE, weights_BTK)
    h_BTEF = jax.nn.silu(jnp.einsum("BTD,EDF->BTEF", x_BTD, experts["gate"])) * jnp.einsum(
        "BTD,EDF->BTEF", x_BTD, experts["up"]
    )
    y_BTD = jnp.einsum("BTEF,EFD,BTE->BTD", h_BTEF, experts["down"], gates_BTE)
    return y_BTD, router_DE.shape[1] * (chosen_BKTE.mean((1, 2)) * probs_BTE.mean(1)).sum(-1)


def mlp_by_hand(x, w):
    if "gate" in w:
        gate = x @ w["gate"]
        return (gate / (1 + np.exp(-gate)) * (x @ w["up"])) @ w["down"]
    h = x @ w["up"]
    return (0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))) @ w["down"]


def ragged_all_to_all(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """`lax.ragged_all_to_all` for a backend without it: gathers all rows and drops those of other devices."""
    me = jax.lax.axis_index(axis_name)
    gather = lambda x: jax.lax.all_gather(x, axis_name)
    rows_sRD, begin_sd, size_sd, arrive_sd = map(gather, (operand, input_offsets, send_sizes, output_offsets))
    row_R = jnp.arange(output.shape[0])
    for s in range(rows_sRD.shape[0]):
        number_R = row_R - arrive_sd[s, me]
        is_sent_R = (number_R >= 0) & (number_R < size_sd[s, me])
        sent_RD = rows_sRD[s][jnp.clip(number_R + begin_sd[s, me], 0, operand.shape[0] - 1)]
        output = jnp.where(is_sent_R[:, None], sent_RD, output)
    return jnp.where((recv_sizes == size_sd[:, me]).all(), output, jnp.nan)


def pipelined_task(**options):
    """Returns the task with its layers as stages of `sk.pipeline`; the layers' losses are sent with the tokens."""
    base = task(**options)

    def embed(_, rows):
        x_BTD = sk.shard(rows["x"], *TOKENS)
        return {"x": x_BTD, "aux": jnp.zeros(x_BTD.shape[0], jnp.float32)}

    def layer(carry, weights, rows):
        y_BTD, load = sk.moe(
            carry["x"], weights["router"], weights["experts"], **{"top_k": 2, "capacity": 1.0} | options
        )
        aux_B = carry["aux"] + 0.1 * load.balance_B + 0.01 * load.z_B
        return {"x": sk.shard(carry["x"] + y_BTD, *TOKENS), "aux": aux_B}

    def head(carry, params, rows):
        logits_BC = carry["x"].mean(1) @ params
        return sk.mean(optax.softmax_cross_entropy_with_integer_labels(logits_BC, rows["y"]) + carry["aux"])

    def loss_fn(params, batch, key):
        return sk.pipeline(embed, layer, head)({}, params["layers"], params["head"], batch)

    rules = [(pattern, ["layers", *dims[1:]]) for pattern, dims in RULES]
    return sk.Task(base.init, loss_fn, keep_gradient(optax.sgd(0.1)), train_data=data(), rules=rules)
