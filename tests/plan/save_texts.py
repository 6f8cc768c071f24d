"""Saves what the compilers of TPUs and GPUs make of some programs, so that reading it is tested without them.

    python tests/plan/save_texts.py [gpu]      (with the extra tpu installed, or gpu-plan)

Paths of files and the compiler's own notes are taken out; nothing that the parser reads is changed.
"""

import gzip
import re
import sys
from pathlib import Path

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

sys.path.insert(0, str(Path(__file__).parents[2]))

from spmdkit.config import load_config, parse_config
from spmdkit.plan.machine.compiler_process import in_compiler_process
from spmdkit.plan.machine.target import open_target, parse_target
from spmdkit.program.opening import open_program, task_of
from tests.plan.golden_collectives import LITTLE_TEXT
from tests.plan.known_traffic import compiled

ROOT = Path(__file__).parents[2]
TEXTS = Path(__file__).with_name("texts")
SAVED = {
    "ring_in_a_scan": "tpu:v5p:2x2x2",
    "nested_scans": "tpu:v5p:2x2x2",
    "zero_2": "tpu:v5e:2x4",
    "conditional": "tpu:v5e:2x4",
    "accumulation": "tpu:v5e:2x4",
}
STRATEGIES = {"fsdp": "tpu:v5e:2x4", "zero2": "tpu:v5p:2x2x2", "pipeline": "tpu:v5p:2x2x2", "context": "tpu:v5e:2x4"}
"""Configs of `configs/`: a text is saved as `fsdp_step`."""


def gather_over_a_torus():
    """Returns the text of a gather over all 64 chips of a v5p 4x4x4: the compiler sends it as an all_reduce."""
    return _moved(
        "tpu:v5p:4x4x4",
        (1, 64),
        lambda w: lax.all_gather(w, "fsdp", tiled=True),
        PartitionSpec("fsdp"),
        PartitionSpec(),
    )


def scatter_in_a_fusion():
    """Returns the text of a reduce_scatter over 8 chips: an all_reduce whose result is cut in the same fusion."""
    scatter = lambda w: lax.psum_scatter(w, "fsdp", tiled=True)
    return _moved("tpu:v5p:2x2x2", (2, 4), scatter, PartitionSpec(), PartitionSpec("fsdp"))


def _moved(target, shape, function, before, after):
    devices = np.array(open_target(parse_target(target)).devices)
    mesh = Mesh(devices.reshape(shape), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    run = jax.shard_map(function, mesh=mesh, in_specs=before, out_specs=after, check_vma=False)
    w = jax.ShapeDtypeStruct((4096, 4096), "bfloat16", sharding=NamedSharding(mesh, before))
    return jax.jit(run).lower(w).compile().as_text()


GPT = {
    "task": f"{Path(__file__).parents[2] / 'examples' / 'gpt.py'}:task",
    "task_args": {
        "width": 256, "layers": 4, "heads": 4, "hidden": 512, "vocab": 512, "context": 512, "random_tokens": True,
    },
    "batch_size": 32,
    "precision": "bfloat16",
    "learning_rate": 1e-3,
    "mesh": {"data": 2, "tensor": 4},
}  # fmt: skip
"""A GPT with the attention of cuDNN, on 8 GPUs."""


def gpt_on_gpus(machine):
    """Returns the text of the step of `GPT`."""
    config = parse_config(GPT)
    return {"text": open_program(config, task_of(config), machine.devices).compiled.as_text()}


def save(name, text):
    text = re.sub(r'^(\d+) ".*/([^/"]*)"$', r'\1 "/home/user/\2"', text, flags=re.M)
    text = re.sub(r'"debug":"(?:[^"\\]|\\.)*"', '"debug":""', text)
    TEXTS.mkdir(exist_ok=True)
    (TEXTS / f"{name}.txt.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


def step(name, target):
    """Returns the text of the step of `configs/<name>.yaml`."""
    machine = open_target(parse_target(target))
    config = load_config(ROOT / "configs" / f"{name}.yaml", LITTLE_TEXT)
    return open_program(config, task_of(config), machine.devices, machine.memory_limit_bytes).compiled.as_text()


if __name__ == "__main__":
    if "gpu" in sys.argv:
        save("gpt_h100", in_compiler_process(gpt_on_gpus, open_target(parse_target("gpu:h100:8")))["text"])
        sys.exit()
    for name, target in SAVED.items():
        save(name, compiled(name, open_target(parse_target(target)).devices).as_text())
    save("gather_over_a_torus", gather_over_a_torus())
    save("scatter_in_a_fusion", scatter_in_a_fusion())
