"""Whether what padding rows contain changes what a step or an evaluation gives: seen by running a short batch twice.

A row that only fills up a short batch must not count. `sk.mean` leaves such rows out of the values that it is given,
but it cannot see whether those were made from padding rows too: batch statistics, a loss over pairs, a ranking, a sum
along the wrong dim. So the same short batch runs twice, its padding filled with other numbers, and nothing that comes
out may change.

    short    some rows of every shard and microbatch are marked as padding, beside those that are
    first    padding rows hold what they held
    second   they hold other rows of the batch, floating point numbers times LARGE: integers and pairs (example, label)
             stay legal

A loss that leaves padding out gives the same bits twice: the program and its keys are the same. What counts rows by
their number alone (`x.shape[0]`) does not follow the contents and is not seen here; `spmdkit verify` compares with a
batch without padding.

Cost: two forward passes, and in training one more compilation, of what is left of the step without gradient and update.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.sharding import NamedSharding

from spmdkit.communication.reducers.base import METRIC_PREFIX
from spmdkit.errors import ConfigError
from spmdkit.foundation.trees import common_dtype, named_leaves
from spmdkit.step import trace_context
from spmdkit.step.step import Batch

LARGE = 8.0
"""Times the numbers of other rows: large enough to show, small enough that `exp` of what is usual stays finite."""

TOLERANCE = 1e-4
"""Relative change that is none. Rounding does not reach it: what leaves padding out is equal to the bit on most
devices."""

MOVED = 0.01
"""By at most how much parameters are larger while the step is probed."""

Grid = tuple[int, int, int]
"""(shards, microbatches, rows): how the rows of a global batch are laid out; see `Feed`."""


class PaddingEffect(NamedTuple):
    """A number that follows the contents of padding rows: its path, and its value with the one filling and with the
    other."""

    path: str
    first: float
    second: float


def changes(run: Callable[[Batch], Any], batch: Batch, grid: Grid, whole: jax.sharding.Sharding) -> list[PaddingEffect]:
    """Returns what of `run(batch)`, a tree of arrays, follows the contents of padding rows. Waits for the device.

    Args:
        run: a compiled function of the batch; it must not donate.
        batch: on the devices; any of its rows may be padding.
        whole: places a scalar on every device of the mesh.
    """
    placed = jax.tree.map(lambda x: x.sharding, batch)
    fill = jax.jit(lambda batch, factor: _filled(batch, factor, grid), out_shardings=placed)
    compare = jax.jit(_compared, out_shardings=whole)

    def filled(factor: float) -> Any:
        return jax.block_until_ready(run(fill(batch, np.float32(factor))))

    def with_first(factor: float) -> dict[str, _Compared]:
        return jax.device_get(compare(first, filled(factor)))  # type: ignore[no-any-return]

    first = filled(0.0)
    found = with_first(LARGE)
    if any(c.broken for c in found.values()):
        # Large numbers may leave the domain of a function (a logarithm) whose values at padding rows are multiplied by
        # zero.
        found = with_first(1.0)
    changed = {path: c for path, c in found.items() if c.broken or c.difference > TOLERANCE * c.size}
    if changed:
        noise = with_first(0.0)  # of a device that adds in another order each time
        changed = {path: c for path, c in changed.items() if c.broken or c.difference > 10 * noise[path].difference}
    return [PaddingEffect(path, float(c.first), float(c.second)) for path, c in changed.items()]


def _filled(batch: Batch, factor: jax.Array, grid: Grid) -> Batch:
    """Returns the batch made short, its padding filled with `factor` times other rows, or as it is where `factor` is
    zero.

    Rows move between devices only where a shard has one row of a microbatch.
    """
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
    """Returns (bool[batch] of rows to take for padding; shift, dim: the place of another row for each, counted
    backwards).

    The last half of the rows of each microbatch on each shard, as padding is the end of a batch; where there is one
    row, every second shard, else every second microbatch.
    """
    dim = 2 if grid[2] > 1 else 0 if grid[0] > 1 else 1
    index = np.arange(math.prod(grid)).reshape(grid)
    place = np.indices(grid)[dim].reshape(-1)[index.reshape(-1)]
    shift = math.ceil(grid[dim] / 2) if dim == 2 else 1
    return (place >= shift if dim == 2 else place % 2 == 1), shift, dim


class _Compared(NamedTuple):
    """Two arrays: the largest change of an element, the largest element, whether one stopped being finite, an element
    of each."""

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


# ---- training, abstract ----------------------------------------------------------------------------------------------


def check_first_dims(
    context: trace_context.Context, trace: Callable[[trace_context.Context, Batch], Any], batch: Batch, what: str
) -> None:
    """Refuses a `sk.mean` of values whose first dim is not the examples, though it is as long as they are many.

    Where padding was left out of the values by `sk.example_mask()`, no filling shows that time steps are then taken for
    padding rows. So the step is traced once more with twice the rows: as many means have to leave padding out. Other
    losses are not traced again.

    Args:
        context: of the step as it was traced.
        trace: traces the step with another context and another abstract batch.
    """
    if not (context.usage.has_called("example_mask") and context.usage.has_called("mean")):
        return
    other = context.for_new_trace()
    longer = lambda shape: (2 * shape[0], *shape[1:]) if shape else ()
    twice = lambda x: jax.ShapeDtypeStruct(longer(x.shape), x.dtype, sharding=x.sharding)
    try:
        trace(other, jax.tree.map(twice, batch))
    except Exception:  # noqa: BLE001  a step that can only have its own number of rows says nothing about another
        return
    found, expected = context.usage.num_masked, other.usage.num_masked
    if found != expected:
        raise ConfigError(
            f"data.drop_remainder is false, and {what} gives {found} times values to sk.mean whose first dim is as "
            f"long as the rows, but {expected} times with twice as many rows: some first dim is no dim of examples "
            "and has that length by chance. sk.mean leaves padding rows out along the first dim, which must be the "
            "examples. Put them first (values.T), or add up to one number before."
        )


# ---- training --------------------------------------------------------------------------------------------------------


def lowered_forward(traced: jax.stages.Traced, state: Any, batch: Batch, placed: Any, whole: Any) -> jax.stages.Lowered:
    """Returns `(state, batch) -> tree of what must not follow padding` from the trace of the step; nothing is donated.

    That is the metrics (what a reducer tells asks for the gradient) and the floating point leaves of the model state,
    or of the parameters where a step has no metrics. Gradient and update are not computed: nothing asks for them. It
    computes with parameters that have been moved a little.

    Args:
        placed: shardings of the state.
        whole: sharding of the metrics.
    """
    step, structure = core.jaxpr_as_fun(traced.jaxpr), jax.tree.structure(traced.out_info)
    abstract_state, metrics, _ = traced.out_info

    def pick(state: Any, metrics: Any, *_: Any) -> dict[str, Any]:
        parts = {"model state": (state.model_state, abstract_state.model_state)}
        if not metrics:
            parts["parameter"] = (state.params, abstract_state.params)
        own = {name: x for name, x in metrics.items() if not name.startswith(METRIC_PREFIX)}
        return {"metric": own} | {name: _floating(*pair) for name, pair in parts.items()}

    def step_from_moved(state: Any, batch: Batch) -> dict[str, Any]:
        state = state.replace(params=jax.tree.map(_moved, state.params, placed.params))
        return pick(*jax.tree.unflatten(structure, step(*jax.tree.leaves((state, batch)))))

    on_device = jax.tree.map(lambda s: NamedSharding(s.mesh, s.spec), placed)
    out_shardings = pick(on_device, jax.tree.map(lambda _: whole, metrics))
    return jax.jit(step_from_moved, out_shardings=out_shardings).lower(state, batch)


def _moved(x: jax.Array, placed: NamedSharding) -> jax.Array:
    """Returns a parameter a little larger, each element by another number: a head that begins at zero hides all that is
    before it."""
    if placed.memory_kind == "pinned_host" or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    angles = [lax.broadcasted_iota(jnp.float32, x.shape, dim) * (dim + 1.3) for dim in range(x.ndim)]
    return x + (MOVED * jnp.abs(jnp.cos(sum(angles, jnp.float32(0))))).astype(x.dtype)


def _floating(tree: Any, shapes: Any) -> dict[str, Any]:
    """Returns path -> leaf of those whose shape has a floating point dtype."""
    pairs = zip(named_leaves(tree), jax.tree.leaves(shapes), strict=True)
    return {path: x for (path, x), shape in pairs if jnp.issubdtype(shape.dtype, jnp.inexact)}


def refused_step(found: list[PaddingEffect], what: str) -> ConfigError:
    """Returns the error of a step, called `what`, in which padding rows count."""
    return ConfigError(
        f"data.drop_remainder is false, and in {what} padding rows count: {_said(found)}. Rows that only fill up a "
        "short batch must not change anything: what mixes examples before there is one value for each (batch "
        "statistics, pairs, ranking) has to leave them out. Use sk.example_mask() there, or set data.drop_remainder: "
        "true."
    )


def refused_evaluation(found: list[PaddingEffect], what: str, num_examples: int, batch_size: int) -> ConfigError:
    """Returns the error of an evaluation, whose function is called `what`, in which padding rows count."""
    return ConfigError(
        f"eval_data has {num_examples} examples, in batches of {batch_size} the last one is filled up, and in {what} "
        f"padding rows count: {_said(found)}. Rows that only fill up a short batch must not change anything: what "
        "mixes examples before there is one value for each (batch statistics, pairs, ranking) has to leave them out. "
        f"Use sk.example_mask() there, or an eval.batch_size that divides {num_examples}."
    )


def _said(found: list[PaddingEffect]) -> str:
    path, first, second = found[0]
    kind, _, name = path.partition("/")
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"{kind} '{name}' is {first:.6g} with one filling of them and {second:.6g} with another{more}"
