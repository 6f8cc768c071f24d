"""Reads plain arrays from a checkpoint, without a model or a mesh. `export` writes parameters for other tools, as
safetensors files or a separate orbax checkpoint. `read_state` is used to compare two runs.

The record describes every leaf, so neither the task nor its code is needed. Memory: safetensors files are written one
array at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spmdkit.checkpoint import architectures, location, record, state_dict
from spmdkit.checkpoint.lazy_array import LazyArray
from spmdkit.checkpoint.location import Location
from spmdkit.checkpoint.run_directory import checkpoints_of_run
from spmdkit.checkpoint.weights import INDEX, SAFETENSORS, one_copy, open_checkpoint
from spmdkit.errors import CheckpointError, CheckpointWriteError, ConfigError
from spmdkit.foundation import files
from spmdkit.foundation.formatting import nearest

FORMATS = ("safetensors", "orbax")
PARTS = ("params", "ema", "model_state", "training")
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}

Evaluated = Callable[[dict[str, np.ndarray], dict[str, Any]], dict[str, np.ndarray]]
"""`(path -> array of the state, record) -> path -> array of the parameters to evaluate`."""


def export(
    directory: Location | str,
    step: int | str | None,
    out: Path | str,
    format: str = "safetensors",
    what: Sequence[str] = ("params",),
    evaluated: Evaluated | None = None,
    names: str | None = None,
    max_shard_size: str = "5GB",
) -> int:
    """Writes parts of a step (a number, `best`, or None for the newest) to `out` atomically; returns the step.

    `safetensors`: a file named by the paths below the part (`blocks/0/kernel`), of several parts by the full paths
    (`params/blocks/0/kernel`), with the metadata `step` and `what`. Above `max_shard_size` it is several files, for
    example `model-00001-of-00002.safetensors`, and `model.safetensors.index.json`. `orbax`: a folder with the nested
    dict, for `ocp.StandardCheckpointer().restore`, without arrays that have no elements, because orbax does not support
    them.

    Args:
        what: `params` are the parameters that are evaluated, `training` those of the optimizer. They differ only for a
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
    for part in what:
        _check_choice("export", part, PARTS)
    most, map_ = _num_bytes(max_shard_size), None if names is None else architectures.find(names)
    if map_ is not None and (len(what) > 1 or "model_state" in what):
        raise ConfigError(f"export of {', '.join(what)} with names: a map names parameters. Export params alone.")
    for path in (out, _index_of(out)):
        if os.path.lexists(path):
            raise ConfigError(f"export to {path}: it exists. Nothing is overwritten. Choose another name or remove it.")
    with _opened(directory, step, what, evaluated) as (saved, arrays):
        metadata = {"step": str(saved.step), "what": ",".join(what)}
        if map_ is not None:
            arrays, metadata = (
                architectures.write(map_, arrays),
                metadata | {"format": "pt"},
            )  # transformers requires it
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            if format == "safetensors":
                _write_safetensors(out, arrays, metadata, most)
            else:
                _write_orbax(out, arrays)
        except OSError as error:
            raise CheckpointWriteError(
                f"export to {out} failed ({record.first_line(error)}). Its folder must be writable and have space "
                "for the parameters. Choose another path."
            ) from error
        return saved.step


def load_params(run: Path | str, what: str = "params") -> Any:
    """Returns the parameters of a checkpoint as numpy arrays, in nested dicts by their paths, without config or mesh.

    Args:
        run: the directory of a run or the URL of its bucket, with `@best` or `@200`; default: the newest step.
        what: `params`, `ema`, `model_state`, or `training`, as in `export`.

    Raises:
        CheckpointError: the step does not exist, is damaged, or does not contain the part.
        ConfigError: `what` is unknown, or `run` is no directory.
    """
    _check_choice("load_params", what, PARTS)
    where, step = location.split_step(str(run))
    with _opened(location.resolve(checkpoints_of_run(where)), step, (what,), None) as (_, lazy):
        arrays = {path: array.read() for path, array in lazy.items()}
    return arrays[what] if arrays.keys() == {what} else state_dict.nest(arrays)


def _check_choice(what: str, value: str, options: Sequence[str]) -> None:
    if value not in options:
        raise ConfigError(f"{what}: unknown {value!r}. Valid: {', '.join(options)}.{nearest(value, options)}")


def _num_bytes(size: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]i?B)", size)
    if match is None or not (num := int(float(match[1]) * UNITS[match[2]])):
        raise ConfigError(f"export: max_shard_size {size!r} is no size. Write a number and a unit: 5GB, 500MB, 2GiB.")
    return num


@contextlib.contextmanager
def _opened(
    directory: Location, step: int | str | None, what: Sequence[str], evaluated: Evaluated | None
) -> Iterator[tuple[record.Record, dict[str, LazyArray]]]:
    """Yields (record, name -> array) of parts of a step; see `export`."""
    with open_checkpoint(directory, step) as (saved, leaves):
        named, merged = dict[str, LazyArray](), one_copy(saved, leaves)
        for part in what:
            if part == "params" and saved.user.get("eval_params"):
                if evaluated is None:
                    raise ConfigError(
                        f"export of step {saved.step}: the task or its optimizer derives the parameters to evaluate "
                        "from the state. Run spmdkit checkpoint export with the run's directory, or choose what: "
                        "training."
                    )
                values = evaluated({path: array.read() for path, array in leaves.items()}, saved.user)
                arrays = {path: LazyArray.of(path, x) for path, x in values.items()}
            else:
                arrays = _part(directory, saved, merged, part)
            start = f"{part}/" if len(what) > 1 else ""
            named |= {(start + path).rstrip("/") or part: array for path, array in arrays.items()}
        yield saved, named


def _part(
    directory: Location, saved: record.Record, arrays: Mapping[str, LazyArray], part: str
) -> dict[str, LazyArray]:
    """Returns path below the part -> array; the path of a single array is empty."""
    field = "params" if part == "training" else part
    paths = [path for path in saved.leaves if path == field or path.startswith(f"{field}/")]
    if not paths:
        held = sorted({path.split("/")[0] for path in saved.leaves})
        hint = " Set ema in the config to keep averaged parameters." if part == "ema" else ""
        raise CheckpointError(
            f"export of {part} from {directory / str(saved.step)}: it holds {', '.join(held)}, no {part}.{hint}"
        )
    for path in paths:
        if path not in arrays:
            raise CheckpointError(
                f"export of {part}: `{path}` is a random key ({saved.leaves[path][1]}), not a parameter, which has no "
                "form outside JAX. Keep keys in the model state."
            )
    return {path.removeprefix(field).removeprefix("/"): arrays[path] for path in paths}


def _write_orbax(out: Path, arrays: Mapping[str, LazyArray]) -> None:
    from spmdkit.checkpoint import orbax_backend

    with files.atomic_path(out) as partial:
        tree = state_dict.nest({name: array.read() for name, array in arrays.items() if 0 not in array.shape})
        orbax_backend.write_plain(partial, tree)


# ---- safetensors


def _index_of(out: Path) -> Path:
    return out.with_name(out.name + INDEX)


def _write_safetensors(out: Path, arrays: Mapping[str, LazyArray], metadata: dict[str, str], most: int) -> None:
    """Writes one file, or several of at most `most` bytes of arrays (or one larger array) and their index.

    Source: the file names and the index of huggingface_hub (`split_state_dict_into_shards_factory`).
    """
    if unknown := sorted({str(array.dtype) for array in arrays.values()} - {*SAFETENSORS.values()}):
        raise ConfigError(
            f"export as safetensors of arrays of {', '.join(unknown)}. This dtype does not exist there. Export with "
            "format orbax."
        )
    shards, size = list[dict[str, LazyArray]](), 0
    for name, array in arrays.items():
        if not shards or (size + array.nbytes > most and shards[-1]):
            shards.append({})
            size = 0
        shards[-1][name] = array
        size += array.nbytes
    with contextlib.ExitStack() as stack:  # files get their names at the end, the index last
        if len(shards) == 1:
            return _write_shard(stack.enter_context(files.atomic_path(out)), shards[0], metadata)
        index = stack.enter_context(files.atomic_path(_index_of(out)))
        holder = dict[str, str]()
        for i, shard in enumerate(shards, 1):
            path = out.with_name(f"{out.stem}-{i:05d}-of-{len(shards):05d}{out.suffix}")
            _write_shard(stack.enter_context(files.atomic_path(path)), shard, metadata)
            holder |= dict.fromkeys(shard, path.name)
        total = {"total_size": sum(array.nbytes for array in arrays.values())}
        index.write_text(json.dumps({"metadata": total, "weight_map": holder}, indent=2))


def _write_shard(path: Path, arrays: Mapping[str, LazyArray], metadata: dict[str, str]) -> None:
    """Writes a safetensors file, one array at a time. The safetensors package holds all arrays twice (0.8.0).

    Source: "Format" in the documentation of safetensors: the length of the header, the header in JSON, the arrays.
    """
    names = {dtype: name for name, dtype in SAFETENSORS.items()}
    header, end = dict[str, Any](__metadata__=metadata), 0
    ordered = sorted(arrays.items(), key=lambda item: -item[1].dtype.itemsize)  # aligned
    for name, array in ordered:
        header[name] = {"dtype": names[str(array.dtype)], "shape": array.shape}
        header[name]["data_offsets"] = [end, end + array.nbytes]
        end += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, array in ordered:
            np.ascontiguousarray(array.read()).tofile(file)


def read_state(directory: Path, step: int | None = None) -> dict[str, np.ndarray]:
    """Returns `{path: array}` of the complete state of a step (None: the newest), without random keys: they are derived
    from the seed and the step.

    Raises:
        CheckpointError: the step does not exist, or is damaged.
    """
    with open_checkpoint(directory, step) as (_, leaves):
        return {path: array.read() for path, array in leaves.items()}
