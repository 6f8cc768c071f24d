"""Horovod's API on JAX, to port existing scripts: `import spmdkit.horovod as hvd`. One process is one rank.

    hvd.init()                                      # joins the processes of `spmdkit launch`, Slurm, ...
    params = hvd.broadcast_parameters(params, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optax.sgd(0.01 * hvd.size()))

Input: arrays of this process. Output: reduced or gathered arrays. Calls block until the other ranks make them, so they
must be outside `jax.jit`. Ranks agree on each operation before data is sent. If the requests differ, every rank raises
`HorovodInternalError` with the request of each rank. For new programs use `spmdkit train`, which reduces inside the
compiled step. Differences from Horovod: docs/coming_from/horovod.md.
"""

from __future__ import annotations

from typing import Any

from spmdkit.horovod import callbacks, elastic
from spmdkit.horovod.compression import Compression
from spmdkit.horovod.gradients import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from spmdkit.horovod.negotiation import HorovodInternalError
from spmdkit.horovod.objects import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters
from spmdkit.horovod.operations import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    ReduceOp,
    Sum,
    add_process_set,
    allgather_async,
    allreduce_async,
    alltoall_async,
    barrier,
    broadcast_async,
    grouped_allgather_async,
    grouped_allreduce_async,
    grouped_reducescatter_async,
    join,
    reducescatter_async,
    remove_process_set,
)
from spmdkit.horovod.optimizer import DistributedOptimizer, sparse_allreduce_async
from spmdkit.horovod.process_sets import ProcessSet, global_process_set
from spmdkit.horovod.queue import Handle, poll, synchronize
from spmdkit.horovod.topology import (
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from spmdkit.horovod.unsupported import (
    absent_from,
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    nccl_built,
    rocm_built,
)


def __getattr__(name: str) -> Any:
    return absent_from("", name)
