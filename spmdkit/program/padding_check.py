"""Checks that the contents of padding rows do not change the result of a step or an evaluation, by running a short
batch twice.

`sk.mean` excludes the padding rows of a short batch from the values passed to it, but it cannot detect values that were
computed from padding rows: batch statistics, a loss over pairs, a ranking. So the same short batch runs twice, with
some more rows of every shard and microbatch marked as padding, and no output may change:

    first    padding rows are unchanged
    second   they contain other rows of the batch, floats times LARGE: integers and pairs (example, label) stay valid

Code that uses only the number of rows (`x.shape[0]`) is not detected; `spmdkit verify` compares with a batch without
padding. Cost: two forward passes, and in training one more compilation, without gradient and update.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from spmdkit.communication.reducers.base import METRIC_PREFIX
from spmdkit.data import BatchSchedule
from spmdkit.errors import ConfigError
from spmdkit.foundation import jaxprs
from spmdkit.foundation.trees import common_dtype, named_leaves
from spmdkit.step.step import Batch
from spmdkit.step.trace_context import Context

LARGE = 8.0
"""Factor for the values of other rows: large enough to be detected, and `exp` of usual values stays finite."""

TOLERANCE = 1e-4
"""Relative change below which values are equal. A loss that excludes padding is bitwise equal on most devices."""

MOVED = 0.01
"""Maximum relative increase of the parameters in the check."""

Grid = tuple[int, int, int]
"""(shards, microbatches, rows): the layout of the rows of a global batch; see `Feed`."""


class PaddingEffect(NamedTuple):
    """A number that depends on the contents of padding rows: its path, and its values with the two fillings."""

    path: str
    first: float
    second: float


def changes(run: Callable[[Batch], Any], batch: Batch, grid: Grid, whole: jax.sharding.Sharding) -> list[PaddingEffect]:
    """Returns the leaves of `run(batch)`, a tree of arrays, that depend on the contents of padding rows. Waits for the
    device.

    Args:
        run: a compiled function of the batch. It must not donate its arguments.
        whole: sharding that replicates a scalar on every device of the mesh.
    """
    placed = jax.tree.map(lambda x: x.sharding, batch)
    fill = jax.jit(lambda batch, factor: _filled(batch, factor, grid), out_shardings=placed)
    compare = jax.jit(_compared, out_shardings=whole)

    def filled(factor: float) -> Any:
        return jax.block_until_ready(run(fill(batch, np.float32(factor))))

    def with_first(factor: float) -> dict[str, _Compared]:
        return jax.device_get(compare(first, filled(factor)))  # type: ignore[no-any-return]

    first = filled(0.0)
    compared = with_first(LARGE)
    if any(c.broken for c in compared.values()):  # large numbers can be outside of a function's domain (a logarithm)
        compared = with_first(1.0)
    changed = {path: c for path, c in compared.items() if c.broken or c.difference > TOLERANCE * c.size}
    if changed:
        noise = with_first(0.0)  # some devices change the order of summation between runs
        changed = {path: c for path, c in changed.items() if c.broken or c.difference > 10 * noise[path].difference}
    return [PaddingEffect(path, float(c.first), float(c.second)) for path, c in changed.items()]


def _filled(batch: Batch, factor: jax.Array, grid: Grid) -> Batch:
    """Returns the short batch with padding set to `factor` times other rows, or unchanged if `factor` is zero."""
    assert batch.mask is not None
    is_last, shift, dim = _last_rows(grid)
    short = batch.mask & ~is_last
    short = jnp.where(short.any(), short, batch.mask)

    def other(x: jax.Array) -> jax.Array:
        rows = jnp.roll(x.reshape(*grid, *x.shape[1:]), shift, dim).reshape(x.shape)
        if jnp.issubdtype(x.dtype, jnp.inexact):
            rows = rows * factor.astype(x.dtype)
        return jnp.where((short | (factor == 0)).reshape(-1, *[1] * (x.ndim - 1)), x, rows)

    return Batch(jax.tree.map(other, batch.examples), short, batch.limit)


def _last_rows(grid: Grid) -> tuple[np.ndarray, int, int]:
    """Returns (bool[batch] of the padding rows; shift, dim: the position of the replacement row, counted backwards).

    The last half of the rows of each microbatch on each shard; with one row, every second shard, else microbatch.
    """
    dim = 2 if grid[2] > 1 else 0 if grid[0] > 1 else 1
    index = np.indices(grid)[dim].reshape(-1)
    shift = math.ceil(grid[dim] / 2) if dim == 2 else 1
    return (index >= shift if dim == 2 else index % 2 == 1), shift, dim


class _Compared(NamedTuple):
    """Two arrays: largest change, largest element, whether an element became non-finite, one element of each."""

    difference: jax.Array
    size: jax.Array
    broken: jax.Array
    first: jax.Array
    second: jax.Array


def _compared(first: Any, second: Any) -> dict[str, _Compared]:
    pairs = zip(named_leaves(first), named_leaves(second), strict=True)
    return {path: _compared_leaf(a, b) for (path, a), (_, b) in pairs if a.size}


def _compared_leaf(first: jax.Array, second: jax.Array) -> _Compared:
    a, b = (x.astype(common_dtype(x.dtype, jnp.float32)).reshape(-1) for x in (first, second))
    known, finite = jnp.isfinite(a), jnp.isfinite(a) & jnp.isfinite(b)
    difference = jnp.where(finite, jnp.abs(a - b), 0)
    at = jnp.argmax(jnp.where(known & ~finite, jnp.inf, difference))
    size = jnp.where(finite, jnp.maximum(jnp.abs(a), jnp.abs(b)), 0)
    return _Compared(difference.max(), size.max(), (known & ~finite).any(), a[at], b[at])


# ---- training, abstract


def check_first_dims(context: Context, trace: Callable[[Context, Batch], Any], batch: Batch, what: str) -> None:
    """Rejects an `sk.mean` of values with a first dim that has the length of the examples by chance.

    After `sk.example_mask()` no filling shows this. So `trace` traces the step again with twice the rows; the same
    number of means must exclude padding.
    """
    if not (context.usage.has_called("example_mask") and context.usage.has_called("mean")):
        return
    other = context.for_new_trace()
    longer: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda shape: (2 * shape[0], *shape[1:]) if shape else ()
    twice = lambda x: jax.ShapeDtypeStruct(longer(x.shape), x.dtype, sharding=x.sharding)
    try:
        trace(other, jax.tree.map(twice, batch))
    except Exception:  # noqa: BLE001  a step that can only have its own number of rows says nothing about another
        return
    found, expected = context.usage.num_masked, other.usage.num_masked
    if found != expected:
        raise ConfigError(
            f"data.drop_remainder is false, and {what} passes {found} times values to sk.mean with a first dim as "
            f"long as the rows, but {expected} times with twice as many rows: a first dim is not the examples and has "
            "that length by chance. sk.mean omits padding rows along the first dim, which must be the examples. Put "
            "them first (values.T), or reduce to one number before."
        )


# ---- training


def lowered_forward(traced: jax.stages.Traced, state: Any, batch: Batch, placed: Any, whole: Any) -> jax.stages.Lowered:
    """Returns `(state, batch) -> tree that must not depend on padding` from the trace of the step; nothing is donated.

    The tree contains the metrics (without the reducer's, which need the gradient) and the floating point leaves of the
    model state, or of the parameters if a step has no metrics. The parameters are slightly perturbed. `placed`:
    shardings of the state; `whole`: sharding of the metrics.
    """
    step = jaxprs.function_of(traced.jaxpr, traced.out_info)
    abstract_state, metrics, _ = traced.out_info

    def pick(state: Any, metrics: Any, *_: Any) -> dict[str, Any]:
        parts = {"model state": (state.model_state, abstract_state.model_state)}
        if not metrics:
            parts["parameter"] = (state.params, abstract_state.params)
        user_metrics = {name: x for name, x in metrics.items() if not name.startswith(METRIC_PREFIX)}
        return {"metric": user_metrics} | {name: _floating(*pair) for name, pair in parts.items()}

    def step_from_moved(state: Any, batch: Batch) -> dict[str, Any]:
        state = state.replace(params=jax.tree.map(_moved, state.params, placed.params))
        return pick(*step(state, batch))

    on_device = jax.tree.map(lambda s: NamedSharding(s.mesh, s.spec), placed)
    out_shardings = pick(on_device, jax.tree.map(lambda _: whole, metrics))
    return jax.jit(step_from_moved, out_shardings=out_shardings).lower(state, batch)


def _moved(x: jax.Array, placed: NamedSharding) -> jax.Array:
    """Returns a parameter with each element slightly increased by a different factor: a head of zeros hides effects."""
    if placed.memory_kind == "pinned_host" or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    angles = [lax.broadcasted_iota(jnp.float32, x.shape, dim) * (dim + 1.3) for dim in range(x.ndim)]
    return x + (MOVED * jnp.abs(jnp.cos(sum(angles, jnp.float32(0))))).astype(x.dtype)


def _floating(tree: Any, shapes: Any) -> dict[str, Any]:
    pairs = zip(named_leaves(tree), jax.tree.leaves(shapes), strict=True)
    return {path: x for (path, x), shape in pairs if jnp.issubdtype(shape.dtype, jnp.inexact)}


def refused_step(found: list[PaddingEffect], what: str, ends: bool) -> ConfigError:
    """Returns the error of a step in which padding rows count. `what`: the name of the step; `ends`: of a stream."""
    key, full = ("repeat", "true") if ends else ("drop_remainder", "true")
    return _refused(found, f"data.{key} is false, and in {what}", f"set data.{key}: {full}")


def refused_evaluation(found: list[PaddingEffect], what: str, schedule: BatchSchedule) -> ConfigError:
    """Returns the error of an evaluation in which padding rows count. `what`: the name of the function."""
    name, num_examples, batch_size = schedule.what, schedule.num_examples, schedule.batch_size
    if num_examples is None:
        where = f"{name} is a stream, its last batch of {batch_size} is padded, and in {what}"
        return _refused(found, where, "an eval.batch_size that divides its number of examples")
    where = f"{name} has {num_examples} examples, in batches of {batch_size} the last one is padded, and in {what}"
    return _refused(found, where, f"an eval.batch_size that divides {num_examples}")


def _refused(found: list[PaddingEffect], where: str, repair: str) -> ConfigError:
    path, first, second = found[0]
    kind, _, name = path.partition("/")
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return ConfigError(
        f"{where} padding rows count: {kind} '{name}' is {first:.6g} with one filling of them and {second:.6g} with "
        f"another{more}. Rows that only fill up a short batch must not change anything: code that mixes examples "
        "before there is one value for each (batch statistics, pairs, ranking) has to omit them. Use "
        f"sk.example_mask() there, or {repair}."
    )
