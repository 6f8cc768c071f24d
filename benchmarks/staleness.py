"""Which optimizers converge with stale gradients: sgd, momentum, adam and adafactor at staleness 0, 1, 2 and 4.

    python benchmarks/staleness.py FILE [--transports threads,ray] [--seeds 3]
    python benchmarks/staleness.py FILE --save

A student (tanh, width 32) learns a random teacher (tanh, width 8) from 512 examples, batch size 64, 400 updates, with a
parameter server. s + 1 workers that wait for their push (`overlap: false`) have a staleness of s. The rates of an
optimizer are the best of `RATES` in a plain loop of optax, and a third of it. The result is the mean of the last five
evaluation losses. A cell is appended to FILE when it is done, and the next call continues; `--save` writes the medians
for docs/measured/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdkit as sk
from spmdkit.errors import NonFiniteError

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"name": "sgd"},
    "momentum": {"name": "sgd", "momentum": 0.9},
    "adam": {"name": "adam"},
    "adafactor": {"name": "adafactor"},
}
RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
STALENESS = (0, 1, 2, 4)
UPDATES = 400


@sk.task
def task(seed: int = 0) -> sk.Task:
    """Returns the task; the seed selects the teacher."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(1024, 8)).astype(np.float32)
    y = np.tanh(x @ rng.normal(size=(8, 8))) @ rng.normal(size=(8, 1))
    data = {"x": x, "y": y.astype(np.float32)}

    def init(key: jax.Array) -> dict[str, jax.Array]:
        first, second = jax.random.split(key)
        return {
            "a": jax.random.normal(first, (8, 32)) / 8**0.5,
            "b": jnp.zeros(32),
            "c": jax.random.normal(second, (32, 1)) / 32**0.5,
        }

    def loss_fn(params: Any, batch: Any, key: jax.Array) -> Any:
        return sk.mean((_model(params, batch["x"]) - batch["y"]) ** 2)

    train, held_out = ({name: part[rows] for name, part in data.items()} for rows in (slice(512), slice(512, None)))
    return sk.Task(init, loss_fn, optax.sgd(0.1), train_data=train, eval_data=held_out)


def cell(optimizer: str, rate: float, staleness: int, seed: int, transport: str) -> dict[str, Any]:
    """Returns the result of one run."""
    folder = Path(tempfile.mkdtemp(prefix="staleness_"))
    server = {"workers": staleness + 1, "overlap": False, "transport": transport}
    try:
        sk.train(
            sk.Config(
                task=f"{Path(__file__).resolve()}:task",
                task_args={"seed": seed},
                run_dir=str(folder / "run"),
                seed=seed,
                steps=UPDATES,
                batch_size=64,
                devices="cpu:1",
                optimizer=OPTIMIZERS[optimizer] | {"learning_rate": rate},
                sync={"parameter_server": server},
                eval={"every_steps": 20},
                log={"every_steps": 100, "progress": "off"},
                checkpoint=None,
                on_nonfinite="continue",
            )
        )
        lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
        losses = [float(line["loss"]) for line in lines if line.get("split") == "eval"]
        seen = [line["staleness"] for line in lines if "staleness" in line]
        loss = statistics.fmean(losses[-5:])
        return {"loss": loss if np.isfinite(loss) else None, "seen": statistics.fmean(seen)}
    except NonFiniteError:
        return {"loss": None, "seen": None}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def plain_loss(optimizer: str, rate: float) -> float:
    """Returns the last evaluation loss of a synchronous loop without spmdkit."""
    options = dict(OPTIMIZERS[optimizer])
    tx = getattr(optax, options.pop("name"))(rate, **options)
    trained = task()
    data = jax.tree.map(jnp.asarray, trained.train_data)
    params = trained.init(jax.random.key(0))

    def step(carry: Any, rows: jax.Array) -> Any:
        params, state = carry
        batch = {name: x[rows] for name, x in data.items()}
        grads = jax.grad(lambda params: jnp.mean((_model(params, batch["x"]) - batch["y"]) ** 2))(params)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    rows = jax.random.randint(jax.random.key(1), (UPDATES, 64), 0, 512)
    (params, _), _ = jax.jit(lambda carry: jax.lax.scan(step, carry, rows))((params, tx.init(params)))
    held_out = trained.eval_data
    loss = float(jnp.mean((_model(params, held_out["x"]) - held_out["y"]) ** 2))
    return loss if np.isfinite(loss) else float("inf")


def _model(params: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["a"] + params["b"]) @ params["c"]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--transports", default="threads,ray")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    asked = parser.parse_args()
    done = {}
    if asked.file.exists():
        done = {tuple(key): value for key, value in map(json.loads, asked.file.read_text().splitlines())}
    if asked.save:
        save(done)
        return 0

    def result(*key: Any) -> dict[str, Any]:
        if key not in done:
            done[key] = cell(*key)
            with asked.file.open("a") as file:
                file.write(json.dumps([key, done[key]]) + "\n")
            print(*key, done[key], flush=True)
        return done[key]

    best = {optimizer: min(RATES, key=lambda rate: plain_loss(optimizer, rate)) for optimizer in OPTIMIZERS}
    print(best, flush=True)
    for seed in range(asked.seeds):
        for transport in asked.transports.split(","):
            for optimizer in OPTIMIZERS if transport == "threads" or not seed else ():
                for rate in (best[optimizer], round(best[optimizer] / 3, 4)):
                    for staleness in STALENESS:
                        result(optimizer, rate, staleness, seed, transport)
    return 0


def save(done: dict[Any, dict[str, Any]]) -> None:
    """Writes the table: evaluation loss relative to the same seed without staleness."""
    from results import save as save_rows

    rows = []
    for optimizer, transport, rate in sorted({(key[0], key[4], key[1]) for key in done}, key=lambda x: _order(*x)):
        keys = [key for key in done if (key[0], key[4], key[1]) == (optimizer, transport, rate)]
        if not all(any(key[2] == staleness for key in keys) for staleness in STALENESS):
            continue  # not finished
        base = {key[3]: done[key]["loss"] for key in keys if key[2] == 0}
        row = {"optimizer": optimizer, "rate": rate, "transport": transport, "loss at 0": _median(base.values())}
        for staleness in STALENESS[1:]:
            found = [key for key in keys if key[2] == staleness and key[3] in base]
            ratios = [_ratio(done[key]["loss"], base[key[3]]) for key in found]
            seen = [done[key]["seen"] for key in found if done[key]["loss"] is not None]
            row[f"at {staleness}"] = _median(ratios) + (f" (seen: {statistics.fmean(seen):.1f})" if seen else "")
        rows.append(row)
    note = "Evaluation loss relative to that without staleness, inf: not finite; the staleness that was seen."
    save_rows("staleness", rows, "python benchmarks/staleness.py FILE", note=note)


def _order(optimizer: str, transport: str, rate: float) -> tuple[int, bool, float]:
    return [*OPTIMIZERS].index(optimizer), transport == "ray", -rate


def _ratio(loss: float | None, base: float) -> float:
    return float("inf") if loss is None else loss / base


def _median(values: Any) -> str:
    return f"{statistics.median(values):.3g}"


if __name__ == "__main__":
    sys.exit(main())
