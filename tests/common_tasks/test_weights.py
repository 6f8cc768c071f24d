"""Common tasks about weights: each with at most one line more than the shortest form in Accelerate, Lightning, PEFT,
Levanter or transformers."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import spmdkit as sk
from tests.reference import transformers_numbers as reference
from tests.support.common_tasks import ROWS, STEPS, loss_of, plain
from tests.support.environment import environment_of_a_user

st = pytest.importorskip("safetensors.numpy")
ALL_ROWS = {name: np.tile(x, (STEPS // 2, 1)) for name, x in ROWS.items()}
IN_ORDER = "data.shuffle=false"
GPT2 = {
    "task": f"{Path(__file__).parents[2]}/examples/transformer.py:task",
    "task_args": "{config: gpt2/config.json, data: tokens.npz}",
    "learning_rate": "0.01",
}


def close(found, expected):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), found, expected)


def write_tokens(folder):
    tokens = reference.inputs("gpt2")["tokens"]
    np.savez(folder / "tokens.npz", tokens=np.tile(tokens, (8, 1)))
    return tokens


def test_15_gpt2_from_safetensors(user):
    golden = json.loads(reference.GOLDEN.read_text())["gpt2"]
    arrays = {name: reference.draw(name, shape) for name, shape in golden["arrays"].items()}
    (user.path / "gpt2").mkdir()
    st.save_file(arrays, user.path / "gpt2/model.safetensors", metadata={"format": "pt"})
    (user.path / "gpt2/config.json").write_text(json.dumps(golden["config"]))
    tokens = write_tokens(user.path)
    user.with_lines(1 + 1, config="init_from: {file: gpt2/model.safetensors, names: gpt2}\n", base=GPT2)
    losses = user.train()
    logits = np.array(golden["logits"]).reshape(*tokens.shape, -1)[:, :-1]
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
    np.testing.assert_allclose(losses[0], expected, rtol=1e-5)
    assert losses[-1] < losses[0]


def test_16_lora(user):
    user.with_lines(0)
    user.train(IN_ORDER, run="base")
    base = user.params("base")
    adapters = '{"lora": {"a": jax.random.normal(key, (4, 2)), "b": jnp.zeros((2, 8))}}'
    adapted = 'params | {"w": params["w"] + params["lora"]["a"] @ params["lora"]["b"]}'
    task = {
        "init": f"lambda key: init(key) | {adapters}",
        "loss_fn": f"lambda params, batch, key: loss_fn({adapted}, batch, key)",
    }
    user.with_lines(3 + 1, task=task, config='train_only: ["lora/.*"]\ninit_from: {path: base, strict: false}\n')
    losses = user.train(IN_ORDER)
    found = user.params()
    assert all(np.array_equal(found[name], base[name]) for name in base)

    def loss(lora, batch):
        return loss_of({"w": base["w"] + lora["a"] @ lora["b"], "b": base["b"]}, batch)

    lora = {"a": jax.random.normal(jax.random.key(0), (4, 2)), "b": np.zeros((2, 8), np.float32)}
    expected = plain(ALL_ROWS, loss, params=lora)
    close((losses, found["lora"]), (expected.losses, expected.params))


def test_17_frozen_parts(user):
    user.with_lines(1 + 1, config="train_only: [b]\n")
    losses = user.train(IN_ORDER)
    w = np.zeros((4, 8), np.float32)
    expected = plain(ALL_ROWS, lambda b, batch: loss_of({"w": w, "b": b}, batch), params=np.zeros(8, np.float32))
    close((losses, user.params()), (expected.losses, {"w": w, "b": expected.params}))


def test_18_parameter_groups(user):
    base = {"optimizer": "{name: adamw, learning_rate: 0.1, weight_decay: 0.1}"}
    groups = """groups:
  - {match: b, weight_decay: 0}
  - {match: w, learning_rate_scale: 0.1}
"""
    user.with_lines(4 + 1, config=groups, base=base, plain_task={"optimizer": None})
    losses = user.train(IN_ORDER)
    parts = {"w": optax.adamw(0.01, weight_decay=0.1), "b": optax.adamw(0.1, weight_decay=0)}
    expected = plain(ALL_ROWS, optimizer=optax.partition(parts, {"w": "w", "b": "b"}))
    close((losses, user.params()), (expected.losses, expected.params))


@pytest.mark.transformers
def test_19_export_for_transformers(user):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    kind = reference.create("gpt2", user.path / "gpt2")
    tokens = write_tokens(user.path)
    commands = ["spmdkit checkpoint export run tuned/model.safetensors --names gpt2", "cp gpt2/*.json tuned/"]
    user.with_lines(1 + 1, commands=commands, base=GPT2 | {"init_from": "{file: gpt2/model.safetensors, names: gpt2}"})
    user.train()
    user.runs(commands)
    logits = reference.logits(kind, user.path / "tuned", {"tokens": tokens})
    expected = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()
    np.testing.assert_allclose(user.train(f"steps={STEPS + 1}")[-1], expected, rtol=1e-5)


def test_20_plain_orbax(user):
    export = "spmdkit checkpoint export run plain --format orbax"
    user.with_lines(1 + 1, commands=[export, 'ocp.StandardCheckpointer().restore(folder / "plain")'])
    user.train("mesh={fsdp: 4}", "layout={min_shard_bytes: 1}")
    user.runs([export])
    with ocp.StandardCheckpointer() as reader:
        close(reader.restore(user.path / "plain"), user.params())


def test_21_moving_average(user):
    user.with_lines(1 + 1, config="ema: 0.5\n")
    user.train(IN_ORDER)
    average = {"w": np.zeros((4, 8)), "b": np.zeros(8)}
    for step in range(1, STEPS + 1):
        params = plain(ALL_ROWS, steps=step).params
        average = jax.tree.map(lambda old, new: 0.5 * old + 0.5 * new, average, params)
    close(sk.load_params(user.path / "run", what="ema"), average)


def test_22_warm_start_with_another_optimizer(user):
    user.with_lines(0)
    user.train(IN_ORDER, run="first")
    user.with_lines(1 + 1, config="init_from: first\n", plain_task={"optimizer": "optax.adam(0.01)"})
    losses = user.train(IN_ORDER)
    expected = plain(ALL_ROWS, optimizer=optax.adam(0.01), params=user.params("first"))
    close((losses, user.params()), (expected.losses, expected.params))


def test_23_inference_in_another_script(user):
    line = 'params = sk.load_params("run@best")'
    best = {"checkpoint": "{best: {metric: loss, mode: min}}", "eval": "{every_steps: 2}"}
    user.with_lines(1 + 1, commands=[line], plain_task={"eval_data": "data"}, base=best)
    user.train(IN_ORDER)
    script = {"sk": sk}
    exec(line, script)
    close(script["params"], plain(ALL_ROWS).params)


def test_24_jax_export(user):
    """No other trainer has a line in the table; the limit is that of the first form of this task."""
    pytest.importorskip("flatbuffers")
    export = "spmdkit checkpoint export run model.safetensors --stablehlo predict.bin"
    script = """
        import sys
        sys.modules["spmdkit"] = None
        import jax
        import numpy as np
        from pathlib import Path
        from safetensors.numpy import load_file
        program = jax.export.deserialize(bytearray(Path("predict.bin").read_bytes()))
        np.save("found.npy", program.call(load_file("model.safetensors"), dict(np.load("batch.npz"))))
    """
    [load] = [line for line in script.splitlines() if "deserialize" in line]
    predict = 'lambda params, batch: batch["x"] @ params["w"] + params["b"]'
    user.with_lines(3, task={"predict_fn": predict}, commands=[export, load])
    user.train(IN_ORDER)
    user.runs([export])
    np.savez(user.path / "batch.npz", x=ROWS["x"][:5])
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, env=environment_of_a_user())
    params = plain(ALL_ROWS).params
    close(np.load(user.path / "found.npy"), ROWS["x"][:5] @ params["w"] + params["b"])
