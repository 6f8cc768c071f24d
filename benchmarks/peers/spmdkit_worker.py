"""spmdkit: the loop of `spmdkit train` with its defaults. The GPT is that of examples/gpt.py, the other models are
those of flax_models.py.

python spmdkit_worker.py MODEL NUM_DEVICES [gpu]

`gpu` is one device of the default platform, with bfloat16 compute, and reports the plan of the step, the peak memory
and the rate of a matrix product (models.GPU_MODELS).
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "benchmarks")]

import flax_models
import gpt
import jax
import jax.numpy as jnp
import numpy as np
from models import GPU_MODELS, MODELS, Model, parameters, rows
from overhead import Block
from worker import CHECKED_STEPS, LOG_EVERY, serve

import spmdkit as sk
from spmdkit.cluster import detect_cluster, join
from spmdkit.data import DeviceBatches
from spmdkit.faults import StopSignals
from spmdkit.plan.document import plan_program
from spmdkit.plan.machine.target import target_of
from spmdkit.program import allocator
from spmdkit.program.program import Program
from spmdkit.run.run import Run
from spmdkit.run.trainer import run_steps

MOST_STEPS = 1_000_000


def gpt_parameters(w: dict[str, np.ndarray], model: Model) -> Any:
    """Returns the parameters of examples/gpt.py."""
    D, heads = model.width, (model.width // model.head_width, model.head_width)
    shapes = {"query": (D, *heads), "key": (D, *heads), "value": (D, *heads), "out": (*heads, D)}
    names = ("attention_norm", "query", "key", "value", "out", "mlp_norm", "up", "down")
    of_layer = lambda i: {name: w[f"{i}.{name}"].reshape(shapes.get(name, w[f"{i}.{name}"].shape)) for name in names}
    return {name: w[name] for name in ("embed", "norm", "head")} | {
        "blocks": [of_layer(i) for i in range(model.layers)]
    }


def make_task(model: Model) -> sk.Task:
    """Returns the task of a model."""
    x, y = rows(model)
    D, heads = model.width, model.width // model.head_width
    if model.kind != "gpt":
        initial = flax_models.variables(parameters(model), model)
        loss_fn = lambda params, batch, key: sk.mean(flax_models.losses(params, batch["x"], batch["y"], model))
        rules = None
    else:
        # Layers are stacked on accelerators, where parameters are drawn on the device: as constants of a program they
        # would be too large.
        is_gpu_model = model in GPU_MODELS.values()
        shape = gpt.Shape(D, model.layers, heads, heads, 4 * D, model.vocab, stacked=is_gpu_model)
        initial = None if is_gpu_model else gpt_parameters(parameters(model), model)
        rules = gpt.rules(shape)

        def loss_fn(params: Any, batch: Any, key: Any) -> Any:
            return gpt.losses(params, batch["x"], batch["y"], jnp.ones(batch["x"].shape, bool), gpt.Options())

    init = lambda key: gpt.init_params(key, shape) if initial is None else jax.tree.map(jnp.asarray, initial)
    options = {} if rules is None else {"rules": rules}
    return sk.Task(init, loss_fn, flax_models.optimizer(), train_data={"x": x, "y": y}, **options)


def figures_of(program: Program) -> dict[str, Any]:
    """Returns the plan of the step on its devices, and the memory and the rates of the device. After a step."""
    target = target_of(program.mesh.devices.flatten().tolist())
    plan, device = plan_program(program, target), target.devices[0]
    return {
        "peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
        "predicted_s": plan["predicted_step_s"],
        "predicted_bytes": plan["memory"]["peak_bytes"],
        "datasheet_flops_per_s": target.chip.peak("bfloat16"),
        "product_flops_per_s": product_rate(8192 if device.platform == "gpu" else 128),
    }


def product_rate(width: int, repeats: int = 20) -> float:
    """Returns the FLOP/s of a square product in bfloat16, the median of five measurements of `repeats` products."""
    a = jax.random.normal(jax.random.key(0), (width, width), jnp.bfloat16)

    @jax.jit
    def run(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, repeats, lambda i, x: x @ a * (width**-0.5), x)

    seconds = []
    for _ in range(6):  # the first compiles
        begun = time.perf_counter()
        jax.block_until_ready(run(a))
        seconds.append(time.perf_counter() - begun)
    return 2 * width**3 * repeats / statistics.median(seconds[1:])


def main() -> None:
    """Serves the loop of the toolkit: logging, hooks, agreement, prefetch and checks."""
    model, num, is_gpu_mode = (MODELS | GPU_MODELS)[sys.argv[1]], int(sys.argv[2]), sys.argv[3:] == ["gpu"]
    devices = [0] if is_gpu_mode else f"cpu:{num}"
    retains = not is_gpu_mode and allocator.limit_arenas(devices, os.environ)
    with ExitStack() as stack:
        config = sk.Config(
            task="spmdkit_worker.py:task",
            run_dir=stack.enter_context(tempfile.TemporaryDirectory()) + "/run",
            steps=MOST_STEPS,
            batch_size=model.batch,
            devices=devices,
            mesh={} if is_gpu_mode else {"data": num},
            precision={"compute": "bfloat16" if is_gpu_mode else "float32"},
            checkpoint=None,
            log={"every_steps": LOG_EVERY, "progress": "off"},
        )
        cluster = join(detect_cluster({}), devices)
        program = Program(config, make_task(model), cluster.devices)
        state, losses = program.init(), []
        for _, batch in program.batches(1, CHECKED_STEPS):
            state, metrics = program.step(state, batch)
            losses.append(float(metrics["loss"]))
        figures = figures_of(program) if is_gpu_mode else {}
        del state  # room for that of the run
        if retains:
            allocator.disable_trimming()
        training = stack.enter_context(Run(config, cluster, program))
        training.signals = stack.enter_context(StopSignals())
        state = training.restore_or_init()
        batches = stack.enter_context(program.stream(1, MOST_STEPS))

        def run(steps: int) -> None:
            nonlocal state
            state, _ = run_steps(training, state, cast(DeviceBatches, Block(batches, steps)))
            jax.block_until_ready(state)

        serve(losses, run, ["jax"], **figures)


if __name__ == "__main__":
    main()
