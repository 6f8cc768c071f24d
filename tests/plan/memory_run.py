"""Trains one step and prints (predicted peak of all devices, bytes by which the process grew at most).

The allocator takes every large array from the kernel and returns it immediately (glibc's MALLOC_MMAP_THRESHOLD_,
MALLOC_TRIM_THRESHOLD_). Otherwise its caches, up to a third of the peak here, are measured too.
"""

import gc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdkit as sk
from spmdkit.plan.compiled_step import read_program
from tests.support.core_runs import program_of

jax.config.update("jax_num_cpu_devices", 4)
D, F, B, LAYERS = 1024, 4096, 2048, 4


def loss(params, batch, key):
    h = batch["x"]
    for i in range(LAYERS):
        h = jnp.tanh(sk.shard(h @ params[f"up{i}"], "batch", None)) @ params[f"down{i}"]
    return sk.mean(((h - batch["y"]) ** 2).mean(-1))


def resident(name):
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


shapes = {f"up{i}": (D, F) for i in range(LAYERS)} | {f"down{i}": (F, D) for i in range(LAYERS)}
x = np.zeros((B, D), np.float32)
task = sk.Task(
    init=lambda key: {name: jnp.full(shape, 0.01) for name, shape in shapes.items()},
    loss_fn=loss,
    optimizer=optax.adam(1e-3),
    train_data={"x": x, "y": x},
)
program = program_of(task, mesh={"fsdp": 4}, batch_size=B)
predicted = read_program(program).memory.peak_bytes * program.mesh.size
gc.collect()
before = resident("VmRSS")
state = program.init()
batch = program.put({"x": x, "y": x})
jax.block_until_ready((state, batch))
Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
jax.block_until_ready(program.step(state, batch))
print(predicted, resident("VmHWM") - before)
