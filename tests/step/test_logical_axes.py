"""flax's logical axis rules and constraints in `init` place parameters as flax does, and change no number."""

import contextlib
import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import spmdkit as sk
from tests.step.test_annotations import DATA, MESHES
from tests.support.core_runs import TOLERANCE, assert_close, program_of, train
from tests.support.fixed_numbers import normal
from tests.support.messages import raises

RULES = (("batch", "data"), ("embed", "fsdp"), ("hidden", "tensor"), ("heads", "tensor"), ("norm", None))
MODEL_MESHES = [name for name in MESHES if name != "one"]
LECUN = lambda key, shape, dtype: normal(0, *shape).astype(dtype) / np.float32(np.sqrt(shape[0]))


class Linen(nn.Module):
    """Layers as in lm1b: logical names of every kernel, fewer names than dims, and constraints of activations."""

    @nn.compact
    def __call__(self, x):
        dense = lambda num, *names, **options: nn.DenseGeneral(
            num, kernel_init=nn.with_logical_partitioning(LECUN, names), use_bias=False, **options
        )
        x = nn.gelu(dense(16, "embed", "hidden", name="up")(x))
        x = nn.with_logical_constraint(x, ("batch", "hidden"))
        x = dense((4, 4), "embed", "kv", name="split")(x)
        x = dense(8, "heads", "norm", axis=(-2, -1), name="join")(x)
        return dense(4, "hidden", "heads", name="down")(x)


MODEL = Linen()


def linen_task(in_init=None, in_loss=None):
    rules = lambda own: contextlib.nullcontext() if own is None else nn.logical_axis_rules(own)

    def init(key):
        with rules(in_init):
            return MODEL.init(key, jnp.zeros((1, 8)))["params"]

    def loss_fn(params, batch, key):
        with rules(in_loss):
            out = MODEL.apply({"params": params}, batch["x"])
        return sk.mean(((out - batch["y"]) ** 2).mean(-1))

    return sk.Task(init, loss_fn, optax.adam(1e-2), DATA)


def program(task, mesh, **settings):
    return program_of(task, mesh=MESHES[mesh] if isinstance(mesh, str) else mesh, batch_size=16, **settings)


def specs(made):
    return {p.path.removeprefix("params/"): p for p in made.layout if p.path.startswith("params/")}


@functools.cache
def one_device():
    return train(program(linen_task(RULES), "one"), evaluate=False, steps=3)


def assert_equal(made, expected):
    run = train(made, evaluate=False, steps=3)
    assert_close(run.losses, expected.losses, TOLERANCE)
    assert_close(jax.tree.leaves(run.gradient), jax.tree.leaves(expected.gradient), TOLERANCE)
    assert_close(jax.tree.leaves(run.params), jax.tree.leaves(expected.params), TOLERANCE)


# ---- linen -----------------------------------------------------------------------------------------------------------


@pytest.mark.forms(2)
@pytest.mark.parametrize("mesh", MESHES)
def test_rules_shard_parameters_as_flax_does(mesh):
    made = program(linen_task(RULES), mesh)
    abstract = jax.eval_shape(MODEL.init, jax.random.key(0), jnp.zeros((1, 8)))["params"]
    right = nn.logical_to_mesh_sharding(nn.get_partition_spec(abstract), made.mesh, RULES)
    for path, leaf in specs(made).items():
        of_flax = right[path.split("/")[0]]["kernel"]
        assert leaf.sharding(made.mesh).is_equivalent_to(of_flax, len(leaf.shape)), path
        assert leaf.reason.startswith("flax's rules: ")
    assert_equal(made, one_device())


def constraints_over(made, axis):
    lines = [line for line in made.lowered.as_text().splitlines() if "sharding_constraint" in line]
    return sum(f'"{axis}"' in line for line in lines)


def test_rules_are_in_force_wherever_the_user_set_them(request):
    mesh = "data 2 x tensor 2"
    in_init, everywhere = program(linen_task(RULES), mesh), program(linen_task(RULES, RULES), mesh)
    request.addfinalizer(lambda: nn.set_logical_axis_rules(()))
    nn.set_logical_axis_rules(RULES)
    of_process = program(linen_task(), mesh)
    nn.set_logical_axis_rules([list(rule) for rule in RULES])
    nested = program(linen_task(RULES), mesh)
    nn.set_logical_axis_rules(())
    with nn.logical_axis_rules(RULES):
        around = program(linen_task(), mesh)
    axes = {name: axis for name, axis in RULES if name != "batch"}
    of_config = program(linen_task(), mesh, layout={"axes": axes | ONLY_HERE, "rules": [["down/.*", ["hidden", None]]]})
    programs = [in_init, everywhere, of_process, nested, around, of_config]
    table = [{path: leaf.spec for path, leaf in specs(made).items()} for made in programs]
    assert all(row == table[0] for row in table)
    assert len({constraints_over(made, "tensor") for made in programs}) == 1
    without = program(linen_task(), mesh, layout={"rules": [["(up|down)/kernel/value", ["mlp", None]], *NO_NAMES]})
    assert constraints_over(without, "tensor") < constraints_over(in_init, "tensor")
    assert "embed = fsdp, hidden = tensor" in in_init.explain()


ONLY_HERE = {"batch": "data", "kv": None, "norm": None}
NO_NAMES = [["(split|join)/kernel/value", [None, None, None]]]


def test_rules_in_the_names_of_the_user():
    renamed = [(name, {"data": "dp", "tensor": "mp"}.get(axis, axis)) for name, axis in RULES]
    roles = {"dp": "data", "mp": "tensor"}
    made = program(linen_task(renamed), {"dp": 2, "mp": 2}, roles=roles)
    right = specs(program(linen_task(RULES), "data 2 x tensor 2"))
    assert {path: leaf.spec for path, leaf in specs(made).items()} == {path: leaf.spec for path, leaf in right.items()}
    with nn.logical_axis_rules(renamed):
        assert_equal(program(linen_task(), {"dp": 2, "mp": 2}, roles=roles), one_device())


def test_a_parameter_is_the_same_on_all_replicas():
    rules = [("embed", "data"), ("hidden", "tensor"), ("heads", "tensor")]
    made = program(linen_task(rules), "data 2 x tensor 2")
    assert specs(made)["up/kernel/value"].spec == P(None, "tensor")
    assert_equal(made, one_device())


def test_contradictory_rules_are_refused():
    mesh = "data 2 x tensor 2"
    found = ("layout.axes has hidden: fsdp", "flax's logical axis rules have hidden: tensor")
    with raises(found, repair="Remove it from layout.axes"):
        program(linen_task(RULES), mesh, layout={"axes": {"hidden": "fsdp"}})
    with nn.logical_axis_rules(RULES), raises(found):
        program(linen_task(), mesh, layout={"axes": {"hidden": "fsdp"}})
    with nn.logical_axis_rules((("hidden", "mp"),)), raises("hidden: mp names 'mp'", repair="roles: {mp: tensor}"):
        program(linen_task(), mesh)

    def init(key):
        return {"a": linen_task(RULES).init(key), "b": linen_task([("hidden", "fsdp")]).init(key)}

    with raises("init uses two sets", repair="Use the same rules"):
        program(sk.Task(init, lambda params, batch, key: sk.mean(batch["y"]), optax.sgd(0.1), DATA), mesh)


# ---- nnx -------------------------------------------------------------------------------------------------------------


class Nnx(nnx.Module):
    def __init__(self, rngs, names, **metadata):
        init = lambda *dims: nnx.with_partitioning(nnx.initializers.lecun_normal(), dims, **metadata)
        self.up = nnx.Linear(8, 16, use_bias=False, kernel_init=init(*names), rngs=rngs)
        self.down = nnx.Linear(16, 4, use_bias=False, kernel_init=init(names[1], None), rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


NNX_RULES = (("width", "fsdp"), ("mlp", "tensor"))


def nnx_task(names, rules=None, **metadata):
    """A task of which the model is built in `init`, and its structure outside of any mesh."""
    with nnx.use_eager_sharding(False):
        graph = nnx.split(nnx.eval_shape(lambda: Nnx(nnx.Rngs(0), names, **metadata)))[0]

    def init(key):
        with contextlib.nullcontext() if rules is None else nnx.logical_axis_rules(rules):
            return nnx.state(Nnx(nnx.Rngs(key), names, **metadata), nnx.Param)

    def loss_fn(params, batch, key):
        out = nnx.merge(graph, params)(batch["x"])
        return sk.mean(((out - batch["y"]) ** 2).mean(-1))

    return sk.Task(init, loss_fn, optax.adam(1e-2), DATA)


NNX = {
    "mesh axes": (("fsdp", "tensor"), None, {}),
    "names of spmdkit": (("embed", "mlp"), None, {}),
    "rules": (("width", "mlp"), NNX_RULES, {}),
    "rules of a variable": (("width", "mlp"), None, {"sharding_rules": NNX_RULES}),
    "not the default rules": (("embed", "mlp"), None, {"sharding_rules": (("embed", "tensor"), ("mlp", "fsdp"))}),
}


@pytest.mark.forms(1)
@pytest.mark.parametrize("kind", NNX)
def test_nnx_shards_its_variables_eagerly(kind):
    names, rules, metadata = NNX[kind]
    task = nnx_task(names, rules, **metadata)
    for mesh in ("data 2 x fsdp 2", "data 2 x tensor 2"):
        made = program(task, mesh)
        table = tuple((n, a) for n, a in NNX_RULES) if rules else ()
        with nnx.use_eager_sharding(False), nnx.logical_axis_rules(table):
            model = nnx.eval_shape(lambda: nnx.state(Nnx(nnx.Rngs(0), names, **metadata)))
            right = nnx.get_partition_spec(model)
        if kind != "names of spmdkit":
            for name in ("up", "down"):
                leaf = next(leaf for path, leaf in specs(made).items() if path.startswith(name))
                of_nnx = NamedSharding(made.mesh, right[name].kernel.get_value())
                assert leaf.sharding(made.mesh).is_equivalent_to(of_nnx, 2)
        if kind in ("rules", "names of spmdkit"):
            assert_equal(made, train(program(task, "one"), evaluate=False, steps=3))


# ---- constraints in init ---------------------------------------------------------------------------------------------


class Equinox(eqx.Module):
    up: jax.Array
    down: jax.Array

    def __init__(self, key):
        keys = jax.random.split(key)
        self.up, self.down = jax.random.normal(keys[0], (8, 16)) * 0.3, jax.random.normal(keys[1], (16, 4)) * 0.3

    def __call__(self, x):
        return jax.nn.gelu(x @ self.up) @ self.down


def equinox_task(spec_of=None):
    """A model sharded by `filter_shard` in a compiled `init`; a step that is compiled by `filter_jit`."""
    optimizer = optax.adam(1e-2)

    @eqx.filter_jit
    def init(key):
        model = Equinox(key)
        return model if spec_of is None else eqx.filter_shard(model, spec_of(model))

    @eqx.filter_jit
    def train_step(state, batch):
        x, y = (eqx.filter_shard(batch[name], P("data")) for name in "xy")
        loss = lambda model: ((jax.vmap(model)(x) - y) ** 2).mean()
        value, grads = eqx.filter_value_and_grad(loss)(state.params)
        return state.apply_gradients(grads), {"loss": value}

    return sk.Task(init, optimizer=optimizer, train_step=train_step, train_data=DATA)


def over(axis):
    return lambda model: eqx.tree_at(lambda m: (m.up, m.down), model, (P(None, axis), P(axis)))


@pytest.mark.forms(2)
@pytest.mark.parametrize("mesh", MODEL_MESHES)
def test_constraints_in_init_place_parameters(mesh):
    axis = mesh.split()[-2]
    made = program(equinox_task(over(axis)), mesh)
    cut = {"up": P(None, axis), "down": P(axis)} if axis != "data" else {"up": P(), "down": P()}
    assert {path: leaf.spec for path, leaf in specs(made).items()} == cut
    if axis != "data":
        assert {leaf.reason for leaf in specs(made).values()} == {"a sharding constraint in init"}
    one = train(program(equinox_task(), "one"), evaluate=False, steps=3)
    assert_equal(made, one)


def test_constraints_that_cannot_place_a_parameter_are_hints():
    def init(key):
        return {"odd": lax.with_sharding_constraint(jnp.ones((3, 8)), P("tensor")), "b": jnp.ones((8, 4))}

    loss = lambda params, batch, key: sk.mean((batch["x"] @ params["b"] + params["odd"].sum()) ** 2)
    made = program(sk.Task(init, loss, optax.sgd(0.1), DATA, rules=[("b", [None, "tensor"])]), "data 2 x tensor 2")
    assert specs(made)["odd"].spec == P()
    assert np.isfinite(train(made, evaluate=False, steps=1).losses).all()
