"""Name maps of architectures: layers stacked or not, other names of files, and what does not fit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.checkpoint import Checkpoints, architectures, export
from spmdkit.checkpoint.lazy_array import LazyArray
from spmdkit.errors import ConfigError
from spmdkit.foundation.trees import named_leaves
from tests.support.core_runs import program_of

st = pytest.importorskip("safetensors.numpy")

V, D, N, K, H, F, LAYERS = 12, 8, 4, 2, 3, 16, 2
SHAPES = {"attention_norm": (D,), "query": (D, N, H), "key": (D, K, H), "value": (D, K, H), "out": (N, H, D)}
SHAPES |= {"mlp_norm": (D,), "gate": (D, F), "up": (D, F), "down": (F, D)}
X = np.ones((32, D), np.float32)


def params_of(draw, stacked=True):
    one = {name: draw((LAYERS, *shape)) for name, shape in SHAPES.items()}
    layers = one if stacked else [{name: x[i] for name, x in one.items()} for i in range(LAYERS)]
    return {"embed": draw((V, D)), "blocks": layers, "norm": draw((D,)), "head": draw((D, V))}


def arrays_of(stacked=True):
    random = np.random.default_rng(0)
    return params_of(lambda shape: random.normal(size=shape).astype(np.float32), stacked)


def program(stacked=True, **settings):
    init = lambda key: params_of(jnp.zeros, stacked)
    rules = [("blocks/query", [None, "embed", "heads", None])] if stacked else []
    loss = lambda params, batch, key: sk.mean((batch["x"] * params["norm"]).sum(-1))
    return program_of(sk.Task(init, loss, optax.sgd(0.1), train_data={"x": X}, rules=rules), **settings)


def file_of(stacked=True):
    return names_of(dict(named_leaves(arrays_of(stacked))))


def names_of(arrays):
    lazy = {path: LazyArray.of(path, x) for path, x in arrays.items()}
    return {name: x.read() for name, x in architectures.write(architectures.find("llama"), lazy).items()}


def save(arrays, path):
    st.save_file({name: np.ascontiguousarray(x) for name, x in arrays.items()}, path)
    return {"file": str(path), "names": "llama"}


@pytest.mark.parametrize("stacked", [True, False])
def test_a_run_loads_and_exports_the_names_of_a_map(tmp_path, stacked):
    arrays = file_of()
    assert arrays["model.layers.1.self_attn.q_proj.weight"].shape == (N * H, D)
    assert all(np.array_equal(x, arrays[name]) for name, x in file_of(stacked=False).items())
    mesh = {"fsdp": 2, "tensor": 2} if stacked else {}
    state = program(stacked, mesh=mesh, init_from=save(arrays, tmp_path / "model.safetensors")).init()
    for (path, found), expected in zip(named_leaves(state.params), jax.tree.leaves(arrays_of(stacked)), strict=True):
        assert np.array_equal(found, expected), path
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(1, state, {}, {})
    checkpoints.close()
    export(tmp_path / "checkpoints", 1, tmp_path / "out.safetensors", names="llama")
    written = st.load_file(tmp_path / "out.safetensors")
    assert written.keys() == arrays.keys()
    assert all(np.array_equal(x, written[name]) for name, x in arrays.items())


def test_names_without_a_prefix_and_buffers_are_known(tmp_path):
    arrays = {name.removeprefix("model."): x for name, x in file_of().items()}
    arrays["layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(3, np.float32)
    built = program(init_from=save(arrays, tmp_path / "model.safetensors"))
    assert np.array_equal(built.init().params["blocks"]["up"], arrays_of()["blocks"]["up"])
    assert any("not used: layers.0.self_attn.rotary_emb" in note for note in built.init_from.notes)


def without(arrays, *names):
    return {name: x for name, x in arrays.items() if name not in names}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: without(a, "lm_head.weight"), r"head: expected float32\[8,12\], not found"),
        (lambda a: without(a, "model.layers.1.mlp.up_proj.weight"), r"blocks/up: expected .*, not found"),
        (lambda a: a | {"model.norm.bias": np.ones(D, np.float32)}, r"model\.norm\.bias float32\[8\] is no leaf"),
        (lambda a: a | {"lora.a": np.ones(D, np.float32)}, r"lora\.a float32\[8\] is no leaf"),
        (
            lambda a: a | {"lm_head.weight": a["lm_head.weight"].T},
            r"lm_head\.weight float32\[8,12\]: expected \[12, 8\] \(V D\) for head of \[8, 12\] \(D V\)",
        ),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path, change, message):
    given = save(change(file_of()), tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        program(init_from=given).init_from  # noqa: B018


def test_a_folder_of_transformers_is_read_and_names_its_map(tmp_path):
    save(file_of(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    built = program(init_from={"path": str(tmp_path), "names": "llama"})
    assert np.array_equal(built.init().params["norm"], arrays_of()["norm"])
    for given in (str(tmp_path), {"path": str(tmp_path), "names": "gpt2"}):
        with pytest.raises(ConfigError, match=r"The config\.json next to it is of llama: set names: llama\."):
            program(init_from=given).init_from  # noqa: B018


def test_an_unknown_map_or_parameter_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"names: no map 'lama'\. Did you mean 'llama'"):
        program(init_from=save(file_of(), tmp_path / "model.safetensors") | {"names": "lama"}).init_from  # noqa: B018
    with pytest.raises(ConfigError, match=r"no row for lora/a \(1 of 1 parameters\)"):
        names_of({"lora/a": X})
    with pytest.raises(ConfigError, match=r"blocks/\*/query: expected the dims D N H, found \[8, 12\]"):
        names_of({"blocks/0/query": np.ones((D, N * H))})
