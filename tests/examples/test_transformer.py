"""The transformer of the examples equals the models of transformers, and its weights are exchanged with them."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.checkpoint import Checkpoints, architectures, export
from spmdkit.checkpoint.lazy_array import LazyArray
from spmdkit.checkpoint.weights import open_weights
from spmdkit.foundation.trees import named_leaves
from tests.reference import transformers_numbers as reference
from tests.support.core_models import made_once
from tests.support.core_runs import program_of, train

st = pytest.importorskip("safetensors.numpy")
GOLDEN = json.loads(reference.GOLDEN.read_text())


@pytest.fixture
def example(load_example):
    return load_example("transformer")


def shape_of(example, case, config):
    return example.Shape.of(config, 3 if case == "bert-classes" else 0)


def load(example, shape, map_, file):
    """Returns the parameters in a file."""
    like = jax.eval_shape(lambda key: example.init_params(key, shape), jax.random.key(0))
    leaves = dict(named_leaves(like))
    with open_weights(file) as weights:
        arrays = dict(architectures.read(map_, weights.names, weights, {k: x.shape for k, x in leaves.items()}))
        assert {path: x.shape for path, x in arrays.items()} == {path: x.shape for path, x in leaves.items()}
        values = [arrays[path].read() for path in leaves]
    return jax.tree.unflatten(jax.tree.structure(like), values)


def check(example, case, config, folder, expected):
    """Returns the parameters: their logits are those expected, and they become the same file again."""
    shape, map_ = shape_of(example, case, config), architectures.find(config["model_type"])
    params = load(example, shape, map_, folder / "model.safetensors")
    found = jax.jit(lambda params, batch: example.logits(params, batch, shape))(params, reference.inputs(case))
    real = reference.inputs(case)["mask"][..., None] > 0 if case == "bert" else True
    difference = np.abs(np.asarray(found) - np.reshape(expected, found.shape))
    assert np.max(np.where(real, difference, 0)) < 1e-5
    arrays = {path: LazyArray.of(path, x) for path, x in named_leaves(params)}
    written = {name: x.read() for name, x in architectures.write(map_, arrays).items()}
    source = st.load_file(folder / "model.safetensors")
    assert written.keys() == source.keys()
    assert all(np.array_equal(written[name], source[name]) for name in source)
    return params


@pytest.mark.parametrize("case", GOLDEN)
def test_logits_and_names_are_those_of_transformers(example, case, tmp_path):
    golden = GOLDEN[case]
    arrays = {name: reference.draw(name, shape) for name, shape in golden["arrays"].items()}
    st.save_file(arrays, tmp_path / "model.safetensors")
    check(example, case, golden["config"], tmp_path, golden["logits"])


@pytest.mark.forms(1)
@pytest.mark.parametrize("mesh", [{"fsdp": 2, "tensor": 2}, {"data": 2, "context": 2}, {"data": 4}])
def test_a_step_on_a_mesh_equals_one_device(example, mesh):
    """Gemma 2: grouped heads, a window, caps, norms on both sides."""
    config = GOLDEN["gemma2"]["config"] | {"vocab_size": 12}
    shape = example.Shape.of(config)
    examples = {"tokens": np.random.default_rng(0).integers(0, 12, (32, 9)).astype(np.int32)}
    init = lambda key: example.init_params(key, shape)
    loss = lambda params, batch, key: example.loss(params, batch, shape)
    task = made_once(sk.Task(init, loss, optax.sgd(0.1), train_data=examples, rules=example.rules(shape)))
    one, many = (train(program_of(task, mesh=sizes), evaluate=False, steps=2) for sizes in ({}, mesh))
    np.testing.assert_allclose(many.losses, one.losses, rtol=1e-5)
    for x, y in zip(jax.tree.leaves(many.params), jax.tree.leaves(one.params), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-6)


@pytest.mark.transformers
@pytest.mark.parametrize("case", reference.CASES)
def test_transformers_loads_what_is_exported(example, case, tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    source, tuned = tmp_path / "source", tmp_path / "tuned"
    kind = reference.create(case, source)
    config = json.loads((source / "config.json").read_text())
    tuned.mkdir()
    (tuned / "config.json").write_text(json.dumps(config))
    expected = reference.logits(kind, source, reference.inputs(case))
    params = check(example, case, config, source, expected)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(1, {"params": jax.tree.map(jnp.asarray, params)}, {})
    checkpoints.close()
    out = tuned / "model.safetensors"
    export(tmp_path / "checkpoints", 1, out, names=config["model_type"], max_shard_size="1KB")
    assert not out.exists() and (tuned / "model.safetensors.index.json").exists()
    before, after = (kind.from_pretrained(folder).state_dict() for folder in (source, tuned))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name].numpy(), after[name].numpy()) for name in before)
