"""Accelerate's YAML, as `accelerate config` writes it. Source: huggingface/accelerate,
src/accelerate/commands/config/config_args.py (1.12)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmdkit.tools.migrate import deepspeed
from spmdkit.tools.migrate.base import (
    AUTOMATIC,
    LOST,
    MAPPED,
    Migration,
    Rule,
    Table,
    also_set,
    automatic,
    each,
    flag,
    is_on,
    section,
    to,
    walk,
    when,
)

NAMES = frozenset({"distributed_type", "compute_environment", "main_training_function"})
NAMES |= {"fsdp_config", "deepspeed_config", "parallelism_config"}
"""Settings that identify a file of Accelerate."""

_MEET = automatic(
    "processes find each other by the variables of what starts them: `spmdkit launch`, Slurm, torchrun, TF_CONFIG ..."
)
_OVERLAP = automatic("XLA gathers and overlaps what the step needs")
_CLOUD = automatic("machines are created by the tools of the cloud; `spmdkit` runs on existing ones")


_STRATEGIES = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD", "5": "HYBRID_SHARD_ZERO2"}


def migrate(settings: Mapping[str, Any], devices: int, folder: Path) -> Migration:
    """Returns the translation of the settings. `folder`: the folder of the file, for a DeepSpeed file that it names."""
    migration = Migration(devices)
    table = {**TABLE, "deepspeed_config": _deepspeed_table(folder), "downcast_bf16": _downcast(settings)}
    ordered = sorted(settings, key=lambda name: name == "downcast_bf16")  # it refines mixed_precision
    walk(migration, {name: settings[name] for name in ordered}, table)
    mesh, zero = migration.config.setdefault("mesh", {}), migration.config.get("layout", {}).get("zero")
    fsdp = settings.get("distributed_type") == "FSDP" or zero is not None
    strategy = str(section(settings, "fsdp_config").get("fsdp_sharding_strategy", ""))
    strategy = _STRATEGIES.get(strategy, strategy)
    if strategy == "NO_SHARD":
        mesh["data"] = -1
        migration.config.pop("layout", None)
    elif -1 not in mesh.values() and settings.get("distributed_type", "NO") != "NO":
        if strategy.startswith("HYBRID"):
            machines = settings.get("num_machines")
            mesh.setdefault("replica", machines if deepspeed.is_count(machines) else 1)
        if not fsdp or "fsdp" not in mesh:
            mesh["fsdp" if fsdp else "data"] = -1
    if not mesh:
        migration.config.pop("mesh")
    return migration


def _type(migration: Migration, key: str, value: Any) -> None:
    sections = {"DEEPSPEED": "by deepspeed_config", "MEGATRON_LM": "by megatron_lm_config"}
    parts = sections | {"FSDP": "fsdp: -1", "NO": "one device"}
    migration.report(MAPPED, key, value, f"mesh: {parts.get(str(value), 'data: -1')}")


def _precision(migration: Migration, key: str, value: Any) -> None:
    if value is False or str(value) == "no":
        return migration.report(AUTOMATIC, key, value, "float32")
    notes = {"fp16": "no float16: bfloat16 needs no loss scale", "fp8": "float8 products are the model's own"}
    return migration.mapped(key, value, "precision", "bfloat16", notes.get(str(value), ""))


def _downcast(settings: Mapping[str, Any]) -> Rule:
    """Returns the rule of `downcast_bf16`, which only concerns bf16 on TPUs: all arrays are then bf16, including the
    parameters."""
    if str(settings.get("mixed_precision")) != "bf16":
        return automatic("it has no effect without mixed_precision: bf16")
    whole = {"compute": "bfloat16", "params": "bfloat16"}
    return when(is_on, to("precision", lambda value: whole), automatic("float32 stays float32"))


def _cpu(migration: Migration, key: str, value: Any) -> None:
    if is_on(value):
        migration.mapped(key, value, "devices", f"cpu:{migration.devices}", "fake devices of this CPU")
    else:
        migration.report(AUTOMATIC, key, value, "devices: auto")


def _gpus(migration: Migration, key: str, value: Any) -> None:
    numbers = str(value).split(",")
    if value is None or not all(n.strip().isdecimal() for n in numbers):
        return migration.report(AUTOMATIC, key, value, "devices: auto")
    return migration.mapped(key, value, "devices", [int(n) for n in numbers])


def _sharding(migration: Migration, key: str, value: Any) -> None:
    name = _STRATEGIES.get(str(value), str(value))
    zero = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2}.get(name)
    if zero is None:
        return migration.report(MAPPED, key, value, "mesh: {data: -1}")
    mesh = "mesh: {replica: machines, fsdp: -1}" if name.startswith("HYBRID") else "mesh: {fsdp: -1}"
    return migration.mapped(key, value, "layout.zero", zero, mesh)


def _reshard(migration: Migration, key: str, value: Any) -> None:
    if isinstance(value, str) and not is_on(value) and value.lower() not in ("false", "no"):
        return _sharding(migration, key, value)
    return migration.mapped(key, value, "layout.zero", 3 if is_on(value) else 2)


def _axis(axis: str) -> Any:
    """Returns the rule of the size of a mesh axis; a size of 1 is omitted."""
    return when(lambda v: v in (None, 1), automatic(f"mesh.{axis} is 1"), to(f"mesh.{axis}"))


def _deepspeed_table(folder: Path) -> Table:
    def file(migration: Migration, key: str, value: Any) -> None:
        path = folder / str(value)
        if not path.is_file():
            why = "the file is not in this folder: run `spmdkit migrate` on it"
            return migration.report(LOST, key, value, why)
        try:
            inner = deepspeed.migrate(json.loads(path.read_text()), migration.devices, folder)
        except (ValueError, AttributeError) as error:
            why = f"that file is no config of DeepSpeed: {' '.join(str(error).split())}"
            return migration.report(LOST, key, value, why)
        migration.config |= inner.config
        migration.report(MAPPED, key, value, "read, line by line below")
        migration.lines += inner.lines
        return None

    return DEEPSPEED | {"deepspeed_config_file": file}


FSDP: Table = {
    "fsdp_sharding_strategy": _sharding,
    "fsdp_reshard_after_forward": _reshard,
    "fsdp_offload_params": flag("offload", ["params", "optimizer"], "stays on the device"),
    "fsdp_activation_checkpointing": flag("remat", "full", "remat: none"),
    **each(
        "fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params fsdp_use_orig_params "
        "fsdp_version",
        automatic("any pytree is sharded leaf by leaf (layout.fsdp: auto, or layout.rules), without wrapping modules"),
    ),
    **each("fsdp_backward_prefetch fsdp_backward_prefetch_policy fsdp_forward_prefetch", _OVERLAP),
    "fsdp_cpu_ram_efficient_loading": automatic("parameters are created or restored on their devices, shard by shard"),
    "fsdp_sync_module_states": automatic(
        "parameters are made from the seed, the same on all processes, and compared before step 1"
    ),
    "fsdp_state_dict_type": automatic("a checkpoint is written in shards and restored on any mesh"),
}

DEEPSPEED: dict[str, Any] = {
    "zero_stage": deepspeed.stage,
    "gradient_accumulation_steps": to("microbatches"),
    "gradient_clipping": deepspeed.clipping,
    "offload_optimizer_device": deepspeed.offload("optimizer"),
    "offload_param_device": deepspeed.offload("params"),
    "zero3_init_flag": automatic("parameters are created on their devices, shard by shard"),
    "zero3_save_16bit_model": automatic("`spmdkit checkpoint export` writes whole arrays"),
    "deepspeed_moe_layer_cls_names": automatic("experts are sk.moe in the model, sharded by mesh.expert"),
    **each("offload_optimizer_nvme_path offload_param_nvme_path", automatic("nothing is offloaded to disks")),
    **each(
        "deepspeed_multinode_launcher deepspeed_hostfile deepspeed_inclusion_filter deepspeed_exclusion_filter", _MEET
    ),
}

MEGATRON: Table = {
    "megatron_lm_tp_degree": _axis("tensor"),
    "megatron_lm_pp_degree": _axis("pipeline"),
    "megatron_lm_num_micro_batches": to("pipeline.microbatches"),
    "megatron_lm_gradient_clipping": deepspeed.clipping,
    "megatron_lm_recompute_activations": flag("remat", "full", "remat: none"),
    "megatron_lm_sequence_parallelism": automatic(
        "activations between tensor-parallel parts are cut along the sequence"
    ),
    "megatron_lm_use_distributed_optimizer": flag("layout.zero", 1, "optimizer state as the parameters"),
}

PARALLEL: Table = {
    "parallelism_config_dp_replicate_size": _axis("replica"),
    "parallelism_config_dp_shard_size": _axis("fsdp"),
    "parallelism_config_tp_size": _axis("tensor"),
    "parallelism_config_cp_size": _axis("context"),
    "parallelism_config_sp_size": when(
        lambda v: v in (None, 1),
        automatic("mesh.context is 1"),
        also_set("attention.context", "all_to_all", to("mesh.context", note="attention.context: all_to_all")),
    ),
    "parallelism_config_cp_comm_strategy": automatic("attention.context: ring passes keys and values around the ring"),
    **each("parallelism_config_cp_backend parallelism_config_sp_backend", _OVERLAP),
    **each(
        "parallelism_config_sp_seq_length parallelism_config_sp_seq_length_is_variable",
        automatic("the sequence is that of the data"),
    ),
    "parallelism_config_sp_attn_implementation": automatic("attention.implementation: auto"),
}

TABLE: dict[str, Any] = {
    "compute_environment": when(
        lambda v: v == "LOCAL_MACHINE", automatic("this machine, or the machines of the scheduler"), _CLOUD
    ),
    "distributed_type": _type,
    "mixed_precision": _precision,
    "fp16": _precision,
    "num_processes": automatic("a mesh axis of -1 uses all devices; `spmdkit launch -n N`"),
    "num_machines": automatic(
        "the hosts that the starter knows; fsdp within and replica across: mesh: {replica: hosts, fsdp: -1}"
    ),
    **each("machine_rank main_process_ip main_process_port rdzv_backend same_network mpirun_config", _MEET),
    "gpu_ids": _gpus,
    "use_cpu": _cpu,
    "main_training_function": automatic("a config names the task: task: file.py:name"),
    "downcast_bf16": automatic("float32 stays float32"),
    "debug": automatic("processes compare config, data, program and parameters before the first step"),
    "enable_cpu_affinity": automatic("XLA manages threads; run the command under numactl"),
    "dynamo_config": automatic("the whole step is compiled"),
    "gradient_accumulation_steps": to("microbatches"),
    "fsdp_config": FSDP,
    "deepspeed_config": DEEPSPEED,
    "megatron_lm_config": MEGATRON,
    "parallelism_config": PARALLEL,
    "fp8_config": automatic("float8 products are part of the model; `precision` sets everything else"),
    **each("tpu_use_cluster tpu_use_sudo tpu_name tpu_zone tpu_vm tpu_env commands command_file", _CLOUD),
    **each("ipex_config use_mps_device use_xpu", automatic("devices: auto uses what JAX detects")),
}
