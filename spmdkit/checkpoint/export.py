"""Reads plain arrays from a checkpoint, without a model or a mesh. `export` writes parameters for other tools, as one
safetensors file or a separate orbax checkpoint. `read_state` is used to compare two runs.

The record describes every leaf, so neither the task nor its code is needed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from spmdkit.checkpoint import architectures, listing, location, record, state_dict
from spmdkit.checkpoint.location import Location
from spmdkit.checkpoint.run_directory import checkpoints_of_run
from spmdkit.errors import CheckpointError, CheckpointWriteError, ConfigError
from spmdkit.foundation import files
from spmdkit.foundation.formatting import nearest

FORMATS = ("safetensors", "orbax")
PARTS = ("params", "ema", "training")

Evaluated = Callable[[dict[str, np.ndarray], dict[str, Any]], dict[str, np.ndarray]]
"""`(path -> array of the state, record) -> path -> array of the parameters to evaluate`."""


def export(
    directory: Location | str,
    step: int | None,
    out: Path | str,
    format: Literal["safetensors", "orbax"] = "safetensors",
    which: Literal["params", "ema", "training"] = "params",
    evaluated: Evaluated | None = None,
    names: str | None = None,
) -> int:
    """Writes the parameters of a step (None: the newest) to `out` atomically; returns the step.

    `safetensors`: a file named by the paths below the parameters (`blocks/0/kernel`), with the metadata `step` and
    `which`. `orbax`: a folder with the nested dict, for `ocp.StandardCheckpointer().restore`, without arrays that have
    no elements, because orbax does not support them.

    Args:
        which: `params` are the parameters that are evaluated, `training` those of the optimizer. They differ only for a
            task with `Task.eval_params`, a schedule-free optimizer or lookahead, and then `params` needs `evaluated`.
        evaluated: computes the parameters to evaluate.
        names: the map of `architectures` that gives the names and the layouts of transformers.

    Raises:
        CheckpointError: the step does not exist, is damaged, or does not contain the part.
        ConfigError: an unknown format or part, or `out` exists.
        CheckpointWriteError: `out` cannot be written.
    """
    directory, out = location.resolve(directory), Path(out).absolute()
    _check_choice("export", format, FORMATS)
    _check_choice("export", which, PARTS)
    map_ = None if names is None else architectures.find(names)
    if os.path.lexists(out):
        raise ConfigError(f"export to {out}: it exists. Nothing is overwritten. Choose another name or remove it.")
    step, arrays = _read_params(directory, step, which, evaluated)
    metadata = {"step": str(step), "which": which}
    if map_ is not None:
        arrays, metadata = architectures.write(map_, arrays), metadata | {"format": "pt"}  # transformers requires it
    _write(out, format, arrays, metadata)
    return step


def load_params(run: Path | str, what: str = "params") -> Any:
    """Returns the parameters of a checkpoint as numpy arrays, in nested dicts by their paths, without config or mesh.

    Args:
        run: the directory of a run or the URL of its bucket, with `@best` or `@200`; default: the newest step.
        what: `params`, `ema`, or `training`, as in `export`.

    Raises:
        CheckpointError: the step does not exist, is damaged, or does not contain the part.
        ConfigError: `what` is unknown, or `run` is no directory.
    """
    _check_choice("load_params", what, PARTS)
    where, step = location.split_step(str(run))
    _, arrays = _read_params(location.resolve(checkpoints_of_run(where)), step, what, None)
    return arrays[what] if arrays.keys() == {what} else state_dict.nest(arrays)


def _check_choice(what: str, value: str, options: Sequence[str]) -> None:
    if value not in options:
        raise ConfigError(f"{what}: unknown {value!r}. Valid: {', '.join(options)}.{nearest(value, options)}")


def _read_params(
    directory: Location, step: int | str | None, which: str, evaluated: Evaluated | None
) -> tuple[int, dict[str, np.ndarray]]:
    """Returns (step, path -> array); see `export`."""
    with listing.hold_step(directory, lambda: listing.choose_step(directory, step)) as chosen:
        saved = record.read_record(directory, chosen)
        record.check_files(directory, saved)
        with location.local_copy(directory, saved.step) as local:
            derives = which == "params" and bool(saved.user.get("eval_params"))
            if derives and evaluated is None:
                raise ConfigError(
                    f"export of step {saved.step}: the task or its optimizer derives the parameters to evaluate from "
                    "the state. Run spmdkit checkpoint export with the run's directory, or choose which: training."
                )
            part = "params" if which == "training" else which
            arrays = _read_state(local, saved) if derives else _read_part(local, saved, part)
    if derives and evaluated is not None:
        arrays = evaluated(arrays, saved.user)
    elif saved.user.get("groups"):  # of replicas that train separately: their mean, which evaluation uses
        arrays = {name: mean_of_groups(array) for name, array in arrays.items()}
    return saved.step, arrays


def _write(out: Path, format: str, arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with files.atomic_path(out) as partial:
            if format == "safetensors":
                _write_safetensors(partial, arrays, metadata)
            else:
                from spmdkit.checkpoint import orbax_backend

                orbax_backend.write_plain(
                    partial, state_dict.nest({name: array for name, array in arrays.items() if array.size})
                )
    except OSError as error:
        raise CheckpointWriteError(
            f"export to {out} failed ({record.first_line(error)}). Its folder must be writable and have space "
            "for the parameters. Choose another path."
        ) from error


def mean_of_groups(array: np.ndarray) -> np.ndarray:
    """Reduces [groups, ...] to [...]: the mean for floats, the first element for other dtypes."""
    is_float = jax.numpy.issubdtype(array.dtype, jax.numpy.inexact)
    wide = np.promote_types(array.dtype, np.float32) if array.dtype.kind == "f" else np.float32
    mean: np.ndarray = array.astype(wide).mean(0).astype(array.dtype) if is_float else array[0]
    return mean


def _read_part(directory: Path, found: record.Record, which: str) -> dict[str, np.ndarray]:
    part = {path: leaf for path, leaf in found.leaves.items() if path == which or path.startswith(f"{which}/")}
    if not part:
        held = sorted({path.split("/")[0] for path in found.leaves})
        hint = " Set ema in the config to keep averaged parameters." if which == "ema" else ""
        raise CheckpointError(
            f"export of {which} from {directory / str(found.step)}: it holds {', '.join(held)}, no {which}.{hint}"
        )
    for path, (_, dtype) in part.items():
        if dtype.startswith("key<"):
            raise CheckpointError(
                f"export of {which}: `{path}` is a random key ({dtype}), not a parameter, which has no form outside "
                "JAX. Keep keys in the model state."
            )
    return {path.removeprefix(f"{which}/"): array for path, array in read_leaves(directory, found, part).items()}


def _write_safetensors(path: Path, arrays: dict[str, Any], metadata: dict[str, str]) -> None:
    try:
        from safetensors import SafetensorError
        from safetensors.numpy import save_file
    except ImportError:
        raise ConfigError(
            "export as safetensors needs the package safetensors, which is not installed. "
            "Run `pip install 'spmdkit[safetensors]'`, or export with format orbax."
        ) from None
    try:
        save_file({name: np.asarray(array, order="C") for name, array in arrays.items()}, path, metadata=metadata)
    except (SafetensorError, KeyError, TypeError) as error:
        dtypes = ", ".join(sorted({str(array.dtype) for array in arrays.values()}))
        raise ConfigError(
            f"export as safetensors of arrays of {dtypes}: {record.first_line(error)}. Not every dtype exists there. "
            "Export with format orbax."
        ) from error


def read_leaves(directory: Path, found: record.Record, part: state_dict.LeafTable) -> dict[str, np.ndarray]:
    """Returns `{path: array}` of the leaves in `part`, which must not contain random keys.

    Raises:
        DamagedError: the leaves cannot be read.
    """
    from spmdkit.checkpoint import orbax_backend

    abstract = {path: jax.ShapeDtypeStruct(shape, jax.numpy.dtype(dtype)) for path, (shape, dtype) in part.items()}
    try:
        loaded = orbax_backend.load_numpy(
            directory / str(found.step), state_dict.nest({path: leaf for path, leaf in abstract.items() if leaf.size})
        )
    except Exception as error:
        raise record.damaged_error(directory, found.step, record.first_line(error)) from error
    return {
        path: state_dict.pick(loaded, path) if leaf.size else np.zeros(leaf.shape, leaf.dtype)
        for path, leaf in abstract.items()
    }


def read_state(directory: Path, step: int | None = None) -> dict[str, np.ndarray]:
    """Returns `{path: array}` of the complete state of a step (None: the newest), without random keys: they are derived
    from the seed and the step.

    Raises:
        CheckpointError: the step does not exist, or is damaged.
    """
    with listing.hold_step(directory, lambda: listing.choose_step(directory, step)) as chosen:
        saved = record.read_record(directory, chosen)
        record.check_files(directory, saved)
        return _read_state(directory, saved)


def _read_state(directory: Path, saved: record.Record) -> dict[str, np.ndarray]:
    part = {path: leaf for path, leaf in saved.leaves.items() if not leaf[1].startswith("key<")}
    return read_leaves(directory, saved, part)
