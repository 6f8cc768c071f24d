"""Dependence analysis of a jaxpr: the inputs that each result depends on, and whether the dependence is linear.

Each input is a bit of an integer, so one pass covers many inputs. There are two kinds of dependence: `linear` (for any
values of the remaining inputs, the result is affine in this one) and `other`. The analysis is conservative: it reports
`other` if it cannot show linearity. A reduction over all replicas clears the `per_replica` bits, since its result is
the same on all of them. The index of a replica sets them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.extend.core
import numpy as np

from spmdkit import compat
from spmdkit.foundation import jaxprs


class Depends(NamedTuple):
    """Bits of the inputs that a value depends on: `linear` for affine dependence, `other` for any other kind.
    `factors`: known factors of inputs, as (bit, factor): every element is the input's times it, plus values of other
    inputs, plus terms that depend on the replica and are not linear in the input."""

    linear: int = 0
    other: int = 0
    factors: tuple[tuple[int, float], ...] = ()

    @property
    def all(self) -> int:
        return self.linear | self.other

    def factor(self, bit: int) -> float | None:
        """Returns the factor of an input, or None if it is unknown."""
        return dict(self.factors).get(bit) if self.all & bit else 0.0


_SUMS = ("add", "add_any", "sub", "neg", "reduce_sum", "cumsum", "reduce_window_sum", "psum", "psum_invariant", "psum2")
_COPIES = ("copy", "copy_p", "name", "pvary", "pcast", "sharding_constraint", "stop_gradient", "all_gather")
_CASTS = ("convert_element_type", "reduce_precision", "real", "imag")
_MOVES = ("broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "slice", "concatenate", "rev", "pad")
_LINEAR = frozenset((*_SUMS, *_COPIES, *_CASTS, *_MOVES))
_PRODUCTS = frozenset(["mul", "dot_general", "conv_general_dilated"])
_OPERAND_FIRST = {"gather": 1, "dynamic_slice": 1, "dynamic_update_slice": 2, "scatter": 1, "div": 1}
"""Operations that are linear in their leading operands -> the number of these operands."""

_REDUCTIONS = frozenset(["psum", "psum_invariant", "psum2", "pmax", "pmin", "all_gather", "all_gather_invariant"])


@dataclass(frozen=True)
class Walk:
    """The replica axes that a reduction must cover, and the bits that such a reduction clears."""

    axes: frozenset[str]
    per_replica: int

    def run(self, jaxpr: Any, given: Sequence[Depends]) -> list[Depends]:
        """Returns the dependences of a jaxpr's results, from those of its inputs."""
        known: dict[Any, Depends] = dict(zip(jaxpr.invars, given, strict=True))
        read: Callable[[Any], Depends] = lambda var: (
            known.get(var, Depends()) if isinstance(var, jax.extend.core.Var) else Depends()
        )
        for eqn in jaxpr.eqns:
            outputs = self.results(eqn, [read(var) for var in eqn.invars])
            known.update(zip(eqn.outvars, outputs, strict=True))
        return [read(var) for var in jaxpr.outvars]

    def results(self, eqn: Any, given: list[Depends]) -> list[Depends]:
        """Returns the dependences of an equation's results."""
        name, num = eqn.primitive.name, len(eqn.outvars)
        if name == "scan":
            return self._scan(eqn, given)
        if name == "while":
            return self._while(eqn, given)
        if name == "cond":
            return self._cond(eqn, given)
        inner = list(jaxprs.inner_jaxprs(eqn))
        if len(inner) == 1 and len(inner[0].invars) == len(given) and len(inner[0].outvars) == num:
            return self.run(inner[0], given)
        if name == "optimization_barrier":
            return given
        if self._covers(eqn):
            if name == "axis_index":
                return [Depends(0, self.per_replica)] * num
            if name in _REDUCTIONS:
                given = [
                    x._replace(linear=x.linear & ~self.per_replica, other=x.other & ~self.per_replica) for x in given
                ]
        constants = [var.val if isinstance(var, jax.extend.core.Literal) else None for var in eqn.invars]
        return [_of_operation(name, given)._replace(factors=self._factors(name, given, constants))] * num

    def _factors(self, name: str, given: Sequence[Depends], constants: Sequence[Any]) -> tuple[tuple[int, float], ...]:
        """Returns the known factors of the inputs in the result of an operation.

        Args:
            constants: the value of each operand that is a literal, otherwise None.
        """
        scales = [1.0] * len(given)
        if name in ("sub", "neg"):
            scales[-1] = -1.0
        elif name == "mul" and len(given) == 2:
            scales = [np.nan if x is None else np.asarray(x).item() for x in reversed(constants)]
        elif name == "div":
            scales = [1 / np.asarray(constants[1]).item() if constants[1] else np.nan, np.nan]
        elif name in ("scatter-add", "scatter_add"):
            scales[1:] = [np.nan] * len(given[1:])
        elif name not in ("add", "add_any", *_COPIES, *_CASTS):
            return ()
        bits = dict.fromkeys(bit for depends in given for bit, _ in depends.factors)
        totals = {
            bit: sum(self._factor(x, bit) * scale for x, scale in zip(given, scales, strict=True) if x.all & bit)
            for bit in bits
        }
        return tuple((bit, total) for bit, total in totals.items() if total == total)

    def _factor(self, depends: Depends, bit: int) -> float:
        """Returns the factor of an input, NaN if it is unknown."""
        is_term = depends.other & bit and depends.all & self.per_replica and bit not in dict(depends.factors)
        return 0.0 if is_term else dict(depends.factors).get(bit, np.nan)

    def _covers(self, eqn: Any) -> bool:
        """Returns whether a collective covers all replica axes, or an `axis_index` is over one of them."""
        names = jaxprs.axis_names(eqn)
        if eqn.primitive.name == "axis_index":
            return bool(names & self.axes)
        return bool(self.axes) and self.axes <= names

    def _scan(self, eqn: Any, given: list[Depends]) -> list[Depends]:
        first, num_carry = compat.carried_inputs(eqn)
        return self._settled(eqn.params["jaxpr"].jaxpr, given, first, num_carry)

    def _while(self, eqn: Any, given: list[Depends]) -> list[Depends]:
        of_test, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        inputs = given[of_test:]
        out = self._settled(eqn.params["body_jaxpr"].jaxpr, inputs, of_body, len(inputs) - of_body)
        (test,) = self.run(eqn.params["cond_jaxpr"].jaxpr, [*given[:of_test], *out])
        return [Depends(depends.linear, depends.other | test.all) for depends in out]

    def _settled(self, body: Any, given: list[Depends], first: int, num_carry: int) -> list[Depends]:
        """Returns the results of a loop body at the fixed point: the final carry, then the stacked results."""
        given = list(given)
        while True:
            out = self.run(body, given)
            carry = [_either(old, new) for old, new in zip(given[first : first + num_carry], out, strict=False)]
            if carry == given[first : first + num_carry]:
                return [*carry, *out[num_carry:]]
            given[first : first + num_carry] = carry

    def _cond(self, eqn: Any, given: list[Depends]) -> list[Depends]:
        which, *operands = given
        branches = [self.run(branch.jaxpr, operands) for branch in eqn.params["branches"]]
        joined = [_either(*results) for results in zip(*branches, strict=True)]
        return [Depends(depends.linear, depends.other | which.all) for depends in joined]


def retained(body: Any, carry: range) -> list[bool]:
    """Returns whether each carry of a loop body, by its index among the inputs, is added unchanged to its next one."""
    given = [_input(1 << i) if i in carry else Depends() for i in range(len(body.invars))]
    out = Walk(frozenset(), 0).run(body, given)
    return [
        bool(depends.linear & 1 << i) and depends.factor(1 << i) == 1 for i, depends in zip(carry, out, strict=False)
    ]


def dependence(
    jaxpr: jax.extend.core.ClosedJaxpr, inputs: Sequence[int], per_replica: int = 0, axes: Collection[str] = ()
) -> list[Depends]:
    """Returns the dependence of each result of `jaxpr`.

    Args:
        inputs: bits of each input; inputs with the same bit are not distinguished.
        per_replica: the bits of inputs that differ between replicas.
        axes: the replica axes larger than one.
    """
    return Walk(frozenset(axes), per_replica).run(jaxpr.jaxpr, [_input(bit) for bit in inputs])


def _input(bit: int) -> Depends:
    return Depends(bit, 0, ((bit, 1.0),) if bit else ())


def _of_operation(name: str, given: Sequence[Depends]) -> Depends:
    all_bits = _union(depends.all for depends in given)
    if name in _LINEAR:
        return _either(*given)
    if name in _PRODUCTS:
        # Linear in an input that only one factor depends on.
        linear = _union(
            depends.linear & ~_union(x.all for j, x in enumerate(given) if j != i) for i, depends in enumerate(given)
        )
        return Depends(linear & ~_union(depends.other for depends in given), all_bits & ~linear)
    if name == "select_n":
        which, *cases = given
        return _either(*cases, Depends(0, which.all))
    if name.startswith("scatter"):
        operand, indices, *updates = given
        return _either(operand, *updates, Depends(0, indices.all))
    if name in _OPERAND_FIRST:
        num = _OPERAND_FIRST[name]
        return _either(*given[:num], Depends(0, _union(depends.all for depends in given[num:])))
    return Depends(0, all_bits)


def _either(*given: Depends) -> Depends:
    other = _union(depends.other for depends in given)
    return Depends(_union(depends.linear for depends in given) & ~other, other)


def _union(bits: Iterable[int]) -> int:
    total = 0
    for more in bits:
        total |= more
    return total
