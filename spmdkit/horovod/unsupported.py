"""Names of Horovod that mean nothing here: each raises when it is called, and says why and what to use instead; and
what was built in.

Names are those of horovod/torch, tensorflow, keras and mxnet (0.28.1); tests/horovod/test_names.py has the list.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

_IN_PLACE = "JAX's arrays do not change in place"
_VARIABLES = (
    "JAX has no variables that live outside of a function's arguments",
    "params = hvd.broadcast_parameters(params, root_rank=0)",
)

_STATE = (
    "a state is a pytree, whatever made it",
    "hvd.elastic.State(params=params, opt_state=opt_state, batch=0, epoch=0)",
)
_FIT = "there is no fit that calls back: the loop is yours"
_LOCAL = (
    "which leaves are local is a matter of the tree, not of variables that are registered",
    "optax.multi_transform with hvd.DistributedOptimizer around the part that all ranks share",
)
_INSIDE = (
    "gradients are reduced in update, and what stands inside of hvd.DistributedOptimizer sees the reduced ones",
    "hvd.DistributedOptimizer(optax.chain(optax.clip_by_global_norm(1.0), optimizer))",
)
_UPDATE = (
    "it changes nothing in place, and the gradients are given to it",
    "updates, state = optimizer.update(gradients, state, params), then optax.apply_updates(params, updates)",
)
_PLAIN_STATE = (
    "its state is a pytree that init and update return",
    "keep that as you keep the parameters; hvd.broadcast_optimizer_state(state, root_rank=0)",
)

ABSENT: dict[str, tuple[str, str]] = {
    **{
        f"{plain}_": (_IN_PLACE, f"keep what hvd.{plain} returns: x = hvd.{plain}(x)")
        for plain in ("allreduce", "grouped_allreduce", "broadcast")
    },
    **{
        f"{plain}_async_": (_IN_PLACE, f"keep what comes out: x = hvd.synchronize(hvd.{plain}_async(x))")
        for plain in ("allreduce", "grouped_allreduce", "broadcast")
    },
    **dict.fromkeys(("broadcast_variables", "broadcast_global_variables", "BroadcastGlobalVariablesHook"), _VARIABLES),
    **{
        f"{name}_op": ("JAX has no graph in which it would be an operation", f"hvd.{name}()")
        for name in ("size", "rank", "local_size", "local_rank")
    },
    "process_set_included_op": ("JAX has no graph in which it would be an operation", "process_set.included()"),
    "broadcast_object_fn": (
        "JAX has no graph into which an object would be fed",
        "hvd.broadcast_object(obj, root_rank=0)",
    ),
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
    **dict.fromkeys(
        ("SyncBatchNorm", "SyncBatchNormalization"),
        (
            "a statistic over all ranks is computed in the middle of the step, where hvd's calls cannot be",
            "train with `spmdkit train` and flax's BatchNorm(axis_name=('replica', 'data')), whose statistics are those of the global batch",
        ),
    ),
    "DistributedGradientTape": (
        "JAX differentiates functions and has no tape",
        "jax.grad, and hvd.DistributedOptimizer or hvd.grouped_allreduce of the gradients",
    ),
    "PartialDistributedGradientTape": (
        "JAX differentiates functions and has no tape",
        "hvd.grouped_allreduce of the gradients that all ranks share, and the others as they are",
    ),
    "PartialDistributedOptimizer": _LOCAL,
    "LocalGradientAggregationHelper": (
        "gradients are added up in the state of the optimizer, not in variables beside it",
        "hvd.DistributedOptimizer(optimizer, backward_passes_per_step=...)",
    ),
    "DistributedTrainer": (
        "it is the trainer of MXNet's gluon, and there is none",
        "hvd.DistributedOptimizer around a transformation of optax",
    ),
    "load_model": (
        "a model is a function, and its parameters are a pytree, whatever saved them",
        "read both with what has written them, on rank 0, and hvd.broadcast_parameters",
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
    "check_num_rank_power_of_2": ("hvd.Adasum looks at the number of ranks by itself", "leave it out"),
    "handle_average_backwards_compatibility": (
        "average= is understood where it is given",
        "op=hvd.Average or op=hvd.Sum",
    ),
    **{
        f"DistributedOptimizer.{method}": why
        for why, methods in (
            (_INSIDE, ("synchronize", "skip_synchronize")),
            (_UPDATE, ("step", "zero_grad", "compute_gradients", "get_gradients", "apply_gradients")),
            (_PLAIN_STATE, ("load_state_dict", "get_slot", "get_slot_names", "variables")),
            (_LOCAL, ("register_local_var",)),
        )
        for method in methods
    },
    "DistributedOptimizer.set_backward_passes_per_step": (
        "the sum of the passes lies in a state whose form init decides",
        "new = hvd.DistributedOptimizer(optimizer, backward_passes_per_step=2); state = new.init(params)._replace(inner=state.inner)",
    ),
}


def absent_from(module: str, name: str) -> Callable[..., Any]:
    """Returns a function that says why a name of `hvd`, or of a module or class in it, means nothing here. Raises
    AttributeError for any other name."""
    known = f"{module}.{name}" if module else name
    if known not in ABSENT:
        raise AttributeError(f"'spmdkit.horovod{f'.{module}' if module else ''}' has no attribute {name!r}")
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
