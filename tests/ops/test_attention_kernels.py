"""The kernels of other devices are lowered here, alone and in every form: what each device would run, without the
device."""

import functools
import re
import types

import jax
import jax.numpy as jnp
import pytest

import spmdkit as sk
from spmdkit.errors import ConfigError
from spmdkit.ops import attention as op
from spmdkit.ops import attention_cudnn, attention_splash
from spmdkit.ops.attention_blocks import XLA
from spmdkit.plan.flops import count
from spmdkit.step import trace_context
from tests.support.ops_mesh import step

CUDNN = ("__cudnn$fmhaSoftmax(", "__cudnn$fmhaSoftmaxBackward(")
SPLASH = ("splash_mha_fwd", "splash_mha_dkv", "splash_mha_dq")


def device(platform, kind="", **more):
    return types.SimpleNamespace(platform=platform, device_kind=kind, **more)


def lowered(platform, implementation, segments=False, attention=None, **asked):
    """Returns the text of the gradient of `sk.attention` for a platform, on a mesh or on one device."""
    shape = lambda heads: jax.ShapeDtypeStruct((2, 1024, heads, 64), jnp.bfloat16)

    def loss(q, k, v):
        q, k, v, ids = sk.context_order((q, k, v, jnp.zeros((2, 1024), jnp.int32) if segments else None))
        return sk.attention(q, k, v, segment_ids_BT=ids, implementation=implementation).astype(jnp.float32).sum()

    run = jax.jit(jax.grad(loss, (0, 1, 2)))
    if not asked:
        return run.trace(shape(4), shape(2), shape(2)).lower(lowering_platforms=(platform,)).as_text()
    record = step(attention=trace_context.AttentionSettings(**(attention or {})), **asked)
    whole = jax.sharding.NamedSharding(record.sharding.mesh, jax.sharding.PartitionSpec())
    given = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole) for x in (shape(4), shape(2), shape(2))]
    with trace_context.tracing(record):
        return run.trace(*given).lower(lowering_platforms=(platform,)).as_text()


def lowered_in_replicas(platform, implementation, data_axes, segments, **asked):
    """Returns the text of the gradients of replicas in the mapped form: a vmap over the devices of `replica` and of
    `data_axes`."""
    record = step(**asked).with_sharding(form="mapped", data_axes=data_axes)
    num = record.sharding.size("replica"), record.sharding.size(*data_axes)
    shape = lambda heads: jax.ShapeDtypeStruct((*num, 2, 1024, heads, 64), jnp.bfloat16)

    def loss(q, k, v):
        ids = jnp.zeros(q.shape[:2], jnp.int32) if segments else None
        return sk.attention(q, k, v, segment_ids_BT=ids, implementation=implementation).astype(jnp.float32).sum()

    of_data = jax.vmap(jax.grad(loss, (0, 1, 2)), axis_name="data", spmd_axis_name=data_axes)
    run = jax.jit(jax.vmap(of_data, axis_name="replica", spmd_axis_name="replica"))
    with trace_context.tracing(record):
        return run.trace(shape(4), shape(2), shape(2)).lower(lowering_platforms=(platform,)).as_text()


REPLICAS = {
    "data 2 x fsdp 4, zero 2": (("data", "fsdp"), {"data": 2, "fsdp": 4}),
    "fsdp 8, zero 1 or 2": (("data", "fsdp"), {"fsdp": 8}),
    "replica 2 x data 4 in the mapped form": (("data",), {"replica": 2, "data": 4}),
    "data 2 x tensor 2": (("data",), {"data": 2, "tensor": 2}),
}
KERNELS = {
    "cuda": (device("gpu", "NVIDIA H100 80GB HBM3", compute_capability="9.0"), CUDNN, False),
    "tpu": (device("tpu", "TPU v5p"), [f"{name}_segmented" for name in SPLASH], True),
}
"""Platform -> device, names of the calls, whether segments are given."""


def devices_are(monkeypatch, one):
    monkeypatch.setattr(op, "_device", lambda step: one)


@pytest.mark.forms(2)
@pytest.mark.parametrize("platform", KERNELS)
@pytest.mark.parametrize("form", [{}, {"context": "all_to_all"}])
def test_kernels_run_in_both_passes_of_each_form(form, platform, monkeypatch):
    one, names, segments = KERNELS[platform]
    devices_are(monkeypatch, one)
    asked = {"context": 2, "tensor": 2} if form else {"context": 4, "tensor": 2}
    text = lowered(platform, "auto", segments, attention=form, **asked)
    assert all(name in text for name in names)


@pytest.mark.forms(2)
@pytest.mark.parametrize("platform", KERNELS)
@pytest.mark.parametrize("mesh", REPLICAS)
def test_kernel_runs_on_shards_under_replica_vmap(mesh, platform, monkeypatch):
    one, names, segments = KERNELS[platform]
    devices_are(monkeypatch, one)
    data_axes, asked = REPLICAS[mesh]
    text = lowered_in_replicas(platform, "auto", data_axes, segments, **asked)
    assert all(text.count(name) == 1 if platform == "cuda" else name in text for name in names)


def test_a_kernel_says_what_it_costs():
    """XLA takes a kernel without cost to be free, and finds nothing to do while keys travel."""
    text = lowered("tpu", "splash").replace("\\22", '"')
    assert all(name in text for name in SPLASH)
    per_product = 2 * 2 * 4 * 64 * 1024 * 1024 // 2
    costs = sorted(int(flops) for flops in re.findall(r'"cost_estimate"[^}]*"flops": *"?([0-9]+)', text))
    assert costs == [2 * per_product, 7 * per_product // 2, 7 * per_product // 2]


def test_a_plan_counts_kernels():
    q = jax.ShapeDtypeStruct((2, 1024, 4, 64), jnp.bfloat16)
    for name in ("splash", "cudnn"):
        found = count(jax.make_jaxpr(functools.partial(sk.attention, implementation=name))(q, q, q))
        assert found.products == 2 * (2 * 2 * 4 * 64 * 1024 * 1024 // 2)


def test_cudnn_is_asked_for_what_jax_asks_for(monkeypatch):
    """The operation below `jax.nn.dot_product_attention` is bound with the options that it would have."""
    library = types.SimpleNamespace(cudnn_get_version=lambda: 91300)
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.cuda_versions", library)
    shape = lambda heads: jax.ShapeDtypeStruct((2, 1024, heads, 64), jnp.bfloat16)
    public = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    loss = lambda q, k, v: public(q, k, v).astype(jnp.float32).sum()
    run = jax.jit(jax.grad(loss, (0, 1, 2))).trace(shape(4), shape(2), shape(2))
    options = lambda text: sorted(re.findall(r'backend_config = "({.*?})"', text))
    expected = options(run.lower(lowering_platforms=("cuda",)).as_text())
    text = lowered("cuda", "cudnn")
    assert len(expected) == 2 and options(text) == expected
    assert all(text.count(name) == 1 for name in CUDNN) and "CAUSAL" in text


A100 = device("gpu", "NVIDIA A100-SXM4-40GB", compute_capability="8.0")
H100 = device("gpu", "NVIDIA H100 80GB HBM3", compute_capability="9.0")
TPU = device("tpu", "TPU v5 lite")
CASES = {
    "cudnn": [(A100, {}), (H100, {"width": 256})],
    "splash": [(TPU, {}), (TPU, {"dtype": jnp.float32}), (TPU, {"segments": True})],
    "xla": [
        (device("cpu", "cpu"), {}),
        (A100, {"dtype": jnp.float32}),
        (A100, {"segments": True}),
        (A100, {"width": 256}),
        (device("gpu", "Tesla V100-SXM2-16GB", compute_capability="7.0"), {}),
        (device("gpu", "AMD Instinct MI300X"), {}),
        (TPU, {"tokens": 100}),
        (TPU, {"positions": True}),
    ],
}


@pytest.mark.parametrize("name, one, change", [(name, *case) for name, cases in CASES.items() for case in cases])
def test_auto_selects_by_device_and_operands(name, one, change, monkeypatch):
    devices_are(monkeypatch, one)
    shape = (2, change.get("tokens", 256), 4, change.get("width", 64))
    q = jax.ShapeDtypeStruct(shape, change.get("dtype", jnp.bfloat16))
    found = op._implementation(
        trace_context.Context(), None, q, q, True, change.get("segments", False), change.get("positions", False)
    )
    expected = {
        "cudnn": attention_cudnn.CUDNN,
        "splash": attention_splash.splash(attention_splash.ResolvedTiles(256, 256, 256, False)),
        "xla": XLA,
    }
    assert found is expected[name]


@pytest.mark.parametrize(
    "chip, tokens, width, causal, requested, expected",
    [
        ("v6e", 8192, 128, True, {}, (2048, 2048, 512, True)),
        ("v6e", 9216, 128, True, {}, (1024, 1024, 512, True)),
        ("v6e", 4096, 64, True, {}, (1024, 512, 512, False)),
        ("v6e", 8192, 256, True, {}, (512, 512, 512, False)),
        ("v6e", 8192, 128, False, {}, (512, 512, 512, False)),
        ("v6e", 8192, 128, True, {"block_kv": 256, "fused_backward": False}, (2048, 256, 256, False)),
        ("7x", 8192, 256, True, {}, (1024, 1024, 512, True)),
        ("v5p", 8192, 128, True, {"block_kv": 1024}, (512, 1024, 1024, False)),
        (None, 384, 128, True, {}, (128, 128, 128, False)),
    ],
)
def test_tiles_follow_recipes_of_the_chip(chip, tokens, width, causal, requested, expected):
    tiles = attention_splash.Tiles(**requested)
    assert attention_splash.tiles_of(chip, (tokens, tokens), width, causal, tiles) == expected


def test_tiles_of_the_config_are_those_of_the_kernels(monkeypatch):
    devices_are(monkeypatch, TPU)
    tiles = {"block_q": 1024, "block_kv": 512, "block_kv_compute": 256, "fused_backward": True}
    text = lowered("tpu", "splash", attention=tiles, tensor=2)
    assert "splash_mha_dkv" in text and "splash_mha_dq" not in text
    with pytest.raises(ConfigError, match=r"block_kv is 384, and a device attends to 1024 keys. .* Try 256"):
        lowered("tpu", "splash", attention={"block_kv": 384}, tensor=2)


@pytest.mark.parametrize(
    "name, one, shape, message",
    [
        ("cudnn", TPU, (2, 256, 4, 64), "cudnn, but it runs on NVIDIA GPUs, and the mesh has tpu devices"),
        ("splash", A100, (2, 256, 4, 64), "splash, but it runs on TPUs, and the mesh has gpu devices"),
        ("cudnn", A100, (2, 256, 4, 256), "a multiple of 8 up to 128, and q has 256"),
        ("splash", TPU, (2, 200, 4, 64), "blocks of a multiple of 128 tokens, and a device attends to blocks of 200"),
    ],
)
def test_a_name_that_cannot_be_is_refused(name, one, shape, message, monkeypatch):
    devices_are(monkeypatch, one)
    q = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    with pytest.raises(ConfigError, match=message):
        jax.eval_shape(functools.partial(sk.attention, implementation=name), q, q, q)
