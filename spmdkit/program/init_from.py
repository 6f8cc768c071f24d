"""Loads the state before step 1 from `init_from`: matches the arrays of a file, a run or a folder of orbax with the
leaves of the state, and puts the slice of each device on it.

A name is renamed by the first rule of `init_from.names` that matches it, or the arrays come from the map of an
architecture or from a function under `@sk.weights`. A path is that of a parameter (`blocks/0/w`), or of a leaf of the
state (`model_state/norm/mean`). `/` and `.` are the same. All differences are reported together, before any array is
read.

Memory: the arrays on the devices and one slice.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmdkit.checkpoint import architectures
from spmdkit.checkpoint.lazy_array import LazyArray
from spmdkit.checkpoint.location import split_step
from spmdkit.checkpoint.weights import Weights, open_weights
from spmdkit.config import Config
from spmdkit.errors import ConfigError
from spmdkit.foundation import plugins, user_code
from spmdkit.foundation.formatting import format_bytes, nearest
from spmdkit.foundation.trees import describe, leaf_bytes

MAX_LINES = 8
Leaves = Mapping[str, jax.ShapeDtypeStruct]


class InitFrom:
    """The leaves of a state that `config.init_from` loads.

    Args:
        leaves: path -> leaf of one copy of the state: of `params`, `model_state`, `opt_state` and `ema`.

    Attributes:
        paths: the leaves that are loaded.
        notes: lines for the user.
        facts: text that is the same on all processes.

    Raises:
        ConfigError: the source does not exist, or does not fit the state.
        CheckpointError: the source is damaged.
    """

    def __init__(self, config: Config, leaves: Leaves):
        self._config, self._leaves = config, leaves
        with self._matched() as (arrays, self.notes):
            self.paths = frozenset(arrays)
            self.facts = "\n".join(f"{path} {array}" for path, array in sorted(arrays.items()))

    def read(self, targets: Leaves) -> dict[str, jax.Array]:
        """Returns path -> array for some of `paths`, with the shardings of `targets`; leading dims that the source does
        not have are copies."""
        with self._matched() as (arrays, _):
            return {path: _on_devices(arrays[path], like) for path, like in targets.items()}

    @contextlib.contextmanager
    def _matched(self) -> Iterator[tuple[dict[str, LazyArray], list[str]]]:
        given = self._config.init_from
        assert given is not None
        where, step = given.located(self._config.folder), None
        if given.path is not None:
            where, step = split_step(where)
        with open_weights(where if "://" in where else Path(where), step) as weights:
            yield _Match(self._config, weights, self._leaves).result()

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.facts.encode()).hexdigest()[:16]


class _Match:
    """The arrays of a source, matched with the leaves of a state."""

    def __init__(self, config: Config, weights: Weights, leaves: Leaves):
        assert config.init_from is not None
        self._config, self._given, self._leaves = config, config.init_from, leaves
        self._where = config.where("init_from")
        self._of_state = any(re.match(r"params[/.]|params$", name) for name in weights.names)
        self._as_params = self._of_state and "ema" in self.what and "params" not in self.what
        unread = {name for name in weights.names if self._of_state and _head(name) not in self.what}
        self._weights = weights.only([name for name in weights.names if name not in unread])
        self._problems = list[str]()
        self._by_name = {path.removeprefix("params/").replace("/", "."): path for path in leaves}
        self._by_name |= {path.replace("/", "."): path for path in leaves}

    @functools.cached_property
    def what(self) -> Collection[str]:
        """The parts of the source that are read."""
        default = ("params", "model_state") if self._of_state else ("params",)
        return default if self._given.what is None else self._given.what

    def result(self) -> tuple[dict[str, LazyArray], list[str]]:
        """Returns (path -> array, notes)."""
        names = self._given.names
        by_function = not isinstance(names, list) and plugins.is_reference(names)
        pairs = self._by_function() if by_function else self._by_rules() if isinstance(names, list) else self._by_map()
        arrays, unused = dict[str, LazyArray](), list[LazyArray]()
        for name, array in pairs:
            path = self._by_name.get(name.replace("/", "."))
            if path is None:
                unused.append(array)
                if self._given.strict or by_function:
                    also = f", named '{name}'," if name != array.name else ""
                    self._problems.append(f"{array}{also} is no leaf.{nearest(name, list(map(_shown, self._leaves)))}")
            elif path in arrays:
                self._problems.append(f"{_shown(path)}: two arrays, {arrays[path].name} and {array.name}")
            else:
                arrays[path] = array
                self._check(path, array)
        missing = [path for path in self._leaves if _head(path) in self._required and path not in arrays]
        if self._given.strict:
            self._problems += [
                f"{_shown(path)}: expected {describe(self._leaves[path])}, not found" for path in missing
            ]
        if not arrays and not self._problems:
            self._problems.append(f"none of its {len(self._weights.names)} arrays is a leaf")
        if self._problems:
            raise self._refused()
        left = [name for name in self._weights.names if name not in self._weights.used]
        return arrays, self._notes(arrays, missing, [array.name for array in unused] + left)

    @property
    def _required(self) -> Collection[str]:
        return ("params",) if self._as_params else self.what

    def _by_rules(self) -> Iterator[tuple[str, LazyArray]]:
        assert isinstance(self._given.names, list)
        rules, matched = self._given.names, set[int]()
        for name in self._weights.names:
            array = self._weights(name)
            for i, (pattern, replacement) in enumerate(rules):
                if (match := re.fullmatch(pattern, name)) is not None:
                    matched.add(i)
                    if replacement is not None:
                        yield self._expanded(match, replacement), array
                    break
            else:
                yield (re.sub(r"^ema(?=[/.]|$)", "params", name) if self._as_params else name), array
        for i, (pattern, _) in enumerate(rules):
            if i not in matched:
                hint = nearest(pattern.replace("\\", ""), self._weights.names)
                self._problems.append(f"names[{i}]: pattern '{pattern}' matches no name.{hint}")

    def _expanded(self, match: re.Match[str], replacement: str) -> str:
        try:
            return match.expand(replacement)
        except (re.error, IndexError) as error:
            raise ConfigError(
                f"{self._where}: names: {replacement!r} is no replacement of the pattern '{match.re.pattern}' "
                f"({error}). Write \\1 for the first group in parentheses."
            ) from None

    def _by_map(self) -> Iterator[tuple[str, LazyArray]]:
        shapes = {_shown(path): leaf.shape for path, leaf in self._leaves.items() if _head(path) == "params"}
        assert isinstance(self._given.names, str)
        map_ = architectures.find(self._given.names, f"{self._where}: names")
        return architectures.read(map_, self._weights.names, self._weights, shapes)

    def _by_function(self) -> Iterator[tuple[str, LazyArray]]:
        text, options = plugins.split(self._given.names)  # type: ignore[arg-type]
        function = user_code.find(text, "weights", self._config.folder)
        pairs: Any = user_code.call_user(lambda: list(function(self._weights, **options)), text, is_model=False)
        for pair in pairs:
            if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[1], LazyArray):
                raise ConfigError(
                    f"{self._where}: {text} yielded {str(pair)[:80]}. It yields pairs of a path and an array of read. "
                    "Write yield 'blocks/w', read('h.w')."
                )
            yield pair

    def _check(self, path: str, array: LazyArray) -> None:
        leaf = self._leaves[path]
        casts = array.dtype == leaf.dtype or all(jnp.issubdtype(x.dtype, jnp.floating) for x in (array, leaf))
        if array.shape != leaf.shape or not casts:
            turned = " (transposed?)" if len(set(leaf.shape)) > 1 and array.shape == leaf.shape[::-1] else ""
            self._problems.append(f"{_shown(path)}: expected {describe(leaf)}, found {array}{turned}")

    def _refused(self) -> ConfigError:
        lines = "".join(f"\n  {line}" for line in self._problems[:MAX_LINES])
        more = f"\n  and {len(self._problems) - MAX_LINES} more" if len(self._problems) > MAX_LINES else ""
        return ConfigError(
            f"{self._where}: {self._weights.source} does not fit the state: {len(self._problems)} "
            f"difference{'s' * (len(self._problems) > 1)} ({len(self._weights.names)} arrays).{lines}{more}\nEach leaf "
            "needs one array of its shape, and each array a leaf. Rename with names: [[pattern, path]], leave an array "
            "out with [pattern, null], transpose or stack in a function under @sk.weights, or set strict: false: init "
            f"then initializes the leaves that are not found.{self._known_map()}"
        )

    def _known_map(self) -> str:
        """Returns the name of the map for the config.json next to the weights, as a hint; empty if there is none."""
        try:
            kind = json.loads((Path(self._weights.source).parent / "config.json").read_text())["model_type"]
        except (OSError, ValueError, KeyError, TypeError):
            return ""
        known = kind in architectures.ARCHITECTURES and kind != self._given.names
        return f" The config.json next to it is of {kind}: set names: {kind}." if known else ""

    def _notes(self, arrays: Mapping[str, LazyArray], missing: list[str], unused: list[str]) -> list[str]:
        size = format_bytes(sum(leaf_bytes(self._leaves[path]) for path in arrays))
        start = f"init_from: {len(arrays)} of {len(arrays) + len(missing)} leaves ({size}) from {self._weights.source}"
        converted = [p for p, x in arrays.items() if x.dtype != self._leaves[p].dtype]
        dtypes = sorted({f"{arrays[p].dtype} to {self._leaves[p].dtype}" for p in converted})
        notes = [start]
        if converted:
            notes.append(f"init_from: converted from {', '.join(dtypes)}: {_some(list(map(_shown, converted)))}")
        if missing:
            notes.append(f"init_from: initialized by init: {_some(list(map(_shown, missing)))}")
        if unused:
            notes.append(f"init_from: not used: {_some(unused)}")
        return notes


def _head(name: str) -> str:
    return re.split(r"[/.]", name, maxsplit=1)[0]


def _shown(path: str) -> str:
    return path.removeprefix("params/")


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _on_devices(array: LazyArray, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns an array with the shape, dtype and sharding of `like`. A slice that several devices hold is read once."""
    sharding: Any = like.sharding
    extra = len(like.shape) - array.ndim
    devices = dict[tuple[tuple[int, int], ...], list[jax.Device]]()
    for device, index in sharding.addressable_devices_indices_map(like.shape).items():
        box = tuple(x.indices(size)[:2] for x, size in zip(index, like.shape, strict=True))
        devices.setdefault(box, []).append(device)
    shards = list[jax.Array]()
    for box, holders in devices.items():
        part = array.read(tuple(slice(*x) for x in box[extra:])).astype(like.dtype, copy=False)
        part = np.broadcast_to(part, tuple(stop - start for start, stop in box))
        put: Callable[[jax.Device], jax.Array] = lambda device, part=part: jax.device_put(  # type: ignore[misc]
            part, jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
        )
        shards += jax.block_until_ready([put(device) for device in holders])
    return jax.make_array_from_single_device_arrays(like.shape, sharding, shards)
