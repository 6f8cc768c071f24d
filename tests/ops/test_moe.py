"""`sk.moe`: the mixture is the one written by hand; every mesh drops the same tokens and learns the same."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.errors import ConfigError
from spmdkit.ops.collectives import all_gather
from spmdkit.ops.moe.experts import MLP_DIMS, mlp, run_sorted
from spmdkit.step import trace_context
from tests.support.core_models import keep_gradient
from tests.support.core_runs import assert_close, assert_same_run, program_of, train
from tests.support.forms import slow_except
from tests.support.moe_models import (
    RULES,
    D,
    E,
    F,
    T,
    data,
    dense,
    moe_by_hand,
    pipelined_task,
    ragged_all_to_all,
    task,
)
from tests.support.ops_mesh import value_and_grad


def arrays(num=3, gated=True, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    experts = {"up": draw(E, D, F) / 3, "down": draw(E, F, D) / 4} | ({"gate": draw(E, D, F) / 3} if gated else {})
    return draw(num, T, D), draw(D, E), experts


@pytest.mark.parametrize(
    "gated, padded, options",
    [
        (True, True, {"capacity": 0.6, "priority": "weight", "top_k": 3}),
        (False, False, {"capacity": 0.5, "score": "sigmoid", "top_k": 3}),
        (True, False, {"capacity": None, "score": "sigmoid", "normalise": False}),
        (False, True, {"capacity": 1.25, "top_k": 1, "normalise": False}),
    ],
)
def test_one_device_does_what_is_written_by_hand(gated, padded, options):
    options = {"top_k": 2} | options
    x, router, experts = arrays(gated=gated)
    where = np.arange(T) < np.array([T, 5, 2])[:, None] if padded else None
    y, load = jax.jit(functools.partial(sk.moe, **options))(x, router, experts, where_BT=where)
    expected, dropped, balance, z, fraction = moe_by_hand(x, router, experts, where=where, **options)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(load.dropped_B, dropped, atol=1e-6)
    np.testing.assert_allclose(load.balance_B, balance, rtol=1e-5)
    np.testing.assert_allclose(load.z_B, z, rtol=1e-5)
    np.testing.assert_allclose(load.fraction_BE, fraction, atol=1e-6)
    np.testing.assert_allclose(load.max_over_mean_B, E * fraction.max(1), rtol=1e-5)
    assert (dropped.max() > 0) == ((options["capacity"] or 9) <= 1.25)


@pytest.mark.parametrize("capacity, slots", [(0.75, 2), pytest.param(None, None, marks=pytest.mark.slow)])
def test_gradients_equal_dense_experts_with_mask(capacity, slots):
    def op(x, router, experts):
        y, load = sk.moe(x, router, experts, top_k=2, capacity=capacity)
        return y, load.balance_B

    def weighted(fn):
        return lambda *args: sum((out * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum() for out in fn(*args))

    reference = functools.partial(dense, top_k=2, slots=slots)
    found, expected = (
        jax.device_get(jax.jit(jax.value_and_grad(weighted(fn), (0, 1, 2)))(*arrays())) for fn in (op, reference)
    )
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    assert_close(found[1], expected[1])


ZIG_ZAG = (0, 1, 6, 7, 2, 3, 4, 5)
"""The tokens' order where two context shards hold the first and last, and the middle quarters."""

CASES = {
    "expert 2 x context 2, zig-zag, noise, padding": (
        {"mesh": {"expert": 2, "context": 2}},
        {"order": "context_order", "noise": 0.5, "padded": True},
    ),
    "expert 4 x data 2, dropless": (
        {"mesh": {"expert": 4, "data": 2}, "microbatches": 2},
        {"capacity": None, "remat": True},
    ),
    "replica 2 x data 2 x expert 2, twice as many experts, sigmoid": (
        {"mesh": {"replica": 2, "data": 2, "expert": 2}, "microbatches": 2},
        {"num_experts": 16, "score": "sigmoid", "top_k": 3, "remat": True},
    ),
    "data 2 x expert 2 x tensor 2": ({"mesh": {"data": 2, "expert": 2, "tensor": 2}}, {}),
    "expert 8": ({"mesh": {"expert": 8}}, {}),
    "fsdp 2 x expert 2 x context 2, an order that positions tell": (
        {"mesh": {"fsdp": 2, "expert": 2, "context": 2}, "microbatches": 2},
        {"order": (5, 0, 3, 1, 6, 2, 7, 4), "noise": 0.5},
    ),
    "expert 2 x context 2 x tensor 2, the order of the mesh": (
        {"mesh": {"expert": 2, "context": 2, "tensor": 2}},
        {"order": "context_order", "noise": 0.5},
    ),
    "expert 8, bfloat16": ({"mesh": {"expert": 8}, "precision": "bfloat16"}, {}),
    "data 2 x fsdp 2 x expert 2": ({"mesh": {"data": 2, "fsdp": 2, "expert": 2}, "microbatches": 2}, {"remat": True}),
    "fsdp 2 x expert 2, the router over both": (
        {"mesh": {"fsdp": 2, "expert": 2}, "layout": {"axes": {"embed": ["fsdp", "expert"]}}},
        {},
    ),
    "data 2 x fsdp 2 x expert 2, zero 1": (
        {"mesh": {"data": 2, "fsdp": 2, "expert": 2}, "layout": {"zero": 1}},
        {"capacity": None},
    ),
    "fsdp 2 x expert 2 x tensor 2, zero 2, tokens whole along tensor": (
        {"mesh": {"fsdp": 2, "expert": 2, "tensor": 2}, "layout": {"zero": 2}},
        {"sequence": "sequence"},
    ),
    "fsdp 2 x expert 2 x tensor 2, dropless, tokens whole along tensor": (
        {"mesh": {"fsdp": 2, "expert": 2, "tensor": 2}, "microbatches": 2},
        {"sequence": "sequence", "capacity": None, "padded": True},
    ),
    "expert 2 x context 2 x tensor 2, weight first, zig-zag": (
        {"mesh": {"expert": 2, "context": 2, "tensor": 2}, "microbatches": 2, "clip_norm": 0.5},
        {"padded": True, "priority": "weight", "capacity": 0.75, "order": ZIG_ZAG},
    ),
    "expert 2 x context 2 x tensor 2, dropless, noise": (
        {"mesh": {"expert": 2, "context": 2, "tensor": 2}, "offload": ["params", "optimizer"]},
        {"capacity": None, "noise": 0.5},
    ),
    "data 2 x expert 2 x tensor 2, one of sixteen": (
        {"mesh": {"data": 2, "expert": 2, "tensor": 2}, "microbatches": 2},
        {"num_experts": 16, "top_k": 1, "capacity": 1.0},
    ),
}


@pytest.mark.parametrize("case", slow_except(list(CASES)[:1], CASES))
def test_a_mesh_is_one_device(case):
    settings, options = CASES[case]
    found = train(program_of(task(**options), **settings), evaluate=False, steps=2)
    # One device sees the tokens in their order and keeps what it computes.
    alone = {name: settings[name] for name in ("precision", "clip_norm") if name in settings}
    options = {name: value for name, value in options.items() if name not in ("order", "remat", "sequence")}
    expected = train(program_of(task(**options), **alone), evaluate=False, steps=2)
    assert (expected.metrics["dropped"] > 0.01) == (options.get("capacity", 1.0) is not None)
    assert_same_run(found, expected, **({"tolerance": 3e-2} if "precision" in settings else {}))


def summed(experts_of=lambda experts: experts, **options):
    """Returns a scalar function of (x, router, experts) in which every result and every loss has a part."""

    def fn(x, router, experts):
        y, load = sk.moe(x, router, experts_of(experts), **options)
        return (
            (y.astype(jnp.float32) * jnp.cos(jnp.arange(y.size).reshape(y.shape))).sum()
            + load.balance_B.sum()
            + load.z_B.mean()
        )

    return fn


def assert_same_on_mesh(fn, sizes, args, reference=None):
    (value, _), grads = jax.device_get(value_and_grad(fn, *args, **sizes))
    (expected, _), expected_grads = jax.device_get(value_and_grad(reference or fn, *args))
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert_close(grads, expected_grads)


FSDP_EXPERT_TENSOR = {"fsdp": 2, "expert": 2, "tensor": 2}


def tanh_expert(weights, x_ND):
    return jnp.tanh(x_ND @ weights["a"] + weights["bias"]) @ weights["b"]


@pytest.mark.parametrize("hidden, capacity", slow_except([("mlp", None)], [("mlp", None), ("mlp", 1.0), (None, 1.25)]))
def test_expert_is_any_function_of_weights_and_tokens(hidden, capacity):
    x, router, given = arrays(num=8, gated=False)
    experts = {"a": given["up"], "bias": given["up"][:, 0], "b": given["down"]}
    dims = {"a": ("expert", "embed", hidden), "bias": ("expert", hidden), "b": ("expert", hidden, "embed")}
    fn = summed(expert=tanh_expert, dims=dims, top_k=2, capacity=capacity)
    assert_same_on_mesh(fn, FSDP_EXPERT_TENSOR, (x, router, experts))


def closing_task():
    """An expert that closes over a parameter of all experts, and over the traced number of the first token."""

    def init(key):
        r, w, s = jax.random.split(key, 3)
        normal = jax.random.normal
        return {"router": normal(r, (D, E)), "w": normal(w, (E, D, D)) / 4, "shared": normal(s, (D, D)) / 4}

    def loss_fn(params, batch, key):
        first = batch["tokens"][0, 0]
        expert = lambda w, x: jnp.tanh(x @ w + x @ params["shared"]) + first.astype(x.dtype) / 100
        dims = ("expert", None, None)
        y, _ = sk.moe(batch["x"], params["router"], params["w"], top_k=2, capacity=None, expert=expert, dims=dims)
        return sk.mean((y**2).sum((1, 2)))

    rng = np.random.default_rng(0)
    rows = {"x": rng.normal(size=(16, T, D)).astype(np.float32), "tokens": np.full((16, 1), 3, np.int32)}
    return sk.Task(init, loss_fn, keep_gradient(optax.sgd(0.01)), train_data=rows)


def plain_closing_loss(params, x):
    gates, chosen = jax.lax.top_k(jax.nn.softmax(x @ params["router"]), 2)
    gates = gates / gates.sum(-1, keepdims=True)
    all_of_them = jnp.tanh(jnp.einsum("btd,edf->btef", x, params["w"]) + (x @ params["shared"])[:, :, None]) + 0.03
    picked = jnp.take_along_axis(all_of_them, chosen[..., None], 2)
    return (((picked * gates[..., None]).sum(2)) ** 2).sum((1, 2)).mean()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{}, {"data": 4}])
def test_dropless_expert_may_close_over_tracers(mesh):
    program = program_of(
        closing_task(), mesh=mesh, batch_size=16, data={"shuffle": False}, remat="full" if mesh else "none"
    )
    params = jax.device_get(program.init().params)
    x = closing_task().train_data["x"]
    found = train(program, evaluate=False, steps=1)
    loss, gradient = jax.value_and_grad(plain_closing_loss)(params, x)
    np.testing.assert_allclose(found.losses[0], loss, rtol=1e-5)
    assert_close(found.gradient, gradient)


def test_expert_closure_is_rejected_on_expert_mesh():
    with pytest.raises(ConfigError, match=r"closes over a traced array.*Pass it as an argument"):
        program_of(closing_task(), mesh={"expert": 2}, batch_size=16)


@pytest.mark.slow
def test_manual_part_accepts_gathered_weights():
    x, router, experts = arrays(num=8)
    dims = {"gate": ("expert", None, "mlp"), "up": ("expert", None, "mlp"), "down": ("expert", "mlp", None)}

    def block(x_BTD, router, experts):
        experts = {n: all_gather(w, "embed", MLP_DIMS[n].index("embed")) for n, w in experts.items()}
        y, load = sk.moe(x_BTD, router, experts, dims=dims, router_dims=(None, None), top_k=2, capacity=1.0)
        return y, load.balance_B, load.z_B

    def fn(x, router, experts):
        rows = ("batch", "norm_sequence", None)
        part = sk.manual(block, [rows, (None, None), MLP_DIMS], (rows, ("batch",), ("batch",)))
        y, balance_B, z_B = part(x, router, experts)
        return (y * jnp.cos(jnp.arange(y.size).reshape(y.shape))).sum() + balance_B.sum() + z_B.mean()

    assert_same_on_mesh(fn, FSDP_EXPERT_TENSOR, (x, router, experts), summed(top_k=2, capacity=1.0))


@pytest.mark.slow
def test_a_vmap_of_the_users_own_changes_nothing():
    x, router, experts = arrays(num=8)
    args = (np.stack([x, x[::-1]]), router, experts)
    one = summed(top_k=2, capacity=None)
    assert_same_on_mesh(lambda *a: jax.vmap(one, (0, None, None))(*a).sum(), {"expert": 4, "context": 2}, args)


def test_ragged_exchange_gives_the_same(monkeypatch):
    """The form of TPUs and GPUs; only the collective itself is another one here, since XLA's CPU backend has none."""
    monkeypatch.setattr(trace_context.Context, "platform", "tpu")
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
    x, router, experts = arrays(num=8)
    where_BT = jnp.arange(T) < jnp.array([T, 5, 2, T, 1, 7, 3, 8])[:, None]
    fn = summed(top_k=2, capacity=None, where_BT=where_BT)
    assert "ragged_dot" in str(jax.make_jaxpr(fn)(x, router, experts))
    assert_same_on_mesh(fn, {"expert": 4}, (x, router, experts))


@pytest.mark.parametrize("expert, platform", [(mlp, "cpu"), (mlp, "tpu"), (tanh_expert, "tpu")])
def test_sorted_rows_go_through_their_own_expert(expert, platform):
    """`tanh_expert` knows no grouped product, so that it runs in blocks everywhere, and makes something of a row of
    zeros."""
    sizes = np.array([3, 0, 17, 1, 0, 0, 9, 0], np.int32)
    rows = np.random.default_rng(1).normal(size=(40, D)).astype(np.float32)
    _, _, given = arrays(gated=expert is mlp)
    bias = given["up"][:, 0]
    experts = given if expert is mlp else {"a": given["up"], "bias": bias, "b": given["down"]}

    def grouped(experts, rows):
        return (run_sorted(expert, experts, rows, sizes, platform)[: sizes.sum()] ** 2).sum()

    def one_by_one(experts, rows):
        own = np.repeat(np.arange(E), sizes)
        weights = jax.tree.map(lambda w: w[own], experts)
        return (jax.vmap(expert)(weights, rows[: len(own)]) ** 2).sum()

    found, expected = (jax.jit(jax.value_and_grad(f, (0, 1)))(experts, rows) for f in (grouped, one_by_one))
    assert_close(jax.device_get(found[1]), jax.device_get(expected[1]))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)


def test_an_expert_may_close_over_traced_arrays():
    sizes, random = np.array([3, 0, 17, 1]), np.random.default_rng(0)
    weights, shared, rows = (random.normal(size=s).astype(np.float32) / 4 for s in ((4, D, D), (D, D), (30, D)))

    def grouped(weights, shared, rows):
        expert = lambda w, x: jnp.tanh(x @ w + x @ shared)
        return (run_sorted(expert, weights, rows, jnp.asarray(sizes, jnp.int32), "cpu")[: sizes.sum()] ** 2).sum()

    def one_by_one(weights, shared, rows):
        own = jnp.tanh(jnp.einsum("nd,ndf->nf", rows[: sizes.sum()], weights[np.repeat(np.arange(4), sizes)] + shared))
        return (own**2).sum()

    found, expected = (jax.jit(jax.grad(fn, (0, 1, 2)))(weights, shared, rows) for fn in (grouped, one_by_one))
    assert_close(jax.device_get(found), jax.device_get(expected))


def test_equal_scores_prefer_first_experts_and_tokens():
    x, router, experts = arrays()
    y, load = jax.jit(functools.partial(sk.moe, top_k=2, capacity=1.0))(x, np.zeros_like(router), experts)
    np.testing.assert_array_equal(load.fraction_BE[0], [0.5, 0.5, 0, 0, 0, 0, 0, 0])
    np.testing.assert_allclose(load.dropped_B, 0.75)
    assert (np.abs(y).sum(-1) > 0).tolist() == [[True, True] + [False] * 6] * 3


def test_in_bfloat16_the_router_still_computes_in_float32():
    half = lambda tree: jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), tree)
    x, router, experts = half(arrays(num=8))
    routed = jax.make_jaxpr(functools.partial(sk.moe, top_k=2))(x, router, experts)
    (first, *_), others = products(routed.jaxpr), products(routed.jaxpr)[1:]
    assert first == jnp.float32 and set(others) == {jnp.dtype(jnp.bfloat16)}


def products(jaxpr):
    """Returns the dtype of the operands of every matrix product, in order."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            found.append(eqn.invars[0].aval.dtype)
        for value in eqn.params.values():
            found += (
                products(value.jaxpr) if hasattr(value, "jaxpr") else products(value) if hasattr(value, "eqns") else []
            )
    return found


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("capacity", [1.0, None])
def test_stages_of_a_pipeline_hold_experts(capacity, schedule):
    settings = {
        "mesh": {"data": 2, "pipeline": 2, "expert": 2},
        "pipeline": {"schedule": schedule, "microbatches": 4},
    }
    found = train(program_of(pipelined_task(capacity=capacity), **settings), evaluate=False)
    assert_same_run(found, train(program_of(pipelined_task(capacity=capacity)), evaluate=False))


def balanced_task():
    """A task in which no loss evens out the load: a bias does, moved a little each step by the load that was
    (DeepSeek-V3)."""
    base = task()

    def init(key):
        params = jax.tree.map(lambda w: w[0], base.init(key)["layers"])
        return sk.Variables(params, {"bias": jnp.zeros(E), "load": jnp.full(E, 1 / E)})

    def loss_fn(params, state, batch, key):
        bias_E = state["bias"] + 0.01 * jnp.sign(1 / E - state["load"])
        y, load = sk.moe(batch["x"], params["router"], params["experts"], top_k=2, capacity=1.0, bias_E=bias_E)
        metrics = {"max_over_mean": sk.mean(load.max_over_mean_B)}
        # The load is averaged over replicas; a sign would not be the sign of the average.
        return sk.mean((y - 1) ** 2), metrics, {"bias": bias_E, "load": load.fraction_BE.mean(0)}

    rules = [(pattern.removeprefix(".*/"), dims[1:]) for pattern, dims in RULES]
    return sk.Task(init, loss_fn, keep_gradient(optax.sgd(0.1)), train_data=data(), rules=rules)


@pytest.mark.slow
def test_balancing_bias_is_model_state():
    found = train(program_of(balanced_task(), mesh={"data": 2, "expert": 4}), evaluate=False)
    assert_same_run(found, train(program_of(balanced_task()), evaluate=False))
    assert np.abs(found.model_state["bias"]).max() > 0.02


@pytest.mark.parametrize(
    "options, message",
    [
        ({"top_k": 9}, "top_k is 9 with 8 experts.*from 1 to 8"),
        ({"capacity": 0}, "capacity is 0"),
        ({"score": "softmin"}, "score is 'softmin'. Did you mean 'softmax'"),
        ({"priority": "luck"}, "priority is 'luck'"),
        ({"top_k": 1, "normalise": True}, "would learn nothing"),
        ({"capacity": None, "priority": "weight"}, "no effect without a capacity"),
        ({"noise": 0.1}, "keys_B is not given"),
        ({"keys_B": jax.random.split(jax.random.key(0), 3)}, "noise is 0.0 and keys_B is given"),
        ({"dims": {"gate": ("embed",), "up": ("expert",), "down": ("expert",)}}, "first dim is the experts'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(options, message):
    x, router, experts = arrays()
    with pytest.raises(ConfigError, match=message):
        sk.moe(x, router, experts, **{"top_k": 2} | options)


def test_weights_that_do_not_fit_are_refused():
    x, router, experts = arrays()
    with pytest.raises(ConfigError, match=r"examples, tokens, width"):
        sk.moe(x[0], router, experts, top_k=2)
    with pytest.raises(ConfigError, match=r"the router knows 7 experts, a weight of experts has shape \(8, "):
        sk.moe(x, router[:, :7], experts, top_k=2)
    with pytest.raises(ConfigError, match=r"experts hold .*'w'.* and dims is not given"):
        sk.moe(x, router, {"w": experts["up"]}, top_k=2)


@pytest.mark.parametrize(
    "num_experts, mesh, repair",
    [(6, {"expert": 4, "data": 2}, "8 experts, or expert: 2"), (4, {"expert": 8}, "8 experts, or expert: 4")],
)
def test_indivisible_experts_are_rejected(num_experts, mesh, repair):
    x, router, experts = arrays(num=8)
    fewer = jax.tree.map(lambda w: w[:num_experts], experts)
    with pytest.raises(ConfigError, match=f"{num_experts} experts on mesh axis expert = .*{repair}"):
        value_and_grad(summed(top_k=2), x, router[:, :num_experts], fewer, **mesh)
