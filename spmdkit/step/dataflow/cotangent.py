"""Whether the gradient of a loss depends on the scale of its cotangent."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from spmdkit.foundation import jaxprs
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


@functools.cache
def has_small_range(dtype: Any) -> bool:
    """Returns whether a dtype is a float with a smaller range than float32."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).maxexp < jnp.finfo(jnp.float32).maxexp
