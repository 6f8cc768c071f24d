"""What small models of transformers compute: `architectures.json`, by `make extras`.

    python tests/reference/transformers_numbers.py [--write]

compares with the file, or writes it. Nothing of spmdkit runs here; tests/examples/test_transformer.py compares
examples/transformer.py with the file. It has the config, the names and shapes of the arrays in the safetensors file,
and the logits. The arrays and the inputs are drawn from their names.
"""

from __future__ import annotations

import json
import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parent / "architectures.json"
B, T, V = 2, 7, 11
SIZES = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 12}
DECODER = {**SIZES, "vocab_size": V, "num_key_value_heads": 2, "max_position_embeddings": 16, "pad_token_id": 0}
ROPE_3 = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE_3 |= {"original_max_position_embeddings": 64}
ENCODER = {**SIZES, "layer_norm_eps": 1e-6}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3, "query_pre_attn_scalar": 5}
CAPS = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0}
TOKENS = {**ENCODER, "vocab_size": V, "max_position_embeddings": T}
CASES = {
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": V, "n_positions": 8}),
    "llama": ("LlamaForCausalLM", {**DECODER, "head_dim": 6, "rope_parameters": ROPE_3}),
    "llama-biases": (
        "LlamaForCausalLM",
        {**DECODER, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "mistral": ("MistralForCausalLM", {**DECODER, "sliding_window": 4}),
    "qwen2": ("Qwen2ForCausalLM", DECODER),
    "qwen3": ("Qwen3ForCausalLM", {**DECODER, "head_dim": 4}),
    "gemma": ("GemmaForCausalLM", {**DECODER, "head_dim": 4}),
    "gemma2": ("Gemma2ForCausalLM", {**DECODER, "head_dim": 4, **WINDOWS, **CAPS}),
    "gemma3_text": ("Gemma3ForCausalLM", {**DECODER, "head_dim": 4, **WINDOWS}),
    "bert": ("BertForMaskedLM", TOKENS),
    "bert-classes": ("BertForSequenceClassification", {**TOKENS, "num_labels": 3}),
    "vit": ("ViTForImageClassification", {**ENCODER, "image_size": 6, "patch_size": 3, "num_labels": 3}),
}


def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns float32 normal numbers that depend on the name alone."""
    return 0.4 * np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape).astype(np.float32)


def inputs(kind: str) -> dict[str, np.ndarray]:
    """Returns the batch of examples/transformer.py."""
    if kind == "vit":
        return {"images": draw("images", (B, 6, 6, 3))}
    random = np.random.default_rng(0)
    batch = {"tokens": random.integers(1, V, (B, T)).astype(np.int32)}
    if kind.startswith("bert"):
        batch["types"] = np.int32(np.arange(T) >= 3) * np.ones((B, 1), np.int32)
        batch["mask"] = np.int32(np.arange(T) < np.array([[T], [T - 2]]))
    return batch


def model_inputs(batch: dict[str, np.ndarray]) -> dict[str, object]:
    """Returns the same batch for a model of transformers."""
    import torch

    if "images" in batch:
        return {"pixel_values": torch.from_numpy(batch["images"].transpose(0, 3, 1, 2).copy())}
    names = {"tokens": "input_ids", "types": "token_type_ids", "mask": "attention_mask"}
    return {names[key]: torch.from_numpy(x.astype(np.int64)) for key, x in batch.items()}


def create(case: str, folder: Path) -> type:
    """Writes a model with random weights to a folder, and returns its class."""
    import torch
    import transformers

    name, config = CASES[case]
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    kind(kind.config_class(**config)).save_pretrained(folder)
    return kind


def logits(kind: type, folder: Path, batch: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the logits of the model in a folder."""
    import torch

    model = kind.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(**model_inputs(batch)).logits.numpy()


def golden(case: str) -> dict[str, object]:
    """Returns the config, the shapes of the arrays and the logits of a case."""
    from safetensors.numpy import load_file, save_file

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kind = create(case, folder)
        file = folder / "model.safetensors"
        arrays = {name: draw(name, array.shape) for name, array in sorted(load_file(file).items())}
        save_file(arrays, file, metadata={"format": "pt"})
        found = logits(kind, folder, inputs(case))
        config = json.loads((folder / "config.json").read_text())
    shapes = {name: list(array.shape) for name, array in arrays.items()}
    return {"config": config, "arrays": shapes, "logits": [float(f"{x:.7g}") for x in found.ravel()]}


def main() -> None:
    found = {case: golden(case) for case in CASES}
    if "--write" in sys.argv:
        rows = [f'"{case}": {json.dumps(entry)}' for case, entry in found.items()]
        GOLDEN.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    stored = json.loads(GOLDEN.read_text())
    for case, entry in found.items():
        assert entry["arrays"] == stored[case]["arrays"], case
        np.testing.assert_allclose(entry["logits"], stored[case]["logits"], rtol=1e-5, atol=1e-6, err_msg=case)
    print(f"{len(found)} architectures equal {GOLDEN.name}")


if __name__ == "__main__":
    main()
