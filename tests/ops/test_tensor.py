"""Column and row pairs and the sharded vocabulary: on every mesh the numbers of plain products on one device."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.ops import tensor
from spmdkit.ops.collectives import all_gather, reduce_scatter
from spmdkit.step import trace_context
from tests.support.core_models import keep_gradient
from tests.support.core_runs import assert_close, assert_same_run, program_of, train
from tests.support.forms import slow_except
from tests.support.ops_mesh import step, value_and_grad

D, F, T, N, H, V, LAYERS = 16, 32, 8, 4, 4, 24, 2
ROWS = ("batch", "norm_sequence", None)


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def attention(q_BTNH, k_BTNH, v_BTNH):
    scores_BNTS = jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BTNH) / 2
    scores_BNTS = jnp.where(jnp.tril(jnp.ones(scores_BNTS.shape[-2:], bool)), scores_BNTS, -1e9)
    return jnp.einsum("BNTS,BSNH->BTNH", jax.nn.softmax(scores_BNTS), v_BTNH)


def mix(q_BTNH, k_BTNH, v_BTNH):
    """Something instead of attention where the sequence is cut, since attention would need the other shards."""
    return q_BTNH * jax.nn.sigmoid(k_BTNH) + v_BTNH


def gate(gate_BTF, up_BTF, scale_F):
    return jax.nn.silu(gate_BTF) * up_BTF * scale_F


def block_of(heads, mlp):
    """Returns a block with two residual branches."""

    def block(x, w):
        x = x + heads(norm(x), w)
        return x + mlp(norm(x), w)

    return block


def plain(between):
    """Returns (embed, block, cross-entropy) in plain JAX."""

    def heads(x, w):
        return jnp.einsum("BTNH,NHD->BTD", between(*(jnp.einsum("BTD,DNH->BTNH", x, w[i]) for i in "qkv")), w["out"])

    def mlp(x, w):
        return gate(x @ w["gate"], x @ w["up"], w["scale"]) @ w["down"]

    def loss(x, head, targets):
        return optax.softmax_cross_entropy_with_integer_labels(x @ head, targets)

    return lambda table, tokens: table[tokens], block_of(heads, mlp), loss


def cut(between, dims):
    """Returns the same, cut."""

    def heads(x, w):
        return sk.column_row_parallel(x, [w["q"], w["k"], w["v"]], between, w["out"], hidden="heads", dims=dims)

    def mlp(x, w):
        more = {"extra": [w["scale"]], "extra_dims": [("mlp",)]}
        return sk.column_row_parallel(x, [w["gate"], w["up"]], gate, w["down"], dims=dims, **more)

    embed = lambda table, tokens: sk.embed(tokens, table, dims=dims)
    return embed, block_of(heads, mlp), functools.partial(sk.cross_entropy, dims=dims, chunk=3)


def whole_block(between, dims):
    """Returns the same, with a block's two pairs in one manual part."""
    embed, block, loss = cut(between, dims)
    qkv, up = ("embed", "heads"), ("embed", "mlp")
    weights = {"q": qkv, "k": qkv, "v": qkv, "out": ("heads", None, "embed"), "gate": up, "up": up}
    weights |= {"scale": ("mlp",), "down": ("mlp", "embed")}

    return embed, sk.manual(block, (dims, weights), dims), loss


def task(ops, remat=False, dims=ROWS):
    embed, block, loss = ops

    def init(key):
        shapes = {"q": (D, N, H), "k": (D, N, H), "v": (D, N, H), "out": (N, H, D)}
        shapes |= {"gate": (D, F), "up": (D, F), "scale": (F,), "down": (F, D)}
        random = np.random.default_rng(0)
        normal = lambda *shape: jnp.asarray(random.normal(size=shape), jnp.float32)
        blocks = {name: normal(LAYERS, *shape) / 4 for name, shape in shapes.items()}
        return {"table": normal(V, D), "blocks": blocks, "head": normal(D, V) / 4}

    def loss_fn(params, batch, key):
        one = sk.remat(lambda x, w: sk.shard(block(x, w), *dims))
        x = sk.shard(embed(params["table"], batch["tokens"]), *dims)
        x, _ = jax.lax.scan(lambda x, w: (one(x, w), None), x, params["blocks"])
        return sk.mean(loss(norm(x), params["head"], batch["targets"]), where=batch["targets"] > 0)

    random = np.random.default_rng(1)
    data = {name: random.integers(0, V, (64, T)).astype(np.int32) for name in ("tokens", "targets")}
    path = "blocks/"
    rules = [
        ("table", ["vocab", "embed"]),
        (path + "[qkv]", [None, "embed", "heads", None]),
        (path + "out", [None, "heads", None, "embed"]),
        (path + "(gate|up)", [None, "embed", "mlp"]),
        (path + "scale", [None, "mlp"]),
        (path + "down", [None, "mlp", "embed"]),
        ("head", ["embed", "vocab"]),
    ]
    return sk.Task(init, loss_fn, keep_gradient(optax.sgd(0.1)), train_data=data, rules=rules)


# A mesh that cuts the sequence gets `mix`; `one sequence` are activations that tensor does not cut (all_reduce).
CASES = {
    "data 8": ({"mesh": {"data": 8}}, cut, attention, ROWS),
    "fsdp 4 x tensor 2": ({"mesh": {"fsdp": 4, "tensor": 2}}, whole_block, attention, ROWS),
    "fsdp 2 x tensor 4, one sequence": (
        {"mesh": {"fsdp": 2, "tensor": 4}},
        cut,
        attention,
        ("batch", "sequence", None),
    ),
    "replica 2 x data 2 x tensor 2": ({"mesh": {"replica": 2, "data": 2, "tensor": 2}}, cut, attention, ROWS),
    "data 2 x fsdp 2 x tensor 2": ({"mesh": {"data": 2, "fsdp": 2, "tensor": 2}}, cut, attention, ROWS),
    "fsdp 2 x context 2 x tensor 2": ({"mesh": {"fsdp": 2, "context": 2, "tensor": 2}}, cut, mix, ROWS),
    "data 2 x context 2 x expert 2": ({"mesh": {"data": 2, "context": 2, "expert": 2}}, whole_block, mix, ROWS),
    "expert 2 x fsdp 4": ({"mesh": {"expert": 2, "fsdp": 4}}, cut, attention, ROWS),
    "fsdp 4 zero 2 x tensor 2": ({"mesh": {"fsdp": 4, "tensor": 2}, "layout": {"zero": 2}}, cut, attention, ROWS),
}


@functools.cache
def reference(between):
    return train(program_of(task(plain(between))), evaluate=False, steps=2)


@pytest.mark.forms(1)
@pytest.mark.parametrize(
    "case", slow_except(["fsdp 2 x context 2 x tensor 2", "fsdp 2 x tensor 4, one sequence"], CASES)
)
def test_sharded_products_and_vocabulary_equal_one_device(case):
    settings, form, between, dims = CASES[case]
    i = list(CASES).index(case)
    program = program_of(
        task(form(between, dims), dims=dims), microbatches=1 + i % 2, remat=("none", "full")[i // 2 % 2], **settings
    )
    assert_same_run(train(program, evaluate=False, steps=2), reference(between))


@pytest.mark.parametrize(("mesh", "order"), [({"tensor": 2}, "TB"), ({"fsdp": 2}, "BT")])
def test_rows_on_gpus_have_the_order_of_collectives(monkeypatch, mesh, order):
    monkeypatch.setattr(trace_context.Context, "platform", "gpu")
    random = np.random.default_rng(0)
    x, w = random.normal(size=(2, T, N, H)), random.normal(size=(N, H, D))
    with trace_context.tracing(step(**mesh)):
        text = str(jax.make_jaxpr(functools.partial(tensor.product, contracted=2))(x, w))
        found = tensor.product(x, w, contracted=2)
    assert ("permutation=(1, 0, 2, 3)" in text) == (order == "TB")
    np.testing.assert_allclose(found, np.einsum("BTNH,NHD->BTD", x, w), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("platform", "reshapes"), [("tpu", False), ("cpu", True)])
def test_products_on_tpus_have_all_dims(monkeypatch, platform, reshapes):
    monkeypatch.setattr(trace_context.Context, "platform", platform)
    random = np.random.default_rng(0)
    x, w = random.normal(size=(2, T, N, H)), random.normal(size=(N, H, D))
    assert ("reshape" in str(jax.make_jaxpr(functools.partial(tensor.product, contracted=2))(x, w))) == reshapes
    np.testing.assert_allclose(tensor.product(x, w, 2), np.einsum("BTNH,NHD->BTD", x, w), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("platform", "tokens", "rows"),
    [
        ("gpu", T, 8),
        ("gpu", tensor.PART_TOKENS // 4, 4),
        ("gpu", 2 * tensor.PART_TOKENS, 2),
        ("tpu", 2 * tensor.PART_TOKENS, 2),
        ("cpu", 2 * tensor.PART_TOKENS, 8),
    ],
)
def test_rows_on_accelerators_are_computed_in_parts(monkeypatch, platform, tokens, rows):
    monkeypatch.setattr(trace_context.Context, "platform", platform)
    random = np.random.default_rng(0)
    x, w = random.normal(size=(8, T, D)).astype(np.float32), random.normal(size=(D, D)).astype(np.float32)
    found = set()

    def layer(x, up, down):
        def pair(x):
            found.add(len(x["x"]))
            hidden = jnp.tanh(tensor.product(all_gather(x["x"], "mlp", 1), up))
            return {"y": reduce_scatter(tensor.product(hidden, down), "mlp", 1)}

        return tensor.in_row_parts(pair, {"x": x, "keys": None}, tokens)["y"]

    part = sk.manual(layer, in_dims=[ROWS, ("embed", "mlp"), ("mlp", "embed")], out_dims=ROWS)
    expected = value_and_grad(lambda x, up, down: jnp.tanh(x @ up) @ down, x, w, w)
    assert_close(value_and_grad(part, x, w, w, tensor=2), expected)
    assert found == {rows}


@pytest.mark.parametrize("rows, shape, is_transposed", [(8, (8, 2), True), (8, (2, 8), False), (4, (8, 2), False)])
def test_gradients_of_tall_weights_are_computed_transposed(rows, shape, is_transposed):
    x, w = jnp.ones((rows, shape[0])), jnp.ones(shape)
    lowered = jax.jit(jax.grad(lambda w: tensor.product(x, w).sum())).lower(w).as_text()
    assert ("optimization_barrier" in lowered) == is_transposed


def test_the_layer_of_the_page_is_a_pair():
    page = (Path(__file__).parents[2] / "docs" / "howto" / "your_own_layer.md").read_text()
    parts = r"\n(DIMS = .*?)\nx = .*?\n(def part.*?)\n\n\n.*?y_BTD = (sk.manual.*?)\n.*The layer above is `(.*?)`"
    code = re.search(parts, page, re.S)
    names = {"jax": jax, "sk": sk, "all_gather": all_gather, "reduce_scatter": reduce_scatter}
    exec(f"{code[1]}\n{code[2]}", names)
    random = np.random.default_rng(0)
    arrays = [random.normal(size=shape).astype(np.float32) for shape in ((8, 8, D), (D, F), (F, D))]

    def written(expression):
        given = lambda x, w: names | {"x": x, "batch": {"x": x}, "w": w, "params": w}
        return lambda x, up, down: eval(expression, given(x, {"up": up, "down": down}))

    asked = {"fsdp": 2, "context": 2, "tensor": 2}
    found = [value_and_grad(written(text), *arrays, **asked) for text in (code[3], code[4])]
    plain = value_and_grad(lambda x, up, down: x + jax.nn.gelu(x @ up) @ down, *arrays)
    for one in found:
        assert_close(one, plain)
