"""Whether the gradient of a loss depends on the scale of its cotangent, and which parameters have a gradient that does
not depend on the cotangent."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from spmdkit.foundation import jaxprs
from spmdkit.step.model_state.dependence import dependence
from spmdkit.step.reducer_io import PACKAGE

_JAX = Path(jax.__file__).parent
_LINEAR = (PACKAGE, str(_JAX / "experimental/pallas/ops"), str(_JAX / "_src/cudnn/fused_attention"))
"""Files and folders with backward rules that are linear in their cotangent."""


def needs_scale(jaxpr: Any) -> bool:
    """Returns whether the gradient depends on the scale of its cotangent: a `custom_vjp` of the user, or a dtype with a
    smaller range than float32."""
    for eqn in jaxprs.equations(jaxpr):
        if eqn.primitive.name == "custom_vjp_call":
            source = eqn.params["call_jaxpr"].jaxpr.debug_info.func_filename or ""
            if not source.startswith(_LINEAR):
                return True
        if any(has_small_range(var.aval.dtype) for var in (*eqn.invars, *eqn.outvars) if hasattr(var.aval, "dtype")):
            return True
    return False


def without_cotangent(closed: ClosedJaxpr, loss: int, params: Sequence[int], bound: Mapping[str, int]) -> list[int]:
    """Returns the inputs among `params` with a gradient that is not zero and does not depend on the cotangent: a
    backward rule returns another value than a derivative.

    Args:
        closed: its first `loss` results are those of the loss.
        bound: names and sizes of the axes that the trace binds.
    """
    is_float: Callable[[Any], bool] = lambda var: jnp.issubdtype(var.aval.dtype, jnp.inexact)
    moving = [i for i in params if is_float(closed.jaxpr.invars[i])]
    results = [i for i in range(loss) if is_float(closed.jaxpr.outvars[i])]

    def pulled(args: Any, cotangent: Any) -> Any:
        def fn(parts: Any) -> Any:
            given = dict(zip(moving, parts, strict=True))
            outputs = jaxpr_as_fun(closed)(*(given.get(i, x) for i, x in enumerate(args)))
            return [outputs[i] for i in results]

        out, pull = jax.vjp(fn, [args[i] for i in moving])
        gradients: list[Any] = pull([jnp.full(x.shape, cotangent.astype(x.dtype)) for x in out])[0]
        return gradients

    args = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in closed.jaxpr.invars]
    traced = jax.make_jaxpr(pulled, axis_env=list(bound.items()))(args, jax.ShapeDtypeStruct((), jnp.float32))
    found = dependence(traced, [*[1] * len(args), 2])
    return [i for i, depends in zip(moving, found, strict=True) if depends.all == 1]


@functools.cache
def has_small_range(dtype: Any) -> bool:
    """Returns whether a dtype is a float with a smaller range than float32."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).maxexp < jnp.finfo(jnp.float32).maxexp
