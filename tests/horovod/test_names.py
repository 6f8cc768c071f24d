"""Horovod's public names: each is here, or raises with the reason and what to use instead."""

import json
from pathlib import Path

import jax.numpy as jnp
import optax
import pytest

import spmdkit.horovod as hvd
from spmdkit.horovod.unsupported import ABSENT
from tests.horovod.semantics import ROWS

words = str.split
PLACES = "init shutdown is_initialized is_homogeneous size rank local_size local_rank cross_size cross_rank"
BUILT = "mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built cuda_built rocm_built"
SETS = "ProcessSet global_process_set add_process_set remove_process_set"
OPERATIONS = "allreduce allgather broadcast alltoall reducescatter"
HERE = words(f"""{PLACES} {BUILT} {SETS} {OPERATIONS} Average Sum Adasum Min Max Product Compression HorovodInternalError poll synchronize join barrier
    {" ".join(f"{name}_async" for name in words(OPERATIONS))} grouped_allreduce grouped_allreduce_async grouped_allgather grouped_allgather_async
    grouped_reducescatter grouped_reducescatter_async sparse_allreduce_async allgather_object broadcast_object broadcast_optimizer_state
    broadcast_parameters DistributedOptimizer elastic.run elastic.ElasticSampler callbacks.MetricAverageCallback
    callbacks.LearningRateScheduleCallback callbacks.LearningRateWarmupCallback""")
RAISE = words("""mpi_threads_supported start_timeline stop_timeline run allreduce_ allreduce_async_ grouped_allreduce_ grouped_allreduce_async_ broadcast_
    broadcast_async_ SyncBatchNorm SyncBatchNormalization DistributedGradientTape PartialDistributedGradientTape PartialDistributedOptimizer
    DistributedTrainer LocalGradientAggregationHelper load_model broadcast_variables broadcast_global_variables broadcast_object_fn
    BroadcastGlobalVariablesHook size_op rank_op local_size_op local_rank_op process_set_included_op check_num_rank_power_of_2
    handle_average_backwards_compatibility elastic.TorchState elastic.TensorFlowState elastic.TensorFlowKerasState elastic.KerasState
    elastic.ObjectState elastic.CommitStateCallback elastic.UpdateBatchStateCallback elastic.UpdateEpochStateCallback
    callbacks.BroadcastGlobalVariablesCallback callbacks.BestModelCheckpoint""")
METHODS = words("""synchronize skip_synchronize set_backward_passes_per_step step zero_grad load_state_dict compute_gradients get_gradients apply_gradients
    get_slot get_slot_names variables register_local_var""")
"""What Horovod 0.28.1 gives to its users: horovod/torch, tensorflow, keras and mxnet, their elastic and callbacks, and
the methods of its optimizers."""


def found(path):
    """Returns what a path names in `hvd`."""
    thing = hvd
    for name in path.split("."):
        thing = getattr(thing, name)
    return thing


def test_supported_names_exist_and_others_are_attribute_errors():
    assert not ABSENT.keys() & set(HERE)
    for module, name in ((hvd, ""), (hvd.elastic, ".elastic"), (hvd.callbacks, ".callbacks")):
        with pytest.raises(AttributeError, match=f"'spmdkit.horovod{name}' has no attribute 'nothing'"):
            module.nothing  # noqa: B018
    assert [path for path in HERE if found(path) is None] == []


@pytest.mark.parametrize("path", [*RAISE, *(f"DistributedOptimizer.{name}" for name in METHODS)])
def test_unsupported_name_raises_with_reason_and_alternative(path):
    owner, _, name = path.rpartition(".")
    of_optimizer = owner == "DistributedOptimizer"
    call = getattr(hvd.DistributedOptimizer(optax.sgd(0.1)), name) if of_optimizer else found(path)
    why, instead = ABSENT[path]
    with pytest.raises(NotImplementedError) as error:
        call()
    assert str(error.value) == f"hvd.{path} has no meaning in JAX: {why}. Use instead: {instead}."
    assert len(why) > 10 and len(instead) > 6


def test_every_refusal_is_of_a_name_of_horovod():
    assert ABSENT.keys() == {*RAISE, *(f"DistributedOptimizer.{name}" for name in METHODS)}
    assert ABSENT["allreduce_"][1] == "the result: x = hvd.allreduce(x)"
    assert ABSENT["broadcast_async_"][1] == "the result: x = hvd.synchronize(hvd.broadcast_async(x))"
    assert ABSENT["run"][1] == "spmdkit launch -n N -- script.py" and ABSENT["size_op"][1] == "hvd.size()"


def test_optimizer_is_from_optax_and_suggested_names_work():
    optimizer, params = hvd.DistributedOptimizer(optax.sgd(0.1, momentum=0.9)), {"w": jnp.ones(2)}
    assert isinstance(optimizer, optax.GradientTransformationExtraArgs) and not hasattr(optimizer, "param_groups")
    assert not hasattr(hvd.DistributedOptimizer, "nothing")
    state = optimizer.init(params)
    new = hvd.DistributedOptimizer(optax.sgd(0.1, momentum=0.9), backward_passes_per_step=2)
    assert new.init(params)._replace(inner=state.inner).sums["w"].shape == (2,)
    optax.chain(optax.clip_by_global_norm(1.0), optimizer).init(params)


NO_ROW = words("""allreduce_inplace grouped_allreduce_inplace broadcast_inplace sync_batch_norm timeline_api synchronize_step_warning
    allreduce_cpu_gpu_error grouped_allreduce_cpu_gpu_error allreduce_multi_gpu alltoall_splits_on_gpu broadcast_state_gpu gpu_required
    dynamic_requires_grad""")
"""Tests of horovod/torch of names that raise here, of arrays of one rank on several devices, and of parameters that
change what they want."""


def test_table_rows_name_tests_of_horovod():
    tests = {
        file: words(names)
        for file, names in json.loads(Path(__file__).with_name("names_of_tests.json").read_text()).items()
    }
    named = {file: set() for file in tests}
    for label, _ in ROWS.values():
        for part in (part for part in label.split("; ") if part.partition(":")[0] != "none"):
            file, _, names = part.rpartition(": ")
            named[file or "test_torch.py"] |= {*names.split(", ")}
    for file, names in named.items():
        assert names <= {*tests[file]}, file
    assert {*tests["test_torch.py"]} - named["test_torch.py"] == {*NO_ROW}
