"""DeepSpeed's JSON. Source: https://www.deepspeed.ai/docs/config-json/ (0.18)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmdkit.tools.migrate import deepspeed_optimizer
from spmdkit.tools.migrate.base import (
    AUTOMATIC,
    LOST,
    MAPPED,
    Migration,
    Rule,
    Table,
    automatic,
    each,
    external,
    flag,
    is_on,
    lost,
    lost_if_set,
    to,
    walk,
    when,
)

_OVERLAP = automatic("XLA gathers, reduces and overlaps what the step needs; there are no buckets")
_SCALE = automatic("bfloat16 has the range of float32, so there is no loss scale")
_NVME = automatic("nothing is offloaded to disks; `offload` uses host memory")
_TRACKER = automatic(
    "metrics.jsonl and report.html are always written; other services are a tracker of yours, log.trackers"
)
_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
NAMES = frozenset({*_SIZES, "zero_optimization"})
"""Settings that identify a file of DeepSpeed."""


def migrate(settings: Mapping[str, Any], devices: int, folder: Path) -> Migration:
    """Returns the translation of the settings."""
    migration = Migration(devices)
    ordered = sorted(settings, key=lambda name: name == "scheduler")  # last: it uses the optimizer's rate
    walk(migration, {name: settings[name] for name in ordered}, TABLE)
    _batch(migration, settings)
    if "dataloader_drop_last" not in settings:
        migration.mapped("dataloader_drop_last", False, "data.drop_remainder", False, "DeepSpeed's default")
    if not settings.keys() & set(_SIZES[:2]):
        migration.report(LOST, "batch size", None, "it is not in this file: set batch_size and microbatches")
    stage = migration.config.get("layout", {}).get("zero", 0)
    if not migration.config.get("mesh"):
        migration.put("mesh", {"data": -1} if stage == 0 else {"fsdp": -1})
    elif "fsdp" not in migration.config["mesh"]:
        migration.put("mesh.fsdp" if stage else "mesh.data", -1)
    return migration


def _batch(migration: Migration, settings: Mapping[str, Any]) -> None:
    """Sets batch_size and microbatches from three numbers, of which DeepSpeed requires two."""
    sizes = {k: settings.get(k) for k in _SIZES}
    total, micro, passes = (x if is_count(x) else None for x in sizes.values())
    tensor = migration.config.get("mesh", {}).get("tensor", 1)
    replicas = max(1, migration.devices // tensor if is_count(tensor) else 1)
    if total is None and micro is not None:
        total = micro * (passes or 1) * replicas
    if passes is None and total is not None and micro is not None and total % (micro * replicas) == 0:
        passes = total // (micro * replicas)
    counts = {"batch_size": total, "microbatches": passes}
    for name, value in counts.items():
        if value is not None and (name == "batch_size" or (total or 0) % value == 0):
            migration.put(name, value)
    sets = (("batch_size",), ("batch_size", "microbatches"), ("microbatches",))
    for (key, value), names in zip(sizes.items(), sets, strict=True):
        if key in settings:
            known = ", ".join(f"{name}: {counts[name]}" for name in names if counts[name] is not None)
            if is_count(value) and known:
                note = f" (for --devices {migration.devices})" if len(names) == 2 else ""
                migration.report(MAPPED, key, value, known + note)
            elif value in (None, "auto"):
                kind = LOST if total is None and value and key != _SIZES[2] else AUTOMATIC
                migration.report(kind, key, value, "the trainer's own value: set batch_size and microbatches")
            else:
                migration.report(LOST, key, value, "not a number of examples: set batch_size and microbatches")


def is_count(value: Any) -> bool:
    """Returns whether a value is a positive integer."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def stage(migration: Migration, key: str, value: Any) -> None:
    """The rule of a ZeRO stage."""
    if is_count(value) and value <= 3:
        migration.mapped(
            key, value, "layout.zero", value, "mesh.fsdp cuts optimizer state, then gradients, then parameters"
        )
    elif value in (0, None, False):
        migration.report(AUTOMATIC, key, value, "replicas over mesh.data")
    else:
        migration.report(LOST, key, value, "the stages are 0 to 3: set layout.zero")


def clipping(migration: Migration, key: str, value: Any) -> None:
    """The rule of a limit of the gradient's norm. For "auto", the default of Hugging Face's trainer is written."""
    if value == "auto":
        migration.put("clip_norm", 1.0)
        external(migration, key, "clip_norm", {"clip_norm": 1.0})
    elif value in (0, None):
        migration.report(AUTOMATIC, key, value, "no clipping")
    else:
        migration.mapped(key, value, "clip_norm", float(value))


def offload(part: str) -> Rule:
    """Returns the rule of a device to which state is offloaded."""
    note = "NVMe is not used: host memory"
    return lambda m, key, value: (
        m.report(AUTOMATIC, key, value, "stays on the device")
        if value in (None, "none")
        else m.mapped(key, value, "offload", [part], note if value == "nvme" else "")
    )


_PINNED = automatic("host memory of `offload` is pinned")
_OFFLOAD_REST = {"pin_memory": _PINNED} | each(
    "nvme_path buffer_count buffer_size max_in_cpu pipeline pipeline_read pipeline_write fast_init ratio", _NVME
)
_PRECISION = flag("precision", "bfloat16", "float32")

ZERO: Table = {
    "stage": stage,
    **each(
        "contiguous_gradients overlap_comm reduce_scatter reduce_bucket_size allgather_partitions sub_group_size "
        "allgather_bucket_size round_robin_gradients ignore_unused_parameters legacy_stage1 memory_efficient_linear "
        "use_multi_rank_bucket_allreduce load_from_fp32_weights override_module_apply stage3_max_live_parameters "
        "stage3_max_reuse_distance stage3_prefetch_bucket_size stage3_param_persistence_threshold "
        "max_live_parameters max_reuse_distance gather_16bit_weights_on_model_save prefetch_bucket_size "
        "param_persistence_threshold stage3_param_persitance_threshold stage3_model_persistence_threshold "
        "stage3_module_granularity_threshold "
        "mics_hierarchical_params_gather",
        _OVERLAP,
    ),
    "cpu_offload": flag("offload", ["optimizer"], "stays on the device"),
    "cpu_offload_params": flag("offload", ["params"], "stays on the device"),
    "cpu_offload_use_pin_memory": _PINNED,
    "offload_optimizer": {"device": offload("optimizer"), **_OFFLOAD_REST},
    "offload_param": {"device": offload("params"), **_OFFLOAD_REST},
    **each(
        "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save",
        automatic("a checkpoint holds whole arrays; `spmdkit checkpoint export` writes them"),
    ),
    "elastic_checkpoint": automatic("a checkpoint is restored on any mesh"),
    "mics_shard_size": lambda m, key, value: m.mapped(
        key, value, "mesh", {"replica": -1, "fsdp": value}, "groups of this size hold the model"
    ),
    "zero_hpz_partition_size": when(
        lambda v: v == 1,
        automatic("parameters are gathered over all of fsdp"),
        automatic("use mesh: {replica, fsdp}, which shards within a host"),
    ),
    "zero_quantized_weights": automatic("weights are gathered as they are computed with: precision: bfloat16"),
    "zero_quantized_gradients": automatic(
        "a compressing reducer works over replicas, not fsdp: set mesh.replica and a reducer"
    ),
}

TABLE: Table = {
    **dict.fromkeys(_SIZES, lambda m, key, value: None),
    "gradient_clipping": clipping,
    "optimizer": deepspeed_optimizer.optimizer,
    "scheduler": deepspeed_optimizer.scheduler,
    "zero_optimization": ZERO,
    "fp16": {
        "enabled": flag("precision", "bfloat16", "float32", "no float16: bfloat16 needs no loss scale"),
        **each(
            "auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis "
            "min_loss_scale fp16_master_weights_and_grads",
            _SCALE,
        ),
    },
    "bf16": {"enabled": _PRECISION, "immediate_grad_update": _OVERLAP},
    "bfloat16": {"enabled": _PRECISION},
    "amp": {"enabled": _PRECISION, "opt_level": _SCALE},
    "data_types": {"grad_accum_dtype": automatic("microbatches are added in float32")},
    "communication_data_type": when(
        lambda v: v is None,
        automatic("gradients are added over devices in the dtype of the computation"),
        to("precision.reduction", lambda v: {"fp32": "float32"}.get(v, "bfloat16")),
    ),
    "seq_parallel_communication_data_type": automatic("activations are sent in the dtype of the computation"),
    **each(
        "prescale_gradients gradient_predivide_factor",
        automatic("sums are divided once, by the count of the whole batch"),
    ),
    "sparse_gradients": automatic("embeddings are named: reducer: {sparse_rows: {leaves: [PATH], rows: N}}"),
    "steps_per_print": to("log.every_steps"),
    "wall_clock_breakdown": automatic("metrics.jsonl has the times of each step; a trace: profile"),
    "dump_state": automatic("config.yaml, environment.json and plan.json of the run"),
    "memory_breakdown": automatic("`spmdkit plan` shows the memory per device"),
    "tensorboard": {
        "enabled": flag("log.trackers", ["tensorboard"], "off"),
        "output_path": automatic("tensorboard/ in run_dir"),
        "job_name": automatic("run_dir names the run"),
    },
    **each("wandb csv_monitor comet", _TRACKER),
    **each("flops_profiler comms_logger", automatic("`spmdkit plan` counts arithmetic and bytes sent")),
    "autotuning": automatic("`spmdkit plan --search` searches the fastest mesh that fits"),
    "elasticity": lost_if_set(
        "DeepSpeed computes the batch size from it: set batch_size, which is the same on any mesh"
    ),
    "activation_checkpointing": {
        "partition_activations": automatic("activations are sharded by the mesh"),
        "cpu_checkpointing": automatic("name what is offloaded: remat: {offload: [...]}"),
        **each(
            "contiguous_memory_optimization number_checkpoints synchronize_checkpoint_boundary profile",
            automatic("`remat` selects the saved activations; XLA places them"),
        ),
    },
    "tensor_parallel": {"autotp_size": to("mesh.tensor", note="with layout.rules, or metadata of the model")},
    "dataloader_drop_last": to("data.drop_remainder", is_on),
    **each(
        "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_allow_comm_data_type disable_allgather aio",
        automatic("an implementation detail of DeepSpeed"),
    ),
    **each(
        "progressive_layer_drop compression_training curriculum_learning data_efficiency quantize_training eigenvalue",
        lost_if_set("part of the model or its data, so of the task"),
    ),
    "sparse_attention": lost("part of the model, so of the task: a mask or a kernel of its attention"),
    **each("compile graph_harvesting", automatic("the whole step is compiled")),
    **each("_comment comment //", automatic("a comment")),
    **each("cuda_visible_devices", automatic("devices: auto")),
    **each(
        "comms_config monitor_config timers nebula hybrid_engine load_universal_checkpoint",
        automatic("it concerns no step of training"),
    ),
    "torch_autocast": {"enabled": _PRECISION, **each("dtype lower_precision_safe_modules", _SCALE)},
    "checkpoint": automatic("`checkpoint` of the config: every process writes its shards, whole or not at all"),
    "use_data_before_expert_parallel_": automatic("the order of mesh axes is fixed"),
}
