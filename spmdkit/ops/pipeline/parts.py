"""The three functions of a pipelined model, and the computation of one stage in one tick.

All code uses the global view: arrays have a leading stage dim, sharded over the pipeline axis, and `over_stages` maps a
function over it. Names: P stages, K layers of a chunk, v chunks, M microbatches, b rows of a microbatch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from spmdkit.ops.pipeline.schedule import StageSchedule
from spmdkit.step import trace_context
from spmdkit.step.row_order import join, split

AXIS = "pipeline"
SINGLE_LAYERS = 8
"""Maximum number of layers of a chunk that are separate arrays in the loop over ticks. A loop over stacked layers
copies the weights and the gradient of each layer from and to the stack, in every tick."""


class Model(NamedTuple):
    """The user's functions: `embed(params, rows)`, `layer(x, weights, rows)`, `head(x, params, rows)`."""

    embed: Callable[..., Any]
    layer: Callable[..., Any]
    head: Callable[..., Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of examples: the user's pytree, and the inputs of `sk.mean` and `sk.example_keys`."""

    data: Any
    mask: jax.Array | None = None
    positions: jax.Array | None = None
    key: jax.Array | None = None

    def map(self, fn: Callable[[jax.Array], Any]) -> Rows:
        """Returns the rows with `fn` applied to every array except the key."""
        data, mask, positions = (jax.tree.map(fn, x) for x in (self.data, self.mask, self.positions))
        return Rows(data, mask, positions, self.key)

    @property
    def num(self) -> int:
        return int(jax.tree.leaves(self.data)[0].shape[0])


@contextlib.contextmanager
def using_rows(context: trace_context.Context, rows: Rows, layer: Any = None) -> Iterator[None]:
    """Context in which the user's functions are traced with `rows` as the current examples, in a layer or none."""
    scope: Any = contextlib.nullcontext()
    if rows.positions is not None:
        examples = trace_context.Examples(rows.num, rows.mask, rows.positions, rows.key, layer=layer)
        scope = trace_context.with_examples(examples)
    with trace_context.tracing(context), scope:
        yield


_traces = itertools.count()


def fresh_trace(fn: Callable[..., Any], *args: Any) -> Any:
    """Returns `fn(*args)` from a new trace. `jax.checkpoint` caches its first trace, with arrays of that time, by the
    names of the axes in scope (jax 0.10.2). So each trace gets a unique axis name."""
    return jax.vmap(fn, None, None, axis_size=1, axis_name=f"pipeline trace {next(_traces)}")(*args)


@dataclasses.dataclass(frozen=True)
class Pipe:
    """One pipeline on one mesh. `context` is that of a stage: the pipeline axis belongs to the enclosing vmap."""

    model: Model
    context: trace_context.Context
    schedule: StageSchedule
    x_shapes: Any
    """Shapes of one microbatch's activation, [b, ...]."""
    head_dim: int | None
    """The dim of the last stage's output that is sharded over the stages for the head: 0 rows, 1 tokens, None:
    unsharded."""
    stacked_dims: int = 1
    """The number of dims on which layers are stacked."""

    # ---- the user's functions

    def stage(self, stage: Any, chunk: Any, embedding: Any, weights: Any, x: Any, rows: Rows) -> Any:
        """Returns x[b, ...] after one chunk of layers, in groups; the input of the first is the embedding of the
        rows."""
        with using_rows(self.context, rows):
            x = select((stage == 0) & (chunk == 0), fresh_trace(self.model.embed, embedding, rows.data), x)
            nums = [jax.tree.leaves(group)[0].shape[0] for group in weights]
            first = (chunk * self.num_stages + stage) * sum(nums)
            for num, group in zip(nums, weights, strict=True):
                x = layers_in_order(lambda x, w: fresh_trace(self.model.layer, x, w, rows.data), first, x, group)
                first = first + num
            return x

    def head(self, params: Any, x: Any, rows: Rows) -> Any:
        """Returns the result of the user's head for one part of a microbatch."""
        with using_rows(self.context, rows):
            return fresh_trace(self.model.head, x, params, rows.data)

    # ---- the stage dim

    @property
    def num_stages(self) -> int:
        return self.schedule.num_stages

    @property
    def stages(self) -> jax.Array:
        """int32[P], the number of each stage."""
        return jnp.arange(self.num_stages, dtype=jnp.int32)

    def over_stages(self, fn: Callable[..., Any], in_axes: Any) -> Callable[..., Any]:
        """Returns `fn` mapped over the stages: each device computes its stage."""
        return jax.vmap(fn, in_axes, spmd_axis_name=AXIS)

    def place(self, tree: Any, *dims: str | None) -> Any:
        """Returns arrays with their first dims sharded as named (`AXIS`, `rows` or None), the rest unconstrained."""
        names: dict[str | None, Any] = {"rows": self.context.sharding.inner_axes or None, AXIS: AXIS, None: None}
        spec, mesh = tuple(names[d] for d in dims), self.context.sharding.mesh
        assert mesh is not None
        free: Callable[[jax.Array], tuple[Any, ...]] = lambda x: (PartitionSpec.UNCONSTRAINED,) * (x.ndim - len(spec))
        where: Callable[[jax.Array], NamedSharding] = lambda x: NamedSharding(mesh, PartitionSpec(*spec, *free(x)))
        return jax.tree.map(lambda x: lax.with_sharding_constraint(x, where(x)), tree)

    def shift(self, tree: Any, by: int) -> Any:
        """Returns [P, b, ...] moved `by` stages along the ring. Wire: one collective-permute of each shard."""
        return self.place(jax.tree.map(lambda x: _roll(x, by), tree), AXIS, "rows")

    def has_head(self, stage: jax.Array) -> jax.Array | bool:
        """Returns whether the head's result at a stage counts: all stages if the head is sharded, else the last."""
        return True if self.head_dim is not None else stage == self.num_stages - 1

    def zeros(self, shapes: Any, *lead: int) -> Any:
        """Returns zeros [*lead, P, ...] for shapes [...], sharded over the stages."""
        zero_arrays = jax.tree.map(lambda s: jnp.zeros((*lead, self.num_stages, *s.shape), s.dtype), shapes)
        return self.place(zero_arrays, *(None for _ in lead), AXIS)

    # ---- layers

    def chunks(self, layers: Any) -> Any:
        """Returns [L, ...] as [P, v, K, ...].

        Wire: none for one chunk, and for layers stacked as [v, L / v, ...]. Otherwise, with W bytes of layers per
        stage, (2 v - 1) / v W if v divides P (an all_to_all among v stages, and a collective-permute of all).
        """
        P, v = self.num_stages, self.schedule.num_chunks
        shape: Callable[[jax.Array], tuple[int, ...]] = lambda w: (v, P, -1, *w.shape[self.stacked_dims :])
        return self.place(jax.tree.map(lambda w: jnp.swapaxes(w.reshape(shape(w)), 0, 1), layers), AXIS)

    def groups(self, chunks: Any) -> list[Any]:
        """Returns [P, v, K, ...] as groups of layers [P, v, G, ...]: single ones, or all of them."""
        num = jax.tree.leaves(chunks)[0].shape[2]
        size = 1 if num <= SINGLE_LAYERS else num
        return [jax.tree.map(lambda w, i=i: w[:, :, i : i + size], chunks) for i in range(0, num, size)]

    def joined(self, chunks: list[jax.Array], layers: list[jax.Array]) -> list[jax.Array]:
        """Returns [P, v, K, ...] in the shapes of the layers. Wire: same as `chunks`."""
        joined: list[jax.Array] = [jnp.swapaxes(c, 0, 1).reshape(w.shape) for c, w in zip(chunks, layers, strict=True)]
        joined = self.place(joined, *(None for _ in range(self.stacked_dims - 1)), AXIS)
        return joined

    # ---- rows

    def microbatches(self, rows: Rows) -> Rows:
        """Returns rows [F M b, ...] as [M, F b, ...]: each of the F batch shards retains its rows, nothing is sent."""
        num = self.schedule.num_microbatches
        return rows.map(lambda x: self.place(split(x, 0, self._num_shards(0), num), None, "rows"))

    def _num_shards(self, dim: int) -> int:
        """Returns the number of parts into which the mesh may shard rows (0) or tokens (1) inside a stage."""
        return self.context.sharding.size(*(self.context.sharding.inner_axes if dim == 0 else ("context", "tensor")))

    # ---- between the last stage and the head

    def rows_of_head(self, rows: Rows) -> tuple[Rows, Any]:
        """Returns (the rows of a microbatch for the parts of the head, the dims to map over the parts)."""
        if self.head_dim is None:
            return rows, None
        shard = lambda x: self.place(self._parts(x, 0), AXIS) if self._is_sharded(x.shape) else x
        axes = rows.map(lambda x: 0 if self._is_sharded(x.shape) else None)
        return rows.map(shard), dataclasses.replace(axes, key=None)

    def spread(self, out: Any) -> Any:
        """Returns the last stage's entry of [P, b, ...], sharded over the stages: [P, b / P, ...] or [P, b, T / P,
        ...].

        Arrays without tokens are replicated. Wire: an all_to_all, (P - 1) / P of one microbatch's activation.
        """
        if self.head_dim is None:
            return out

        def spread_leaf(x: jax.Array) -> jax.Array:
            if not self._is_sharded(x.shape[1:]):
                return jnp.broadcast_to(x[-1], x.shape)
            x = self.place(self._parts(x, 1), None, AXIS, "rows")
            x = self.place(x, AXIS, None, "rows")[:, -1]
            return x

        return jax.tree.map(spread_leaf, out)

    def gather(self, parts: Any) -> Any:
        """The transpose of `spread`: [P, ...], sharded over the stages -> [P, b, ...], at the last stage, zero at other
        stages."""
        if (dim := self.head_dim) is None:
            return parts

        def at_last(x: jax.Array, stage_dim: int) -> jax.Array:
            is_last = self.stages == self.num_stages - 1
            return jnp.where(is_last.reshape(-1, *(1,) * (x.ndim - stage_dim - 1)), x, 0)

        def gather_leaf(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
            if not self._is_sharded(shape):
                return at_last(jnp.broadcast_to(x.sum(0), x.shape), 0)
            x = self.place(at_last(jnp.broadcast_to(x[:, None], (x.shape[0], *x.shape)), 1), AXIS, None, "rows")
            return join(self.place(x, None, AXIS, "rows"), dim + 1, self._num_shards(dim))

        return jax.tree.map(lambda x, s: gather_leaf(x, s.shape), parts, self.x_shapes)

    def _is_sharded(self, shape: tuple[int, ...]) -> bool:
        return self.head_dim == 0 or (len(shape) > 1 and shape[1] == self.num_tokens)

    def _parts(self, x: jax.Array, lead: int) -> jax.Array:
        assert self.head_dim is not None
        return split(x, self.head_dim + lead, self._num_shards(self.head_dim), self.num_stages)

    @property
    def num_tokens(self) -> int:
        """T, the second dim of the activation."""
        return int(max(s.shape for s in jax.tree.leaves(self.x_shapes) if s.ndim > 1)[1])


# ---- helpers


def layers_in_order(layer: Callable[..., Any], first: Any, x: Any, weights: Any) -> Any:
    """Returns x[b, ...] after the layers of `weights` [K, ...]. `first`: number of the first of them."""
    examples = trace_context.current_examples()

    def step(x: Any, numbered: Any) -> tuple[Any, None]:
        number, of_layer = numbered
        scope: Any = contextlib.nullcontext()
        if examples is not None:
            scope = trace_context.with_examples(dataclasses.replace(examples, layer=number))
        with scope:
            return layer(x, of_layer), None

    num = jax.tree.leaves(weights)[0].shape[0]
    numbered = (first + jnp.arange(num, dtype=jnp.int32), weights)
    return lax.scan(step, x, numbered, unroll=num == 1)[0]


def select(condition: Any, a: Any, b: Any) -> Any:
    """Returns `a` if the scalar condition holds, else `b`; NaN in the other operand does not propagate."""
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)


def masked(condition: Any, tree: Any) -> Any:
    """Returns `tree`, or zeros if the condition does not hold, even if `tree` has NaN."""
    return jax.tree.map(lambda x: jnp.where(condition, x, jnp.zeros_like(x)), tree)


def gate(condition: Any, tree: Any) -> Any:
    """Returns `tree`; its gradient is zero if the condition does not hold, even if the cotangent is NaN."""
    return jax.tree.map(lambda x: _gate(condition, x) if jnp.issubdtype(x.dtype, jnp.inexact) else x, tree)


@jax.custom_vjp
def _gate(condition: jax.Array, x: jax.Array) -> jax.Array:
    return x


_gate.defvjp(lambda condition, x: (x, condition), lambda condition, ct: (None, masked(condition, ct)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _roll(x: jax.Array, by: int) -> jax.Array:
    """A roll of the first dim, transposed to one roll: JAX's transpose is two pads and two transfers (jax 0.10.2)."""
    return jnp.roll(x, by, axis=0)


_roll.defvjp(lambda x, by: (_roll(x, by), None), lambda by, _, ct: (_roll(ct, -by),))


def pick(tree: Any, index: Any, dim: int = 0) -> Any:
    """Returns the entry at `index` along one dim. The only entry is not indexed: a loop would save it as a residual of
    each iteration."""

    def entry(x: jax.Array) -> jax.Array:
        return x.squeeze(dim) if x.shape[dim] == 1 else lax.dynamic_index_in_dim(x, index, dim, keepdims=False)

    return jax.tree.map(entry, tree)


SEAMS = {"chunks": Pipe.chunks, "joined": Pipe.joined}
"""Functions that `verify` replaces (verify/mutations.py)."""
