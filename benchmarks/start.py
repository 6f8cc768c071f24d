"""Seconds from a command to its first step, of `spmdkit train` and of a hand-written script, in alternating pairs.

    python benchmarks/start.py [--rounds 7]

    cold       the compile cache is empty
    warm       the compile cache holds the programs
    restart    after SIGKILL: from the checkpoint of step 10 to step 11; the script restores with orbax

Both train the same perceptron of 24 layers on two CPU devices, mirrored, and find the bytecode of every module. Also:
`spmdkit config check` of a config that names no optax function, and what imports add to `import jax`. Goals: ratios of
1.2, 0.4 s for `config check`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from results import interval, is_met, save

RATIO, CHECK_S, TIMEOUT_S = 1.2, 0.4, 60.0
MODEL = """
import jax, jax.numpy as jnp, numpy as np, optax
LAYERS, WIDTH = 24, 64
X = np.random.default_rng(0).normal(size=(1024, WIDTH)).astype(np.float32)
def init(key):
    keys = jax.random.split(key, LAYERS)
    return {f"w{i:02}": jax.random.normal(k, (WIDTH, WIDTH)) * WIDTH**-0.5 for i, k in enumerate(keys)}
def losses(params, x):
    h = x
    for name in sorted(params):
        h = jnp.tanh(h @ params[name])
    return ((h - x) ** 2).mean(1)
"""
BY_HAND = (
    MODEL
    + """
import os, sys, time
from functools import partial
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
jax.config.update("jax_platforms", "cpu"); jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
steps, folder = int(sys.argv[2]), sys.argv[3]
mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
optimizer = optax.adamw(1e-3)
@partial(jax.jit, out_shardings=whole)
def start():
    params = init(jax.random.key(0))
    return {"params": params, "opt_state": optimizer.init(params)}
def gradient(p, x):
    p = lax.pcast(p, "data", to="varying")
    loss, grads = jax.value_and_grad(lambda p: losses(p, x).sum())(p)
    return lax.psum((loss / 64, jax.tree.map(lambda g: g / 64, grads)), "data")
gradient = jax.shard_map(gradient, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
@partial(jax.jit, donate_argnums=0)
def step(state, x):
    loss, grads = gradient(state["params"], x)
    updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss
begin, manager = 0, None
if folder:
    import orbax.checkpoint as ocp
    manager = ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(save_interval_steps=10))
    begin = manager.latest_step() or 0
if begin:
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), jax.eval_shape(start))
    state = manager.restore(begin, args=ocp.args.StandardRestore(shapes))
else:
    state = start()
rng = np.random.default_rng(0)
for number in range(begin + 1, steps + 1):
    x = jax.device_put(X[rng.permutation(1024)[:64]], rows)
    state, loss = step(state, x)
    print(f"step {number}/ {float(loss)}", flush=True)
    if manager is not None and number % 10 == 0:
        manager.save(number, args=ocp.args.StandardSave(state)); manager.wait_until_finished()
        print(f"saved {number}", flush=True)
"""
)
TASK = (
    MODEL
    + """
import spmdkit as sk
def loss_fn(params, batch, key):
    return sk.mean(losses(params, batch["x"]))
task = sk.Task(init, loss_fn, optax.adamw(1e-3), train_data={"x": X})
"""
)
CONFIG = """task: task.py:task
steps: 100000
batch_size: 64
devices: cpu:2
mesh: {data: 2}
log: {every_steps: 1, progress: plain}
checkpoint: {every_steps: 10}
"""


class Commands:
    """The two commands, in a folder with their files."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "hand.py").write_text(BY_HAND)
        (folder / "task.py").write_text(TASK)
        (folder / "first.yaml").write_text(CONFIG)
        env = {
            k: v for k, v in os.environ.items() if k not in ("PYTHONDONTWRITEBYTECODE", "XLA_FLAGS", "JAX_PLATFORMS")
        }
        self.env = env | {"PYTHONUNBUFFERED": "1", "PYTHONPYCACHEPREFIX": str(folder / "bytecode")}

    def by_hand(self, cache: str, run: str) -> list[str]:
        """Returns the command of the script; `run`: folder of its checkpoints, or empty."""
        run = str(self.folder / run) if run else ""
        return [sys.executable, str(self.folder / "hand.py"), str(self.folder / f"{cache}-hand"), "100000", run]

    def spmdkit(self, cache: str, run: str) -> list[str]:
        """Returns the command of `spmdkit train`."""
        (self.folder / f"{cache}-kit").mkdir(mode=0o700, exist_ok=True)
        keys = [f"run_dir={run}", f"compile_cache.directory={cache}-kit"]
        return [sys.executable, "-m", "spmdkit", "train", str(self.folder / "first.yaml"), *keys]

    def until(self, command: list[str], line: str, then: Callable[[], bool] = lambda: True) -> float:
        """Returns the seconds until a command prints a line with this text; then kills it, as soon as `then` holds."""
        begun = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=self.env, cwd=self.folder) as child:
            assert child.stdout is not None
            deadline = threading.Timer(TIMEOUT_S, child.kill)
            deadline.start()
            lines = (" ".join(text.split()) for text in child.stdout)
            seconds = next((time.perf_counter() - begun for text in lines if line in text), None)
            while seconds is not None and not then() and child.poll() is None:
                time.sleep(0.05)
            child.kill()
            deadline.cancel()
        if seconds is None:
            raise SystemExit(f"{' '.join(command)} did not print {line!r}")
        return seconds


def pairs(commands: Commands, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Returns situation -> (seconds of spmdkit, seconds of the script) of each round."""
    saved = commands.folder / "saved" / "checkpoints" / "10"
    commands.until(commands.by_hand("warm", ""), "step 1/")
    commands.until(commands.spmdkit("warm", "fill"), "step 1/")
    commands.until(commands.by_hand("warm", "saved-hand"), "saved 10")
    commands.until(commands.spmdkit("warm", "saved"), "step 10/", saved.exists)
    found: dict[str, list[tuple[float, float]]] = {"cold": [], "warm": [], "restart": []}
    for number in range(rounds):
        for name, of in found.items():
            cache, line = ("warm", "step 1/") if name != "cold" else (f"cold{number}", "step 1/")
            run, hand_run = f"{name}{number}", ""
            if name == "restart":
                hand_run, line = f"{run}-hand", "step 11/"
                shutil.copytree(commands.folder / "saved", commands.folder / run)
                shutil.copytree(commands.folder / "saved-hand", commands.folder / hand_run)
            both = (commands.spmdkit(cache, run), commands.by_hand(cache, hand_run))
            order = (0, 1) if number % 2 == 0 else (1, 0)
            seconds = {i: commands.until(both[i], line) for i in order}
            of.append((seconds[0], seconds[1]))
    return found


def seconds_of(command: list[str], env: dict[str, str]) -> float:
    """Returns the seconds of a whole command."""
    begun = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, timeout=120, env=env)
    return time.perf_counter() - begun


def imports(commands: Commands, rounds: int) -> list[dict[str, Any]]:
    """Returns the rows of `config check` and of imports."""
    check = [sys.executable, "-m", "spmdkit", "config", "check", str(commands.folder / "first.yaml")]
    names = "[getattr(spmdkit, name) for name in spmdkit.__all__]"
    codes = ["import jax", "import jax, spmdkit", f"import jax, spmdkit; {names}"]
    times: list[list[float]] = []
    for _ in range(rounds + 1):
        times.append([seconds_of(c, commands.env) for c in (check, *([sys.executable, "-c", code] for code in codes))])
    checks, jax, own, every = (list(of) for of in zip(*times[1:], strict=True))
    more: Callable[[list[float]], float] = lambda of: statistics.median(a - b for a, b in zip(of, jax, strict=True))
    return [
        {"what": "`spmdkit config check`, no optax function named", "spmdkit, s": statistics.median(checks)},
        {"what": "`import spmdkit`, more than `import jax`", "spmdkit, s": more(own)},
        {"what": "every public name of spmdkit, more than `import jax`", "spmdkit, s": more(every)},
    ]


def main() -> None:
    """Measures, saves the table and prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="pairs of each situation")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        commands = Commands(Path(name))
        found, others = pairs(commands, options.rounds), imports(commands, options.rounds)
    rows: list[dict[str, Any]] = []
    for situation, of in found.items():
        ratio = interval([a / b for a, b in of])
        medians = [statistics.median(seconds) for seconds in zip(*of, strict=True)]
        rows.append(
            {
                "what": f"first step, {situation}" if situation != "restart" else "step 11, restart after SIGKILL",
                "spmdkit, s": medians[0],
                "script, s": medians[1],
                "ratio": ratio,
                "goal": f"{RATIO}",
                "met": is_met(ratio, RATIO),
            }
        )
    others[0] |= {"goal": f"{CHECK_S} s", "met": others[0]["spmdkit, s"] <= CHECK_S}
    rows += others
    save("start", rows, f"python benchmarks/start.py --rounds {options.rounds}")
    print(json.dumps({"benchmark": "start", "rows": rows}))


if __name__ == "__main__":
    main()
