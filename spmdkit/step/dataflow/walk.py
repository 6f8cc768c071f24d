"""The walk over a jaxpr, with its loops, branches, calls and collectives."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.extend.core
import numpy as np

from spmdkit import compat
from spmdkit.foundation import jaxprs
from spmdkit.foundation.trees import is_key
from spmdkit.step.dataflow import structure
from spmdkit.step.dataflow.arithmetic import COPIES, ZERO, elementwise, linear
from spmdkit.step.dataflow.flow import NONE, Flow, first, marks
from spmdkit.step.model_state.dependence import retained

_LARGEST = 64
"""A literal that is up to this multiple of the reciprocal of the number of rows is derived from it."""


@dataclass(frozen=True)
class Walk:
    """Attributes:
    num: number of rows of the replica; replicas: number of replicas; 1 if it is not known.
    unique: whether no other dim or number of the program is a multiple of `num`.
    axes: the replica axes.
    needed: the axes that a collective must name to cover all replicas.
    """

    num: int
    replicas: int
    unique: bool
    axes: frozenset[str]
    needed: frozenset[str]

    def run(self, jaxpr: Any, given: Sequence[Flow], consts: Sequence[Any] = ()) -> list[Flow]:
        """Returns the flow of each result of an open jaxpr."""
        known: dict[Any, Flow] = dict(zip(jaxpr.invars, given, strict=True))
        for var, value in zip(jaxpr.constvars, consts, strict=False):
            known[var] = self._constant(value, first(eqn for eqn in jaxpr.eqns if var in eqn.invars))
        for eqn in jaxpr.eqns:
            flows = [self._read(known, var) for var in eqn.invars]
            known.update(zip(eqn.outvars, self._results(eqn, flows), strict=True))
        return [self._read(known, var) for var in jaxpr.outvars]

    def _read(self, known: dict[Any, Flow], var: Any) -> Flow:
        if isinstance(var, jax.extend.core.Literal):
            return self._constant(var.val, None)
        return known.get(var, NONE)

    def _constant(self, value: Any, use: Any) -> Flow:
        """Returns the flow of a constant with the first equation that uses it: zeros, numbers that are derived from the
        number of rows, and a number for each row."""
        if isinstance(value, jax.core.Tracer) or is_key(value):
            return NONE
        if np.size(value) != 1:
            return self._positions(np.asarray(value), use)
        number = np.asarray(value).reshape(())
        number = number if number.imag else number.real
        if number.dtype.kind not in "iuf" or not np.isfinite(number):
            return NONE
        if number == 0:
            return ZERO
        if not self.unique:
            return NONE
        if float(number) % self.num == 0:  # a multiple of the rows of all replicas is the same on every mesh
            return Flow(degree=int(self.replicas == 1 or float(number) % (self.num * self.replicas) != 0))
        scaled = float(number) * self.num
        reciprocal = abs(scaled - round(scaled)) < 1e-5 * abs(scaled) and abs(round(scaled)) <= _LARGEST
        return Flow(degree=-1) if reciprocal else NONE

    def _positions(self, value: np.ndarray[Any, Any], use: Any) -> Flow:
        """Returns the flow of a constant array: it depends on the position of a row if it has a value for each row."""
        dims = [d for d, size in enumerate(value.shape) if size == self.num]
        if not self.unique or len(dims) != 1:
            return NONE
        if not value.any():
            return replace(NONE, tag="false" if value.dtype == bool else "zero")
        row = Flow("row", 0, self.num, math.prod(value.shape[dims[0] + 1 :]))
        if np.array_equal(value, np.broadcast_to(value.take([0], dims[0]), value.shape)):
            return row
        is_index = np.array_equal(value.ravel(), np.arange(self.num))
        return replace(row, mixed=use, tag="index" if is_index else "")

    def _results(self, eqn: Any, flows: list[Flow]) -> list[Flow]:
        name, num = eqn.primitive.name, len(eqn.outvars)
        if not num:
            return []
        if name in ("scan", "while", "cond"):
            return {"scan": self._scan, "while": self._while, "cond": self._cond}[name](eqn, flows)
        if name == "custom_linear_solve":
            solve, lengths = eqn.params["jaxprs"].solve, eqn.params["const_lengths"]
            start, right = lengths.matvec + lengths.vecmat, sum(lengths)
            return self.run(solve.jaxpr, [*flows[start : start + lengths.solve], *flows[right:]], solve.consts)
        inner, rule = list(jaxprs.inner_jaxprs(eqn)), structure.RULES.get(name.replace("-", "_"))
        if inner and rule is None and len(inner[0].invars) == len(flows):
            return [_at_call(eqn, flows, f) for f in self.run(inner[0], flows, _consts(eqn))]
        if name in COPIES:
            return flows
        if name == "axis_index":
            return [replace(NONE, tag="replica" if jaxprs.axis_names(eqn) & self.axes else "")]
        if jaxprs.axis_names(eqn) & self.axes:
            return self._collective(eqn, flows)
        if name.startswith("psum"):  # under `vmap(axis_name=)`
            return [structure.reduce_sum(eqn, [flow]) for flow in flows]
        if name == "iota":
            return [structure.iota(eqn, self.num if self.unique else -1)]
        if name == "broadcast_in_dim":
            return [structure.broadcast(eqn, flows[:1], self.num if self.unique else -1)]
        if name in ("split", "unstack"):
            return self._split(eqn, flows[0])
        if (flow := elementwise(eqn, _aligned(eqn, flows))) is not None:
            return [flow] * num
        if rule is not None:
            flow, shape = rule(eqn, flows), structure.result_shape(eqn)
            same = {d: d for d in range(len(shape))}
            return [flow, *(flow.moved(shape, tuple(var.aval.shape), same) for var in eqn.outvars[1:])]
        if not any(f.enters for f in flows):
            return [replace(NONE, **marks(flows))] * num
        found = marks(flows)
        row = next((f for f in flows if f.is_row), None)
        out = replace(row, stride=0, tag="") if row else Flow("unknown")
        return [replace(out, **{**found, "unknown": found["unknown"] or eqn})] * num

    def _split(self, eqn: Any, flow: Flow) -> list[Flow]:
        """split, unstack."""
        shape = structure.shape_of(eqn)
        if eqn.primitive.name == "unstack":
            axis = eqn.params["axis"]
            ones = (*shape[:axis], 1, *shape[axis + 1 :])
            return [structure.part(eqn, flow, shape, ones, [0] * len(shape))] * len(eqn.outvars)
        outs, start = [], 0
        for var in eqn.outvars:
            starts = [start if d == eqn.params["axis"] else 0 for d in range(len(shape))]
            outs.append(structure.part(eqn, flow, shape, tuple(var.aval.shape), starts))
            start += var.aval.shape[eqn.params["axis"]]
        return outs

    # ---- collectives over replicas

    def _collective(self, eqn: Any, flows: list[Flow]) -> list[Flow]:
        """Results of a collective over replica axes. A gather, or a sum of totals, has the value of one device."""
        name, outs = eqn.primitive.name, []
        covers = self.needed <= jaxprs.axis_names(eqn)
        for flow in flows:
            counts_rows = covers and name.startswith("psum") and not flow.enters and flow.degree == 1
            if not (flow.enters or counts_rows):
                outs.append(flow)
                continue
            exact = (
                counts_rows
                or (name.startswith("all_gather") and flow.how in ("row", "total", "max", "min"))
                or (name.startswith("psum") and flow.how == "total")
                or name == f"p{flow.how}"
            )
            source = flow.source or eqn
            mixed = flow.mixed if exact else flow.mixed or source
            outs.append(
                Flow(mixed=mixed, added=None, whole=flow.whole or source, unknown=flow.unknown, source=source)
                if covers
                else replace(flow, mixed=flow.mixed or source)
            )
        return outs

    # ---- loops and branches

    def _scan(self, eqn: Any, flows: list[Flow]) -> list[Flow]:
        start, num_carry = compat.carried_inputs(eqn)
        body, length = eqn.params["jaxpr"], eqn.params["length"]
        xs = start + num_carry
        shapes = [tuple(v.aval.shape) for v in eqn.invars]
        sliced = [self._slice(f, shape) for f, shape in zip(flows[xs:], shapes[xs:], strict=True)]
        by_row = any(f.rows != g.rows for f, g in zip(flows[xs:], sliced, strict=True))
        orders = {  # (rows, iterations of each): row (i // iterations) % rows is read in iteration i
            (f.rows, f.stride // math.prod(shape[1:]))
            for f, g, shape in zip(flows[xs:], sliced, shapes[xs:], strict=True)
            if f.rows != g.rows == 1
        }
        is_sum = retained(body.jaxpr, range(start, xs)) if by_row else [True] * num_carry
        if by_row and (len(orders) > 1 or any(f.rows == 1 for f in flows)):  # the row of an outer loop meets all rows
            sliced = [replace(f, mixed=f.mixed or eqn) if f.is_row else f for f in sliced]
        carry = flows[start:xs]
        while True:
            out = self.run(body.jaxpr, [*flows[:start], *carry, *sliced], body.consts)
            found = [self._of_all_rows(eqn, *pair) for pair in zip(out, is_sum, strict=False)] if by_row else out
            new = [self._carried(eqn, *pair) for pair in zip(carry, found[:num_carry], strict=True)]
            if all(a.same_as(b) for a, b in zip(carry, new, strict=True)):
                break
            carry = new
        stacked = [
            self._stack(f, var.aval.shape, *max(orders, default=(length, 1))) if by_row else f
            for f, var in zip(out[num_carry:], eqn.outvars[num_carry:], strict=True)
        ]
        if by_row and any(f.is_statistic for f in carry):
            stacked = [_depending(f, f.source or eqn) if f.is_statistic else f for f in stacked]  # sums of rows before
        return [*carry, *stacked]

    def _slice(self, flow: Flow, shape: tuple[int, ...]) -> Flow:
        """Returns one slice along the first dim."""
        if flow.span(shape) is None:
            return flow
        chunk = math.prod(shape[1:])
        tag = replace(flow, tag="")
        if flow.stride % chunk == 0:
            return replace(tag, rows=1, stride=0)
        if chunk % flow.stride == 0:
            return replace(tag, rows=min(flow.rows, chunk // flow.stride))
        return replace(tag, stride=0)

    def _stack(self, flow: Flow, shape: tuple[int, ...], rows: int, each: int) -> Flow:
        """Returns the values of all iterations of a loop over rows, stacked along a new first dim. `each`: iterations
        of each row."""
        if flow.rows == 1:
            return replace(flow, rows=rows, stride=each * math.prod(shape[1:]))
        return replace(flow, rows=self.num) if flow.is_row else flow

    def _of_all_rows(self, eqn: Any, new: Flow, is_sum: bool) -> Flow:
        """Returns the flow after all rows of a carry that is `new` after one: a sum over rows if `is_sum`."""
        if not is_sum and (new.rows == 1 or new.is_statistic):
            return _depending(replace(new, how="other", rows=0), new.source or eqn)
        if new.rows == 1:
            return replace(new, how="total", degree=1 if new.degree == 0 else None, rows=0, source=new.source or eqn)
        return new

    def _carried(self, eqn: Any, old: Flow, new: Flow) -> Flow:
        """Returns the flow of a carry that was `old` before and `new` after an iteration."""
        if old.same_as(new):
            return old
        joined = linear(eqn, [old, new])
        degree = joined.degree if old.tag == "zero" or old.degree == joined.degree else None
        return replace(joined, degree=degree, **marks([old, joined]))

    def _while(self, eqn: Any, flows: list[Flow]) -> list[Flow]:
        of_test, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        consts, carry = flows[of_test : of_test + of_body], flows[of_test + of_body :]
        body, test = eqn.params["body_jaxpr"], eqn.params["cond_jaxpr"]
        while True:
            out = self.run(body.jaxpr, [*consts, *carry], body.consts)
            new = [self._carried(eqn, *pair) for pair in zip(carry, out, strict=True)]
            if all(a.same_as(b) for a, b in zip(carry, new, strict=True)):
                break
            carry = new
        (stops,) = self.run(test.jaxpr, [*flows[:of_test], *carry], test.consts)
        if not stops.enters or stops.is_row:
            return carry
        source = stops.source or eqn
        return [_depending(f, source) for f in carry]

    def _cond(self, eqn: Any, flows: list[Flow]) -> list[Flow]:
        which, *operands = flows
        branches = [self.run(branch.jaxpr, operands, branch.consts) for branch in eqn.params["branches"]]
        joined = [linear(eqn, results) for results in zip(*branches, strict=True)]
        if not which.enters or which.is_row:
            return joined
        source = which.source or eqn
        return [_depending(f, source) for f in joined]


def _depending(flow: Flow, source: Any) -> Flow:
    """Returns the flow of a value that also depends on a decision of `source`, a function of several rows."""
    how = flow.how if flow.enters else "other"
    return replace(flow, how=how, tag="", mixed=flow.mixed or source, source=flow.source or source)


def _aligned(eqn: Any, flows: list[Flow]) -> list[Flow]:
    """Returns the flows of the operands of an elementwise operation after dims of length one are broadcast."""
    out = tuple(eqn.outvars[0].aval.shape)
    shapes = [tuple(var.aval.shape) for var in eqn.invars]
    same = dict(zip(range(len(out)), range(len(out)), strict=True))
    return [f if shape == out else f.moved(shape, out, same) for f, shape in zip(flows, shapes, strict=True)]


def _at_call(call: Any, given: Sequence[Flow], flow: Flow) -> Flow:
    """Returns the flow of a result of a call, with the call in place of equations of its body if JAX has cached the
    trace of the body for another line."""
    line = compat.user_line(call)
    changes = {}
    for name in ("mixed", "added", "whole", "source"):
        eqn = getattr(flow, name)
        before = any(eqn is getattr(f, mark) for f in given for mark in ("mixed", "added", "whole", "source"))
        if eqn is not None and not before and line is not None and line not in compat.user_lines(eqn):
            changes[name] = call
    return replace(flow, **changes) if changes else flow


def _consts(eqn: Any) -> Sequence[Any]:
    """Returns the constants of the function that an equation calls."""
    for value in eqn.params.values():
        if isinstance(value, jax.extend.core.ClosedJaxpr):
            return list(value.consts)
    return ()


def flows_of(
    closed: jax.extend.core.ClosedJaxpr,
    given: Sequence[Flow],
    num: int,
    replicas: int,
    unique: bool,
    axes: Collection[str],
    needed: Collection[str],
) -> list[Flow]:
    """Returns the flow of each result of a jaxpr.

    Args:
        given: the flow of each input.
        num, replicas, unique, axes, needed: see `Walk`.
    """
    return Walk(num, replicas, unique, frozenset(axes), frozenset(needed)).run(closed.jaxpr, given, closed.consts)
