"""spmdkit: the loop of `spmdkit train` with its defaults. The GPT is that of examples/gpt.py, the other models are
those of flax_models.py.

python spmdkit_worker.py MODEL NUM_DEVICES
"""

from __future__ import annotations

import os
import sys
import tempfile
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
from models import HEAD_WIDTH, MODELS, VOCAB, Model, parameters, rows
from overhead import Block
from worker import CHECKED_STEPS, LOG_EVERY, serve

import spmdkit as sk
from spmdkit.cluster import detect_cluster, join
from spmdkit.data import DeviceBatches
from spmdkit.faults import StopSignals
from spmdkit.program import allocator
from spmdkit.program.program import Program
from spmdkit.run.run import Run
from spmdkit.run.trainer import run_steps

MOST_STEPS = 1_000_000


def gpt_parameters(w: dict[str, np.ndarray], model: Model) -> Any:
    """Returns the parameters of examples/gpt.py."""
    D, heads = model.width, (model.width // HEAD_WIDTH, HEAD_WIDTH)
    shapes = {"query": (D, *heads), "key": (D, *heads), "value": (D, *heads), "out": (*heads, D)}
    names = ("attention_norm", "query", "key", "value", "out", "mlp_norm", "up", "down")
    of_layer = lambda i: {name: w[f"{i}.{name}"].reshape(shapes.get(name, w[f"{i}.{name}"].shape)) for name in names}
    return {name: w[name] for name in ("embed", "norm", "head")} | {
        "blocks": [of_layer(i) for i in range(model.layers)]
    }


def make_task(model: Model) -> sk.Task:
    """Returns the task of a model."""
    x, y = rows(model)
    if model.kind != "gpt":
        initial = flax_models.variables(parameters(model), model)
        loss_fn = lambda params, batch, key: sk.mean(flax_models.losses(params, batch["x"], batch["y"], model))
        rules = None
    else:
        initial = gpt_parameters(parameters(model), model)
        D, heads = model.width, model.width // HEAD_WIDTH
        rules = gpt.rules(gpt.Shape(D, model.layers, heads, heads, 4 * D, VOCAB, stacked=False))

        def loss_fn(params: Any, batch: Any, key: Any) -> Any:
            return gpt.losses(params, batch["x"], batch["y"], jnp.ones(batch["x"].shape, bool), gpt.Options())

    init = lambda key: jax.tree.map(jnp.asarray, initial)
    options = {} if rules is None else {"rules": rules}
    return sk.Task(init, loss_fn, flax_models.optimizer(), train_data={"x": x, "y": y}, **options)


def main() -> None:
    """Serves the loop of the toolkit: logging, hooks, agreement, prefetch and checks."""
    model, num = MODELS[sys.argv[1]], int(sys.argv[2])
    devices = f"cpu:{num}"
    retains = allocator.use_one_arena(devices, os.environ)
    with ExitStack() as stack:
        config = sk.Config(
            task="spmdkit_worker.py:task",
            run_dir=stack.enter_context(tempfile.TemporaryDirectory()) + "/run",
            steps=MOST_STEPS,
            batch_size=model.batch,
            devices=devices,
            mesh={"data": num},
            checkpoint=None,
            log={"every_steps": LOG_EVERY, "progress": "off"},
        )
        cluster = join(detect_cluster({}), devices)
        program = Program(config, make_task(model), cluster.devices)
        state, losses = program.init(), []
        for _, batch in program.batches(1, CHECKED_STEPS):
            state, metrics = program.step(state, batch)
            losses.append(float(metrics["loss"]))
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

        serve(losses, run, ["jax"])


if __name__ == "__main__":
    main()
