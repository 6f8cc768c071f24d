"""`predict`: what `Task.predict_fn` returns for every row of a data set, from a checkpoint, in the order of the rows.

Each batch is one evaluated batch. A replica writes its rows into zeros of the size of the batch, and they are added.
Wire: an all-reduce of the results of a batch over the replicas.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from spmdkit.cluster import Cluster
from spmdkit.config import Config, load_config, replace_keys
from spmdkit.data import open_stream
from spmdkit.errors import CheckpointWriteError, ConfigError
from spmdkit.foundation import files
from spmdkit.foundation.formatting import visible
from spmdkit.foundation.trees import describe, is_key, named_leaves
from spmdkit.foundation.user_code import call_user
from spmdkit.program.opening import join_processes, task_of
from spmdkit.program.program import Program
from spmdkit.program.task import Task
from spmdkit.run.loop import on_checkpoint
from spmdkit.step import trace_context
from spmdkit.step.metrics.aggregates import Bincount
from spmdkit.step.metrics.mean import example_mask
from spmdkit.step.replica_collectives import num_replicas, replica_index
from spmdkit.step.state import TrainState

SUFFIXES = (".npz", ".npy")


def predict(
    config: Config | str | Path,
    data: Any = "eval_data",
    *,
    step: int | None = None,
    best: bool = False,
    initial: bool = False,
    cluster: Cluster | None = None,
    task: Task | None = None,
) -> Any:
    """Returns what `Task.predict_fn` returns for every row, as numpy arrays on every process, in the order of the rows.

    Several evaluation sets give a dict by their names.

    Args:
        data: `eval_data` or `train_data` of the task, or a data set with any structure that `predict_fn` accepts.
        step, best, initial: the state: of a step, the best checkpoint, or before step 1; default: the newest.

    Raises:
        ConfigError: the task has no `predict_fn` or no data, or a result has not one row per example.
        CheckpointError: the checkpoint does not exist, is damaged, or is of a different model.
    """
    config = config if isinstance(config, Config) else load_config(config)
    cluster = cluster or join_processes(config)
    task = task or task_of(config)
    predict_fn = predict_fn_of(task, "predict")
    if isinstance(data, str):
        name, data = data, {"eval_data": task.eval_data, "train_data": task.train_data}.get(data)
        if data is None:
            raise ConfigError(f"predict needs data: the task has no {name}. Choose eval_data or train_data.")
    found = dict[Literal["structure"], Any]()
    changes: dict[str, Any] = {"checkpoint.best": None} if config.checkpoint else {}
    sets = (data, *data.values()) if isinstance(data, Mapping) else (data,)
    if all(open_stream(x) is None for x in sets):  # a stream may have no end
        changes["eval.batches"] = None
    config = replace_keys(config, changes)
    predicting = dataclasses.replace(task, eval_data=data, eval_fn=of_rows(predict_fn, found))

    def run(program: Program, state: TrainState) -> Any:
        for note in program.notes:
            if "eval_fn" in note and cluster.is_main:  # it mixes rows
                text = note.replace("eval_fn", "predict_fn").replace("evaluation metric 'result ", "result '")
                print(visible(f"note: {text}"), file=sys.stderr, flush=True)
        return _joined(program, state, found)

    return on_checkpoint(config, cluster, run, predicting, step, best, initial)[1]


def predict_fn_of(task: Task, command: str) -> Callable[..., Any]:
    """Returns `Task.predict_fn`. Raises ConfigError, which names the command, if the task has none."""
    if task.predict_fn is None:
        raise ConfigError(f"{command} needs Task.predict_fn, and the task has none. Pass Task(predict_fn=...).")
    return task.predict_fn


def of_rows(predict_fn: Callable[..., Any], found: dict[Literal["structure"], Any]) -> Callable[..., Any]:
    """Returns an evaluation with one metric for each array, which is added over replicas as `sk.bincount` is.

    `found` receives the tree of the results.
    """

    def eval_fn(*arguments: Any) -> dict[str, Bincount]:
        examples = trace_context.current_examples()
        assert examples is not None
        results, num = call_user(lambda: predict_fn(*arguments), "predict_fn"), examples.num
        for path, leaf in named_leaves(results):
            where = f" at '{path}'" if path else ""
            if jnp.ndim(leaf) == 0 or leaf.shape[0] != num or is_key(leaf):
                raise ConfigError(
                    f"predict_fn returned {describe(leaf)}{where} for {num} rows. The first "
                    "dim of each result is the rows of the batch. Return one row of numbers per example."
                )
        arrays = {f"result {path or 'predictions'}": leaf for path, leaf in named_leaves(results)}
        found["structure"] = jax.tree.structure(results), {name: x.dtype for name, x in arrays.items()}
        arrays |= {} if examples.mask is None else {"mask": example_mask()}

        def spread(x: jax.Array) -> Bincount:
            x = x.astype(jnp.uint8) if x.dtype == bool else x
            if num_replicas() == 1:
                return Bincount(x)
            zeros = jnp.zeros((num * num_replicas(), *x.shape[1:]), x.dtype)
            at = replica_index() * num + jnp.arange(num)
            return Bincount(zeros.at[at].add(x, indices_are_sorted=True, unique_indices=True))

        return {name: spread(x) for name, x in arrays.items()}

    return eval_fn


def _joined(program: Program, state: TrainState, found: dict[Literal["structure"], Any]) -> Any:
    """Returns the results of all batches without padding rows; of several sets, by their names."""
    joined = dict[str, Any]()
    for name, batches in program.evaluator.of_batches(state).items():
        parts = list[dict[str, np.ndarray]]()
        for metrics in batches:
            arrays = {key: np.asarray(metric.value) for key, metric in jax.device_get(metrics).items()}
            kept = arrays.pop("mask", np.True_).astype(bool)
            parts.append({key: x[kept] if kept.ndim else x for key, x in arrays.items()})
        structure, dtypes = found["structure"]
        leaves = [np.concatenate([part[x] for part in parts]).astype(dtype) for x, dtype in dtypes.items()]
        joined[name] = jax.tree.unflatten(structure, leaves)
    return joined[""] if joined.keys() == {""} else joined


def write(results: Any, out: Path) -> None:
    """Writes results to a new file: `.npz`, arrays by their paths; `.npy`, one array. Floats that numpy does not have
    (bfloat16) are written as float32.

    Raises:
        ConfigError: the results are several arrays for `.npy`.
        CheckpointWriteError: the file cannot be written.
    """
    plain: Callable[[np.ndarray], Any] = lambda x: x.astype(np.float32) if x.dtype.kind == "V" else x
    arrays = {path or "predictions": plain(x) for path, x in named_leaves(results)}
    if out.suffix == ".npy" and len(arrays) != 1:
        raise ConfigError(f"predict --out {out}: predict_fn returns {len(arrays)} arrays. Write an .npz file.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with files.atomic_path(out) as partial, partial.open("wb") as file:
            if out.suffix == ".npz":
                np.savez(file, **arrays)
            else:
                np.save(file, *arrays.values())
    except OSError as error:
        raise CheckpointWriteError(f"predict --out {out} failed ({error}). Choose another path.") from error


def check_out(out: Path) -> None:
    """Raises ConfigError for a file that exists or has an unknown suffix."""
    if out.suffix not in SUFFIXES:
        raise ConfigError(f"predict --out {out}: unknown suffix. Valid: {', '.join(SUFFIXES)}.")
    if out.exists():
        raise ConfigError(f"predict --out {out}: it exists. Nothing is overwritten. Choose another name or remove it.")
