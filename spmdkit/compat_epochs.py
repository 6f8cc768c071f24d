"""What of JAX lets a process leave one job and join another (jax 0.10.2 to 0.12). As compat.py for everything else."""

from __future__ import annotations

import contextlib

import jax


def let_others_die() -> None:
    """Before `jax.distributed.initialize`: that another process dies is no end of this one by JAX's own doing (0.10.2 to 0.12)."""
    jax.config.update("jax_enable_recoverability", True)


def leave_backend() -> None:
    """Leaves the job that this process has joined, and gives up its devices and all that was compiled for them: it may join another one."""
    from jax._src import distributed
    from jax.extend.backend import clear_backends

    state = distributed.global_state
    state.client = getattr(state.client, "own", state.client)
    with contextlib.suppress(RuntimeError):
        jax.distributed.shutdown()
    state.client = state.service = state.preemption_sync_manager = None
    clear_backends()
    jax.clear_caches()
