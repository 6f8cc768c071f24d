"""Rules of elementwise arithmetic: `(eqn, flows) -> Flow`. All operands have one shape, or are scalars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from spmdkit.step.dataflow.flow import NONE, Flow, How, marks, mixing

ZERO = Flow(tag="zero")


def plus(first: int | None, second: int | None) -> int | None:
    """Returns the degree of a product."""
    return None if first is None or second is None else first + second


def times(degree: int | None, exponent: int) -> int | None:
    """Returns the degree of a power."""
    return None if degree is None else degree * exponent


def layout(flows: Sequence[Flow]) -> tuple[int, int, bool]:
    """Returns (rows, stride, whether they agree) of the `row` values among `flows`."""
    known = {(f.rows, f.stride) for f in flows if f.stride or f.rows == 1}
    return (*max(known, default=(0, 0)), len(known) <= 1)


def _row(eqn: Any, flows: Sequence[Flow], degree: int | None, mixes: bool) -> Flow:
    """Returns the `row` value computed from `flows`, elementwise."""
    rows, stride, agree = layout(flows)
    found = mixing(eqn, flows) if mixes or not agree or degree is None else marks(flows)
    return Flow("row", degree or 0, rows, stride, **found)


def _proportional(flow: Flow) -> Flow:
    """Returns the flow with the power of the number of rows that its value is proportional to."""
    return replace(flow, degree=None, tag="") if flow.tag == "grown" else flow


def linear(eqn: Any, flows: Sequence[Flow]) -> Flow:
    """A sum or a choice of values."""
    out = _sum(eqn, flows)
    has_old = any(f.tag in ("old", "grown") for f in flows)
    return replace(out, tag="grown") if has_old and out.degree != 0 else out


def _sum(eqn: Any, flows: Sequence[Flow]) -> Flow:
    name = eqn.primitive.name
    if name in ("neg", "sub") and flows[-1].how in ("max", "min"):
        return Flow("other", 0, **mixing(eqn, flows))
    parts = [f for f in flows if f.tag != "zero"]
    parts = [f for f in parts if f.tag != "old"] or parts[:1]
    if len(parts) < 2:
        return parts[0] if parts else ZERO
    tags = {f.tag for f in parts}
    if tags == {"index", "offset"}:  # the position in the batch of all replicas
        index = next(f for f in parts if f.tag == "index")
        return replace(index, tag="", mixed=None)
    degrees = {f.degree for f in parts}
    degree = degrees.pop() if len(degrees) == 1 else None
    if jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.integer):  # an index counted from the end
        degree = parts[0].degree
    statistics = [f for f in parts if f.is_statistic]
    if any(f.is_row for f in parts):
        if not statistics:
            return _row(eqn, parts, degree, mixes=False)
        totals = all(f.how == "total" for f in statistics)
        if totals and all(f.rows == 1 for f in parts if f.is_row):  # accumulated in a loop over rows
            return Flow("total", statistics[0].degree, **marks(parts))
        if not totals or degree is None or any(f.mixed for f in statistics):
            return _row(eqn, parts, degree, mixes=True)
        return replace(_row(eqn, parts, degree, mixes=False), added=eqn)
    hows: set[How] = {f.how for f in statistics}
    if not hows:
        return Flow(degree=degree, tag="replica" if tags == {"replica"} else "", **marks(parts))
    added_extremes = len(statistics) > 1 and hows <= {"max", "min"} and name in LINEAR
    if len(hows) == 1 and not added_extremes and degree is not None:
        return Flow(statistics[0].how, degree, **marks(parts))
    if hows <= {"total", "moment"} and "moment" in hows:
        return Flow("moment", degree, **marks(parts))
    return Flow("other", degree, **mixing(eqn, parts))


def product(eqn: Any, flows: Sequence[Flow]) -> Flow:
    """A product of two values."""
    if any(f.tag == "zero" for f in flows):
        return ZERO
    flows = [_proportional(f) for f in flows]
    degree = plus(*(f.degree for f in flows))
    statistics = [f for f in flows if f.is_statistic]
    if any(f.is_row for f in flows):
        both = all(f.is_row for f in flows)
        return _row(eqn, flows, degree, mixes=bool(statistics) or (both and any(f.added for f in flows)))
    if not statistics:
        tags = {f.tag for f in flows}
        tag = ("offset" if degree == 1 else "replica") if "replica" in tags else ""
        tag = "old" if "old" in tags and degree == 0 else tag
        return Flow(degree=degree, tag=tag, **marks(flows))  # type: ignore[arg-type]
    if len(statistics) == 1:
        how = statistics[0].how
        if degree is None:
            return Flow("other", None, **mixing(eqn, flows))
        return Flow("other" if how in ("max", "min") else how, degree, **marks(flows))
    moments = all(f.how in ("total", "moment") for f in flows)
    return Flow("moment" if moments else "other", degree, **mixing(eqn, flows))


def quotient(eqn: Any, flows: Sequence[Flow]) -> Flow:
    """The first value divided by the second."""
    top, bottom = flows[0], _proportional(flows[1])
    inverse = replace(bottom, degree=times(bottom.degree, -1), tag="")
    if bottom.is_statistic:
        out = product(eqn, (top, replace(inverse, how="other")))
        return replace(out, **mixing(eqn, flows)) if out.enters else out
    if bottom.added:
        return product(eqn, (top, replace(inverse, **mixing(eqn, flows))))
    return product(eqn, (top, inverse))


def power(eqn: Any, flows: Sequence[Flow]) -> Flow:
    """An integer power."""
    base = _proportional(flows[0])
    exponent = eqn.params.get("y", 2)
    if base.how in ("total", "moment") and exponent > 1:
        return Flow("moment", times(base.degree, exponent), **mixing(eqn, flows))
    if base.how == "none":
        return replace(base, degree=times(base.degree, exponent), tag="")
    return nonlinear(eqn, flows)


def nonlinear(eqn: Any, flows: Sequence[Flow]) -> Flow:
    """Any other function of the elements."""
    name = eqn.primitive.name
    if name == "lt" and flows[0].tag in ("index", "offset") and flows[1].tag == "zero":
        return replace(NONE, tag="false")
    entering = [f for f in flows if f.enters]
    if not entering:
        exact = all(f.degree == 0 for f in flows)
        return Flow(degree=0 if exact else None, **marks(flows))
    statistics = [f for f in flows if f.is_statistic]
    scaled = any(f.degree != 0 for f in flows)
    if any(f.is_row for f in flows):
        return _row(eqn, flows, 0, mixes=bool(statistics) or scaled or any(f.added for f in flows))
    if name in ("max", "min"):
        kept = [f for f in flows if f.tag != "zero"]
        if len(kept) == 1 and kept[0].how == "moment":  # a variance that is clipped at zero
            return kept[0]
        if all(f.how in (name, "none") for f in flows):
            return Flow(name, 0, **marks(flows))
    return Flow("other", 0, **mixing(eqn, flows))


def choice(eqn: Any, flows: Sequence[Flow]) -> Flow:
    """`select_n`: the first value selects among the others."""
    which, *cases = flows
    if which.tag == "false":
        return cases[0]
    chosen = linear(eqn, cases)
    if not which.enters:
        return chosen
    if which.is_statistic or chosen.is_statistic or chosen.added:
        if which.is_row or chosen.is_row:
            return _row(eqn, [which, chosen], 0, mixes=True)
        return Flow("other", 0, **mixing(eqn, flows))
    return _row(eqn, [which, chosen], chosen.degree, mixes=False)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


COPIES = _names(
    "copy name pvary pcast pbroadcast sharding_constraint stop_gradient reduce_precision real imag conj to_edtype "
    "from_edtype random_clone reshard optimization_barrier device_put"
)
LINEAR = _names("add add_any sub neg complex")
NONLINEAR = _names(
    "abs acos acosh and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil clamp clz cos "
    "cosh digamma eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac is_finite le lgamma log "
    "log1p log2 logistic lt max min ne nextafter not one_minus_square or polygamma population_count pow "
    "regularized_incomplete_beta rem round rsqrt shift_left shift_right_arithmetic shift_right_logical sign sin sinh "
    "sqrt tan tanh xor zeta eq_to le_to lt_to"
)


def _truncates(eqn: Any) -> bool:
    """Returns whether a float becomes an integer or a boolean."""
    old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    return bool(jnp.issubdtype(old, jnp.inexact)) and not jnp.issubdtype(new, jnp.inexact)


def elementwise(eqn: Any, flows: Sequence[Flow]) -> Flow | None:
    """Returns the flow of an elementwise operation, or None for any other operation."""
    name = eqn.primitive.name
    if name == "convert_element_type":
        (flow,) = flows
        changes = _truncates(eqn) and (flow.added or (flow.is_statistic and flow.degree == 0))
        return nonlinear(eqn, flows) if changes else flow
    if name in LINEAR:
        return linear(eqn, flows)
    if name == "mul":
        return product(eqn, flows)
    if name == "div":
        return quotient(eqn, flows)
    if name in ("integer_pow", "square"):
        return power(eqn, flows)
    if name == "select_n":
        return choice(eqn, flows)
    return nonlinear(eqn, flows) if name in NONLINEAR else None
