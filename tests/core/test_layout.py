"""The layout: rules, metadata, the fsdp tactic, ZeRO stages, what optimizer states follow, and every message."""

import dataclasses
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import spmdkit as sk
from spmdkit.errors import ConfigError
from spmdkit.foundation.formatting import shown
from spmdkit.mesh import layout
from spmdkit.mesh.annotations import Annotations
from spmdkit.mesh.layout import LayoutOptions
from spmdkit.mesh.mesh import AXES, canonical, resolve
from spmdkit.step import trace_context
from tests.support.core_models import regression, regression_loss
from tests.support.core_runs import assert_close, one_device, program_of, train
from tests.support.messages import raises

PARAMS = {"block": {"up": (64, 256), "down": (256, 64), "bias": (6,)}, "head": (64, 10)}
SIZES = {"data": 1, "fsdp": 2, "tensor": 4}


def params(shapes=PARAMS):
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), shapes, is_leaf=lambda x: isinstance(x, tuple))


def lay_out(rules=(), task_rules=(), sizes=SIZES, tree=None, **options):
    axes = layout.logical_axes(options.pop("axes", {}))
    options = LayoutOptions(config_rules=tuple(rules), task_rules=tuple(task_rules), axes=axes, **options)
    sizes = {axis: sizes.get(axis, 1) for axis in AXES}
    return {p.path: p for p in layout.lay_out(params() if tree is None else tree, options, sizes)}


# ---- who decides -----------------------------------------------------------------------------------------------------


def test_a_rule_shards_dims_by_logical_names():
    placed = lay_out([("block/up", ["embed", "mlp"]), ("block/(down)", ["mlp", None]), ("head", [["fsdp"], None])])
    assert placed["block/up"].spec == P("fsdp", "tensor")
    assert placed["block/down"].spec == P("tensor")
    assert placed["head"].spec == P("fsdp")
    assert placed["block/up"].reason == "rule 'block/up'"
    assert placed["block/down"].reason == "rule 'block/(down)'"


def test_no_source_shards_a_parameter_over_replicas():
    """A rule, the model's metadata and a constraint in `init` have one meaning, and the table has a note."""
    sizes = {"data": 2, "fsdp": 2, "tensor": 2}
    leaf = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    tree = {"rule": leaf, "box": nn.Partitioned(leaf, ("data", "tensor")), "init": leaf, "only": leaf}
    constraints = {"init": P("data", "tensor"), "only": P("data")}
    annotations = Annotations(constraints=constraints)
    placed = lay_out([("rule", ["data", "tensor"])], sizes=sizes, tree=tree, annotations=annotations)
    note = f"; not over {shown('data')}: parameters are the same on all replicas"
    assert [p.spec for p in placed.values()] == [P(None, "tensor")] * 2 + [P("fsdp"), P(None, "tensor")]
    assert all(p.reason.endswith(note) for p in placed.values())
    one = lay_out([("rule", ["data", "tensor"])], sizes={"tensor": 2}, tree=tree, annotations=annotations)
    assert "replicas" not in "".join(p.reason for p in one.values())


def test_names_of_the_config_win_over_defaults():
    placed = lay_out([("block/up", ["embed", "mlp"])], axes={"mlp": ["fsdp", "tensor"], "embed": None})
    assert placed["block/up"].spec == P(None, ("fsdp", "tensor"))
    assert lay_out([("block/up", ["width", None])], axes={"width": "tensor"})["block/up"].spec == P("tensor")


def test_sharding_sources_have_an_order():
    class Dense(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_partitioning(nn.initializers.ones, (None, "mlp"))
            return x @ self.param("kernel", init, (64, 256))

    tree = jax.eval_shape(Dense().init, jax.random.key(0), jnp.zeros((1, 64)))["params"]
    path = "kernel/value"
    by_config, by_task = [(path, ["mlp", None])], [(path, ["embed", "mlp"])]
    placed = [
        lay_out(by_config, by_task, tree=tree)[path],
        lay_out((), by_task, tree=tree)[path],
        lay_out(tree=tree)[path],
        lay_out(tree=nn.unbox(tree))["kernel"],
    ]
    assert [p.spec for p in placed] == [P("tensor"), P("fsdp", "tensor"), P(None, "tensor"), P(None, "fsdp")]
    assert [p.reason for p in placed] == [
        f"rule '{path}'",
        f"task rule '{path}'",
        "metadata of the model",
        "fsdp auto: dim 1 is the largest divisible",
    ]


def test_fsdp_auto_shards_the_largest_divisible_dim():
    tree = params({"a": (6, 512), "odd": (65, 127), "first": (64, 64), "small": (8, 8), "scalar": ()})
    placed = lay_out(tree=tree, sizes={"fsdp": 4}, min_shard_bytes=1024)
    assert {path: (p.spec, p.reason) for path, p in placed.items()} == {
        "a": (P(None, "fsdp"), "fsdp auto: dim 1 is the largest divisible"),
        "odd": (P(), "replicated: no dim of (65, 127) is divisible by fsdp(4)"),
        "first": (P("fsdp"), "fsdp auto: dim 0 is the largest divisible"),
        "small": (P(), "small: 256 B is below layout.min_shard_bytes"),
        "scalar": (P(), "small: 4 B is below layout.min_shard_bytes"),
    }
    off = lay_out(tree=tree, sizes={"fsdp": 4}, fsdp="off")
    assert off["a"].spec == P() and off["a"].reason == "replicated: layout.fsdp is off"
    assert lay_out(tree=tree, sizes={"data": 8})["a"].reason == "no fsdp axis"


def test_one_sharding_has_one_spec():
    sizes = {axis: {"data": 2, "fsdp": 2}.get(axis, 1) for axis in AXES}
    assert canonical([("replica", "data"), ("tensor",), None], sizes) == P("data")
    assert canonical([("data", "fsdp"), None, "fsdp"], sizes) == P(("data", "fsdp"), None, "fsdp")
    assert canonical(["tensor", None], sizes) == P()


# ---- metadata --------------------------------------------------------------------------------------------------------


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        up = nn.Dense(32, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp")))
        down = nn.Dense(8, kernel_init=nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("mlp", None)))
        return down(nn.relu(up(x)))


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal()
        self.up = nnx.Linear(16, 32, kernel_init=nnx.with_partitioning(init, ("embed", "mlp")), rngs=rngs)
        self.down = nnx.Linear(32, 8, kernel_init=nnx.with_partitioning(init, ("mlp", None)), rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def predicting(init, predict):
    def loss_fn(params, batch, key):
        return sk.mean(((predict(params, batch["x"]) - batch["y"]) ** 2).sum(-1)), {}

    return dataclasses.replace(regression(), init=init, loss_fn=loss_fn, rules=())


def linen_task():
    model = LinenModel()
    init = lambda key: model.init(key, jnp.zeros((1, 16)))["params"]
    return predicting(init, lambda params, x: model.apply({"params": params}, x))


def nnx_task():
    with nnx.use_eager_sharding(False):
        graph = nnx.split(nnx.eval_shape(lambda: NnxModel(nnx.Rngs(0))))[0]

    def init(key):
        return nnx.state(NnxModel(nnx.Rngs(key)), nnx.Param)

    return predicting(init, lambda params, x: nnx.merge(graph, params)(x))


@pytest.mark.forms(1)
@pytest.mark.parametrize("make", [linen_task, nnx_task])
def test_metadata_of_linen_and_nnx_is_used(make):
    task = make()
    program = program_of(task, mesh={"fsdp": 2, "tensor": 4})
    placed = {re.sub("Dense_0|up", "up", re.sub("Dense_1|down", "down", p.path)): p for p in program.layout}
    kernels = {path: p for path, p in placed.items() if path.startswith("params") and "kernel" in path}
    assert {path.split("/")[1]: p.spec for path, p in kernels.items()} == {
        "up": P("fsdp", "tensor"),
        "down": P("tensor"),
    }
    assert {p.reason for p in kernels.values()} == {"metadata of the model"}
    state = program.init()
    shards = {x.addressable_shards[0].data.shape for x in jax.tree.leaves(state.params) if x.ndim == 2}
    assert shards == {(8, 8), (8, 8)}
    many = train(program, steps=2)
    one = train(program_of(task), steps=2)
    assert_close(many.gradient, one.gradient)
    assert_close(many.params, one.params)
    assert many.eval == pytest.approx(one.eval, rel=1e-5)


# ---- the state -------------------------------------------------------------------------------------------------------


def table(program):
    return {p.path: p for p in program.layout}


@pytest.mark.parametrize(
    ("zero", "stored", "compute", "gradient"),
    [(1, P(), P(), P()), (2, P(), P(), P("fsdp")), (3, P("fsdp"), P("fsdp"), P("fsdp"))],
)
def test_zero_decides_what_the_fsdp_axis_cuts(zero, stored, compute, gradient):
    seen = {}

    def loss_fn(params, batch, key):
        seen["placements"] = trace_context.current().sharding.placements
        return regression_loss(params, batch, key)

    task = dataclasses.replace(regression(), loss_fn=loss_fn, optimizer=optax.adam(1e-2))
    program = program_of(task, mesh={"fsdp": 8}, layout={"zero": zero}, ema=0.9)
    assert table(program)["params/w"].spec == stored
    for path in ("opt_state/0/mu/w", "opt_state/0/nu/w", "ema/w"):
        assert table(program)[path].spec == P("fsdp")
    placements = seen["placements"]
    assert (placements.compute["w"], placements.gradient["w"], placements.update["w"]) == (compute, gradient, P("fsdp"))
    state = program.init()
    assert state.params["w"].sharding.spec == stored
    assert state.opt_state[0].mu["w"].addressable_shards[0].data.shape == (2, 8)


def test_zero_keeps_what_other_axes_cut():
    program = program_of(regression(), mesh={"fsdp": 2, "tensor": 4}, layout={"zero": 1})
    assert table(program)["params/w"].spec == P(None, "tensor")
    assert table(program)["opt_state/0/w"].spec == P("fsdp", "tensor")


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.multi_transform({"a": optax.adam(1e-2), "b": optax.sgd(1e-2, momentum=0.9)}, {"w": "a", "b": "b"}),
        optax.MultiSteps(optax.apply_if_finite(optax.lion(1e-2), 3), 2),
    ],
    ids=["multi_transform", "MultiSteps"],
)
def test_optimizer_states_are_sharded_like_their_parameters(optimizer):
    program = program_of(dataclasses.replace(regression(), optimizer=optimizer), mesh={"fsdp": 2, "tensor": 4})
    twins = [p for p in program.layout if p.path.startswith("opt_state") and p.shape == (16, 8)]
    assert twins and all(p.spec == P("fsdp", "tensor") for p in twins)
    assert {p.reason for p in twins} == {"as parameter 'w'"}
    others = [p for p in program.layout if p.path.startswith("opt_state") and p.shape == ()]
    assert all(p.spec == P() for p in others)
    state = program.init()
    for _, batch in program.batches(stop=2):
        state, _ = program.step(state, batch)
    assert [x.sharding for x in jax.tree.leaves(state)] == [p.sharding(program.mesh) for p in program.layout]


def test_factored_moments_are_sharded_by_their_own_shapes():
    init = lambda key: {"w": jnp.linspace(-0.1, 0.1, 16 * 256).reshape(16, 256), "out": jnp.full((256, 8), 0.05)}
    optimizer = optax.adafactor(1e-2, min_dim_size_to_factor=8)

    def loss_fn(params, batch, key):
        return sk.mean(((batch["x"] @ params["w"] @ params["out"] - batch["y"]) ** 2).sum(-1)), {}

    rules = [("w", ["embed", "mlp"]), ("out", ["mlp", None])]
    task = dataclasses.replace(regression(), init=init, loss_fn=loss_fn, optimizer=optimizer, rules=rules)
    program = program_of(task, mesh={"fsdp": 2, "tensor": 4})
    factored = {p.path: p for p in program.layout if re.search("v_(row|col)/w", p.path)}
    assert {p.shape for p in factored.values()} == {(16,), (256,)}
    assert all("fsdp" in p.reason for p in factored.values())
    many, one = (train(made, steps=2).params for made in (program, program_of(task)))
    assert_close(many, one)


def test_a_parameter_at_the_root_is_sharded():
    task = dataclasses.replace(
        regression(),
        init=lambda key: jnp.full((16, 8), 0.1),
        loss_fn=lambda w, batch, key: regression_loss({"w": w, "b": 0.0}, batch, key),
        rules=[],
    )
    program = program_of(task, mesh={"fsdp": 8})
    assert table(program)["params"].spec == P("fsdp")
    assert table(program)["opt_state/0"].reason == "as the parameter"
    assert train(program, steps=1).losses[0] == pytest.approx(one_device("regression").losses[0], rel=1e-5)


def test_the_table_lists_every_leaf_with_reason():
    program = program_of(regression(), mesh={"data": 2, "fsdp": 4}, ema=0.5)
    rows = [(p.path, p.shape, str(p.spec), p.memory_kind, p.reason) for p in program.layout]
    cut = str(P("fsdp"))
    assert rows == [
        ("step", (), str(P()), "device", "scalar"),
        ("params/b", (8,), cut, "device", "fsdp auto: dim 0 is the largest divisible"),
        ("params/w", (16, 8), cut, "device", "task rule 'w'"),
        ("opt_state/0/b", (8,), cut, "device", "as parameter 'b'"),
        ("opt_state/0/w", (16, 8), cut, "device", "as parameter 'w'"),
        ("ema/b", (8,), cut, "device", "as parameter 'b'"),
        ("ema/w", (16, 8), cut, "device", "as parameter 'w'"),
        ("rng", (2,), str(P()), "device", "random key"),
    ]
    assert program.layout[2].num_bytes == 16 * 8 * 4


# ---- messages --------------------------------------------------------------------------------------------------------


def test_a_rule_without_match_names_the_nearest():
    with raises("layout.rules: pattern 'block/upp'", "none of the 4 parameters", "whole path", "'block/up'?"):
        lay_out([("block/upp", [None, None])])
    with raises("the task's rules: pattern 'q'", repair="block/bias, block/down"):
        lay_out((), [("q", [None])])
    with raises("pattern 'up' matches none"):
        lay_out([("up", [None, None])])  # a part of a path is not a match


def test_a_parameter_has_one_rule():
    rules = [("block/.*p", ["embed", None]), ("block/up", [None, None])]
    with raises("parameter 'block/up'", "'block/.*p' and 'block/up'", "A parameter has one rule", "narrower"):
        lay_out(rules)
    lay_out([rules[0]], [rules[1]])  # in two tables the config's wins


def test_a_rule_names_every_dim():
    with raises("rule 'head' names 1 dims ['embed']", "shape (64, 10)", repair="each of the 2 dims"):
        lay_out([("head", ["embed"])])
    with raises("names 3 dims ['layers', None, 'layers']", "shape (64, 10)"):
        lay_out([("head", ["layers", None, "layers"])])


def test_an_indivisible_dim_is_reported():
    requested, repair = "rule 'head' shards dim 1 of 'head'", ("length 12", "null")
    with raises(requested, ("length 10", "tensor = 4"), "10 is not divisible by 4", repair):
        lay_out([("head", [None, "mlp"])])
    with raises(found="fsdp x tensor = 8", rule="10 is not divisible"):
        lay_out([("head", [None, ["fsdp", "tensor"]])])


def test_a_mesh_axis_on_two_dims_says_which():
    requested = "rule 'block/up' uses mesh axis 'tensor' twice on 'block/up'"
    with raises(requested, "dims 0 and 1", "one dim of a leaf", "null"):
        lay_out([("block/up", ["mlp", "heads"])])


def test_an_unknown_axis_names_the_nearest():
    found = ("neither a mesh axis", "nor a logical axis")
    with raises("rule 'head' shards dim 0 of 'head' by 'embd'", found, "embed", ("'embed'?", "layout.axes")):
        lay_out([("head", ["embd", None])])


def test_a_large_copy_has_to_be_asked_for():
    tree = params({"table": (1001, 33)})
    options = {"tree": tree, "sizes": {"fsdp": 4}, "replicate_above_bytes": 1000}
    requested, found = "parameter 'table' (129.0 KiB, shape (1001, 33))", ("all 4 fsdp devices", "replicated: no dim")
    with raises(requested, found, "replicate_above_bytes (1000 B)", "['table', [null, null]]"):
        lay_out(**options)
    assert lay_out([("table", [None, None])], **options)["table"].reason == "rule 'table'"
    with raises("layout.fsdp is off"):
        lay_out(tree=params({"w": (64, 64)}), sizes={"fsdp": 4}, fsdp="off", replicate_above_bytes=1)


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_a_mesh_axis_that_cuts_nothing_is_refused(axis):
    task = dataclasses.replace(regression(), rules=[])
    with pytest.raises(
        ConfigError,
        match=rf"mesh\.{axis} is 4, but (no parameter is sharded|loss_fn shards nothing) over {axis}.*or use data: 4",
    ):
        program_of(task, mesh={"data": 2, axis: 4})


@pytest.mark.parametrize(
    ("requested", "devices", "match"),
    [
        ({"data": 4, "tensor": 3}, 8, r"needs data\(4\) x tensor\(3\) = 12 devices, found 8.*Try tensor: 2|Try data: "),
        ({"data": -1, "tensor": 3}, 8, r"3 does not divide 8.*Try tensor: 2\."),
        ({"data": -1, "fsdp": -1}, 8, "two axes are -1"),
        ({"data": 4}, 8, r"= 4 devices, found 8.*Try data: 8, or data: -1"),
    ],
)
def test_a_mesh_that_does_not_fit_is_reported(requested, devices, match):
    with pytest.raises(ConfigError, match=match):
        resolve(requested, devices)


def test_one_axis_fills_the_mesh():
    assert resolve({"data": -1, "tensor": 2}, 8) | {} == {axis: {"data": 4, "tensor": 2}.get(axis, 1) for axis in AXES}
    assert resolve({}, 8) == dict.fromkeys(AXES, 1)
    assert np.prod(list(resolve({"data": -1}, 1).values())) == 1
