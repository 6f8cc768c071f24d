"""Writes `Task.predict_fn` as a serialized program of `jax.export` (StableHLO), which runs without spmdkit.

Its arguments are a dict of arrays, with the names that `checkpoint export` writes, and a batch. It is traced as
`predict` on one device.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.export
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from spmdkit import compat
from spmdkit.checkpoint.record import first_line
from spmdkit.config import Config, replace_keys
from spmdkit.errors import CheckpointWriteError, ConfigError
from spmdkit.foundation import files
from spmdkit.foundation.trees import abstract, named_leaves
from spmdkit.program.evaluation import SetEvaluator
from spmdkit.program.opening import task_of
from spmdkit.program.program import Program
from spmdkit.run.prediction import of_rows, predict_fn_of
from spmdkit.step.state import TrainState
from spmdkit.step.step import Batch

FFT_LAYOUT = jax.export.DisabledSafetyCheck.custom_call("LayoutConstraint")
"""Of `compat.lay_out_ffts`; XLA implements it on every platform."""
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
KEPT = ["task", "task_args", "run_dir", "seed", "steps", "batch_size", "precision", "roles", "optimizer"]
KEPT += ["learning_rate", "groups", "train_only", "ema", "data"]
"""Keys of a config that a program on one device needs."""


def export_predict(
    config: Config, what: Sequence[str], out: Path, print_line: Callable[[str], None] = lambda line: None
) -> None:
    """Writes `predict_fn` to a new file, for `jax.export.deserialize(...).call(arrays, batch)`.

    `arrays` are those that `checkpoint export` writes for `what`. `batch` has the arrays of a batch that `predict_fn`
    reads, with any number of rows if `jax.export` can trace `predict_fn` so, otherwise with `batch_size` rows.

    Args:
        what: `params`, `ema` or `training`, and `model_state` if the task has model state.

    Raises:
        ConfigError: the task has no `predict_fn`, `what` does not fit, `jax.export` rejects the program, or `out`
            exists.
        CheckpointWriteError: `out` cannot be written.
    """
    command = "checkpoint export --stablehlo"
    if out.exists():
        raise ConfigError(f"{command} {out}: it exists. Nothing is overwritten. Choose another name or remove it.")
    if importlib.util.find_spec("flatbuffers") is None:
        raise ConfigError(
            f"{command} needs the package flatbuffers, which is not installed. Run `pip install 'spmdkit[stablehlo]'`."
        )
    task = task_of(config)
    predict_fn = predict_fn_of(task, command)
    found = dict[Literal["structure"], Any]()
    data = task.eval_data if task.eval_data is not None else task.train_data
    task = dataclasses.replace(task, eval_data=data, eval_fn=of_rows(predict_fn, found))
    function, arrays, batch = _function(Program(_on_one_device(config), task, jax.devices()[:1]), what, found)
    serialized = _serialized(function, arrays, batch, print_line)
    try:
        with files.atomic_path(out) as partial:
            partial.write_bytes(serialized)
    except OSError as error:
        raise CheckpointWriteError(f"{command} {out} failed ({error}). Choose another path.") from error


def _on_one_device(config: Config) -> Config:
    defaults = {name: x.get_default(call_default_factory=True) for name, x in type(config).model_fields.items()}
    changes = {name: default for name, default in defaults.items() if name not in KEPT}
    changes |= {"layout": {"axes": config.layout.axes}, "checkpoint": None}
    changes |= {"attention": {"implementation": config.attention.implementation}}
    return replace_keys(config, changes)


def _function(
    program: Program, what: Sequence[str], found: Mapping[Literal["structure"], Any]
) -> tuple[Callable[..., Any], dict[str, jax.ShapeDtypeStruct], Any]:
    """Returns (function of arrays and a batch, the abstract arrays, the abstract batch)."""
    state, whole = program.abstract_state, NamedSharding(program.mesh, PartitionSpec())
    of_part = {"training": state.params, "ema": state.ema, "model_state": state.model_state}
    of_part["params"] = jax.eval_shape(program._params_to_evaluate, state)
    chosen = [part for part in what if part != "model_state"]
    if len(chosen) != 1 or (program.stateful and "model_state" not in what):
        raise ConfigError(
            f"checkpoint export --stablehlo with --what {','.join(what)}: predict_fn receives params, ema or training"
            f"{', and model_state' * program.stateful}. Choose --what params{',model_state' * program.stateful}."
        )
    parts = {part: abstract(of_part[part]) for part in what}
    start: Callable[[str], str] = lambda part: f"{part}/" if len(what) > 1 else ""
    arrays = {
        (start(part) + path).rstrip("/") or part: leaf for part in what for path, leaf in named_leaves(parts[part])
    }

    def state_of(arrays: Mapping[str, Any]) -> TrainState:
        leaves = iter([arrays[name] for name in names])
        trees = {part: jax.tree.map(lambda _: next(leaves), tree) for part, tree in parts.items()}
        params = trees[chosen[0]]
        params = params.slow if isinstance(params, optax.LookaheadParams) else params
        only = {"step": None, "rng": None, "opt_state": None, "ema": None, "reducer": (), "sync": None}
        return state.replace(params=params, model_state=trees.get("model_state"), **only)

    names, feed = [*arrays], next(iter(program._eval_feeds.values()))
    of_batch = SetEvaluator(
        program.task,
        feed,
        program._step_context,
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), state_of(arrays)),
        params_of=lambda current: current.params,
        seed=program.config.seed,
        to_device=lambda current: current,
        compile=lambda lowered: lowered.compile(),
    ).of_batch

    def predict(arrays: Mapping[str, Any], batch: Any) -> Any:
        num = jax.tree.leaves(batch)[0].shape[0]
        unread = {name: jax.tree.map(lambda x: jnp.zeros((num, *x.shape[1:]), x.dtype), x) for name, x in rest.items()}
        metrics = of_batch(state_of(arrays), Batch({**batch, **unread} if rest else batch), jnp.zeros((), jnp.int32))
        structure, dtypes = found["structure"]
        return jax.tree.unflatten(structure, [metrics[x].value.astype(dtype) for x, dtype in dtypes.items()])

    rest, batch = dict[str, Any](), abstract(feed.abstract().examples)
    if isinstance(batch, dict):  # without the arrays that predict_fn does not read, such as labels
        used = compat.used_inputs(jax.make_jaxpr(predict)(arrays, batch))[len(arrays) :]
        read = {path.split("/")[0] for (path, _), is_used in zip(named_leaves(batch), used, strict=True) if is_used}
        rest = {name: x for name, x in batch.items() if str(name) not in read} if read else {}
    return predict, arrays, {name: x for name, x in batch.items() if name not in rest} if rest else batch


def _serialized(function: Callable[..., Any], arrays: Any, batch: Any, print_line: Callable[[str], None]) -> bytearray:
    """Returns the program for any number of rows and every platform, or for what `jax.export` accepts."""
    rows, *_ = jax.export.symbolic_shape("rows")
    symbolic = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), batch)
    refused = list[str]()
    for platforms, examples in itertools.product((PLATFORMS, None), (symbolic, batch)):
        try:
            exported = jax.export.export(jax.jit(function), platforms=platforms, disabled_checks=[FFT_LAYOUT])
            serialized = exported(arrays, examples).serialize()
        except Exception as error:  # noqa: BLE001 - of a transformation of jax or of the user's function
            refused.append(first_line(error))
            continue
        limits = [f"{jax.tree.leaves(batch)[0].shape[0]} rows"] * (examples is batch)
        limits += [f"platform {jax.default_backend()}"] * (platforms is None)
        if limits:
            print_line(f"note: the program is only for {' on '.join(limits)} ({refused[0]})")
        return serialized
    raise ConfigError(
        f"checkpoint export --stablehlo: jax.export rejects predict_fn ({refused[-1]}). It must not call the "
        "host, and its results are arrays, lists, tuples and dicts. Change predict_fn."
    )
