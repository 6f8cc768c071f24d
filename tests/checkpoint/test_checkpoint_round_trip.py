"""What was saved comes back bit for bit: any tree, any dtype, any mesh."""

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

from spmdkit.checkpoint import Checkpoints, ignored_entries, leaf_table
from spmdkit.config.retention import Retention
from spmdkit.errors import ConfigError
from tests.support.checkpoint_states import State, abstract_on, assert_same, mesh_of, place, train_state

RECORD = {"config": "task: x\n", "versions": {"jax": jax.__version__}, "seed": 3, "data": {"step": 40}}


def round_trip(directory, state, target):
    checkpoints = Checkpoints(directory)
    checkpoints.save(40, state, RECORD)
    assert checkpoints.wait() == [40]
    restored, record = checkpoints.restore(40, target)
    checkpoints.close()
    assert record == RECORD
    return restored


@pytest.mark.parametrize(("shape", "memory_kind"), [((1,), None), ((2, 4), "pinned_host"), ((3,), None)])
def test_train_state_restores_bitwise_on_another_mesh(directory, shape, memory_kind):
    mesh = mesh_of(*shape)
    state = place(train_state(), mesh_of(4, 2))
    restored = round_trip(directory, state, abstract_on(state, mesh, memory_kind))
    assert_same(restored, state)
    for leaf, asked in zip(
        jax.tree.leaves(restored), jax.tree.leaves(abstract_on(state, mesh, memory_kind)), strict=True
    ):
        assert leaf.sharding == asked.sharding


def test_a_state_in_host_memory_can_be_saved(directory):
    state = place(train_state(), mesh_of(8), "pinned_host")
    assert_same(round_trip(directory, state, abstract_on(state, mesh_of(2))), state)


@pytest.mark.parametrize(
    "dtype", ["float8_e4m3fn", "float8_e4m3", "float4_e2m1fn", "uint32", "complex64", "bool", "int4", "uint4", "uint2"]
)
def test_every_dtype_comes_back_bit_for_bit(directory, dtype):
    state = {"x": jnp.array([[0, 1, 1], [1, 0, 1]]).astype(dtype), "scalar": jnp.ones((), dtype)}
    assert_same(round_trip(directory, state, jax.eval_shape(lambda: state)), state)


def test_nan_infinity_and_negative_zero_keep_their_bits(directory):
    state = {"x": jnp.array([jnp.nan, -jnp.nan, jnp.inf, -jnp.inf, -0.0, 1e-42], jnp.float32)}
    assert_same(round_trip(directory, state, jax.eval_shape(lambda: state)), state)


def test_typed_random_keys_come_back_as_keys(directory):
    mesh = mesh_of(8)
    state = {"one": jax.random.key(5), "many": jax.random.split(jax.random.key(1, impl="rbg"), 8)}
    restored = round_trip(directory, place(state, mesh), abstract_on(state, mesh))
    assert_same(restored, state)


def test_equinox_module_is_restored_into_its_type(directory):
    eqx = pytest.importorskip("equinox")
    params = eqx.filter(eqx.nn.MLP(3, 2, 4, 2, key=jax.random.key(0)), eqx.is_array)
    state = State(step=jnp.int32(1), params=params, opt_state=())
    restored = round_trip(directory, state, jax.eval_shape(lambda: state))
    assert isinstance(restored.params, eqx.nn.MLP)
    assert_same(restored, state)


def test_odd_but_distinct_keys_are_saved(directory):
    state = {"a b": jnp.ones(2), "ü/é": jnp.ones(3), 3: {"4": jnp.ones(4)}, "x.y": jnp.zeros(1)}
    state = {str(k): v for k, v in state.items()}
    assert_same(round_trip(directory, state, jax.eval_shape(lambda: state)), state)


@pytest.mark.parametrize(
    ("state", "word"),
    [
        ({"a/b": 1.0, "a": {"b": 2.0}}, "two leaves have the path `a/b`"),
        ({"a.b": 1.0, "a": {"b": 2.0}}, "have the same name in a checkpoint, `a.b`"),
        ({"a": 1.0, "a/b": 2.0}, "is also the folder of the leaf `a/b`"),
        ({"a": {"": 1.0}}, "the leaf `a/` has an empty part"),
    ],
)
def test_colliding_leaf_names_are_refused_before_writing(directory, state, word):
    checkpoints = Checkpoints(directory)
    with pytest.raises(ConfigError, match=word):
        checkpoints.save(1, jax.tree.map(jnp.asarray, state), {})
    assert ignored_entries(checkpoints.directory) == []
    checkpoints.close()


def test_a_leaf_that_is_no_array_is_refused():
    with pytest.raises(ConfigError, match="leaf `lr` is a float"):
        leaf_table({"lr": 0.1})


def test_a_donated_state_is_saved_as_it_was(directory):
    """The train step donates its state right after `save` returns, while the writing goes on."""
    mesh = mesh_of(8)
    state = place({"sharded": jnp.zeros(2**20), "replicated": jnp.zeros(2**16 + 1)}, mesh)
    train = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    checkpoints = Checkpoints(directory, retention=Retention(keep=9))
    for step in range(1, 5):
        state = train(state)
        checkpoints.save(step, state, {})
        state = train(train(state))
    jax.block_until_ready(state)
    checkpoints.wait()
    for step in range(1, 5):
        restored, _ = checkpoints.restore(step, abstract_on(state, mesh))
        for leaf in jax.tree.leaves(restored):
            assert (leaf == 3 * step - 2).all()
        donated = train(train(restored))
        assert (donated["sharded"] == 3 * step).all() and (donated["replicated"] == 3 * step).all()
    checkpoints.close()


def test_plain_orbax_reads_a_checkpoint(directory):
    state = train_state()
    checkpoints = Checkpoints(directory)
    checkpoints.save(40, state, {})
    checkpoints.close()
    with ocp.CheckpointManager(directory) as manager:
        assert manager.latest_step() == 40
        tree = {"params": {"blocks": {"0": abstract_on(state.params["blocks"][0], mesh_of(1))}}}
        wanted = ocp.checkpoint_utils.construct_restore_args(tree)
        args = ocp.args.PyTreeRestore(tree, restore_args=wanted, partial_restore=True)
        restored = manager.restore(40, args=ocp.args.Composite(state=args))
    assert_same(restored.state["params"]["blocks"]["0"], state.params["blocks"][0])


def test_record_and_tree_can_be_read_without_arrays(directory):
    checkpoints = Checkpoints(directory)
    checkpoints.save(40, {"w": jnp.ones((2, 3), jnp.bfloat16), "n": None}, RECORD)
    checkpoints.wait()
    assert checkpoints.read_record(40) == RECORD
    assert checkpoints.read_tree(40) == {"w": ((2, 3), "bfloat16")}
    checkpoints.close()
