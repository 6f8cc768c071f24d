"""The temporary memory of the GPT at real size, by the TPU compiler, against the least that its strategy can live
with."""

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

    A device has B sequences of T tokens, so n = B T tokens, and 1/t of heads, hidden units and vocabulary. At every
    moment of the backward pass the inputs of the layers that it has still to do are there; at its start of all L
    layers, n D / t elements each.
    On top of them at the head, before the first layer's gradient exists:

        the gathered head and its whole gradient, 2 D V / t (each is one array to the collective that gathers or
        scatters it);
        the head's input, n D, its gradient, added up over blocks of columns in float32, n D; one block of logits
        (`LOGITS_BYTES` of float32, held in bfloat16).

    and at the last layer's MLP, where the gradients of the attention's part are still to come:

        the gathered weights, 2 D F / t + D H (2 N + 2 K) / t, and the gradient of one of the MLP's, D F / t;
        what attention's backward pass reads: q, k, v and its result, n H (2 N + 2 K) / t, a log-sum-exp, n N / t
        float32;
        what the MLP's reads: its normed input, n D, hidden units before the square, n F / t, and their gradient, n F /
        t;
        the gradient of its result over all positions, n D; the residual stream and its gradient, 2 n D / t;
        its own shards of the gradients of a layer (the sum over layers grows as the saved inputs are used up, and is
        smaller).

    All in bfloat16 but where it says float32. Not counted, though this program has them: the copies of its shards in
    bfloat16 (2 of 4 bytes a parameter), the next layer's weights, gathered while this one computes, tiles,
    fragmentation.
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
def test_temporary_memory_is_within_a_fifth_of_the_floor(name, target, num):
    path = CONFIGS / f"{name}.yaml"
    command = [sys.executable, "-m", "spmdkit", "plan", str(path), "--target", f"tpu:v5p:{target}", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    least = floor(load_config(path), num)
    assert least < found["memory"]["temp_bytes"] < 1.2 * least
    assert found["findings"] == []
    assert "Involuntary full rematerialization" not in ended.stderr
