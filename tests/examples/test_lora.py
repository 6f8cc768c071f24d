"""LoRA: the adapters of examples/lora.py are trained on a GPT that was trained before."""

from pathlib import Path

import jax
import numpy as np

import spmdkit as sk

CONFIGS = Path(__file__).parents[2] / "configs"
TEXT = ["task_args={width: 32, layers: 1, context: 16, train_bytes: 20000, eval_bytes: 1000}", "log.progress=off"]
SHORT = [*TEXT, "steps=6", "batch_size=8", "checkpoint.every_steps=3"]


def test_adapters_of_a_pretrained_gpt(tmp_path):
    base, lora = tmp_path / "base", tmp_path / "lora"
    sk.train(sk.load_config(CONFIGS / "lora_pretrain.yaml", [*SHORT, f"run_dir={base}", "eval.every_steps=3"]))
    result = sk.train(sk.load_config(CONFIGS / "lora.yaml", [*SHORT, f"run_dir={lora}", f"init_from.path={base}@best"]))
    pretrained, adapted = sk.load_params(f"{base}@best"), sk.load_params(lora)
    adapters = adapted.pop("lora")
    assert jax.tree.all(jax.tree.map(np.array_equal, adapted, pretrained))
    assert all(np.abs(pair["b"]).max() > 0 for pair in adapters.values())
    state = [leaf.path for leaf in result.program.layout if leaf.path.startswith("opt_state")]
    assert all("lora" in path or path.endswith("count") for path in state)
