"""Weights of other programs and runs: safetensors files, checkpoints of spmdkit, folders of orbax. Only the slices that
are read are in memory.

| source | arrays |
| --- | --- |
| `model.safetensors`, `model.safetensors.index.json` | by their names in the file; of an index, in several files |
| `runs/first`, `runs/first@best`, `runs/first@200`, a bucket | `params/...` and the other fields of a train state |
| a folder that orbax wrote, or the folder of its steps | by their paths in the tree |
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spmdkit.checkpoint import lazy_array, listing, location, record
from spmdkit.checkpoint.lazy_array import Box, LazyArray
from spmdkit.checkpoint.location import Location
from spmdkit.checkpoint.run_directory import checkpoints_of_run
from spmdkit.errors import CheckpointError, ConfigError
from spmdkit.foundation.formatting import nearest

INDEX = ".index.json"
FILES = (f"model.safetensors{INDEX}", "model.safetensors")
"""In a folder of transformers."""
FIELDS = ("params", "opt_state", "model_state", "ema")
"""The parts of a train state that can be loaded."""
SAFETENSORS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32"}
SAFETENSORS |= {"I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8"}
SAFETENSORS |= {"BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
"""Names of dtypes in safetensors files."""


class Weights:
    """The arrays of a file or a checkpoint. A function under `@sk.weights` receives it as `read`.

    Attributes:
        source: the file or the checkpoint, for messages.
        names: the names of the arrays.
        used: the names that were read.
    """

    def __init__(self, source: str, arrays: Mapping[str, LazyArray]):
        self.source, self._arrays = source, dict(arrays)
        self.names, self.used = list(self._arrays), set[str]()

    def __call__(self, name: str) -> LazyArray:
        """Returns the array `name`. Raises ConfigError if there is none."""
        if name not in self._arrays:
            raise ConfigError(
                f"{self.source} has no array '{name}'; it has {len(self.names)}.{nearest(name, self.names)} Names are "
                f"those of the file: {', '.join(self.names[:4])}. Correct the name."
            )
        self.used.add(name)
        return self._arrays[name]

    def stack(self, arrays: str | Sequence[LazyArray], num: int | None = None, dim: int = 0) -> LazyArray:
        """Returns arrays stacked along a new dim. `arrays`: a name in which `{}` is 0 to `num` - 1, or a list."""
        if isinstance(arrays, str):
            if num is None or "{}" not in arrays:
                raise ConfigError(f"read.stack('{arrays}', {num}): write read.stack('h.{{}}.weight', 12).")
            arrays = [self(arrays.replace("{}", str(i))) for i in range(num)]
        return lazy_array.stack(arrays, dim)

    def concatenate(self, arrays: Sequence[LazyArray], dim: int = 0) -> LazyArray:
        """Returns arrays joined along a dim."""
        return lazy_array.concatenate(arrays, dim)

    def only(self, names: Sequence[str]) -> Weights:
        """Returns the arrays with these names."""
        return Weights(self.source, {name: self._arrays[name] for name in names})


@contextlib.contextmanager
def open_weights(where: Path | str, step: int | str | None = None) -> Iterator[Weights]:
    """Yields the arrays of a safetensors file, a folder of transformers, a run, a bucket or a folder of orbax.

    They can be read in the context.

    Args:
        step: of a run; `best`; None: the newest.

    Raises:
        ConfigError: it does not exist, or a package is missing.
        CheckpointError: it is damaged, or has no such step.
    """
    path = Path(where)
    if not location.is_url(where):  # a folder of transformers
        path = next((found for name in FILES if (found := path / name).is_file()), path)
    with contextlib.ExitStack() as stack:
        if not location.is_url(where) and path.suffix in (".safetensors", ".json"):
            yield Weights(str(path), _safetensors(path, stack))
            return
        if not location.is_url(where) and not path.is_dir():
            names = [found.name for found in path.parent.glob("*")] if path.parent.is_dir() else []
            kinds = "a .safetensors file, its .index.json, the directory of a run, or a folder of orbax"
            raise ConfigError(f"{path} does not exist. It is {kinds}.{nearest(path.name, names)} Correct the path.")
        if not location.is_url(where) and (path / record.RECORD_FILE).is_file():
            path, step = path.parent, int(path.name) if path.name.isdecimal() else step
        directory = location.resolve(checkpoints_of_run(str(where) if location.is_url(where) else str(path)))
        plain = None
        if isinstance(directory, Path) and not record.committed_steps(directory):
            plain = _orbax_folder(directory, step)
        if plain is not None:
            yield Weights(str(plain), _orbax(plain))
            return
        saved, arrays = stack.enter_context(open_checkpoint(directory, step))
        yield Weights(f"{where} step {saved.step}", one_copy(saved, arrays))


# ---- safetensors


def _safetensors(path: Path, stack: contextlib.ExitStack) -> dict[str, LazyArray]:
    if path.name.endswith(INDEX):
        try:
            holder = dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
        except FileNotFoundError:
            raise _missing(path) from None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({record.first_line(error)}). It is the index of safetensors files: "
                '{"weight_map": {name: file}}. Download it again.'
            ) from error
        of_file = {name: _open_safetensors(path.parent / name, stack) for name in sorted({*holder.values()})}
        for name, file in holder.items():
            if name not in of_file[file]:
                raise CheckpointError(
                    f"{path} lists '{name}' in {file}, which does not hold it. An index and its files belong together. "
                    "Download them again."
                )
        return {name: of_file[file][name] for name, file in holder.items()}
    return _open_safetensors(path, stack)


def _missing(path: Path) -> ConfigError:
    names = [found.name for found in path.parent.glob("*")] if path.parent.is_dir() else []
    return ConfigError(
        f"{path} does not exist. A path is relative to the config's folder.{nearest(path.name, names)} Correct it."
    )


def _open_safetensors(path: Path, stack: contextlib.ExitStack) -> dict[str, LazyArray]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ConfigError(
            f"{path} needs the package safetensors, which is not installed. Run `pip install 'spmdkit[safetensors]'`."
        ) from None
    try:
        file: Any = stack.enter_context(safe_open(path, framework="np"))
    except FileNotFoundError:
        raise _missing(path) from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a complete safetensors file ({record.first_line(error)}). Download or write it again."
        ) from error
    arrays = {}
    for name in file.keys():  # noqa: SIM118  not a mapping
        part = file.get_slice(name)
        if part.get_dtype() in SAFETENSORS and not part.get_dtype().startswith("F8"):  # numpy in safetensors 0.8.0
            dtype = jax.numpy.dtype(SAFETENSORS[part.get_dtype()])
            arrays[name] = LazyArray(name, tuple(part.get_shape()), dtype, part.__getitem__)
    return arrays


# ---- checkpoints


@contextlib.contextmanager
def open_checkpoint(
    directory: Location, step: int | str | None
) -> Iterator[tuple[record.Record, dict[str, LazyArray]]]:
    """Yields (record, path -> array of the state) of a step, without random keys. They can be read in the context.

    Args:
        step: a number, `best`, or None for the newest.

    Raises:
        CheckpointError: the step does not exist, or is damaged.
    """
    with contextlib.ExitStack() as stack:
        chosen = stack.enter_context(listing.hold_step(directory, lambda: listing.choose_step(directory, step)))
        saved = record.read_record(directory, chosen)
        record.check_files(directory, saved)
        yield saved, _checkpoint(directory, saved, stack)


def _checkpoint(directory: Location, saved: record.Record, stack: contextlib.ExitStack) -> dict[str, LazyArray]:
    from spmdkit.checkpoint import orbax_backend

    step = saved.step

    @functools.cache
    def folder() -> Path:  # of a bucket: downloaded when the first array is read
        return stack.enter_context(location.local_copy(directory, step)) / str(step) / record.STATE_FOLDER

    def leaf(path: str, shape: tuple[int, ...], dtype: str) -> LazyArray:
        opened = functools.cache(lambda: orbax_backend.open_array(folder(), path.replace("/", ".")))

        def fetch(box: Box) -> np.ndarray:
            try:
                return opened()[box].read().result().astype(jax.numpy.dtype(dtype), copy=False)  # type: ignore[no-any-return]
            except Exception as error:
                what = f"{path}: {record.first_line(record.root_cause(error))}"
                raise record.damaged_error(directory, step, what) from error

        return LazyArray(path, shape, jax.numpy.dtype(dtype), fetch)

    return {
        path: leaf(path, shape, dtype) for path, (shape, dtype) in saved.leaves.items() if not dtype.startswith("key<")
    }


def merged(array: np.ndarray, kind: str | None = None) -> np.ndarray:
    """Reduces [groups, ...] to [...], as an evaluation does. `kind`: mean, sum, max or identical (the first element);
    default: the mean for floats, otherwise identical."""
    is_float = jax.numpy.issubdtype(array.dtype, jax.numpy.inexact)
    kind = kind or ("mean" if is_float else "identical")
    if kind in ("identical", "max"):
        return array[0] if kind == "identical" else np.asarray(array.max(0))
    wide = np.promote_types(array.dtype, np.float32) if array.dtype.kind == "f" else np.float32
    array, dtype = array.astype(wide) if is_float else array, array.dtype
    return np.asarray((array.mean(0) if kind == "mean" else array.sum(0)).astype(dtype))


def one_copy(saved: record.Record, arrays: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
    """Returns the arrays of a checkpoint with those of groups of replicas merged, if it has any."""
    kinds = saved.user.get("state_reduction")
    grouped = FIELDS if saved.user.get("groups") else () if kinds is None else ("model_state",)

    def one(path: str, array: LazyArray) -> LazyArray:
        field, _, name = path.partition("/")
        if field not in grouped:
            return array
        every, kind = slice(0, array.shape[0]), (kinds or {}).get(name) if field == "model_state" else None
        fetch: Callable[[Box], np.ndarray] = lambda box: merged(array.fetch((every, *box)), kind)
        return LazyArray(array.name, array.shape[1:], array.dtype, fetch)

    return {path: one(path, array) for path, array in arrays.items()}


def _orbax_folder(folder: Path, step: int | str | None) -> Path | None:
    """Returns the folder with the arrays of a checkpoint that orbax wrote, or None."""
    steps = sorted((int(path.name) for path in folder.iterdir() if path.name.isdecimal()), reverse=True)
    roots = [folder / str(step)] if isinstance(step, int) else [folder, *(folder / str(number) for number in steps)]
    inside = (root / name for root in roots for name in ("", "default", record.STATE_FOLDER))
    return next((path for path in inside if (path / "_METADATA").is_file()), None)


def _orbax(folder: Path) -> dict[str, LazyArray]:
    from spmdkit.checkpoint import orbax_backend

    def leaf(path: str, shape: tuple[int, ...], dtype: Any, opened: Callable[[], Any]) -> LazyArray:
        opened = functools.cache(opened)

        def fetch(box: Box) -> np.ndarray:
            try:
                return opened()[box].read().result()  # type: ignore[no-any-return]
            except Exception as error:
                raise _unreadable(folder, error) from error

        return LazyArray(path, shape, dtype, fetch)

    try:
        return {path: leaf(path, *found) for path, found in orbax_backend.plain_arrays(folder).items()}
    except Exception as error:
        raise _unreadable(folder, error) from error


def _unreadable(folder: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"{folder} cannot be read ({record.first_line(record.root_cause(error))}). It has the metadata of orbax, and "
        "must be a complete checkpoint. Copy it again, or name another step: PATH@STEP."
    )
