"""Flags with which programs compile in a fifth of the time, for this process and for those that tests start."""

from __future__ import annotations

import importlib.metadata
import os

QUICK_XLA = (
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    if importlib.metadata.version("jax").startswith("0.10.")
    else ""
)
"""XLA's older emitter and one LLVM module a program. Which flags XLA knows moves with its version, and it ends a
process at one that it does not know."""

QUICKLY = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "SPMDKIT_COMPILE_CACHE": "off"} | (
    {"XLA_FLAGS": QUICK_XLA} if QUICK_XLA else {}
)
"""What a started process compiles quickly with: a whole run of the smallest model takes 4 processor seconds instead of
7."""


def environment_of_a_user() -> dict[str, str]:
    """Returns this process's variables without those that the suite, or who started it, has set for JAX, XLA and
    spmdkit, and `QUICKLY`."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "SPMDKIT_"))} | QUICKLY
