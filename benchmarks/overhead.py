"""What the toolkit costs over a hand-written JAX loop of the same model and data, paired in one process.

    python benchmarks/overhead.py [--pairs N] [--json]

Both loops: mirrored over two CPU devices, shuffled batches from arrays in memory, loss fetched and written as a JSON line every
ten steps. The hand-written one is what a careful user writes: a jitted shard_map with one psum, donated state, numpy
indexing and device_put in the loop. They take turns in blocks; a ratio is of two neighbouring blocks, and the median over the
pairs is reported, since absolute times on a shared machine mean nothing.

Reported: ratio of step time for steps of about 2, 10 and 50 ms; ratio of device memory (arguments + temporaries + outputs -
aliased, as compiled); seconds from command to first step, more than the hand-written script; seconds that `import
spmdkit` adds to `import jax`; ratio of the time that a save blocks the loop to orbax alone.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import spmdkit as sk
from spmdkit import compat
from spmdkit.cluster import environment, join
from spmdkit.faults import StopSignals
from spmdkit.loop import run_steps
from spmdkit.program import Program
from spmdkit.run import Run

BATCH, FEATURES, CLASSES, NUM_EXAMPLES = 64, 64, 16, 4096
LOG_EVERY = 10
SIZES = {"2 ms": (512, 2, 200), "10 ms": (1024, 3, 40), "50 ms": (1280, 5, 20)}
"""Name -> (width, layers, steps in a block)."""


def make_data() -> dict[str, np.ndarray]:
    """Returns the examples: float32 x, int32 y."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_EXAMPLES, FEATURES)).astype(np.float32)
    return {"x": x, "y": rng.integers(0, CLASSES, NUM_EXAMPLES).astype(np.int32)}


def init(key: jax.Array, width: int, layers: int) -> dict[str, jax.Array]:
    """Returns the weights of a multilayer perceptron."""
    sizes = [FEATURES, *[width] * layers, CLASSES]
    keys = jax.random.split(key, len(sizes) - 1)
    pairs = zip(keys, sizes[:-1], sizes[1:], strict=True)
    return {f"w{i}": jax.random.normal(k, (m, n)) * m**-0.5 for i, (k, m, n) in enumerate(pairs)}


def losses(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    """Returns the cross-entropy of each example."""
    h = batch["x"]
    for name in sorted(params)[:-1]:
        h = jax.nn.relu(h @ params[name])
    return optax.softmax_cross_entropy_with_integer_labels(h @ params[max(params)], batch["y"])


class ByHand:
    """The hand-written loop."""

    def __init__(self, data: dict[str, np.ndarray], width: int, layers: int):
        self.data = data
        mesh = compat.auto_mesh(np.array(jax.devices()[:2]), ("data",))
        self.rows, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
        optimizer = optax.adamw(1e-3)

        def gradient(params, batch):
            params = lax.pcast(params, "data", to="varying")
            loss, grads = jax.value_and_grad(lambda p: losses(p, batch).sum())(params)
            loss, grads = lax.psum((loss, grads), "data")
            return loss / BATCH, jax.tree.map(lambda g: g / BATCH, grads)

        gradient = jax.shard_map(
            gradient, mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec("data")), out_specs=PartitionSpec()
        )

        def step(params, opt_state, batch):
            loss, grads = gradient(params, batch)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        def start():
            params = init(jax.random.key(0), width, layers)
            return params, optimizer.init(params)

        self.start = jax.jit(start, out_shardings=whole)
        params, opt_state = self.start()
        batch = jax.device_put({k: v[:BATCH] for k, v in data.items()}, self.rows)
        self.compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, opt_state, batch).compile()

    def run(self, steps: int, out: Path) -> float:
        """Returns the seconds of `steps` steps."""
        rng = np.random.default_rng(0)
        params, opt_state = jax.block_until_ready(self.start())
        begun = time.perf_counter()
        with out.open("a") as file:
            order = np.empty(0, np.int64)
            for step in range(1, steps + 1):
                if len(order) < BATCH:
                    order = rng.permutation(NUM_EXAMPLES)
                rows, order = order[:BATCH], order[BATCH:]
                batch = jax.device_put({k: v[rows] for k, v in self.data.items()}, self.rows)
                params, opt_state, loss = self.compiled(params, opt_state, batch)
                if step % LOG_EVERY == 0:
                    file.write(json.dumps({"step": step, "loss": float(loss)}) + "\n")
                    file.flush()
        jax.block_until_ready(params)
        return time.perf_counter() - begun


class ByToolkit:
    """The toolkit's own loop, whole: logging, hooks, agreement, prefetch."""

    def __init__(self, data: dict[str, np.ndarray], width: int, layers: int, steps: int, folder: Path):
        def loss_fn(params, batch, key):
            return sk.mean(losses(params, batch))

        start = functools.partial(init, width=width, layers=layers)
        task = sk.Task(init=lambda key: start(key), loss_fn=loss_fn, optimizer=optax.adamw(1e-3), train_data=data)
        config = sk.Config(
            task="overhead.py:task",
            run_dir=str(folder),
            steps=steps,
            batch_size=BATCH,
            devices="cpu:2",
            mesh={"data": 2},
            checkpoint=None,
            log={"every_steps": LOG_EVERY, "progress": "off"},
        )
        self.cluster = join(environment({}), "cpu:2")
        self.program = Program(config, task, self.cluster.devices)
        self.compiled = self.program.compiled

    def run(self) -> float:
        """Returns the seconds of one run's steps; opening and closing the run is set-up, not a step."""
        with Run(self.program.config, self.cluster, self.program) as run, StopSignals() as signals:
            state = jax.block_until_ready(run.restore_or_init())
            # As in `train`, where the data is opened before the step compiles.
            with self.program.stream(1) as batches:
                begun = time.perf_counter()
                state = run_steps(run, self.program, state, batches, signals)
                jax.block_until_ready(state.params)
                return time.perf_counter() - begun


def memory(compiled: jax.stages.Compiled) -> int:
    """Returns the bytes of one device that a step needs."""
    m = compiled.memory_analysis()
    return m.argument_size_in_bytes + m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes


def compare_steps(name: str, pairs: int, folder: Path) -> dict[str, float]:
    """Returns the ratios of one size."""
    width, layers, steps = SIZES[name]
    data = make_data()
    hand = ByHand(data, width, layers)
    kit = ByToolkit(data, width, layers, steps, folder / name.replace(" ", ""))
    out = folder / "hand.jsonl"
    hand.run(steps, out), kit.run()
    ratios, times = [], []
    for i in range(pairs):
        # The order alternates, so that a drift of the machine does not fall on one side.
        first, second = (lambda: hand.run(steps, out)), kit.run
        a, b = (first(), second()) if i % 2 == 0 else reversed((second(), first()))
        ratios.append(b / a)
        times.append(a / steps)
    low, _, high = statistics.quantiles(ratios, n=4)
    return {
        "step_ms": statistics.median(times) * 1e3,
        "ratio": statistics.median(ratios),
        "ratio_quartiles": [low, high],
        "memory_ratio": memory(kit.compiled) / memory(hand.compiled),
    }


FIRST_STEP_BY_HAND = """
import os, time
import jax, jax.numpy as jnp, numpy as np, optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
jax.config.update("jax_platforms", "cpu"); jax.config.update("jax_num_cpu_devices", 2)
mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
x = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
optimizer = optax.adamw(1e-3)
params = jax.device_put({"w": jnp.zeros((64, 64))}, whole)
opt_state = jax.device_put(optimizer.init(params), whole)
def gradient(p, x):
    p = lax.pcast(p, "data", to="varying")
    loss, grads = jax.value_and_grad(lambda p: ((x @ p["w"] - x) ** 2).sum())(p)
    return lax.psum((loss / 64, jax.tree.map(lambda g: g / 64, grads)), "data")
gradient = jax.shard_map(gradient, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
def step(p, s, x):
    loss, grads = gradient(p, x)
    updates, s = optimizer.update(grads, s, p)
    return optax.apply_updates(p, updates), s, loss
_, _, loss = jax.jit(step, donate_argnums=(0, 1))(params, opt_state, jax.device_put(x, rows))
print("first step", float(loss), time.time() - float(os.environ["BEGUN"]), flush=True)
"""

FIRST_STEP_TASK = """
import jax.numpy as jnp, numpy as np, optax
import spmdkit as sk
x = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
def init(key):
    return {"w": jnp.zeros((64, 64))}
def loss_fn(params, batch, key):
    return sk.mean(((batch["x"] @ params["w"] - batch["x"]) ** 2).sum(1))
task = sk.Task(init, loss_fn, optax.adamw(1e-3), train_data={"x": x})
"""


def first_step_seconds(folder: Path, tries: int = 5) -> dict[str, float]:
    """Returns the median seconds from command to first step of both, and the median difference of neighbours."""
    script, task = folder / "hand.py", folder / "task.py"
    script.write_text(FIRST_STEP_BY_HAND)
    task.write_text(FIRST_STEP_TASK)
    config = folder / "first.yaml"
    config.write_text("task: task.py:task\nsteps: 1\nbatch_size: 64\ndevices: cpu:2\nmesh: {data: 2}\n")
    hand, kit = [], []
    for i in range(tries):
        hand.append(_until([sys.executable, str(script)], "first step"))
        kit.append(_until([sys.executable, "-m", "spmdkit", "train", str(config), f"run_dir=first{i}"], "step 1/1"))
    return {
        "by_hand_s": statistics.median(hand),
        "toolkit_s": statistics.median(kit),
        "more_s": statistics.median(k - h for k, h in zip(kit, hand, strict=True)),
    }


def _until(command: list[str], sign: str) -> float:
    begun = time.time()
    env = {**os.environ, "BEGUN": str(begun), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if sign in line:
                seconds = time.time() - begun
                child.wait(timeout=60)
                return seconds
    raise RuntimeError(f"{command} never printed {sign!r}")


def import_seconds(tries: int = 7) -> dict[str, float]:
    """Returns what `import spmdkit` adds to `import jax`, with every public name used once."""
    code = (
        "import time, jax; t = time.perf_counter(); import spmdkit; a = time.perf_counter() - t; "
        "[getattr(spmdkit, n) for n in spmdkit.__all__]; print(a, time.perf_counter() - t)"
    )
    runs = []
    for _ in range(tries):
        text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
        runs.append([float(x) for x in text.stdout.split()])
    return {
        "import_s": statistics.median(r[0] for r in runs),
        "every_name_s": statistics.median(r[1] for r in runs),
    }


def main() -> None:
    """Measures all of it and prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=41)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    # Before the first use of JAX, so that both loops run on the devices as the toolkit sets them up.
    join(environment({}), "cpu:2")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = {
            "steps": {size: compare_steps(size, options.pairs, folder) for size in SIZES},
            "first_step": first_step_seconds(folder),
            "import": import_seconds(),
        }
    if options.json:
        print(json.dumps(found))
        return
    for size, row in found["steps"].items():
        low, high = row["ratio_quartiles"]
        print(
            f"step of {size:>5} (measured {row['step_ms']:5.1f} ms)  time ratio {row['ratio']:.3f} "
            f"(quartiles {low:.3f} to {high:.3f})  memory ratio {row['memory_ratio']:.4f}"
        )
    first, imported = found["first_step"], found["import"]
    print(
        f"command to first step: {first['toolkit_s']:.2f} s, by hand {first['by_hand_s']:.2f} s, {first['more_s']:+.2f} s"
    )
    print(
        f"import spmdkit adds {imported['import_s']:.3f} s to import jax; every public name {imported['every_name_s']:.3f} s"
    )


if __name__ == "__main__":
    main()
