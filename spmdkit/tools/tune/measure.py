"""`python -m spmdkit.tools.tune.measure REQUEST`: the process in which a variant runs next to the unchanged config.

Both programs train alternately, block by block. A ratio is of adjacent blocks, since on a shared machine only these are
comparable. If the device memory does not hold both states, each block starts from an initial state. A variant that is
faster then computes one step of the same batch with an optimizer that stores the gradient: loss and gradient have to
be those of the unchanged config.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spmdkit.cluster import Cluster, detect_cluster, join
from spmdkit.config import Config, load_config, replace_keys
from spmdkit.errors import SpmdkitError
from spmdkit.foundation.json_output import print_json, reserve_stdout
from spmdkit.foundation.trees import named_leaves
from spmdkit.plan.machine.target import target_of
from spmdkit.plan.search.candidates import variants
from spmdkit.program import allocator
from spmdkit.program.compile_cache import enable_cache
from spmdkit.program.memory import memory_limit
from spmdkit.program.opening import open_program, task_of
from spmdkit.program.program import Program
from spmdkit.tools.bench.figures import interval
from spmdkit.tools.bench.interleaved import Trained, period
from spmdkit.tools.bench.programs import OFF, check_fits, fit_together

BLOCK_S = 0.2
"""Minimum time of a block of steps."""
MIN_PAIRS, MAX_PAIRS = 8, 40
NOISE = 0.99
"""A variant is faster if the 95 % interval of its ratio is below this."""
NUM_STEPS = 1_000_000
LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3, "float64": 1e-10}
"""Largest relative difference of loss and gradient, by the compute dtype: some hundred times its rounding error."""

Result = dict[str, Any]


def main() -> None:
    """Reads the request, and prints its result as one JSON object."""
    reserve_stdout()
    request = json.loads(sys.argv[1])
    try:
        config = load_config(Path(request["config"]))
        retain_memory = allocator.limit_arenas(config.devices, os.environ)
        cluster = join(detect_cluster({}), config.devices)
        with enable_cache(config.compile_cache, config.folder):
            if "settings" in request:
                result = _variants(config, cluster, request["settings"])
            else:
                result = _measure(config, cluster, request, retain_memory)
    except SpmdkitError as error:
        result = {"refused": " ".join(str(error).split())}
    print_json(result)
    os._exit(0)  # without waiting for the threads that read batches


def _variants(config: Config, cluster: Cluster, settings: Sequence[str]) -> Result:
    """Returns the device, and the variants of each setting."""
    target, task = target_of(cluster.devices), task_of(config)
    rows = variants(config, task, target, settings)
    first = cluster.devices[0]
    return {"device": first.device_kind, "platform": first.platform, "num": len(cluster.devices), "variants": rows}


def _measure(config: Config, cluster: Cluster, request: Mapping[str, Any], retain_memory: bool) -> Result:
    """Returns ratio, interval and number of pairs of a variant's time relative to the unchanged config's; and the
    differences of loss and gradient, if it is faster."""
    own = replace_keys(config, {**OFF, "steps": NUM_STEPS})
    changed = replace_keys(own, request["changes"])
    programs = [open_program(each, task_of(each), cluster.devices) for each in (own, changed)]
    for program in programs:
        check_fits(program, cluster.devices)
    if retain_memory and cluster.devices[0].platform == "cpu":
        allocator.disable_trimming()
    found = _ratios(programs, time.monotonic() + request["seconds"])
    low, high = interval(found["ratios"])
    ratio = statistics.median(found.pop("ratios"))
    result = {"ratio": ratio, "low": low, "high": high, **found}
    result["faster"] = high < NOISE
    if result["faster"]:
        result |= _differences(own, changed, cluster)
    return result


def _ratios(programs: list[Program], deadline: float) -> Result:
    """Returns the ratios of adjacent blocks until the deadline, or until the variant is not faster, and the median
    seconds of a step of both."""
    together = fit_together(programs, memory_limit(list(programs[0].mesh.devices.flat)))
    trained = [Trained(program, NUM_STEPS) for program in programs] if together else []
    steps = max(_block(program, trained[i] if together else None) for i, program in enumerate(programs))
    of: list[list[float]] = [[], []]
    number = 0
    while number < MAX_PAIRS and (number < MIN_PAIRS or time.monotonic() < deadline):
        for i in (0, 1) if number % 2 == 0 else (1, 0):
            run = trained[i] if together else _warm(Trained(programs[i], NUM_STEPS))
            run.block_steps = steps
            run.train_block()
            of[i].append(run.blocks[-1].step_s)
        number += 1
        pairs = [b / a for a, b in zip(*of, strict=True)]
        if number >= MIN_PAIRS and interval(pairs)[0] > NOISE:  # it is not faster
            break
    medians = [statistics.median(seconds) for seconds in of]
    return {"ratios": pairs, "pairs": number, "unchanged_s": medians[0], "step_s": medians[1]}


def _block(program: Program, run: Trained | None) -> int:
    """Returns the steps of a block: a multiple of the period of the sync that takes `BLOCK_S`."""
    run, every = _warm(run or Trained(program, NUM_STEPS)), period(program)
    return every * math.ceil(BLOCK_S / every / run.blocks[-1].step_s)


def _warm(run: Trained) -> Trained:
    """Trains two short blocks: the first steps fill caches."""
    run.block_steps = 2
    run.train_block()
    run.train_block()
    return run


def _differences(own: Config, changed: Config, cluster: Cluster) -> Result:
    """Returns the relative differences of the loss and the gradient of one step of the same batch, and `same`.

    If the parameters have another structure (layers in a stack or apart), the norms of the gradients are compared. A
    user-defined step has no recorded gradient: the changes of the parameters are compared.
    """
    (loss, gradient), (other_loss, other) = (_one_step(config, cluster) for config in (own, changed))
    norm = math.sqrt(sum(float(np.vdot(x, x)) for x in gradient.values()))
    if gradient.keys() == other.keys():
        apart = math.sqrt(sum(float(np.linalg.norm(x - other[path]) ** 2) for path, x in gradient.items()))
    else:
        apart = abs(norm - math.sqrt(sum(float(np.vdot(x, x)) for x in other.values())))
    differences = abs(other_loss - loss) / max(abs(loss), 1e-30), apart / max(norm, 1e-30)
    same = all(x <= LOSS_TOLERANCE.get(own.precision.compute, 2e-2) for x in differences)
    return {"loss_difference": differences[0], "gradient_difference": differences[1], "same": same}


def _one_step(config: Config, cluster: Cluster) -> tuple[float, dict[str, np.ndarray]]:
    """Returns (loss, path -> gradient) of the first step."""
    task = task_of(config)
    records = task.train_step is None
    if records:  # the optimizer's state is the gradient
        zeros: Callable[[Any], Any] = lambda params: jax.tree.map(jnp.zeros_like, params)
        optimizer = optax.GradientTransformation(zeros, lambda grads, state, params=None: (zeros(grads), grads))
        task = dataclasses.replace(task, optimizer=optimizer)
        frozen = [{"match": x.match, "frozen": x.frozen} for x in config.groups if x.frozen is not None]
        plain = {"optimizer": None, "learning_rate": None, "clip_norm": None, "groups": frozen, "ema": None}
        config = replace_keys(config, plain)
    program = open_program(config, task, cluster.devices)
    state = program.init()
    before = _host(state.params)
    _, batch = next(iter(program.batches(1, 1)))
    state, output = program.step(state, batch)
    loss = float(program.metrics(output)["loss"])
    if records:
        return loss, _host(state.opt_state)
    return loss, {path: x - before[path] for path, x in _host(state.params).items()}


def _host(tree: Any) -> dict[str, np.ndarray]:
    """Returns path -> values in float64, of the leaves of floating point."""
    leaves = ((path, x) for path, x in named_leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating))
    return {path: np.asarray(jax.device_get(x)).astype(np.float64) for path, x in leaves}


if __name__ == "__main__":
    main()
