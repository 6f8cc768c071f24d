"""How the keys of a loss are used: once, several times, or inside a loop without the iteration folded in.

Two values with the same derivation from the key of a loss are the same key. A loop that draws from a key which does not
depend on its iteration draws the same numbers in every iteration.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp

from spmdkit import compat
from spmdkit.foundation import jaxprs

_DRAWS = frozenset(["random_bits", "random_gamma"])


class Value(NamedTuple):
    """A value of a loss.

    Attributes:
        path: its derivation from a key: operations and operands, equal for equal values; None if it is no key.
        loops: the loops of which it depends on the iteration.
    """

    path: tuple[Any, ...] | None = None
    loops: frozenset[int] = frozenset()


@dataclass
class KeyUses:
    """The draws of a loss.

    Attributes:
        draws: derivation of a key -> lines that draw from it.
        in_loops: lines inside a loop that draw from a key which does not depend on the iteration.
    """

    draws: dict[tuple[Any, ...], list[str | None]] = field(default_factory=dict)
    in_loops: list[str | None] = field(default_factory=list)

    @property
    def several(self) -> list[str | None]:
        """The lines that draw from a key which has been drawn from before, with the first line."""
        repeated = next((lines for lines in self.draws.values() if len(lines) > 1), [])
        return list(dict.fromkeys(repeated))

    @property
    def text(self) -> str:
        """How the keys are used, with the lines of a repeated use."""
        at: Callable[[list[str | None]], str] = lambda lines: ", ".join(line for line in lines if line)
        if self.in_loops:
            return f"once for all iterations of a loop: {at(self.in_loops[:1])}"
        return f"several times: {at(self.several)}" if self.several else "once" if self.draws else "not used"


def key_uses(closed: jax.extend.core.ClosedJaxpr, keys: Sequence[int]) -> KeyUses:
    """Returns how the inputs with these indices are used as keys."""
    uses, given = KeyUses(), [Value()] * len(closed.jaxpr.invars)
    for index in keys:
        given[index] = Value(("key", index))
    _Walk(uses, itertools.count()).run(closed.jaxpr, given, (), None)
    return uses


@dataclass(frozen=True)
class _Walk:
    uses: KeyUses
    numbers: Iterator[int]

    def run(self, jaxpr: Any, given: Sequence[Value], loops: tuple[int, ...], line: str | None) -> list[Value]:
        """Returns the results of a jaxpr. `loops`: the loops around it; `line`: of the call."""
        known: dict[Any, Value] = dict(zip(jaxpr.invars, given, strict=True))
        read: Callable[[Any], Value] = lambda var: Value() if _is_literal(var) else known.get(var, Value())
        for eqn in jaxpr.eqns:
            outputs = self._results(eqn, [read(var) for var in eqn.invars], loops, line)
            known.update(zip(eqn.outvars, outputs, strict=True))
        return [read(var) for var in jaxpr.outvars]

    def _results(self, eqn: Any, given: list[Value], loops: tuple[int, ...], line: str | None) -> list[Value]:
        name, num = eqn.primitive.name, len(eqn.outvars)
        around = frozenset().union(*(value.loops for value in given))
        inner = list(jaxprs.inner_jaxprs(eqn))
        here = compat.user_line(eqn) or line
        if name in ("scan", "while"):
            return self._loop(eqn, given, loops, here)
        if name == "cond":
            return [self.run(body, given[1:], loops, here) for body in inner][0]  # noqa: RUF015 - all of them
        if inner and len(inner[0].invars) == len(given) and len(inner[0].outvars) == num:
            return self.run(inner[0], given, loops, here)
        if all(value.path is None for value in given):
            return [Value(None, around)] * num
        if name in _DRAWS:
            self._draw(given[0], loops, here)
            return [Value(None, around)] * num
        if not any(_may_be_key(var) for var in eqn.outvars):
            return [Value(None, around)] * num
        operands = zip(given, eqn.invars, strict=True)
        parts = [value.path or (str(var) if _is_literal(var) else id(var)) for value, var in operands]
        path = (name, *parts, str(sorted((key, str(value)) for key, value in eqn.params.items())))
        return [Value((*path, i), around) for i in range(num)]

    def _draw(self, key: Value, loops: tuple[int, ...], line: str | None) -> None:
        if key.path is None:
            return
        if any(loop not in key.loops for loop in loops):
            self.uses.in_loops.append(line)
        self.uses.draws.setdefault(key.path, []).append(line)

    def _loop(self, eqn: Any, given: list[Value], loops: tuple[int, ...], line: str | None) -> list[Value]:
        loop = next(self.numbers)
        if eqn.primitive.name == "scan":
            first, body = compat.carried_inputs(eqn)[0], eqn.params["jaxpr"].jaxpr
        else:
            given = given[eqn.params["cond_nconsts"] :]
            first, body = eqn.params["body_nconsts"], eqn.params["body_jaxpr"].jaxpr
        moving = [
            Value(x.path and ("iteration", loop, i, x.path), x.loops | {loop}) for i, x in enumerate(given[first:])
        ]
        out = self.run(body, [*given[:first], *moving], (*loops, loop), line)
        return [Value(x.path and ("after", loop, x.path), x.loops - {loop}) for x in out]


def _is_literal(var: Any) -> bool:
    return isinstance(var, jax.extend.core.Literal)


def _may_be_key(var: Any) -> bool:
    """Returns whether a value is a key or the data of one."""
    return bool(jnp.issubdtype(var.aval.dtype, jax.dtypes.prng_key)) or var.aval.dtype == "uint32"
