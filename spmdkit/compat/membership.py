"""What of JAX lets a process leave one job and join another (jax 0.10.2 to 0.12). As the package for everything
else."""

from __future__ import annotations

import contextlib
import os

import jax


def let_others_die() -> None:
    """Before `jax.distributed.initialize`: that another process dies is no end of this one by JAX's own doing (0.10.2
    to 0.12)."""
    jax.config.update("jax_enable_recoverability", True)


def reduce_one_by_one() -> None:
    """Lets XLA's CPU collectives over processes end at the first that fails. Before JAX has devices.

    XLA joins all all-reduces of a step to one of many arrays. When another process dies, that of one array fails and
    those of the others begin all the same (jaxlib 0.10.2): the next process of the ring then waits for ever for what
    nobody sends, or takes one array for another and is aborted by Gloo. Not joined, each is a collective of its own,
    and after the first that fails none begins. Bytes and bits are the same.
    """
    flag, joins, flags = "--xla_disable_hlo_passes=", "cpu-all-reduce-combiner", os.environ.get("XLA_FLAGS", "").split()
    if not any(joins in each for each in flags):
        own = [each.removeprefix(flag) for each in flags if each.startswith(flag)][-1:]  # XLA takes the last one alone
        os.environ["XLA_FLAGS"] = " ".join([*flags, flag + ",".join([*own, joins])])


def leave_backend() -> None:
    """Leaves the job that this process has joined, and gives up its devices and all that was compiled for them: it may
    join another one."""
    from jax._src import distributed
    from jax.extend.backend import clear_backends

    state = distributed.global_state
    state.client = getattr(state.client, "own", state.client)
    with contextlib.suppress(RuntimeError):
        jax.distributed.shutdown()
    state.client = state.service = state.preemption_sync_manager = None
    clear_backends()
    jax.clear_caches()
