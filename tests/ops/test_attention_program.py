"""A small packed language model with `sk.attention`: on every mesh the losses, gradients and parameters of one
device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.errors import ConfigError
from spmdkit.ops.attention_blocks import XLA, Implementation
from spmdkit.ops.collectives import all_reduce
from tests.support.core_models import keep_gradient
from tests.support.core_runs import assert_close, assert_same_run, program_of, train
from tests.support.fixed_numbers import normal

D, N, K, H, T, V, LAYERS = 16, 4, 2, 8, 16, 32, 2
ROWS = ("batch", "sequence", None)


def rotary(x_BTNH, positions_T):
    angles_TH = positions_T[:, None].astype(jnp.float32) * 100.0 ** (-jnp.arange(H // 2) / (H // 2))
    cos, sin = (f(angles_TH)[:, None].astype(x_BTNH.dtype) for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x_BTNH, 2, -1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def init(key):
    scaled = lambda seed, *shape: normal(seed, *shape) / np.float32(np.sqrt(shape[-2]))
    return {
        "embed": normal(0, V, D),
        "query": scaled(1, LAYERS, N, D, H),
        "key_value": scaled(2, LAYERS, 2, K, D, H),
        "out": scaled(3, LAYERS, N, H, D) / N,
        "head": scaled(4, D, V),
    }


RULES = [("query", [None, "heads", "embed", None]), ("out", [None, "heads", None, "embed"])]


def loss_fn(params, batch, key, order=True, manual=False, targets_late=False):
    """Next-token loss of packed rows: a target of another segment has no loss."""
    tokens, segments = batch["tokens"].astype(jnp.int32), batch["segments"]
    inputs, targets, ids = tokens[:, :-1], tokens[:, 1:], segments[:, :-1]
    is_text = (segments[:, 1:] == ids) & (ids >= 0)
    cut = sk.context_order if order else lambda x: x
    if targets_late:  # the mistake: shifted in the order of the mesh
        inputs, ids, is_text = cut((inputs, ids, is_text))
        targets = jnp.roll(inputs, -1, 1)
    else:
        inputs, targets, ids, is_text = cut((inputs, targets, ids, is_text))
    positions_T = sk.context_positions(T) if order else jnp.arange(T, dtype=jnp.int32)

    def block(x_BTD, w, ids, positions_T):
        q = jnp.einsum("BTD,NDH->BTNH", x_BTD, w["query"])
        k, v = jnp.einsum("BTD,ZKDH->ZBTKH", x_BTD, w["key_value"])
        q, k = (rotary(x, positions_T) for x in (q, k))
        mixed = sk.attention(q, k, v, segment_ids_BT=ids)
        out = jnp.einsum("BTNH,NHD->BTD", mixed, w["out"])
        return x_BTD + (all_reduce(out, "heads") if manual else out)

    if manual:
        heads = {"query": ("heads",), "key_value": (None, "heads"), "out": ("heads",)}
        block = sk.manual(block, [ROWS, heads, ("batch", "sequence"), ("sequence",)], ROWS)
    block = sk.remat(block)
    x = sk.shard(params["embed"][inputs], *ROWS)
    layers = {name: params[name] for name in ("query", "key_value", "out")}
    x, _ = jax.lax.scan(lambda x, w: (block(x, w, ids, positions_T), None), x, layers)
    logits = jnp.einsum("BTD,DV->BTV", x, params["head"]).astype(jnp.float32)
    losses_BT = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return sk.mean(losses_BT, where=is_text), {"last": sk.mean(jnp.where(positions_T == T - 1, losses_BT, 0).sum(1))}


def task(**options):
    random = np.random.default_rng(0)
    data = {
        "tokens": random.integers(0, V, (64, T + 1)).astype(np.int32),
        "segments": np.sort(random.integers(-1, 3, (64, T + 1)), axis=1).astype(np.int32),
    }
    loss = functools.partial(loss_fn, **options)
    return sk.Task(init, loss, keep_gradient(optax.sgd(0.1)), train_data=data, rules=RULES)


MESHES = {
    "context 8": {"mesh": {"context": 8}},
    "data 2 x fsdp 2 x context 2": {"mesh": {"data": 2, "fsdp": 2, "context": 2}},
    "replica 2 x context 2 x tensor 2": {"mesh": {"replica": 2, "context": 2, "tensor": 2}},
    "fsdp 2 zero 2 x context 2": {"mesh": {"fsdp": 2, "context": 2}, "layout": {"zero": 2}},
    "data 2 x tensor 4": {"mesh": {"data": 2, "tensor": 4}},
    "data 8": {"mesh": {"data": 8}},
    "fsdp 2 zero 1 x expert 2 x context 2": {"mesh": {"fsdp": 2, "expert": 2, "context": 2}, "layout": {"zero": 1}},
}
FORMS = {
    "ring": {},
    "contiguous": {"attention": {"order": "contiguous"}},
    "all to all": {"attention": {"context": "all_to_all"}},
}
ALL = [
    (mesh, form, microbatches, remat)
    for mesh, settings in MESHES.items()
    for form in FORMS
    if form == "ring" or "context" in settings["mesh"]
    if form != "all to all" or N % (settings["mesh"]["context"] * settings["mesh"].get("tensor", 1)) == 0
    for microbatches, remat in ((1, "none"), (2, "full"), (2, "attention"))
]


def settings_of(mesh, form, microbatches, remat):
    named = {"save": ["attention"]} if remat == "attention" else remat
    return MESHES[mesh] | FORMS[form] | {"microbatches": microbatches, "remat": named}


@pytest.fixture(scope="module")
def one_device():
    return train(program_of(task()), evaluate=False, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("mesh, form, microbatches, remat", ALL)
def test_a_packed_model_is_that_of_one_device(mesh, form, microbatches, remat, one_device):
    program = program_of(task(), **settings_of(mesh, form, microbatches, remat))
    assert_same_run(train(program, evaluate=False, steps=2), one_device)


@pytest.mark.slow
def test_a_whole_block_in_one_manual_part_too(one_device):
    program = program_of(task(manual=True), mesh={"data": 2, "tensor": 2, "context": 2}, microbatches=2)
    assert_same_run(train(program, evaluate=False, steps=2), one_device)


@pytest.mark.parametrize(
    "zero, mesh", [(2, {"fsdp": 4}), pytest.param(1, {"data": 2, "fsdp": 4}, marks=pytest.mark.slow)]
)
def test_kernel_attention_is_a_part_with_zero_1(zero, mesh, one_device, monkeypatch):
    like_a_kernel = Implementation(XLA.forward, XLA.backward)
    monkeypatch.setattr("spmdkit.ops.attention._implementation", lambda *_: like_a_kernel)
    program = program_of(task(), mesh=mesh, layout={"zero": zero}, microbatches=2, remat={"save": ["attention"]})
    assert "spmdkit_manual" in str(program.traced.jaxpr)
    assert_same_run(train(program, evaluate=False, steps=2), one_device)


@pytest.mark.slow
def test_bfloat16_differs_by_its_rounding_alone(one_device):
    settings = {"mesh": {"fsdp": 2, "context": 2, "tensor": 2}, "precision": "bfloat16", "microbatches": 2}
    found = train(program_of(task(), **settings), evaluate=False, steps=1)
    assert_close(found.gradient, one_device.gradient, 0.05)


@pytest.mark.slow
def test_shifting_targets_after_ordering_is_detected(one_device):
    found = train(program_of(task(targets_late=True), mesh={"context": 2}), evaluate=False, steps=1)
    assert abs(found.losses[0] - one_device.losses[0]) > 1e-2


def refused(message, *, model=None, **settings):
    with pytest.raises(ConfigError, match=message):
        program_of(task(**(model or {})), **settings)


def test_what_cannot_be_is_said_with_its_repair():
    refused("has not put its tokens into that order.*sk.context_order", model={"order": False}, mesh={"context": 2})
    by_heads = {"context": "all_to_all"}
    refused("context: ring", mesh={"context": 8}, attention=by_heads)
    refused("runs on NVIDIA GPUs, and the mesh has cpu", attention={"implementation": "cudnn"})
    refused("runs on TPUs, and the mesh has cpu", attention={"implementation": "splash"})
    refused(
        r"16\]?\)?; mesh.context 3 in zigzag order cuts dim 1 into 6 chunks.*Try a length of 18", mesh={"context": 3}
    )


@pytest.mark.slow
def test_contiguous_order_needs_no_call(one_device):
    settings = {"mesh": {"context": 4}, "attention": {"order": "contiguous"}}
    found = train(program_of(task(order=False), **settings), evaluate=False, steps=2)
    assert_same_run(found, one_device)


def test_unused_op_setting_is_rejected():
    plain = sk.Task(
        lambda key: {"w": jnp.ones(4)},
        lambda params, batch, key: sk.mean((batch["x"] * params["w"]).sum(1) ** 2),
        optax.sgd(0.1),
        train_data={"x": np.ones((32, 4), np.float32)},
    )
    with pytest.raises(ConfigError, match=r"attention.implementation is xla, but loss_fn never calls sk.attention"):
        program_of(plain, attention={"implementation": "xla"})
