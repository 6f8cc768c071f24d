"""The temporary memory of the GPT at real size, by the TPU compiler, against the minimum of its strategy."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from spmdkit.config import load_config
from spmdkit.ops.vocab import LOGITS_BYTES

pytestmark = [pytest.mark.tpu, pytest.mark.slow]
CONFIGS = Path(__file__).parents[2] / "configs"
BF16, F32 = 2, 4


def floor(config, num_devices):
    """Returns bytes of one device that no order of the same work can do without: ZeRO 3 over f, tensor t, remat `full`.

    A device has n tokens and 1/t of heads, hidden units and vocabulary. At the start of the backward pass the inputs of
    all L layers are there, n D / t elements each. On top of them, in bfloat16 unless float32 is named:

        at the head: its gathered weights and their whole gradient, 2 D V / t; its input, n D, with a gradient that is
        summed in float32, n D; one block of logits (`LOGITS_BYTES` of float32, held in bfloat16).

        at the last layer: the gathered weights, 2 D F / t + D H (2 N + 2 K) / t, and the gradient of one of the MLP's,
        D F / t; what attention's backward pass reads: q, k, v and its result, n H (2 N + 2 K) / t, and n N / t float32;
        what the MLP's reads: its input, n D, hidden units and their gradient, 2 n F / t; the gradient of its result,
        n D; the residual stream and its gradient, 2 n D / t; its own shards of the gradients of a layer.

    Not counted: copies of shards in bfloat16, the next layer's weights, tiles, fragmentation.
    """
    m, sizes = config.task_args, config.mesh.sizes()
    t = sizes.get("tensor", 1)
    f = num_devices // t
    tokens = config.batch_size // f * m["context"]
    width, hidden, vocab = m["width"], m["hidden"] // t, m["vocab"] // t
    head_dim = m["width"] // m["heads"]
    projected = head_dim * (2 * m["heads"] + 2 * m["kv_heads"]) // t
    stream, whole = tokens * width // t * BF16, tokens * width * BF16
    saved = m["layers"] * stream
    weights = (2 * width * hidden + width * projected) * BF16
    head = 2 * width * vocab * BF16 + whole + tokens * width * F32 + LOGITS_BYTES // F32 * BF16
    attended = tokens * projected * BF16 + tokens * m["heads"] // t * F32
    layer = (
        weights + width * hidden * BF16 + attended + 2 * whole + 2 * tokens * hidden * BF16 + 2 * stream + weights // f
    )
    return saved + max(head, layer)


@pytest.mark.parametrize("name, target, num", [("llama_8b_v5p", "4x4x4", 64), ("llama_70b_v5p", "8x8x16", 1024)])
def test_temporary_memory_within_a_fifth_of_the_floor(name, target, num):
    path = CONFIGS / f"{name}.yaml"
    command = [sys.executable, "-m", "spmdkit", "plan", str(path), "--target", f"tpu:v5p:{target}", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    least = floor(load_config(path), num)
    assert least < found["memory"]["temp_bytes"] < 1.2 * least
    assert found["findings"] == []
    assert "Involuntary full rematerialization" not in ended.stderr
