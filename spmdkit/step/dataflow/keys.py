"""How the keys of a loss are used: once, several times, or inside a loop without the iteration folded in.

Two values with the same derivation from the key of a loss are the same key. A loop that draws from a key which does not
depend on its iteration draws the same numbers in every iteration.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.extend.core

from spmdkit import compat
from spmdkit.foundation import jaxprs
from spmdkit.step import rng

_DRAWS = frozenset(["random_bits", "random_gamma"])
_CONVERSIONS = frozenset(["convert_element_type", "reshape", "broadcast_in_dim", "squeeze"])


class Call(NamedTuple):
    """A call of `sk.example_keys`.

    Attributes:
        line: line of the user's code.
        trace: identities of the traces that made its operations. A function that JAX traces once and copies
            (`jax.checkpoint`) has one; two calls of it have different ones.
        loops: the loops around the call.
    """

    line: str | None
    trace: tuple[int, ...]
    loops: tuple[int, ...]


class Value(NamedTuple):
    """A value of a loss.

    Attributes:
        path: its derivation from a key: operations and operands, equal for equal values; None if it is no key.
        loops: the loops of which it depends on the iteration.
        call: the call of `sk.example_keys` that derived it, or None.
        same: of a value that is no key: equal for equal values.
        varies: whether it can differ between replicas.
    """

    path: tuple[Any, ...] | None = None
    loops: frozenset[int] = frozenset()
    call: Call | None = None
    same: Any = None
    varies: bool = False


class Draw(NamedTuple):
    """A draw from a key: its line, the call of `sk.example_keys` or None, and the branches around it."""

    line: str | None
    call: Call | None
    branches: Mapping[int, int]


@dataclass
class KeyUses:
    """The draws of a loss.

    Attributes:
        draws: derivation of a key -> draws from it.
        in_loops: lines inside a loop that draw from a key which does not depend on the iteration.
        repeated: (line of a call of `sk.example_keys`, line of its loop) with the same keys in each iteration.
        on_each_replica: lines that draw the same numbers for the rows of every replica.
    """

    draws: dict[tuple[Any, ...], list[Draw]] = field(default_factory=dict)
    in_loops: list[str | None] = field(default_factory=list)
    repeated: list[tuple[str | None, str | None]] = field(default_factory=list)
    on_each_replica: list[str | None] = field(default_factory=list)

    @property
    def several(self) -> list[str | None]:
        """The lines that draw from a key which has been drawn from before, with the first line."""
        repeated = next((draws for draws in self.draws.values() if len(draws) > 1), [])
        return list(dict.fromkeys(draw.line for draw in repeated))

    def draw_of(self, inputs: Container[int]) -> str | None:
        """Returns the line of a draw from one of these inputs, other than by `sk.example_keys`."""
        for path, (draw, *_) in self.draws.items():
            if draw.call is None and any(root in inputs for root in _roots(path)):
                return draw.line or "the loss"
        return None

    @property
    def problem(self) -> str:
        """A message about calls of `sk.example_keys` that give the same random numbers twice, or an empty text."""
        for line, loop in self.repeated:
            return (
                f"{line} calls sk.example_keys() in the loop of {loop}: every iteration draws the same numbers. Fold "
                "the iteration in, sk.example_keys(i), or call it before the loop if the same numbers are intended."
            )
        called = [[(draw.call, draw.branches) for draw in draws if draw.call] for draws in self.draws.values()]
        for (first, ours), (second, theirs) in (pair for draws in called for pair in itertools.combinations(draws, 2)):
            exclusive = any(theirs.get(cond, branch) != branch for cond, branch in ours.items())
            if exclusive or set(first.trace) <= set(second.trace):  # one call that JAX copied
                continue
            return (
                f"{first.line} and {second.line} call sk.example_keys() with the same salt: both draw the same "
                "numbers. Give each call its own salt, sk.example_keys('name of the layer'), or call it once and pass "
                "the keys to both if the same numbers are intended."
            )
        return ""

    @property
    def text(self) -> str:
        """How the keys are used, with the lines of a repeated use."""
        at: Callable[[list[str | None]], str] = lambda lines: ", ".join(line for line in lines if line)
        if self.on_each_replica:
            return f"the same numbers on every replica: {at(self.on_each_replica[:1])}"
        if self.in_loops:
            return f"once for all iterations of a loop: {at(self.in_loops[:1])}"
        return f"several times: {at(self.several)}" if self.several else "once" if self.draws else "not used"


def _roots(path: Any) -> Iterator[int]:
    """Yields the inputs from which a key is derived."""
    if isinstance(path, tuple):
        yield from [path[1]] if path[0] == "key" else itertools.chain(*map(_roots, path))


def key_uses(closed: jax.extend.core.ClosedJaxpr, keys: Sequence[int], shared: int, rows: int) -> KeyUses:
    """Returns how a loss uses its keys.

    Args:
        keys: indices of the inputs that are keys.
        shared: number of leading inputs that are the same on every replica.
        rows: number of rows if no other dim is a multiple of it, otherwise 0.
    """
    given = [Value(("key", i) if i in keys else None, varies=i >= shared) for i in range(len(closed.jaxpr.invars))]
    walk = _Walk(KeyUses(), itertools.count(), {}, {}, rows)
    walk.run(closed.jaxpr, given, _CallSite())
    return walk.uses


@dataclass(frozen=True)
class _CallSite:
    """Where a jaxpr is called: the loops, branches and traces around it, and the line of the call."""

    loops: tuple[int, ...] = ()
    branches: Mapping[int, int] = field(default_factory=dict)
    trace: tuple[int, ...] = ()
    line: str | None = None


@dataclass(frozen=True)
class _Walk:
    uses: KeyUses
    numbers: Iterator[int]
    lines: dict[int, str | None]  # of loops
    drawing: dict[Any, bool]  # jaxpr -> whether it draws random numbers
    rows: int

    def run(self, jaxpr: Any, given: Sequence[Value], place: _CallSite) -> list[Value]:
        """Returns the results of a jaxpr."""
        known: dict[Any, Value] = {}
        name: Callable[[Any, Value], Value] = lambda var, x: x if x.same else x._replace(same=id(var))
        known.update((var, name(var, value)) for var, value in zip(jaxpr.invars, given, strict=True))
        read: Callable[[Any], Value] = lambda var: Value() if _is_literal(var) else known.get(var, Value())
        for eqn in jaxpr.eqns:
            outputs = self._results(eqn, [read(var) for var in eqn.invars], place)
            known.update((var, name(var, value)) for var, value in zip(eqn.outvars, outputs, strict=True))
        return [read(var) for var in jaxpr.outvars]

    def _results(self, eqn: Any, given: list[Value], place: _CallSite) -> list[Value]:
        name, num = eqn.primitive.name, len(eqn.outvars)
        around = frozenset().union(*(value.loops for value in given))
        varies = name == "axis_index" or any(value.varies for value in given)
        inner = list(jaxprs.inner_jaxprs(eqn))
        if all(value.path is None for value in given) and name not in _DRAWS and not self._draws(inner):
            same = (name, str(eqn.params), given[0].same) if name in _CONVERSIONS and given[0].same else None
            return [Value(None, around, same=same, varies=varies)] * num
        line = compat.user_line(eqn) or place.line
        here = replace(place, line=line, trace=(*place.trace, id(eqn.source_info.traceback)))
        if name in ("scan", "while"):
            return self._loop(eqn, given, here)
        if name == "cond":
            cond = next(self.numbers)
            results = [
                self.run(body, given[1:], replace(here, branches={**here.branches, cond: i}))
                for i, body in enumerate(inner)
            ]
            return results[0]
        if inner and len(inner[0].invars) == len(given):
            return self.run(inner[0], given, here)
        if name in _DRAWS:
            self._draw(given[0], here, eqn.outvars[0].aval.shape)
            return [Value(None, around, varies=varies)] * num
        operands = zip(given, eqn.invars, strict=True)
        makers = compat.functions_of(eqn, rng.__file__)
        of_layer = rng.fold_layer.__name__ in makers
        parts = [
            value.path or (str(var) if _is_literal(var) else "layer" if of_layer else value.same)
            for value, var in operands
        ]
        path = (name, *parts, str(sorted((key, str(value)) for key, value in eqn.params.items())))
        call = next((value.call for value in given if value.call is not None), None)
        if rng.example_keys.__name__ in makers:
            call = Call(line, here.trace, here.loops)
        return [Value((*path, i), around, call, varies=varies) for i in range(num)]

    def _draws(self, inner: Sequence[Any]) -> bool:
        """Returns whether one of these jaxprs draws random numbers."""
        for jaxpr in inner:
            if jaxpr not in self.drawing:
                self.drawing[jaxpr] = any(
                    eqn.primitive.name in _DRAWS or self._draws(list(jaxprs.inner_jaxprs(eqn))) for eqn in jaxpr.eqns
                )
        return any(self.drawing[jaxpr] for jaxpr in inner)

    def _draw(self, key: Value, place: _CallSite, shape: Sequence[int]) -> None:
        if not key.varies and self.rows and any(dim % self.rows == 0 for dim in shape):
            self.uses.on_each_replica.append(place.line)
        if key.path is None:
            return
        if same := [loop for loop in place.loops if loop not in key.loops]:
            self.uses.in_loops.append(place.line)
            if key.call and (called := [loop for loop in same if loop in key.call.loops]):
                self.uses.repeated.append((key.call.line, self.lines[called[-1]]))
        self.uses.draws.setdefault(key.path, []).append(Draw(place.line, key.call, place.branches))

    def _loop(self, eqn: Any, given: list[Value], place: _CallSite) -> list[Value]:
        loop = next(self.numbers)
        self.lines[loop] = place.line
        if eqn.primitive.name == "scan":
            first, body = compat.carried_inputs(eqn)[0], eqn.params["jaxpr"].jaxpr
        else:
            given = given[eqn.params["cond_nconsts"] :]
            first, body = eqn.params["body_nconsts"], eqn.params["body_jaxpr"].jaxpr
        moving = [
            Value(x.path and ("iteration", loop, i, x.path), x.loops | {loop}, x.call, varies=x.varies)
            for i, x in enumerate(given[first:])
        ]
        out = self.run(body, [*given[:first], *moving], replace(place, loops=(*place.loops, loop)))
        return [Value(x.path and ("after", loop, x.path), x.loops - {loop}, x.call, varies=x.varies) for x in out]


def _is_literal(var: Any) -> bool:
    return isinstance(var, jax.extend.core.Literal)
