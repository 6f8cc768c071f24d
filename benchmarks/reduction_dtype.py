"""The dtype in which gradients are added over devices, in a bfloat16 step: loss and gradient error with bfloat16 and
with float32, byte GPT of `examples/gpt.py`.

    python benchmarks/reduction_dtype.py [--steps 300] [--seeds 0 1 2] [--replicas 8 64] [--save]

Each replica differentiates its part of the batch in bfloat16. The parts are added one after the other, as in a ring:
in bfloat16, every partial sum is rounded. XLA's CPU backend adds bfloat16 in float32, so the ring is a loop on one
device here. The last line is JSON: for each seed and dtype the loss in nats per byte on the evaluation bytes, and for
each number of replicas a thousand times the relative 2-norm of the gradient's error against float64, at steps of the
run of seed 0. `one device` is the bfloat16 step without replicas.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import gpt
import results

WIDTH, LAYERS, CONTEXT, BATCH = 64, 2, 64, 64
KINDS = ("float32", "bfloat16")
CHECKS = 4
"""Times in a run at which gradients are compared with float64."""


def gradient(task: Any, params: Any, batch: Any, replicas: int, dtype: Any, compute: Any = jnp.bfloat16) -> Any:
    """Returns the gradient of the mean loss, added over `replicas` parts of the batch in `dtype`."""
    parts = jax.tree.map(lambda x: x.reshape(replicas, -1, *x.shape[1:]), batch)
    count = batch["num_targets"].sum()
    cast = jax.tree.map(lambda p: p.astype(compute), params)

    def add(total: Any, part: Any) -> Any:
        share = jax.grad(lambda p: task.loss_fn(p, part, None)[0].sum / count)(cast)
        return jax.tree.map(lambda t, g: (t + g.astype(t.dtype)).astype(t.dtype), total, share), None

    start = jax.tree.map(lambda p: jnp.zeros(p.shape, dtype), params)
    return jax.lax.scan(add, start, parts)[0]


def error(found: Any, expected: Any) -> float:
    """Returns a thousand times the relative 2-norm of the error of a tree."""
    pairs = [
        (np.asarray(a, np.float64), np.asarray(b))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    ]
    return 1000 * float(np.sqrt(sum(((a - b) ** 2).sum() for a, b in pairs) / sum((b**2).sum() for _, b in pairs)))


def gradient_errors(task: Any, replicas: list[int]) -> Callable[[Any, Any], dict[str, float]]:
    """Returns `(params, batch) -> name -> error of a gradient against float64`."""
    forms = {"one device": (1, jnp.float32)}
    forms |= {f"{n} replicas, {d.name}": (n, d) for n in replicas for d in map(jnp.dtype, KINDS)}
    compiled = {
        name: jax.jit(lambda p, batch, n=n, d=d: gradient(task, p, batch, n, d)) for name, (n, d) in forms.items()
    }
    exact = jax.jit(lambda p, batch: gradient(task, p, batch, 1, jnp.float64, jnp.float64))

    def errors(params: Any, batch: Any) -> dict[str, float]:
        with jax.enable_x64(True):
            wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), params)
            expected = jax.device_get(exact(wide, batch))
        return {name: error(of(params, batch), expected) for name, of in compiled.items()}

    return errors


def trained(task: Any, seed: int, steps: int, dtype: Any, check: Callable[[int, Any, Any], None]) -> float:
    """Returns the evaluation loss after `steps` steps with 8 replicas; `check(step, params, batch)` before each."""
    rate = optax.warmup_cosine_decay_schedule(0.0, 5e-3, 20, steps)
    tx = optax.chain(optax.clip_by_global_norm(1.0), task.optimizer(rate))
    params = task.init(jax.random.key(seed))
    state, draws = tx.init(params), np.random.default_rng(seed)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), gradient(task, params, batch, 8, dtype))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for number in range(steps):
        rows = draws.integers(0, len(task.train_data["tokens"]), BATCH)
        batch = {name: np.asarray(x[rows]) for name, x in task.train_data.items()}
        check(number, params, batch)
        params, state = step(params, state, batch)
    loss = jax.jit(lambda p, rows: task.loss_fn(p, rows, None)[0])
    means = [loss(params, {name: x[i : i + BATCH] for name, x in task.eval_data.items()}) for i in range(0, 256, BATCH)]
    return float(sum(m.sum for m in means) / sum(m.count for m in means))


def rows(losses: dict[int, dict[str, float]], of_gradients: dict[int, dict[str, float]]) -> list[dict[str, Any]]:
    """Returns the rows of the table."""
    table: list[dict[str, Any]] = [{"figure": f"loss after the last step, seed {n}", **of} for n, of in losses.items()]
    for step, errors in of_gradients.items():
        for num in sorted({name.split()[0] for name in errors} - {"one"}, key=int):
            of = {kind: errors[f"{num} replicas, {kind}"] for kind in KINDS}
            name = f"1000 x gradient's error, step {step}, {num} replicas"
            table.append({"figure": name, **of, "one device": errors["one device"]})
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--replicas", type=int, nargs="+", default=[8, 64], help="divisors of 64")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/reduction_dtype.json")
    asked = parser.parse_args()
    task = gpt.task(width=WIDTH, layers=LAYERS, context=CONTEXT, scan_layers=False)
    errors = gradient_errors(task, asked.replicas)
    losses, of_gradients = dict[int, dict[str, float]](), dict[int, dict[str, float]]()
    for seed in asked.seeds:
        for kind in KINDS:

            def check(number: int, params: Any, batch: Any, is_checked: bool = (seed, kind) == (0, KINDS[0])) -> None:
                if is_checked and number % (asked.steps // CHECKS) == 0:
                    of_gradients[number] = errors(params, batch)

            losses.setdefault(seed, {})[kind] = trained(task, seed, asked.steps, jnp.dtype(kind), check)
            print(f"seed {seed}, {kind}: {losses[seed][kind]:.4f} nats per byte", flush=True)
    found = rows(losses, of_gradients)
    if asked.save:
        results.save("reduction_dtype", found, " ".join(["python", "benchmarks/reduction_dtype.py", *sys.argv[1:]]))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
