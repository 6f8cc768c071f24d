"""A step that also returns every intermediate value: its jaxpr is evaluated again with taps.

    program = TappedProgram(closed_jaxpr)   the values and their dependencies, read from the jaxpr
    program(*arguments)                     (results, {place: array}), one compiled program

Calls (`jit`, `remat`, custom rules) and parts of `sk.manual` are evaluated inline. A value inside a `shard_map` is
stacked over the devices of its mesh; a value inside a `scan` is stacked over the iterations, after the device dims.
Values inside `while` and `cond` are not tapped. A value's place is its equation's path and the index of the result.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal
from jax.sharding import PartitionSpec

from spmdkit import compat
from spmdkit.foundation import jaxprs
from spmdkit.foundation.formatting import shown
from spmdkit.foundation.trees import is_key
from spmdkit.ops.part import Part
from spmdkit.step.step import global_step, replica_step

ValuePath = tuple[int, ...]

IN_LINE = frozenset(
    ["jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call"]
)


class Line(NamedTuple):
    """Source of an equation: `file.py:12 (function)`, whether it is the user's line, and the (file, line) of its
    frames, innermost first."""

    text: str
    own: bool
    frames: tuple[tuple[str, int], ...]
    is_jit: bool = False


NO_LINE = Line("", False, ())


class Loop(NamedTuple):
    """A `scan`: the path of its equation, its number of iterations, and whether it runs in reverse."""

    path: tuple[int, ...]
    length: int
    reverse: bool


class _Enclosing(NamedTuple):
    """Context of an equation: the line of the call, the axes of the `shard_map`, the loops, and for each input the
    places carried from the previous iteration."""

    line: Line
    stacked: dict[str, int]
    loops: tuple[Loop, ...]
    carried: list[list[ValuePath]]


@dataclasses.dataclass
class Value:
    """One result of an equation.

    Attributes:
        line: `file.py:12 (function)` of the user's line, or of the innermost line of the package.
        own: whether the line is the user's.
        backward: whether the value belongs to a transposed part of the program.
        parents: places of the values it is computed from; (-1, index) for an argument.
        stacked: sizes of the mesh axes over which it is stacked, in order.
        loops: the enclosing loops, outermost first. A value has one dim per loop, after the device dims.
        carried: the parents computed in the previous iteration.
        is_key: whether it is a random key or key data. These are not compared: a loss's plain key differs between
            replicas.
        is_index: whether it depends on no argument and is an integer or computed by spmdkit: a shard's number of rows,
            a count, a replica's index.
    """

    place: ValuePath
    line: str
    own: bool
    primitive: str
    shape: tuple[int, ...]
    backward: bool
    parents: list[ValuePath]
    stacked: dict[str, int]
    loops: tuple[Loop, ...]
    carried: frozenset[ValuePath]
    is_key: bool
    is_index: bool

    @property
    def key(self) -> tuple[Any, ...]:
        """The identity of the value across traces of the same source."""
        return self.line, self.primitive, self.backward, len(self.loops)


class TappedProgram:
    """A traced function with taps.

    Attributes:
        values: by place, in program order.
        results: for each result of the function, the places it is computed from.
        wanted: indices of the requested results, in order.
    """

    def __init__(self, closed: Any, wanted: Sequence[int] | None = None):
        self._closed, self.values = closed, dict[ValuePath, Value]()
        self._parts: dict[int, Any] = {}
        arguments: list[list[ValuePath]] = [[(-1, i)] for i in range(len(closed.jaxpr.invars))]
        self.results = self._read(closed.jaxpr, arguments, (), _Enclosing(NO_LINE, {}, (), []))
        self.wanted = list(range(len(self.results))) if wanted is None else list(wanted)
        self._tapped = self.ancestors(p for i in self.wanted for p in self.results[i])

    def ancestors(self, places: Iterable[ValuePath]) -> set[ValuePath]:
        """Returns `places` and the places of all values they are computed from."""
        seen, todo = set[ValuePath](), list(places)
        while todo:
            place = todo.pop()
            if place not in seen and place in self.values:
                seen.add(place)
                todo += self.values[place].parents
        return seen

    # ---- dependencies

    def _read(self, jaxpr: Any, given: Sequence[Any], path: ValuePath, at: _Enclosing) -> list[Any]:
        """Returns the sources of a jaxpr's results, a list of places for each."""
        known: dict[Any, list[ValuePath]] = dict(zip(jaxpr.invars, given, strict=True))
        carried = dict(zip(jaxpr.invars, at.carried, strict=True)) if at.carried else {}
        read: Callable[[Any], list[ValuePath]] = lambda v: [] if isinstance(v, Literal) else known.get(v, [])
        for number, eqn in enumerate(jaxpr.eqns):
            here = (*path, number)
            sources = [read(v) for v in eqn.invars]
            before = [[] if isinstance(v, Literal) else carried.get(v, []) for v in eqn.invars]
            now = at._replace(line=_line(eqn, at.line), carried=before)
            outs = self._inside(eqn, sources, here, now)
            if outs is None:
                outs = self._own(eqn, sources, here, now)
            known.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _own(self, eqn: Any, sources: list[Any], here: ValuePath, at: _Enclosing) -> list[list[ValuePath]]:
        """Records the values of an equation without an inner jaxpr, and returns their places."""
        parents = list(dict.fromkeys(p for source in sources for p in source))
        by_index = all(p[0] != -1 and self.values[p].is_index for p in parents)
        if eqn.primitive.name == "axis_index":
            by_index = not at.line.own
        for i, var in enumerate(eqn.outvars):
            place, dtype = (*here, i), getattr(var.aval, "dtype", None)
            self.values[place] = Value(
                place,
                at.line.text,
                at.line.own,
                eqn.primitive.name,
                tuple(getattr(var.aval, "shape", ())),
                "transpose(" in str(eqn.source_info.name_stack),
                parents,
                dict(at.stacked),
                at.loops,
                frozenset(p for before in at.carried for p in before),
                is_key(var.aval) or eqn.primitive.name == "random_unwrap",
                by_index and (not at.line.own or getattr(dtype, "kind", "f") in "iub"),
            )
        return [[(*here, i)] for i in range(len(eqn.outvars))]

    def _inside(self, eqn: Any, sources: list[Any], here: ValuePath, at: _Enclosing) -> list[Any] | None:
        name = eqn.primitive.name
        if (body := self._in_line(eqn)) is not None:
            return self._read(body.jaxpr, sources, here, at)
        if name == "shard_map" and not at.stacked:
            return self._read(
                eqn.params["jaxpr"], sources, here, at._replace(stacked={shown(a): n for a, n in _sizes(eqn).items()})
            )
        if name == "scan":
            first, num = compat.carried_inputs(eqn)
            body = eqn.params["jaxpr"].jaxpr
            loop = Loop(here, eqn.params["length"], eqn.params["reverse"])
            at = at._replace(loops=(*at.loops, loop))
            outs = self._read(body, sources, here, at)
            inputs, carried = list(sources), [list[ValuePath]() for _ in sources]
            for i in range(num):  # an iteration also reads the results of the previous one
                inputs[first + i] = [*inputs[first + i], *outs[i]]
                carried[first + i] = outs[i]
            return self._read(body, inputs, here, at._replace(carried=carried))
        return None

    # ---- values

    def __call__(self, *arguments: Any) -> tuple[list[Any], dict[ValuePath, Any]]:
        """Returns (the requested results, every numeric array they are computed from). Must be traced."""
        taps: dict[ValuePath, Any] = {}
        outs = self._evaluate(self._closed.jaxpr, self._closed.consts, arguments, (), taps, True)
        return [outs[i] for i in self.wanted], {p: x for p, x in taps.items() if p in self._tapped}

    def _in_line(self, eqn: Any) -> Any:
        """Returns the closed jaxpr of a call or of a part of `sk.manual`, or None for other equations."""
        if isinstance(part := eqn.params.get("part"), Part):
            if id(eqn) not in self._parts:  # traced once, so that the jaxpr read and the jaxpr evaluated are the same
                shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
                self._parts[id(eqn)] = jax.make_jaxpr(part.run)(*shapes)
            return self._parts[id(eqn)]
        if eqn.primitive.name not in IN_LINE:
            return None
        body = next((eqn.params[k] for k in ("jaxpr", "call_jaxpr", "fun_jaxpr") if k in eqn.params), None)
        if body is None or len(jaxprs.open_jaxpr(body).invars) != len(eqn.invars):
            return None
        return body if hasattr(body, "consts") else jax.extend.core.ClosedJaxpr(body, ())

    def _evaluate(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        arguments: Sequence[Any],
        path: ValuePath,
        taps: dict[ValuePath, Any],
        at_top: bool,
    ) -> list[Any]:
        """Returns a jaxpr's results and adds its values to `taps`. `at_top`: it is not inside a `shard_map`."""
        known: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(
            zip(jaxpr.invars, arguments, strict=True)
        )
        read: Callable[[Any], Any] = lambda v: v.val if isinstance(v, Literal) else known[v]
        for number, eqn in enumerate(jaxpr.eqns):
            here = (*path, number)
            inputs = [read(v) for v in eqn.invars]
            if (body := self._in_line(eqn)) is not None:
                outs = self._evaluate(body.jaxpr, body.consts, inputs, here, taps, at_top)
            elif eqn.primitive.name == "shard_map" and at_top:
                outs = self._shard_map(eqn, inputs, here, taps)
            elif eqn.primitive.name == "scan":
                outs = self._scan(eqn, inputs, here, taps, at_top)
            else:
                with eqn.ctx.manager:
                    result = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
                outs = list(result) if eqn.primitive.multiple_results else [result]
                taps.update({(*here, i): x for i, x in enumerate(outs) if _is_numbers(x)})
            known.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _shard_map(self, eqn: Any, given: Sequence[Any], here: ValuePath, taps: dict[ValuePath, Any]) -> list[Any]:
        params, inner_taps = eqn.params, dict[ValuePath, Any]()
        axes = tuple(_sizes(eqn))

        def body(*shards: Any) -> Any:
            inner_taps.clear()
            outs = self._evaluate(params["jaxpr"], (), shards, here, inner_taps, False)
            return outs, [compat.as_varying(jnp.asarray(x)[None], axes) for x in inner_taps.values()]

        results, tapped = jax.shard_map(
            body,
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=(list(params["out_specs"]), PartitionSpec(axes)),
            axis_names=set(params["newly_manual_axes"]),
            check_vma=params["check_vma"],
        )(*given)
        taps.update(zip(inner_taps, tapped, strict=True))
        return list(results)

    def _scan(
        self, eqn: Any, given: Sequence[Any], here: ValuePath, taps: dict[ValuePath, Any], at_top: bool
    ) -> list[Any]:
        first, num = compat.carried_inputs(eqn)
        body, inner_taps = eqn.params["jaxpr"], dict[ValuePath, Any]()
        consts, carry, xs = given[:first], list(given[first : first + num]), list(given[first + num :])

        def iteration(carry: Any, x: Any) -> Any:
            inner_taps.clear()
            outs = self._evaluate(body.jaxpr, body.consts, [*consts, *carry, *x], here, inner_taps, at_top)
            return outs[:num], (outs[num:], list(inner_taps.values()))

        end, (ys, tapped) = lax.scan(iteration, carry, xs, length=eqn.params["length"], reverse=eqn.params["reverse"])
        for place, x in zip(inner_taps, tapped, strict=True):
            taps[place] = jnp.moveaxis(x, 1, 0) if at_top and self.values[place].stacked else x
        return [*end, *ys]


def _sizes(eqn: Any) -> dict[str, int]:
    mesh, manual = eqn.params["mesh"], eqn.params["newly_manual_axes"]
    return {axis: size for axis, size in mesh.shape.items() if axis in manual}


def _is_numbers(x: Any) -> bool:
    return hasattr(x, "dtype") and (jnp.issubdtype(x.dtype, jnp.number) or x.dtype == jnp.bool_)


def _line(eqn: Any, around: Line) -> Line:
    """Returns the line of an equation, or of the enclosing call if JAX reuses the cached trace of another call."""
    line = line_of(eqn)
    if line is None or (around.is_jit and around.frames[0] not in line.frames):
        return around
    return around if around.own and not line.own else line


def line_of(eqn: Any) -> Line | None:
    """Returns the user's innermost line inside the step, else the package's innermost line, else None."""
    traceback = eqn.source_info.traceback
    inside = []
    for frame in () if traceback is None else traceback.frames:
        if frame.file_name.startswith(_PACKAGE) and frame.function_name.startswith(_STEP):
            break
        if not any(part in frame.file_name for part in _LIBRARIES):
            inside.append(frame)
    ours = [f for f in inside if f.file_name.startswith(_PACKAGE)]
    users = [f for f in inside if not f.file_name.startswith(_PACKAGE)]
    for is_user, frames in ((True, users), (False, ours)):
        for f in frames[:1]:
            name = f.function_name.rpartition(".")[2]
            all_frames = tuple((f.file_name, f.line_num) for f in inside)
            is_jit = eqn.primitive.name in ("jit", "pjit")
            return Line(f"{_short(f.file_name)}:{f.line_num} ({name})", is_user, all_frames, is_jit)
    return None


def _short(file: str) -> str:
    return f"spmdkit/{file.removeprefix(_PACKAGE)}" if file.startswith(_PACKAGE) else file


_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_LIBRARIES = ("site-packages" + os.sep, "dist-packages" + os.sep, os.sep + "lib" + os.sep + "python", "<frozen")
_STEP = (*(f"{maker.__qualname__}." for maker in (global_step, replica_step)), Part.run.__qualname__)
"""Name prefixes of the package functions that form the step or a part of it. The frames inside them are the user's."""
