"""A small model for the pipeline tests: token embedding, residual MLPs with dropout and a balance loss, a softmax
head."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdkit as sk
from spmdkit.ops.collectives import all_gather, reduce_scatter
from tests.support.core_models import keep_gradient, made_once
from tests.support.fixed_numbers import normal

D, F, T, V = 16, 32, 8, 24
ROWS = ("batch", "norm_sequence", None)


def column_row(x_BTD, up_DF, down_FD):
    x_BTD = all_gather(x_BTD, "mlp", dim=1)
    up_DF, down_FD = all_gather(up_DF, "embed", dim=0), all_gather(down_FD, "embed", dim=1)
    return reduce_scatter(jax.nn.gelu(x_BTD @ up_DF) @ down_FD, "mlp", dim=1)


def plain_mlp(x_BTD, up_DF, down_FD):
    h_BTF = sk.shard(jax.nn.gelu(x_BTD @ up_DF), "batch", "sequence", "mlp")
    return h_BTF @ down_FD


def norm(x_BTD, scale_D):
    """Without an epsilon: zero activations become NaN, so that a test detects an idle stage that computes on them."""
    return x_BTD * jax.lax.rsqrt((x_BTD**2).mean(-1, keepdims=True)) * scale_D


def embed(table_VD, rows):
    x_BTD = sk.shard(sk.shard(table_VD, "vocab", None)[rows["tokens"]], *ROWS)
    zeros_B = jnp.zeros(x_BTD.shape[0], jnp.float32)
    return {"x": x_BTD, "balance": zeros_B, "depth": zeros_B}


def make_layer(mlp, dropout):
    def layer(carry, weights, rows):
        index, w = weights
        x_BTD = carry["x"]
        h_BTD = mlp(norm(x_BTD, w["norm"]), w["up"], w["down"])
        if dropout:
            keep_BTD = jax.vmap(lambda key: jax.random.bernoulli(key, 0.9, h_BTD.shape[1:]))(sk.example_keys())
            h_BTD = jnp.where(keep_BTD, h_BTD / 0.9, 0)
        # One for activations of the previous layer; zero or infinite in an idle stage.
        h_BTD /= (1 + carry["depth"] - index.astype(carry["depth"].dtype))[:, None, None].astype(h_BTD.dtype)
        balance_B = carry["balance"] + (h_BTD.astype(jnp.float32) ** 2).mean((1, 2))
        return {"x": sk.shard(x_BTD + h_BTD, *ROWS), "balance": balance_B, "depth": carry["depth"] + 1}

    return layer


def head(carry, params, rows):
    logits_BTV = sk.shard(norm(carry["x"], params["norm"]) @ params["head"], "batch", "sequence", "vocab")
    logits_BTV = logits_BTV.astype(jnp.float32)
    losses_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, rows["targets"])
    losses_BT += 0.1 * carry["balance"][:, None]
    hits_BT = logits_BTV.argmax(-1) == rows["targets"]
    where_BT = rows["is_text"]
    return sk.mean(losses_BT, where=where_BT), {"accuracy": sk.mean(hits_BT, where=where_BT)}


@functools.cache
def model(layers=8, manual=False, mlp=plain_mlp, dropout=True, head_per_token=False, num_examples=80, num_tokens=T):
    """Returns the task: uneven numbers of tokens, and some examples without tokens."""
    if manual:
        mlp = sk.manual(column_row, [ROWS, ("embed", "mlp"), ("mlp", "embed")], ROWS)

    def init(key):
        return {
            "table": normal(0, V, D),
            "blocks": {
                "norm": jnp.ones((layers, D)),
                "up": normal(1, layers, D, F) / 4,
                "down": normal(2, layers, F, D) / 12,
            },
            "norm": jnp.ones(D),
            "head": normal(3, D, V) / 4,
        }

    def loss_fn(params, batch, key):
        layer = make_layer(mlp, dropout and key is not None)
        ends = {name: params[name] for name in ("norm", "head")}
        run = sk.pipeline(embed, layer, head, head_per_token=head_per_token)
        return run(params["table"], (jnp.arange(layers), params["blocks"]), ends, batch)

    rng = np.random.default_rng(0)
    tokens = rng.integers(0, V, (num_examples, num_tokens + 1)).astype(np.int32)
    lengths = rng.integers(0, num_tokens + 1, num_examples)
    data = {
        "tokens": tokens[:, :-1],
        "targets": (tokens[:, :-1] * 5 + 3) % V,
        "is_text": np.arange(num_tokens) < lengths[:, None],
    }
    rules = [
        ("blocks/norm", ["layers", None]),
        ("blocks/up", ["layers", "embed", "mlp"]),
        ("blocks/down", ["layers", "mlp", "embed"]),
        ("table", ["vocab", "embed"]),
        ("head", ["embed", "vocab"]),
    ]
    task = sk.Task(
        init,
        loss_fn,
        keep_gradient(optax.sgd(0.1)),
        train_data=data,
        eval_data={k: x[:20] for k, x in data.items()},
        rules=rules,
    )
    return made_once(task)


@functools.cache
def model_of_ops(layers=4):
    """Returns a task with the other ops: lookup, column and row pair, mixture of experts, cross-entropy."""
    num_experts = 4

    def init(key):
        quarter = lambda seed, *shape: normal(seed, *shape) / 4
        return {
            "table": normal(0, V, D),
            "blocks": {
                "up": quarter(1, layers, D, F),
                "down": quarter(2, layers, F, D) / 2,
                "router": quarter(3, layers, D, num_experts),
                "experts": {"up": quarter(4, layers, num_experts, D, F), "down": quarter(5, layers, num_experts, F, D)},
            },
            "head": quarter(6, D, V),
        }

    def lookup(table_VD, rows):
        x_BTD = sk.embed(rows["tokens"], table_VD)
        return {"x": x_BTD, "balance": jnp.zeros(x_BTD.shape[0]), "dropped": jnp.zeros(x_BTD.shape[0])}

    def layer(carry, w, rows):
        x_BTD = carry["x"] + sk.column_row_parallel(norm(carry["x"], 1), [w["up"]], jax.nn.gelu, w["down"])
        y_BTD, load = sk.moe(norm(x_BTD, 1), w["router"], w["experts"], top_k=2, capacity=1.0)
        sums = {"balance": carry["balance"] + load.balance_B, "dropped": carry["dropped"] + load.dropped_B / layers}
        return {"x": x_BTD + y_BTD, **sums}

    def ends(carry, head_DV, rows):
        losses_BT = sk.cross_entropy(norm(carry["x"], 1), head_DV, rows["targets"])
        losses_BT += 0.01 * carry["balance"][:, None]
        return sk.mean(losses_BT, where=rows["is_text"]), {"dropped": sk.mean(carry["dropped"])}

    run = sk.pipeline(lookup, layer, ends)
    rules = [
        ("blocks/up", ["layers", "embed", "mlp"]),
        ("blocks/down", ["layers", "mlp", "embed"]),
        ("blocks/router", ["layers", "embed", None]),
        ("blocks/experts/up", ["layers", "expert", "embed", "mlp"]),
        ("blocks/experts/down", ["layers", "expert", "mlp", "embed"]),
        ("table", ["vocab", "embed"]),
        ("head", ["embed", "vocab"]),
    ]
    loss_fn = lambda params, batch, key: run(params["table"], params["blocks"], params["head"], batch)
    other = model()
    task = sk.Task(init, loss_fn, keep_gradient(optax.sgd(0.1)), train_data=other.train_data, rules=rules)
    return made_once(task)
