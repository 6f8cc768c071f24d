"""Checks of the arguments of `sk.pipeline` before the first step, the same on one device and on every mesh."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from spmdkit.errors import ConfigError
from spmdkit.foundation.trees import describe, first_difference, named_leaves
from spmdkit.ops.pipeline.parts import Model, Rows, fresh_trace, using_rows
from spmdkit.ops.remat import remat
from spmdkit.step import trace_context
from spmdkit.step.metrics.mean import Mean, Means


def check_not_in_manual(context: trace_context.Context) -> None:
    """Raises ConfigError inside `sk.manual`."""
    if context.in_manual:
        raise ConfigError(
            "sk.pipeline was called inside sk.manual. Its stages may hold manual parts, not the other way. Call "
            "it outside."
        )


def check_layers(layers: Any, stacked_dims: int, num_stages: int, num_chunks: int) -> None:
    """Raises ConfigError unless all arrays stack the same number of layers, divisible by stages and chunks."""
    leaves = named_leaves(layers)
    lengths = {path: math.prod(jnp.shape(x)[:stacked_dims]) if jnp.ndim(x) >= stacked_dims else 0 for path, x in leaves}
    if not leaves or 0 in lengths.values() or len(set(lengths.values())) > 1:
        found = ", ".join(f"{path} {describe(x)}" for path, x in leaves[:4]) or "no array"
        raise ConfigError(
            f"sk.pipeline: layers hold {found}. Every array has the layers as its first "
            f"dim{'s' * (stacked_dims > 1)}, all the same number. Stack the layers' parameters: "
            "jax.vmap(init_layer)(keys)."
        )
    num, cut = next(iter(lengths.values())), num_stages * (num_chunks if num_stages > 1 else 1)
    if num % cut:
        chunks = f" x {num_chunks} chunks = {cut}" if cut > num_stages else ""
        below = max((d for d in range(1, num_stages) if num % (d * cut // num_stages) == 0), default=1)
        raise ConfigError(
            f"sk.pipeline: {num} layers over {num_stages} stages{chunks}, found a remainder of {num % cut}. Each must "
            f"hold the same number of layers. Try {num // cut * cut or cut} or {-(-num // cut) * cut} layers, or "
            f"mesh.pipeline: {below}."
        )


def checked(
    model: Model, context: trace_context.Context, embed_params: Any, weights: Any, head_params: Any, rows: Rows
) -> tuple[Model, Any]:
    """Returns the model with rematerialised layers, and the shapes of the activation. Raises ConfigError for functions
    that return a wrong result or close over a traced array. `weights` are the weights of one layer."""
    trace = dataclasses.replace(context, usage=context.usage.without("remat"))

    def traced(name: str, fn: Callable[..., Any], *args: Any) -> Any:
        def on_rows(rows: Rows, *args: Any) -> Any:
            with using_rows(trace, rows, jnp.int32(0) if name == "layer" else None):
                return fresh_trace(fn, *args, rows.data)

        closed, out = jax.make_jaxpr(on_rows, return_shape=True)(rows, *args)
        if any(isinstance(c, jax.core.Tracer) for c in closed.consts):
            raise ConfigError(
                f"sk.pipeline: {name} closes over a traced array. It runs on one microbatch of one stage, and what "
                "comes from outside has no place there. Pass it in the parameters or in rows, or compute it inside "
                "(sk.example_keys() too)."
            )
        return out

    x = traced("embed", lambda params, rows: model.embed(params, rows), embed_params)
    if wrong := [f"{path} {describe(s)}" for path, s in named_leaves(x) if not jnp.issubdtype(s.dtype, jnp.floating)]:
        raise ConfigError(
            f"sk.pipeline: embed returned {', '.join(wrong)}. The activation is floating point, since its gradient "
            "flows back. Leave what does not change in rows, which every layer sees."
        )
    num = rows.num
    if wrong := [f"{path} {describe(s)}" for path, s in named_leaves(x) if not s.shape or s.shape[0] != num]:
        raise ConfigError(
            f"sk.pipeline: embed returned {', '.join(wrong)} for {num} rows. The first dim of every array of the "
            f"activation is the rows: they are split into microbatches. Return [{num}, ...]."
        )
    y = traced("layer", lambda x, weights, rows: model.layer(x, weights, rows), x, weights)
    if difference := first_difference(x, y):
        raise ConfigError(
            f"sk.pipeline: layer changes the activation: {difference}. Layers follow each other, so shapes and dtypes "
            "stay the same. Cast or project inside the layer."
        )
    if not trace.usage.has_called("remat"):
        model = model._replace(layer=remat(model.layer))
    traced("head", lambda x, params, rows: model.head(x, params, rows), x, head_params)
    context.usage.merge_from(trace.usage)
    return model, x


def loss_and_metrics(out: Any, one_sum: bool) -> tuple[Mean | Means, dict[str, Mean | Means] | None]:
    """Returns (loss, metrics or None) from the result of a head; only the loss has a gradient.

    `one_sum`: the schedule computes the gradient of a sum before its count is known over all microbatches.
    """
    loss, metrics = out if isinstance(out, tuple) and len(out) == 2 else (out, None)
    named = metrics if isinstance(metrics, dict) else {} if metrics is None else {"": None}
    if not all(isinstance(m, Mean | Means) for m in (loss, *named.values())):
        raise ConfigError(
            f"sk.pipeline: head returned {describe(out)}. Its loss sums over microbatches, so it returns "
            "sk.mean(...), or (sk.mean(...), {name: sk.mean(...)})."
        )
    if one_sum and isinstance(loss, Means):
        raise ConfigError(
            f"sk.pipeline: head returned a sum of {len(loss.parts)} means, each with its own count. The "
            "schedules 1f1b and interleaved compute the gradient of one sum, before the counts of all microbatches "
            "are known. Use pipeline.schedule: gpipe, or one sk.mean in which weights share out what counts."
        )
    return loss, lax.stop_gradient(metrics)


def constant_count(count: jax.Array) -> jax.Array:
    """Returns `count`; raises ConfigError if it depends on differentiated parameters."""
    return _without_gradient(
        count,
        "the count of the loss depends on the parameters (sk.mean with learned weights). The schedules 1f1b and "
        "interleaved compute the gradient of the loss's sum alone. Use pipeline.schedule: gpipe, or weights without a "
        "gradient (jax.lax.stop_gradient).",
    )


def without_gradient(rows: Any) -> Any:
    """Returns `rows`; raises ConfigError if they depend on differentiated parameters."""
    message = (
        "rows hold {} that depends on the parameters, and rows have no gradient. Compute it in embed, which has "
        "parameters."
    )
    return jax.tree.map(lambda x: _without_gradient(x, message.format(describe(x))), rows)


def _without_gradient(x: jax.Array, message: str) -> jax.Array:
    def refuse(primals: Any, tangents: Any) -> Any:
        if not isinstance(tangents[0], SymbolicZero):
            raise ConfigError(f"sk.pipeline: {message}")
        return primals[0], tangents[0]

    same: jax.custom_jvp[jax.Array] = jax.custom_jvp(lambda x: x)
    same.defjvp(refuse, symbolic_zeros=True)
    return same(x)
