"""Unsupported names of Horovod, which raise with the reason and the alternative when called; and the build flags.

The names are from horovod/torch, tensorflow, keras and mxnet (0.28.1); tests/horovod/test_names.py lists them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax

_TABLE = """\
broadcast_variables broadcast_global_variables BroadcastGlobalVariablesHook callbacks.BroadcastGlobalVariablesCallback
    JAX has no variables outside of a function's arguments
    params = hvd.broadcast_parameters(params, root_rank=0)
process_set_included_op
    JAX has no graph operations
    process_set.included()
broadcast_object_fn
    JAX has no graph with fed values
    hvd.broadcast_object(obj, root_rank=0)
elastic.TorchState elastic.TensorFlowState elastic.TensorFlowKerasState elastic.KerasState elastic.ObjectState
    a state is a pytree, in any framework
    hvd.elastic.State(params=params, opt_state=opt_state, batch=0, epoch=0)
elastic.CommitStateCallback elastic.UpdateBatchStateCallback elastic.UpdateEpochStateCallback
    there is no fit with callbacks: the loop is yours
    state.batch = batch and state.epoch = epoch, and state.commit() after a number of batches
callbacks.BestModelCheckpoint
    there is no fit with callbacks: the loop is yours
    orbax on rank 0 after the evaluation, or `checkpoint: {best: ...}` of `spmdkit train`
SyncBatchNorm SyncBatchNormalization
    a statistic over all ranks is computed inside the step, where hvd's calls are not possible
    `spmdkit train` and flax's BatchNorm(axis_name=('replica', 'data')), with statistics of the global batch
DistributedGradientTape PartialDistributedGradientTape
    JAX differentiates functions and has no tape
    jax.grad, and hvd.DistributedOptimizer, or hvd.grouped_allreduce of the shared gradients
PartialDistributedOptimizer DistributedOptimizer.register_local_var
    local leaves are selected in the tree, not by registered variables
    optax.multi_transform with hvd.DistributedOptimizer around the shared part
LocalGradientAggregationHelper
    gradients are summed in the state of the optimizer, not in variables
    hvd.DistributedOptimizer(optimizer, backward_passes_per_step=...)
DistributedTrainer
    it is the trainer of MXNet's gluon, which is not supported
    hvd.DistributedOptimizer around a transformation of optax
load_model
    a model is a function, and its parameters are a pytree in any file format
    the library that wrote both, on rank 0, and hvd.broadcast_parameters
start_timeline stop_timeline
    XLA does not run a queue of named tensors
    jax.profiler.start_trace(directory) and stop_trace(), or `profile` in a config of `spmdkit train`
run
    a function for other processes would be pickled, and nothing here is
    spmdkit launch -n N -- script.py
mpi_threads_supported
    JAX's processes do not use MPI
    nothing; mpirun may still start them
check_num_rank_power_of_2
    hvd.Adasum checks the number of ranks itself
    nothing
handle_average_backwards_compatibility
    average= is supported
    op=hvd.Average or op=hvd.Sum
DistributedOptimizer.synchronize DistributedOptimizer.skip_synchronize
    gradients are reduced in update, and transformations inside hvd.DistributedOptimizer receive the reduced ones
    hvd.DistributedOptimizer(optax.chain(optax.clip_by_global_norm(1.0), optimizer))
DistributedOptimizer.step DistributedOptimizer.zero_grad DistributedOptimizer.compute_gradients
DistributedOptimizer.get_gradients DistributedOptimizer.apply_gradients
    it changes nothing in place, and receives the gradients as an argument
    updates, state = optimizer.update(gradients, state, params), then optax.apply_updates(params, updates)
DistributedOptimizer.load_state_dict DistributedOptimizer.get_slot DistributedOptimizer.get_slot_names
DistributedOptimizer.variables
    its state is a pytree that init and update return
    hvd.broadcast_optimizer_state(state, root_rank=0), and what you do with parameters
DistributedOptimizer.set_backward_passes_per_step
    the sum of the passes is in a state with a structure fixed by init
    new = hvd.DistributedOptimizer(optimizer, backward_passes_per_step=2), new.init(params)._replace(inner=state.inner)
"""
"""Names, why they are unsupported, and the alternative."""

ABSENT: dict[str, tuple[str, str]] = {}
for _row in re.findall(r"((?:\w.*\n)+)    (.*)\n    (.*)\n", _TABLE):
    ABSENT |= dict.fromkeys(_row[0].split(), _row[1:])
for _name in ("allreduce", "grouped_allreduce", "broadcast"):
    for _form, _use in ((_name, f"hvd.{_name}(x)"), (f"{_name}_async", f"hvd.synchronize(hvd.{_name}_async(x))")):
        ABSENT[f"{_form}_"] = "JAX's arrays do not change in place", f"the result: x = {_use}"
for _name in ("size", "rank", "local_size", "local_rank"):
    ABSENT[f"{_name}_op"] = "JAX has no graph operations", f"hvd.{_name}()"


def absent_from(module: str, name: str) -> Callable[..., Any]:
    """Returns a function that raises with the reason why a name of `hvd`, or of a module or class in it, is
    unsupported. Raises AttributeError for any other name."""
    known = f"{module}.{name}" if module else name
    if known not in ABSENT:
        raise AttributeError(f"'spmdkit.horovod{f'.{module}' if module else ''}' has no attribute {name!r}")
    why, instead = ABSENT[known]

    def call(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"hvd.{known} has no meaning in JAX: {why}. Use instead: {instead}.")

    call.__name__ = name
    return call


mpi_enabled = mpi_built = ddl_built = ccl_built = lambda: False
gloo_enabled = gloo_built = lambda: jax.default_backend() == "cpu"
nccl_built = lambda: int(jax.default_backend() == "gpu")
"""Whether collectives use NCCL, as a number: 1 on GPU, otherwise 0."""


def rocm_built() -> bool:
    """Returns whether JAX runs on an AMD GPU."""
    return jax.default_backend() == "gpu" and "rocm" in jax.devices()[0].client.platform_version.lower()


def cuda_built() -> bool:
    """Returns whether JAX runs on an NVIDIA GPU."""
    return jax.default_backend() == "gpu" and not rocm_built()
