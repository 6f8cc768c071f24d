"""Analyzes a loss before the first step: how rows enter the loss, each metric and each leaf of the model state.

The loss of one replica is traced once more, with a number of rows that no other dim is a multiple of, on named replica
axes and without a mesh. So the result is the same on every mesh.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from spmdkit import compat
from spmdkit.errors import ConfigError
from spmdkit.foundation.trees import named_leaves
from spmdkit.step.dataflow.constants import check_constants
from spmdkit.step.dataflow.cotangent import needs_scale, without_cotangent
from spmdkit.step.dataflow.flow import NONE, Flow
from spmdkit.step.dataflow.keys import key_uses
from spmdkit.step.dataflow.walk import flows_of
from spmdkit.step.metrics.aggregates import Max
from spmdkit.step.metrics.base import Metric, is_metric
from spmdkit.step.metrics.mean import Mean, Means
from spmdkit.step.metrics.user_metric import CustomMetric
from spmdkit.step.model_state.dependence import dependence

Rows = Literal["not at all", "row by row", "as a sum", "as a mean", "mixed across rows", "by their number", "unknown"]

PRIMES = (101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157, 163, 167, 173, 179, 181, 191, 193, 197, 199)
"""Numbers of rows for the analysis: larger than most dims that a program writes out, small enough for loops in Python
over the rows."""


LARGEST = 20_000
"""Most rows of an analyzed loss."""

ANALYZED_REPLICAS = {"replica": 11, "data": 13}
"""Sizes of the replica axes in the analysis: a multiple of the rows of all replicas is no other number."""


@dataclass(frozen=True)
class Usage:
    """How rows enter one result.

    Attributes:
        what: `loss`, `metric`, `model state`, or a metric of `eval_fn`.
        name: of the metric, or path of the leaf.
        rows: how rows enter.
        mixed: line of the user's code at which the rows of a replica were mixed, or None.
        whole: line at which rows of other replicas were read, or None.
        unknown: (primitive, line) of the first operation without a rule, or None.
        keys: how a loss uses its keys.
        same_draws: line at which a loss draws the same random numbers for the rows of every replica, or None.
        flow: of a leaf of the model state.
        old: how the old value of a leaf of the model state enters; `factor`: the number it is multiplied by, or None if
            that is unknown.
        per_replica: whether a leaf depends on the rows or the key of a replica.
        counted: whether a leaf depends on the number of rows only.
        inexact: whether a leaf is a float.
        unchanged: whether the loss returns a leaf of the model state as it was.
        read: whether the loss or a metric depends on the old value of a leaf of the model state.
        needs_scale: whether the gradient of a loss depends on the scale of its cotangent.
        plain_draw: the line at which a loss draws from its plain key, or None.
        fixed_gradients: parameters with a gradient that does not depend on the cotangent.
    """

    what: Literal["loss", "metric", "model state", "evaluation metric"]
    name: str
    rows: Rows
    mixed: str | None = None
    whole: str | None = None
    unknown: tuple[str, str | None] | None = None
    keys: str = ""
    same_draws: str | None = None
    flow: Flow = NONE
    old: Literal["", "not at all", "retained", "affine", "other"] = ""
    factor: float | None = None
    per_replica: bool = False
    counted: bool = False
    inexact: bool = False
    unchanged: bool = False
    read: bool = False
    needs_scale: bool = False
    fixed_gradients: tuple[str, ...] = ()
    plain_draw: str | None = None


@dataclass(frozen=True)
class Inputs:
    """Abstract inputs of the loss of one replica.

    Attributes:
        state: the model state.
        shared: (parameters, key): the same on every replica.
        of_rows: `number of rows -> (values with the rows as first dim, other values of this replica)`.
        num: number of rows of a microbatch.
    """

    state: Any
    shared: Any
    of_rows: Callable[[int], tuple[Any, Any]]
    num: int


def analyze(
    loss: Callable[..., tuple[Any, Mapping[str, Metric], Any]],
    inputs: Inputs,
    bound: Mapping[str, int],
    axes: Sequence[str],
    needed: Sequence[str],
) -> list[Usage] | None:
    """Returns how rows enter each result, or None if the loss cannot be traced. Compiles nothing.

    Raises:
        ConfigError: calls of `sk.example_keys` give the same random numbers twice.

    Args:
        loss: `(state, shared, rows, replica) -> (loss, metrics, new model state)` of one replica.
        bound: names and sizes of the replica axes that the trace binds; empty if they are bound already.
        axes: the replica axes; `needed`: those that a collective must name.
    """
    sizes = {d for x in jax.tree.leaves((inputs.state, inputs.shared, inputs.of_rows(1))) for d in np.shape(x)}
    prime = next(p for p in PRIMES if all(d % p for d in sizes if d))
    multiple = prime * inputs.num  # divisible by what divides the batch: a loss may split its rows into chunks
    found = None
    for num in dict.fromkeys((prime, multiple) if multiple <= LARGEST else (prime,)):
        usages = _usages(loss, inputs, bound, axes, needed, num, unique=True, check=found is None)
        if usages is not None and not any(usage.mixed for usage in usages):
            return usages
        found = found or usages
    return found or _usages(loss, inputs, bound, axes, needed, inputs.num, unique=False)


def _usages(
    loss: Callable[..., Any],
    inputs: Inputs,
    bound: Mapping[str, int],
    axes: Sequence[str],
    needed: Sequence[str],
    num: int,
    unique: bool,
    check: bool = True,
) -> list[Usage] | None:
    """Returns how rows enter each result of a loss of `num` rows, or None if it cannot be traced.

    Args:
        check: whether to trace twice and compare the constants.

    Raises:
        ConfigError: a constant of the loss differs between two traces.
    """
    traced, shapes = _traced(loss, inputs, bound, num)
    if traced is None:
        return None
    again = _traced(loss, inputs, bound, num)[0] if check else None
    if again is not None:
        check_constants(traced, again)
    rows, replica = inputs.of_rows(num)
    lead = [Flow(tag="old")] * len(jax.tree.leaves(inputs.state)) + [NONE] * len(jax.tree.leaves(inputs.shared))
    of_rows = [Flow("row", 0, num, int(np.prod(x.shape[1:]))) for x in jax.tree.leaves(rows)]
    given = [*lead, *of_rows, *[NONE] * len(jax.tree.leaves(replica))]
    try:
        found = flows_of(traced, given, num, math.prod(bound.values()), unique, axes, needed)
    except Exception:  # noqa: BLE001 - an unusual program is not refused because its analysis fails
        found = [Flow("unknown")] * len(traced.jaxpr.outvars)
    flows = iter(found)
    loss_flows, metric_flows = (jax.tree.map(lambda _: next(flows), part) for part in shapes[:2])
    leaves_in = jax.tree.leaves((inputs.state, inputs.shared, rows, replica))
    is_key = [i for i, x in enumerate(leaves_in) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    keys = key_uses(traced, is_key, len(lead), num if unique else 0)
    if keys.problem:
        raise ConfigError(keys.problem)
    loss_usages = [] if shapes[0] is None else [_usage("loss", "", shapes[0], loss_flows)]
    scaled = bool(loss_usages) and needs_scale(traced)
    fixed = _without_cotangent(traced, inputs, len(jax.tree.leaves(loss_flows)), bound) if scaled else ()
    same = keys.on_each_replica[0] if keys.on_each_replica else None
    plain = keys.draw_of(range(len(leaves_in) - len(jax.tree.leaves(replica)), len(leaves_in)))
    facts: dict[str, Any] = {"keys": keys.text, "same_draws": same, "plain_draw": plain}
    usages = [replace(usage, **facts, needs_scale=scaled, fixed_gradients=fixed) for usage in loss_usages]
    usages += [_usage("metric", name, shapes[1][name], metric_flows[name]) for name in shapes[1]]
    leaves = named_leaves(shapes[2])
    if leaves:
        usages += _of_state(traced, inputs, loss, bound, needed, list(flows), leaves, num)
    return usages


def _without_cotangent(traced: Any, inputs: Inputs, loss: int, bound: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the paths of parameters with a gradient that does not depend on the loss."""
    first, leaves = len(jax.tree.leaves(inputs.state)), named_leaves(inputs.shared[0])
    try:
        found = without_cotangent(traced, loss, range(first, first + len(leaves)), bound)
    except Exception:  # noqa: BLE001 - an unusual program is not refused because its analysis fails
        return ()
    return tuple(leaves[i - first][0] for i in found)


def _traced(loss: Any, inputs: Inputs, bound: Mapping[str, int], num: int) -> tuple[Any, Any]:
    """Returns (jaxpr, shapes of the results) of the loss of `num` rows, or nothing if it cannot be traced."""
    uncached = lambda *args: loss(*args)  # JAX caches the trace of a function
    make = jax.make_jaxpr(uncached, axis_env=list(bound.items()), return_shape=True)
    try:
        return make(inputs.state, inputs.shared, *inputs.of_rows(num))
    except Exception:  # noqa: BLE001 - a loss for one number of rows; the trace of the step reports other errors
        return None, None


def _of_state(
    traced: Any,
    inputs: Inputs,
    loss: Any,
    bound: Mapping[str, int],
    needed: Sequence[str],
    flows: Sequence[Flow],
    leaves: Sequence[tuple[str, Any]],
    num: int,
) -> list[Usage]:
    """Returns the usages of the leaves of the model state."""
    replica_bit, start = 1 << len(leaves), len(traced.jaxpr.outvars) - len(leaves)
    bits = [1 << i for i in range(len(leaves))] + [0] * len(jax.tree.leaves(inputs.shared))
    bits += [replica_bit] * (len(traced.jaxpr.invars) - len(bits))
    all_depends = dependence(traced, bits, replica_bit, needed)
    results, depends = all_depends[:start], all_depends[start:]
    other = None
    if not all(d.all & replica_bit for d in depends):
        other = _traced(loss, inputs, bound, 2 * num)[0]
    usages = list[Usage]()
    for i, ((path, leaf), flow, of_leaf) in enumerate(zip(leaves, flows, depends, strict=True)):
        counted = flow.degree != 0
        if not of_leaf.all & replica_bit and flow.whole is None and other is not None:
            counted = compat.jaxpr_of_result(traced, start + i) != compat.jaxpr_of_result(other, start + i)
        rows: Rows = "by their number" if counted and not flow.enters else _rows(flow)
        old: Any = "not at all" if not of_leaf.all & 1 << i else "other" if of_leaf.other & 1 << i else "affine"
        factor = of_leaf.factor(1 << i)
        old = "retained" if old == "affine" and factor == 1 else old
        of_rows = bool(of_leaf.all & replica_bit)
        inexact = bool(jnp.issubdtype(leaf.dtype, jnp.inexact))
        unchanged = traced.jaxpr.outvars[start + i] is traced.jaxpr.invars[i]
        read = any(d.all & 1 << i for d in results)
        facts = (flow, old, factor, of_rows, counted, inexact, unchanged, read)
        usages.append(_with_lines("model state", path, rows, [flow], *facts))
    return usages


def _rows(flow: Flow) -> Rows:
    if flow.how == "none":
        return "not at all"
    if flow.how == "unknown" or flow.unknown is not None:
        return "unknown"
    if flow.how == "total" and not flow.mixed and flow.degree in (0, 1):
        return "as a sum" if flow.degree else "as a mean"
    return "row by row" if flow.is_row and not flow.mixed else "mixed across rows"


def _usage(what: Literal["loss", "metric"], name: str, metric: Any, flows: Any) -> Usage:
    """Returns the usage of the loss or a metric."""
    parts = jax.tree.leaves(flows, is_leaf=lambda x: isinstance(x, Flow))
    kinds = [_metric_rows(*pair) for pair in _parts(metric, flows)]
    order: tuple[Rows, ...] = ("unknown", "mixed across rows", "as a mean", "as a sum", "row by row", "not at all")
    rows: Rows = next((kind for kind in order if kind in kinds), order[-1])
    return _with_lines(what, name, rows, parts)


def _parts(metric: Any, flows: Any) -> list[tuple[Any, Any]]:
    """Returns the (metric, flows) that a metric consists of."""
    if isinstance(metric, Means):
        return list(zip(metric.parts, flows.parts, strict=True))
    if is_metric(metric) and metric.crosses == "by part":
        pairs = zip(metric.parts, flows.parts, strict=True)
        return list(itertools.chain.from_iterable(_parts(*pair) for pair in pairs))
    return [(metric, flows)]


def _metric_rows(metric: Any, flows: Any) -> Rows:
    """Returns how rows enter one mean, sum or maximum. Rows are mixed if its value over replicas is another one than
    over all rows on one device."""
    parts = jax.tree.leaves(flows, is_leaf=lambda x: isinstance(x, Flow))
    if any(f.unknown is not None or f.how == "unknown" for f in parts):
        return "unknown"
    if isinstance(metric, CustomMetric):
        return "mixed across rows" if any(f.mixed for f in parts) else "as a sum"
    if any(f.mixed for f in parts):
        return "mixed across rows"
    if isinstance(metric, Max):
        largest = flows.largest
        return "not at all" if not largest.enters else "row by row" if largest.how == "max" else "mixed across rows"
    if isinstance(metric, Mean):
        total, count = flows.sum, flows.count if isinstance(flows.count, Flow) else NONE
        if total.tag == "zero" or not (total.enters or total.degree or count.degree):
            return "not at all"
        if total.how in ("none", "total") and total.degree == count.degree:
            return "as a mean"
        return "mixed across rows"
    if all(f.tag == "zero" for f in parts):
        return "not at all"
    sums = all(f.tag == "zero" or (f.how in ("none", "total") and f.degree == 1) for f in parts)
    return "as a sum" if sums else "mixed across rows"


def _with_lines(
    what: Literal["loss", "metric", "model state"], name: str, rows: Rows, flows: Sequence[Flow], *rest: Any
) -> Usage:
    """Returns a usage with the lines of the marks of its flows."""
    lines: dict[str, str | None] = {}
    for mark in ("mixed", "whole"):
        eqn = next((getattr(f, mark) for f in flows if getattr(f, mark) is not None), None)
        if mark == "mixed" and eqn is None and rows == "mixed across rows":
            eqn = next((f.source for f in flows if f.source is not None), None)
        lines[mark] = None if eqn is None else compat.user_line(eqn)
    eqn = next((f.unknown for f in flows if f.unknown is not None), None)
    unknown: tuple[str, str | None] | None = None if eqn is None else (eqn.primitive.name, compat.user_line(eqn))
    if eqn is None and any(flow.how == "unknown" for flow in flows):
        unknown = ("an operation", None)
    return Usage(what, name, rows, lines["mixed"], lines["whole"], unknown, "", None, *rest)
