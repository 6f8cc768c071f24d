"""Flags that reduce compile time to a fifth, for this process and the processes that tests start."""

from __future__ import annotations

import importlib.metadata
import os

QUICK_XLA = (
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    if importlib.metadata.version("jax").startswith("0.10.")
    else ""
)
"""XLA's older emitter and one LLVM module per program. XLA's flags depend on its version, and an unknown flag aborts
the process."""

QUICKLY = {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
    "SPMDKIT_COMPILE_CACHE": "off",
} | ({"XLA_FLAGS": QUICK_XLA} if QUICK_XLA else {})
"""Environment for fast compilation in a started process: a run of the smallest model takes 4 processor seconds instead
of 7."""


def environment_of_a_user() -> dict[str, str]:
    """Returns this process's environment without variables for JAX, XLA and spmdkit, plus `QUICKLY`."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "SPMDKIT_"))} | QUICKLY
