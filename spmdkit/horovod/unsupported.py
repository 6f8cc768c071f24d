"""Names of Horovod without a meaning here: each raises when it is called, with the reason and the alternative; and the
build flags.

Names are those of horovod/torch, tensorflow, keras and mxnet (0.28.1); tests/horovod/test_names.py has the list.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

_IN_PLACE = "JAX's arrays do not change in place"
_VARIABLES = (
    "JAX has no variables outside of a function's arguments",
    "params = hvd.broadcast_parameters(params, root_rank=0)",
)

_STATE = (
    "a state is a pytree, in any framework",
    "hvd.elastic.State(params=params, opt_state=opt_state, batch=0, epoch=0)",
)
_FIT = "there is no fit with callbacks: the loop is yours"
_LOCAL = (
    "local leaves are selected in the tree, not by registered variables",
    "optax.multi_transform with hvd.DistributedOptimizer around the shared part",
)
_INSIDE = (
    "gradients are reduced in update, and transformations inside of hvd.DistributedOptimizer receive the reduced ones",
    "hvd.DistributedOptimizer(optax.chain(optax.clip_by_global_norm(1.0), optimizer))",
)
_UPDATE = (
    "it changes nothing in place, and receives the gradients as an argument",
    "updates, state = optimizer.update(gradients, state, params), then optax.apply_updates(params, updates)",
)
_PLAIN_STATE = (
    "its state is a pytree that init and update return",
    "treat it like the parameters; hvd.broadcast_optimizer_state(state, root_rank=0)",
)

ABSENT: dict[str, tuple[str, str]] = {
    **{
        f"{plain}_": (_IN_PLACE, f"use the result of hvd.{plain}: x = hvd.{plain}(x)")
        for plain in ("allreduce", "grouped_allreduce", "broadcast")
    },
    **{
        f"{plain}_async_": (_IN_PLACE, f"use the result: x = hvd.synchronize(hvd.{plain}_async(x))")
        for plain in ("allreduce", "grouped_allreduce", "broadcast")
    },
    **dict.fromkeys(("broadcast_variables", "broadcast_global_variables", "BroadcastGlobalVariablesHook"), _VARIABLES),
    **{
        f"{name}_op": ("JAX has no graph operations", f"hvd.{name}()")
        for name in ("size", "rank", "local_size", "local_rank")
    },
    "process_set_included_op": ("JAX has no graph operations", "process_set.included()"),
    "broadcast_object_fn": (
        "JAX has no graph with fed values",
        "hvd.broadcast_object(obj, root_rank=0)",
    ),
    **dict.fromkeys(
        (f"elastic.{kind}State" for kind in ("Torch", "TensorFlow", "TensorFlowKeras", "Keras", "Object")), _STATE
    ),
    "elastic.CommitStateCallback": (_FIT, "state.commit() after a number of batches"),
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
            "a statistic over all ranks is computed inside the step, where hvd's calls are not possible",
            (
                "train with `spmdkit train` and flax's BatchNorm(axis_name=('replica', 'data')), with statistics of "
                "the global batch"
            ),
        ),
    ),
    "DistributedGradientTape": (
        "JAX differentiates functions and has no tape",
        "jax.grad, and hvd.DistributedOptimizer or hvd.grouped_allreduce of the gradients",
    ),
    "PartialDistributedGradientTape": (
        "JAX differentiates functions and has no tape",
        "hvd.grouped_allreduce of the shared gradients, and the others unchanged",
    ),
    "PartialDistributedOptimizer": _LOCAL,
    "LocalGradientAggregationHelper": (
        "gradients are summed in the state of the optimizer, not in variables",
        "hvd.DistributedOptimizer(optimizer, backward_passes_per_step=...)",
    ),
    "DistributedTrainer": (
        "it is the trainer of MXNet's gluon, which is not supported",
        "hvd.DistributedOptimizer around a transformation of optax",
    ),
    "load_model": (
        "a model is a function, and its parameters are a pytree in any file format",
        "read both with the library that wrote them, on rank 0, and hvd.broadcast_parameters",
    ),
    "start_timeline": (
        "XLA does not run a queue of named tensors",
        "jax.profiler.start_trace(directory), or `profile` in a config of `spmdkit train`",
    ),
    "stop_timeline": ("XLA does not run a queue of named tensors", "jax.profiler.stop_trace()"),
    "run": (
        "a function for other processes would be pickled, and nothing here is",
        "spmdkit launch -n N -- script.py",
    ),
    "mpi_threads_supported": ("JAX's processes do not use MPI", "omit it; mpirun may still start them"),
    "check_num_rank_power_of_2": ("hvd.Adasum checks the number of ranks itself", "leave it out"),
    "handle_average_backwards_compatibility": (
        "average= is supported",
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
        "the sum of the passes is in a state with a structure fixed by init",
        "new = hvd.DistributedOptimizer(optimizer, backward_passes_per_step=2); state = new.init(params)._replace(inner=state.inner)",  # noqa: E501
    ),
}


def absent_from(module: str, name: str) -> Callable[..., Any]:
    """Returns a function that raises with the reason why a name of `hvd`, or of a module or class in it, has no meaning
    here. Raises AttributeError for any other name."""
    known = f"{module}.{name}" if module else name
    if known not in ABSENT:
        raise AttributeError(f"'spmdkit.horovod{f'.{module}' if module else ''}' has no attribute {name!r}")
    why, instead = ABSENT[known]

    def call(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"hvd.{known} has no meaning in JAX: {why}. Use instead: {instead}.")

    call.__name__ = name
    return call


def mpi_enabled() -> bool:
    """Returns False: processes use JAX's coordination service."""
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
