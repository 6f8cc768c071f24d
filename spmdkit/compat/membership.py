"""Private JAX functions to disconnect a process from one job and join another (jax 0.10.2 to 0.12)."""

from __future__ import annotations

import contextlib
import os

import jax


def survive_peer_failure() -> None:
    """Disables JAX's abort of this process when another process fails (0.10.2 to 0.12). Call before
    `jax.distributed.initialize`."""
    jax.config.update("jax_enable_recoverability", True)


def disable_all_reduce_combiner() -> None:
    """Disables XLA's all-reduce combiner, so that CPU collectives stop at the first failure. Call before JAX creates
    devices.

    When another process fails, the combined all-reduce of one array fails but those of the other arrays still start
    (jaxlib 0.10.2): the next process then waits indefinitely, or Gloo aborts it. Bytes and results are the same.
    """
    flag, pass_, flags = "--xla_disable_hlo_passes=", "cpu-all-reduce-combiner", os.environ.get("XLA_FLAGS", "").split()
    if not any(pass_ in each for each in flags):
        disabled = [each.removeprefix(flag) for each in flags if each.startswith(flag)][-1:]  # XLA uses only the last
        os.environ["XLA_FLAGS"] = " ".join([*flags, flag + ",".join([*disabled, pass_])])


def disconnect_backend() -> None:
    """Disconnects this process from its job, and releases its devices and compiled programs. It can then join another
    job."""
    from jax._src import distributed
    from jax.extend.backend import clear_backends

    state = distributed.global_state
    state.client = getattr(state.client, "own", state.client)  # of cluster.barrier.Client
    with contextlib.suppress(RuntimeError):
        jax.distributed.shutdown()
    state.client = state.service = state.preemption_sync_manager = None
    clear_backends()
    jax.clear_caches()
