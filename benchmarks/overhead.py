"""What the toolkit costs over a hand-written JAX loop of the same model and data, paired in one process.

    python benchmarks/overhead.py [--sittings N] [--sizes "2 ms" "10 ms" "50 ms" "1 s"] [--looks shipped|both|neither]

Both loops: mirrored over two CPU devices, shuffled batches from arrays in memory, loss fetched and written as a JSON
line every ten steps. The hand-written one is what a careful user writes: a jitted shard_map with one psum, donated
state, numpy indexing and device_put in the loop. Both train on and on, in turns of a fraction of a second, and the
order of the two alternates (the toolkit's batches come from one stream, which a run begins once: 0.9 ms of its first
step that are not counted here);
a ratio is of two neighbouring blocks, since absolute times on a shared machine mean nothing. Reported is the median of
all ratios with its 95 % interval from order statistics, which assumes no distribution. Several sittings, each a process
of its own that builds both anew and chooses the model's width for the step time, show what one process cannot: how far
medians of equal programs lie apart.

Who looks whether the gradient is finite: the toolkit alone, as it is shipped and as the hand-written script usually
does not; both, each in its own way; or neither. The last two tell what the loop costs for the same work.

Reported: ratio of wall time and of processor time for steps of about 2, 10, 50 ms and 1 s, with the goal for the wall
time; ratio of device memory (arguments + temporaries + outputs - aliased, as compiled). Only `--looks shipped` is
saved.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, cast

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from results import interval, is_met, save

import spmdkit as sk
from spmdkit import compat
from spmdkit.cluster import detect_cluster, join
from spmdkit.data import DeviceBatches
from spmdkit.faults import StopSignals
from spmdkit.program.program import Program
from spmdkit.run.run import Run
from spmdkit.run.trainer import run_steps

BATCH, FEATURES, CLASSES, NUM_EXAMPLES = 64, 64, 16, 4096
LOG_EVERY = 10
LAYERS = 3
WIDTHS = (256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048, 3072, 4096, 5120, 6144)
SITTING_TIMEOUT_S = 300


class Size(NamedTuple):
    """A step time to measure at, the steps in a block, the pairs of blocks in a sitting, and the goal of the ratio."""

    step_s: float
    steps: int
    pairs: int
    goal: float


SIZES = {
    "2 ms": Size(0.002, 50, 100, 1.05),
    "10 ms": Size(0.010, 20, 60, 1.01),
    "50 ms": Size(0.050, 10, 60, 1.00),
    "1 s": Size(1.0, 2, 10, 1.00),
}
SITTINGS = 5


def make_data() -> dict[str, np.ndarray]:
    """Returns the examples: float32 x, int32 y."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_EXAMPLES, FEATURES)).astype(np.float32)
    return {"x": x, "y": rng.integers(0, CLASSES, NUM_EXAMPLES).astype(np.int32)}


def init(key: jax.Array, width: int) -> dict[str, jax.Array]:
    """Returns the weights of a multilayer perceptron."""
    sizes = [FEATURES, *[width] * LAYERS, CLASSES]
    keys = jax.random.split(key, len(sizes) - 1)
    pairs = zip(keys, sizes[:-1], sizes[1:], strict=True)
    return {f"w{i}": jax.random.normal(k, (m, n)) * m**-0.5 for i, (k, m, n) in enumerate(pairs)}


def losses(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    """Returns the cross-entropy of each example."""
    h = batch["x"]
    for name in sorted(params)[:-1]:
        h = jax.nn.relu(h @ params[name])
    return optax.softmax_cross_entropy_with_integer_labels(h @ params[max(params)], batch["y"])


class Spent(NamedTuple):
    """Seconds of a block, on the clock and on the processors."""

    wall_s: float
    cpu_s: float

    @classmethod
    def now(cls) -> Spent:
        """Returns the clocks."""
        return cls(time.perf_counter(), time.process_time())

    def until_now(self) -> Spent:
        """Returns what was spent since."""
        return Spent(time.perf_counter() - self.wall_s, time.process_time() - self.cpu_s)


class ByHand:
    """The hand-written loop."""

    def __init__(self, data: dict[str, np.ndarray], width: int, out: Path, looks: bool = False):
        self.data, self.file = data, out.open("a")
        self.rng, self.order, self.step = np.random.default_rng(0), np.empty(0, np.int64), 0
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
            if looks:
                finite = jnp.array([jnp.isfinite(x).all() for x in (loss, *jax.tree.leaves(grads))]).all()
                loss = jnp.where(finite, loss, jnp.nan)  # read, with the loss, every ten steps
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        def start():
            params = init(jax.random.key(0), width)
            return params, optimizer.init(params)

        self.params, self.opt_state = jax.jit(start, out_shardings=whole)()
        batch = jax.device_put({k: v[:BATCH] for k, v in data.items()}, self.rows)
        self.compiled = jax.jit(step, donate_argnums=(0, 1)).lower(self.params, self.opt_state, batch).compile()

    def run(self, steps: int) -> Spent:
        """Trains `steps` steps on; returns what they took."""
        data, file, rng, order, compiled = self.data, self.file, self.rng, self.order, self.compiled
        params, opt_state = self.params, self.opt_state
        begun = Spent.now()
        for step in range(self.step + 1, self.step + steps + 1):
            if len(order) < BATCH:
                order = rng.permutation(NUM_EXAMPLES)
            rows, order = order[:BATCH], order[BATCH:]
            batch = jax.device_put({k: v[rows] for k, v in data.items()}, self.rows)
            params, opt_state, loss = compiled(params, opt_state, batch)
            if step % LOG_EVERY == 0:
                file.write(json.dumps({"step": step, "loss": float(loss)}) + "\n")
                file.flush()
        jax.block_until_ready(params)
        spent = begun.until_now()
        self.params, self.opt_state, self.order, self.step = params, opt_state, order, step
        return spent


class Block:
    """So many batches of a stream that stays open, as the loop takes them."""

    def __init__(self, batches: DeviceBatches, num: int):
        self._batches, self._left = batches, num

    def __iter__(self) -> Block:
        return self

    def __next__(self) -> tuple[int, object, float]:
        if not self._left:
            raise StopIteration
        self._left -= 1
        return next(self._batches)

    def close(self) -> None:
        """Leaves the stream open for the next block."""


class ByToolkit:
    """The toolkit's own loop, whole: logging, hooks, agreement, prefetch. A context manager: one run that is open
    throughout."""

    def __init__(self, data: dict[str, np.ndarray], width: int, most_steps: int, folder: Path, looks: bool = True):
        def loss_fn(params, batch, key):
            return sk.mean(losses(params, batch))

        task = sk.Task(init=lambda key: init(key, width), loss_fn=loss_fn, optimizer=optax.adamw(1e-3), train_data=data)
        config = sk.Config(
            task="overhead.py:task",
            run_dir=str(folder),
            steps=most_steps,
            batch_size=BATCH,
            devices="cpu:2",
            mesh={"data": 2},
            checkpoint=None,
            on_nonfinite="stop" if looks else "continue",
            log={"every_steps": LOG_EVERY, "progress": "off"},
        )
        self.most_steps = most_steps
        cluster = join(detect_cluster({}), "cpu:2")
        self.program = Program(config, task, cluster.devices)
        self.compiled = self.program.compiled
        self.context = Run(config, cluster, self.program)

    def __enter__(self) -> ByToolkit:
        with ExitStack() as stack:
            self.training = stack.enter_context(self.context)
            self.training.signals = stack.enter_context(StopSignals())
            self.state = jax.block_until_ready(self.training.restore_or_init())
            self.batches = stack.enter_context(self.program.stream(1, self.most_steps))
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.__exit__(*error)

    def run(self, steps: int) -> Spent:
        """Trains `steps` steps on; returns what they took."""
        begun = Spent.now()
        self.state, _ = run_steps(self.training, self.state, cast(DeviceBatches, Block(self.batches, steps)))
        jax.block_until_ready(self.state.params)
        return begun.until_now()


def memory(compiled: jax.stages.Compiled) -> int:
    """Returns the bytes of one device that a step needs."""
    m = compiled.memory_analysis()
    return m.argument_size_in_bytes + m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes


def sitting(size: Size, pairs: int, looks: str) -> dict[str, object]:
    """Returns the ratios of all pairs of blocks of one size, measured in this process."""
    data, steps = make_data(), size.steps
    with tempfile.TemporaryDirectory() as name:
        hand, width = _fitting(data, size.step_s, Path(name) / "hand.jsonl", looks == "both")
        with ByToolkit(data, width, (pairs + 1) * steps, Path(name) / "run", looks != "neither") as kit:
            hand.run(steps), kit.run(steps)
            found: list[tuple[Spent, Spent]] = []
            for i in range(pairs):
                # The order alternates, so that a drift of the machine does not fall on one side.
                if i % 2 == 0:
                    a, b = hand.run(steps), kit.run(steps)
                else:
                    b, a = kit.run(steps), hand.run(steps)
                found.append((a, b))
            return {
                "width": width,
                "step_ms": statistics.median(a.wall_s for a, _ in found) / steps * 1e3,
                "wall": [b.wall_s / a.wall_s for a, b in found],
                "cpu": [b.cpu_s / a.cpu_s for a, b in found],
                "memory_ratio": memory(kit.compiled) / memory(hand.compiled),
            }


def _fitting(data: dict[str, np.ndarray], step_s: float, out: Path, looks: bool) -> tuple[ByHand, int]:
    """Returns the hand-written loop of the smallest width whose step takes about `step_s` now, and that width."""
    for width in (width for width in WIDTHS if step_s < 0.5 or width > 2048):
        hand = ByHand(data, width, out, looks)
        num = 10 if step_s < 0.5 else 1
        hand.run(num)
        # Three times, since one busy moment of the machine makes a small model look slow.
        if all(min(hand.run(num).wall_s for _ in range(5)) / num > 0.85 * step_s for _ in range(3)):
            break
    return hand, width


def compare_steps(size: str, sittings: list[dict]) -> dict[str, object]:
    """Returns the medians over all pairs of all sittings of one size, with their intervals."""
    row: dict[str, object] = {"size": size, "step_ms": statistics.median(s["step_ms"] for s in sittings)}
    for clock in ("wall", "cpu"):
        ratios = [ratio for s in sittings for ratio in s[clock]]
        row[clock] = {
            **interval(ratios),
            "sittings": [statistics.median(s[clock]) for s in sittings],
        }
    row["memory_ratio"] = max(s["memory_ratio"] for s in sittings)
    return row


def main() -> None:
    """Measures all of it and prints a table; each sitting as it ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sittings", type=int, default=SITTINGS, help="processes per size")
    parser.add_argument("--pairs", type=int, help="pairs of blocks in a sitting")
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=list(SIZES), help="step times to measure at")
    parser.add_argument(
        "--looks",
        default="shipped",
        choices=["shipped", "both", "neither"],
        help="at the gradient: the toolkit alone, both, neither",
    )
    parser.add_argument("--sitting", choices=list(SIZES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sitting:
        # Before the first use of JAX, so that both loops run on the devices as the toolkit sets them up.
        join(detect_cluster({}), "cpu:2")
        size = SIZES[options.sitting]
        print(json.dumps(sitting(size, options.pairs or size.pairs, options.looks)))
        return
    sittings: dict[str, list[dict]] = {size: [] for size in options.sizes}
    # In turns, so that an hour in which the machine is busy does not fall on one size.
    for number in range(options.sittings):
        for size, of_size in sittings.items():
            command = [sys.executable, __file__, "--sitting", size, "--looks", options.looks]
            command += ["--pairs", str(options.pairs)] if options.pairs else []
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=SITTING_TIMEOUT_S)
            of_size.append(json.loads(done.stdout.splitlines()[-1]))
            print(f"sitting {number + 1}: {_line(compare_steps(size, of_size[-1:]))}", flush=True)
    rows = [compare_steps(size, of_size) for size, of_size in sittings.items() if of_size]
    table = [
        {
            "step": f"{row['size']} ({row['step_ms']:.1f} ms)",
            "wall time": row["wall"],
            "goal": f"{SIZES[row['size']].goal:.2f}",
            "met": is_met(row["wall"], SIZES[row["size"]].goal),
            "processor time": row["cpu"],
            "device memory": row["memory_ratio"],
        }
        for row in rows
    ]
    if options.looks == "shipped":
        sizes = "" if options.sizes == list(SIZES) else " --sizes " + " ".join(f'"{size}"' for size in options.sizes)
        pairs = f" --pairs {options.pairs}" if options.pairs else ""
        save("overhead", table, f"python benchmarks/overhead.py --sittings {options.sittings}{pairs}{sizes}")
    print(json.dumps({"benchmark": "overhead", "looks": options.looks, "rows": table}))


def _line(row: dict) -> str:
    words = [f"step of {row['size']:>5} (measured {row['step_ms']:5.1f} ms), {row['wall']['rounds']:3} pairs"]
    for clock in ("wall", "cpu"):
        words.append("{} ratio {median:.3f} (95 % {low:.3f} to {high:.3f})".format(clock, **row[clock]))
    return "  ".join(words)


if __name__ == "__main__":
    main()
