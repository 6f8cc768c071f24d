"""Names of Horovod that mean nothing here: each raises when it is called, and says why and what to use instead; and what was built in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

_IN_PLACE = "JAX's arrays do not change in place", "keep what hvd.{plain} returns: x = hvd.{plain}(x)"
_VARIABLES = (
    "JAX has no variables that live outside of a function's arguments",
    "params = hvd.broadcast_parameters(params, root_rank=0)",
)

_STATE = (
    "a state is a pytree, whatever made it",
    "hvd.elastic.State(params=params, opt_state=opt_state, batch=0, epoch=0)",
)
_FIT = "there is no fit that calls back: the loop is yours"

ABSENT: dict[str, tuple[str, str]] = {
    **{
        f"{plain}_": (_IN_PLACE[0], _IN_PLACE[1].format(plain=plain))
        for plain in (
            "allreduce",
            "allreduce_async",
            "grouped_allreduce",
            "grouped_allreduce_async",
            "broadcast",
            "broadcast_async",
        )
    },
    **dict.fromkeys(("broadcast_variables", "broadcast_global_variables", "BroadcastGlobalVariablesHook"), _VARIABLES),
    **{
        f"{name}_op": ("JAX has no graph in which it would be an operation", f"hvd.{name}()")
        for name in ("size", "rank", "local_size", "local_rank")
    },
    **dict.fromkeys(
        (f"elastic.{kind}State" for kind in ("Torch", "TensorFlow", "TensorFlowKeras", "Keras", "Object")), _STATE
    ),
    "elastic.CommitStateCallback": (_FIT, "state.commit() after so many batches"),
    "elastic.UpdateBatchStateCallback": (_FIT, "state.batch = batch before state.commit()"),
    "elastic.UpdateEpochStateCallback": (_FIT, "state.epoch = epoch before state.commit()"),
    "callbacks.BroadcastGlobalVariablesCallback": _VARIABLES,
    "callbacks.BestModelCheckpoint": (
        _FIT,
        "orbax on rank 0 after the evaluation, or `checkpoint: {best: ...}` of `spmdkit train`",
    ),
    "SyncBatchNorm": (
        "a statistic over all ranks is computed in the middle of the step, where hvd's calls cannot be",
        "train with `spmdkit train` and flax's BatchNorm(axis_name=('replica', 'data')), whose statistics are those of the global batch",
    ),
    "DistributedGradientTape": (
        "JAX differentiates functions and has no tape",
        "jax.grad, and hvd.DistributedOptimizer or hvd.grouped_allreduce of the gradients",
    ),
    "PartialDistributedGradientTape": (
        "JAX differentiates functions and has no tape",
        "hvd.grouped_allreduce of the gradients that all ranks share, and the others as they are",
    ),
    "PartialDistributedOptimizer": (
        "which leaves are local is a matter of the tree, not of variables that are registered",
        "optax.multi_transform with hvd.DistributedOptimizer around the part that all ranks share",
    ),
    "start_timeline": (
        "what XLA runs is not a queue of named tensors",
        "jax.profiler.start_trace(directory), or `profile` in a config of `spmdkit train`",
    ),
    "stop_timeline": ("what XLA runs is not a queue of named tensors", "jax.profiler.stop_trace()"),
    "run": (
        "a function that is sent to other processes would be pickled, and nothing here is",
        "spmdkit launch -n N -- script.py",
    ),
    "mpi_threads_supported": ("JAX's processes meet without MPI", "leave it out; mpirun may start them all the same"),
}


def absent_from(module: str, name: str) -> Callable[..., Any]:
    """Returns a function that says why a name of `hvd`, or of its module, means nothing here. Raises AttributeError for any other name."""
    known = f"{module}.{name}" if module else name
    if known not in ABSENT:
        raise AttributeError(f"module 'spmdkit.horovod{f'.{module}' if module else ''}' has no attribute {name!r}")
    why, instead = ABSENT[known]

    def call(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"hvd.{known} means nothing in JAX: {why}. Instead: {instead}.")

    call.__name__ = name
    return call


def mpi_enabled() -> bool:
    """Returns False: processes meet through JAX's coordination service."""
    return False


mpi_built = ddl_built = ccl_built = mpi_enabled


def gloo_enabled() -> bool:
    """Returns whether collectives go through Gloo: on CPU."""
    return jax.default_backend() == "cpu"


gloo_built = gloo_enabled


def nccl_built() -> int:
    """Returns whether collectives go through NCCL, as a number: 0, or 1 on GPU."""
    return int(jax.default_backend() == "gpu")


def cuda_built() -> bool:
    """Returns whether JAX runs on a GPU of Nvidia."""
    return jax.default_backend() == "gpu" and "rocm" not in jax.devices()[0].client.platform_version.lower()


def rocm_built() -> bool:
    """Returns whether JAX runs on a GPU of AMD."""
    return jax.default_backend() == "gpu" and not cuda_built()
