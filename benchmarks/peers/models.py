"""The models of the comparison with other frameworks: sizes, initial parameters and rows, the same for all of them.

Parameters are float32 arrays of NumPy by name, products are `x @ w`, and a convolution is [height, width, in, out]. The
training set is one batch, so that the order of its rows does not change the loss.

    gpt     RMSNorm, rotary positions, causal attention with heads of width 32, squared ReLU, no biases
    lstm    embedding, one LSTM (gates in the order input, forget, cell, output), linear head
    resnet  a 3x3 convolution, then three stages of one block (two 3x3 convolutions with group norm); stages start with
            a 1x1 convolution, and the second and third with an average over 2x2
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

VOCAB = 257
HEAD_WIDTH = 32
GROUPS = 8
CLASSES, IMAGE = 10, 32
STAGES = (16, 32, 64)
LEARNING_RATE, B2, DECAY, EPS = 1e-3, 0.95, 0.1, 1e-8
"""AdamW on all parameters."""


class Model(NamedTuple):
    """A model by its kind and sizes; `steps` is the number of steps in a block of a round."""

    kind: str
    batch: int
    steps: int
    width: int = 0
    layers: int = 0
    context: int = 0
    vocab: int = VOCAB
    head_width: int = HEAD_WIDTH

    @property
    def flops(self) -> int:
        """FLOPs of the products of a step of a GPT: 6 for each parameter except `embed` and token, and 6 L T D for each
        token for causal attention, without what the mask excludes (Kaplan et al., 2020, section 2.1)."""
        of_layers = self.layers * (12 * self.width**2 + self.context * self.width)
        return 6 * self.tokens * (of_layers + self.width * self.vocab)

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.context


MODELS = {
    "gpt_1m": Model("gpt", batch=32, steps=8, width=128, layers=4, context=128),
    "gpt_10m": Model("gpt", batch=8, steps=3, width=384, layers=6, context=128),
    "resnet": Model("resnet", batch=64, steps=8),
    "lstm": Model("lstm", batch=32, steps=8, width=256, context=64),
}
GPU_MODELS = {
    "gpt_tiny": Model("gpt", batch=2, steps=1, width=64, layers=2, context=16),
    "gpt_124m": Model("gpt", batch=32, steps=20, width=768, layers=12, context=1024, vocab=50304, head_width=64),
    "gpt_350m": Model("gpt", batch=16, steps=15, width=1024, layers=24, context=1024, vocab=50304, head_width=64),
    "gpt_1300m": Model("gpt", batch=16, steps=8, width=2048, layers=24, context=1024, vocab=50304, head_width=128),
}
"""The models of benchmarks/gpu.py, in bfloat16 with float32 parameters; gpt_tiny is for a machine without a GPU."""


def parameters(model: Model) -> dict[str, np.ndarray]:
    """Returns the initial parameters by name, in the order in which the model uses them."""
    rng = np.random.default_rng(0)

    def normal(*shape: int, fan_in: int) -> np.ndarray:
        return (rng.standard_normal(shape) / math.sqrt(fan_in)).astype(np.float32)

    def ones(*shape: int) -> np.ndarray:
        return np.ones(shape, np.float32)

    D = model.width
    if model.kind == "lstm":
        return {
            "embed": normal(VOCAB, D, fan_in=1),
            "input": normal(D, 4 * D, fan_in=D),
            "recurrent": normal(D, 4 * D, fan_in=D),
            "bias": np.zeros(4 * D, np.float32),
            "head": normal(D, VOCAB, fan_in=D),
        }
    if model.kind == "gpt":
        found = {"embed": normal(model.vocab, D, fan_in=1)}
        for i in range(model.layers):
            found[f"{i}.attention_norm"] = ones(D)
            found |= {f"{i}.{name}": normal(D, D, fan_in=D) for name in ("query", "key", "value")}
            found[f"{i}.out"] = normal(D, D, fan_in=2 * D * model.layers)
            found[f"{i}.mlp_norm"] = ones(D)
            found[f"{i}.up"] = normal(D, 4 * D, fan_in=D)
            found[f"{i}.down"] = normal(4 * D, D, fan_in=8 * D * model.layers)
        return found | {"norm": ones(D), "head": normal(D, model.vocab, fan_in=D)}
    found, last = {"stem": normal(3, 3, 3, STAGES[0], fan_in=27)}, STAGES[0]
    for i, C in enumerate(STAGES):
        found[f"{i}.project"] = normal(1, 1, last, C, fan_in=last)
        for j in range(2):
            found[f"{i}.{j}.scale"], found[f"{i}.{j}.bias"] = ones(C), np.zeros(C, np.float32)
            found[f"{i}.{j}.conv"] = normal(3, 3, C, C, fan_in=9 * C)
        last = C
    return found | {"head": normal(last, CLASSES, fan_in=last)}


def rows(model: Model) -> tuple[np.ndarray, np.ndarray]:
    """Returns (inputs, targets) of the batch: int32[B, T] both, or float32[B, 32, 32, 3] and int32[B]."""
    rng = np.random.default_rng(1)
    if model.kind == "resnet":
        images = rng.standard_normal((model.batch, IMAGE, IMAGE, 3)).astype(np.float32)
        return images, rng.integers(0, CLASSES, model.batch).astype(np.int32)
    tokens = rng.integers(0, model.vocab, (model.batch, model.context + 1)).astype(np.int32)
    return tokens[:, :-1], tokens[:, 1:]


def rotary_angles(model: Model) -> np.ndarray:
    """Returns float32[T, head_width / 2], the angle of each pair of channels at each position."""
    half = model.head_width // 2
    frequencies = 10_000.0 ** (-np.arange(half, dtype=np.float32) / half)
    return np.arange(model.context, dtype=np.float32)[:, None] * frequencies.astype(np.float32)
