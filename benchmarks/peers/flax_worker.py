"""flax linen with a hand-written train step: `jit` on one device, `shard_map` with one `psum` on several.

python flax_worker.py MODEL NUM_DEVICES
"""

from __future__ import annotations

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import optax
from flax_models import losses, optimizer, variables
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from models import MODELS, parameters, rows
from worker import CHECKED_STEPS, LOG_EVERY, serve


def main() -> None:
    """Serves the hand-written loop."""
    model, num = MODELS[sys.argv[1]], int(sys.argv[2])
    jax.config.update("jax_num_cpu_devices", num)
    mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    by_rows, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    data, tx = rows(model), optimizer()
    grad = jax.value_and_grad(lambda params, x, y: losses(params, x, y, model).sum() / model.batch)

    def gradient(params, x, y):
        return lax.psum(grad(params, x, y), "data")

    if num > 1:
        specs = (PartitionSpec(), PartitionSpec("data"), PartitionSpec("data"))
        step_gradient = jax.shard_map(gradient, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
    else:
        step_gradient = grad

    def step(params, opt_state, x, y):
        loss, grads = step_gradient(params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    compiled = jax.jit(step, donate_argnums=(0, 1))
    params = jax.device_put(variables(parameters(model), model), whole)
    state = [params, jax.device_put(tx.init(params), whole)]
    rng, count = np.random.default_rng(0), 0

    def run(steps: int, log_every: int = LOG_EVERY) -> list[float]:
        nonlocal count
        found = []
        for _ in range(steps):
            order = rng.permutation(model.batch)
            *state[:], loss = compiled(*state, *jax.device_put([a[order] for a in data], by_rows))
            count += 1
            if count % log_every == 0:
                found.append(float(loss))
        jax.block_until_ready(state)
        return found

    serve(run(CHECKED_STEPS, 1), run, ["jax", "flax"])


if __name__ == "__main__":
    main()
