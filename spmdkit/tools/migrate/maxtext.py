"""MaxText's YAML. Source: AI-Hypercomputer/maxtext, src/MaxText/configs/base.yml."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from spmdkit.tools.migrate.base import (
    AUTOMATIC,
    MAPPED,
    MEANINGLESS,
    NO_OPTIMIZER,
    UNKNOWN,
    Migration,
    Rule,
    also_set,
    apply,
    automatic,
    flag,
    is_on,
    meaningless,
    to,
    unless_off,
    when,
)

NAMES = frozenset({"base_config", "base_emb_dim", "base_mlp_dim", "decoder_block", "max_target_length", "remat_policy"})
NAMES |= {"per_device_batch_size", "ici_fsdp_parallelism", "mesh_axes"}
"""Settings that identify a file of MaxText."""

_AXES = {name: name for name in ("data", "fsdp", "tensor", "expert", "pipeline", "context")}
_AXES |= {"fsdp_transpose": "fsdp", "tensor_transpose": "tensor", "tensor_sequence": "tensor"}
_AXES |= {"sequence": "context", "context_autoregressive": "context"}
_MESH = re.compile(r"(ici|dcn)_(\w+)_parallelism")

MODEL = re.compile(
    r"base_(emb|mlp|moe|num)\w*|head_dim|vocab_size|decoder_block|num_experts\w*|mlp_activations|dropout_rate|logits_\w+|normaliz\w+|"
    r"global_parameter_scale|rope_\w+|sliding_window_size|attn_logits_soft_cap|final_logits_soft_cap|use_\w*(norm|bias)\w*|max_target_length|"
    r"max_position_embeddings|trainable_position_size|model_name|attention_type|shared_experts|moe_\w+|q_lora_rank|kv_lora_rank|"
    r"qk_\w+_head_dim|v_head_dim|mla_\w+|\w+_for_(vit|audio|vision)|\w*position_embeddings|beta_(fast|slow)|\w*mscale\w*|\w*(rope|timescale|rotary)\w*|"
    r"vision_\w+|norm_topk_prob|inhomogeneous_layer\w*|\w+_head_dim|\w+_num_kv_heads|(attention|mlp)_bias|(gdn|indexer|engram|mhc|index)_\w+|attention_sink|"
    r"nope_layer_interval|z_loss_multiplier|float32_\w+|share_kv_projections|chunk_attn_\w+|temperature_tuning|(n|topk)_routing_group\w*|o_(lora_rank|groups)|interleave_moe_layer_step|first_num_dense_layers|load_balance_loss_weight|fused_(qkv|mlp)|"
    r"use_iota_embed|use_untrainable_positional_embedding|num_layers_per_pipeline_stage|routed_\w+|mtp_\w+|enable_dropout"
)
"""Settings that describe the model: they become keyword arguments of the task."""

PATTERNS: list[tuple[str, str, str]] = [
    (
        (
            r"(hf|grain|tfds|dataset|eval_dataset|tokenizer|tokenize|train|eval)_\w+|dataset\w*|max_corpus_chars|expansion_factor_\w+|add_(bos|eos)|packing|"
            r"eval_split|train_split|use_sft|sft_\w+|colocated_\w+|generate_padding_\w+|\w*image\w*|use_multimodal"
        ),
        MEANINGLESS,
        "the task defines its data: Task(train_data=...), any random-access source",
    ),
    (
        (
            r"(decode|inference|prefill|ar|autoregressive|prometheus|jetstream|stack|return_log_prob|multi_sampling|pagedattn|paged)_\w+|"
            r"prompt|max_prefill\w*|load_from_prefill_dir|quantize_kvcache|kv_quant\w*|compute_axis_order|reshape_q|vllm\w*"
        ),
        MEANINGLESS,
        "serving is not what this does",
    ),
    (
        r"quant\w*|use_qwix\w*|checkpoint_is_quantized|save_quantized\w*|replicate_quant_scale|act_quant\w*|use_qk_norm_quant",
        MEANINGLESS,
        "quantised products are the model's own",
    ),
    (
        r"compile_topology\w*|compiled_trainstep_file|compile_xla_flags",
        AUTOMATIC,
        "`spmdkit plan --target tpu:v5p:4x4x4` compiles for machines that are not here",
    ),
    (
        (
            r"\w*(goodput|badput|vertex|telemetry|cloud_logger|standard_logger|managed_mldiagnostics|gcp_\w+|heartbeat)\w*|gcs_metrics|save_config_to_gcs|"
            r"metrics_file|enable_tensorboard|enable_structured\w*|log_config|record_internal_nn_metrics|"
            r"monitor_\w+|report_\w+"
        ),
        AUTOMATIC,
        "metrics.jsonl, events.jsonl, config.yaml and report.html are always written; log.trackers for more",
    ),
    (
        r"collect_stack_trace|stack_trace_\w+|max_checkify|debug_sharding|hide_profiler_step_metric|dump_\w+",
        AUTOMATIC,
        "stacks of all processes are shown when one hangs (watchdog); `spmdkit layout` and `plan` say what lies where",
    ),
    (
        (
            r"mesh_axes|logical_axis_rules|data_sharding|input_data_sharding_logical_axes|sharding_tolerance|custom_mesh\w*|allow_split_physical_axes|"
            r"optimize_mesh\w*|shard_mode|context_sharding|sharding_strategy"
        ),
        AUTOMATIC,
        "mesh axes have fixed names; what of a model lies on which is layout.rules and layout.axes",
    ),
    (
        (
            r"scan_layers|param_scan_axis|force_unroll|scan_\w+|sa_\w+|megablox\w*|sparse_matmul|capacity_factor|use_ragged\w*|tile_\w+|wi_\w+|wo_\w+|"
            r"use_splash\w*|use_ring_of\w*|use_tokamax\w*|cost_estimate\w*"
        ),
        AUTOMATIC,
        "the model's own lines, or chosen by spmdkit.ops",
    ),
    (
        r"hardware|num_slices|jax_\w+|xla_\w+|libtpu_\w+|enable_single_controller|subslice_shape|enable_jax_profiler|jax_profiler_port|skip_jax_distributed\w*",
        AUTOMATIC,
        "JAX finds its devices; a compilation cache and XLA's flags are set in the environment or compiler_options",
    ),
    (
        (
            r"\w*(load|restore)\w*_path|load_\w+|enable_single_replica_ckpt\w*|checkpoint_storage\w*|enable_orbax_v1|use_ocdbt|use_zarr3|\w*emergency\w*|local_checkpoint\w*|\w*multi_tier\w*|"
            r"checkpoint_\w+|source_checkpoint\w*|replicator\w*|use_replicator\w*|elastic\w*|use_ckpt\w*|async_checkpointing|force_q_layout"
        ),
        AUTOMATIC,
        "the newest good checkpoint of run_dir is restored, on any mesh; saves are asynchronous",
    ),
    (
        r"(rl|grpo|dpo|sft|distill|lora|use_dpo|use_grpo|student|teacher)\w*",
        MEANINGLESS,
        "another loss: it is the task's",
    ),
    (
        r"muon_\w+|mu_dtype|adam_eps_root|skip_step_\w+",
        MEANINGLESS,
        "give the optimizer in the task, or its arguments under optimizer",
    ),
]
"""(names, kind, why) of settings without an entry in a table; the first match counts."""  # fmt: skip

_REMAT = {"full": "full", "none": "none"}
_REMAT |= dict.fromkeys(("minimal", "minimal_flash", "minimal_with_context"), "dots_no_batch")


def migrate(settings: Mapping[str, Any], devices: int, folder: Path) -> Migration:
    """Returns the translation of the settings."""
    migration = Migration(devices)
    for name, value in settings.items():
        key = str(name)
        axis = _MESH.fullmatch(key)
        if axis is not None:
            apply(_axis, migration, key, value)
        elif key in TABLE:
            apply(TABLE[key], migration, key, value)
        elif MODEL.fullmatch(key):
            migration.mapped(key, value, f"task_args.{key}", value)
        else:
            rows = (row for row in PATTERNS if re.fullmatch(row[0], key))
            _, kind, why = next(rows, ("", UNKNOWN, "unknown setting, ignored: check its meaning"))
            migration.report(kind, key, value, why)
    _optimizer(migration, settings)
    apply(lambda m, key, value: _rate(m, settings), migration, "learning_rate", settings.get("learning_rate"))
    _mesh(migration)
    return migration


def _axis(migration: Migration, key: str, value: Any) -> None:
    """One size of the mesh. Data across slices is `replica`; the size of any other axis is the product of both."""
    where, name = _MESH.fullmatch(key).groups()  # type: ignore[union-attr]
    axis = "replica" if (where, name) == ("dcn", "data") else _AXES.get(name)
    if value == 1:
        return migration.report(AUTOMATIC, key, value, "a missing axis has size 1")
    if axis is None:
        return migration.report(MEANINGLESS, key, value, "no such axis here: use its devices for another")
    if axis == "replica" and value == -1:
        return migration.report(AUTOMATIC, key, value, "one slice; for several, mesh.replica is their number")
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is no size of an axis")
    mesh = migration.config.setdefault("mesh", {})
    before = mesh.get(axis, 1)
    mesh[axis] = -1 if -1 in (before, value) else before * value
    return migration.report(MAPPED, key, value, f"mesh.{axis}: {mesh[axis]}")


def _mesh(migration: Migration) -> None:
    """MaxText's default, which a short file omits: fsdp takes the remaining devices."""
    mesh = migration.config.setdefault("mesh", {})
    if list(mesh.values()).count(-1) == 0:
        mesh["fsdp"] = -1
    for axis in [axis for axis, size in mesh.items() if size == -1][1:]:
        mesh.pop(axis)


def _optimizer(migration: Migration, settings: Mapping[str, Any]) -> None:
    kind = settings.get("opt_type")
    names = {"adamw": "adamw", "adam_pax": "adamw", "sgd": "sgd"}
    options = {option: settings[key] for key, option in ADAM.items() if key in settings}
    if kind is None and not options:
        return
    name = names.get(str(kind or "adamw"))
    if name is None:
        return migration.report(MEANINGLESS, "opt_type", kind, NO_OPTIMIZER)
    is_adam = name == "adamw"
    migration.put("optimizer", {"name": name, **(options if is_adam else {})})
    if kind is not None:
        migration.report(MAPPED, "opt_type", kind, f"optimizer.name: {name}")
    for key, option in ADAM.items():
        if key in settings:
            kind, why = (MAPPED, f"optimizer.{option}") if is_adam else (AUTOMATIC, f"{name} has none")
            migration.report(kind, key, settings[key], why)
    return None


ADAM = {"adam_b1": "b1", "adam_b2": "b2", "adam_eps": "eps", "adam_weight_decay": "weight_decay"}
RATE = (
    "learning_rate",
    "warmup_steps_fraction",
    "learning_rate_schedule_steps",
    "cosine_learning_rate_final_fraction",
    "learning_rate_final_fraction",
)


def _rate(migration: Migration, settings: Mapping[str, Any]) -> None:
    """Linear warm-up and cosine decay, which MaxText always uses."""
    if "learning_rate" not in settings:
        return
    rate, num_steps = float(settings["learning_rate"]), settings.get("learning_rate_schedule_steps", -1)
    steps = num_steps if isinstance(num_steps, int) and num_steps > 0 else migration.config.get("steps", 150_001)
    final = settings.get("cosine_learning_rate_final_fraction", settings.get("learning_rate_final_fraction", 0.1))
    warmup = int(steps * float(settings.get("warmup_steps_fraction", 0.1)))
    schedule = {"name": "warmup_cosine_decay_schedule", "init_value": 0.0, "peak_value": rate, "warmup_steps": warmup}
    migration.put("learning_rate", schedule | {"decay_steps": steps, "end_value": rate * float(final)})
    for key in RATE:
        if key in settings:
            migration.report(MAPPED, key, settings[key], "learning_rate: warmup_cosine_decay_schedule")


def _batch(path: str) -> Rule:
    def rule(migration: Migration, key: str, value: Any) -> None:
        total = round(
            float(value) * migration.devices * (migration.config.get("microbatches", 1) if path == "batch_size" else 1)
        )
        if total < 1:
            return migration.report(AUTOMATIC, key, value, "as batch_size")
        return migration.mapped(key, value, path, total, f"for --devices {migration.devices}")

    return rule


def _passes(migration: Migration, key: str, value: Any) -> None:
    if "batch_size" in migration.config:
        migration.config["batch_size"] *= value
    migration.mapped(key, value, "microbatches", value)


def _remat(migration: Migration, key: str, value: Any) -> None:
    policy = _REMAT.get(str(value), "dots" if str(value).startswith("save_") else None)
    if policy is None:
        why = "name what is kept or offloaded: remat: {save: [...], offload: [...]}; it is `full` until then"
        return migration.report(MEANINGLESS, key, value, why)
    return migration.mapped(key, value, "remat", policy, "" if value in ("full", "none") else "the nearest")


def _period(migration: Migration, key: str, value: Any) -> None:
    if migration.config.get("checkpoint", {}) is None:
        migration.report(AUTOMATIC, key, value, "nothing is saved")
    else:
        migration.mapped(key, value, "checkpoint.every_steps", value)


def _of_trace(rule: Rule) -> Rule:
    return lambda m, key, v: (rule if "profile" in m.config else automatic("no trace"))(m, key, v)


def _profiler(migration: Migration, key: str, value: Any) -> None:
    if value:
        migration.put("profile.start", 2)
        return migration.report(MAPPED, key, value, "profile")
    return migration.report(AUTOMATIC, key, value, "no trace")


_POSITIVE: Callable[[str, str], Rule] = lambda path, why: when(
    lambda v: isinstance(v, int | float) and v > 0, to(path), automatic(why)
)
_DTYPES: Callable[[str], Rule] = lambda path: to(path, lambda v: v if v in ("float32", "bfloat16") else "float32")
_off: Callable[[str, Any, str], Rule] = lambda path, value, default: when(
    is_on, automatic(default), to(path, lambda _: value)
)
_LATER: Rule = lambda migration, key, value: None

TABLE: dict[str, Rule] = {
    "steps": when(lambda v: v > 0, to("steps"), automatic("set steps")),
    "per_device_batch_size": _batch("batch_size"),
    "eval_per_device_batch_size": _batch("eval.batch_size"),
    "gradient_accumulation_steps": _passes,
    "gradient_clipping_threshold": _POSITIVE("clip_norm", "no clipping"),
    "dtype": _DTYPES("precision.compute"),
    "weight_dtype": _DTYPES("precision.params"),
    "grad_dtype": automatic(
        "gradients are reduced in the wider of float32 and the parameters' dtype: precision.reduce"
    ),
    "remat_policy": _remat,
    "enable_checkpointing": _off("checkpoint", None, "checkpoint"),
    "checkpoint_period": _period,
    "max_num_checkpoints_to_keep": _POSITIVE("checkpoint.keep", "the newest three are kept"),
    "eval_interval": _POSITIVE("eval.every_steps", "at the end"),
    "log_period": to("log.every_steps"),
    "init_weights_seed": to("seed"),
    "data_shuffle_seed": automatic("one seed for parameters, order and keys: seed"),
    "enable_data_shuffling": _off("data.shuffle", False, "data.shuffle: true"),
    "base_output_directory": automatic("run_dir"),
    "run_name": when(bool, to("run_dir", lambda v: f"runs/{v}"), automatic("runs/<config name>")),
    "profiler": _profiler,
    "skip_first_n_steps_for_profiler": _of_trace(to("profile.start", lambda v: v + 1)),
    "profiler_steps": _of_trace(to("profile.steps")),
    "profile_periodically_period": automatic("one trace per run"),
    "profile_cleanly": automatic("a trace begins between two steps"),
    "upload_all_profiler_results": automatic("the trace is in run_dir"),
    "optimizer_memory_host_offload": flag("offload", ["optimizer"], "kept on the device"),
    "parameter_memory_host_offload": flag("offload", ["params"], "kept on the device"),
    "num_pipeline_microbatches": _POSITIVE("pipeline.microbatches", "chosen by the rows of a shard"),
    "num_pipeline_repeats": when(
        lambda v: isinstance(v, int) and v > 1,
        also_set("pipeline.schedule", "interleaved", to("pipeline.chunks")),
        automatic("one chunk of layers per stage"),
    ),
    "attention": to(
        "attention.implementation",
        lambda v: {"dot_product": "xla", "cudnn_flash_te": "cudnn", "cudnn_flash_jax": "cudnn"}.get(v, "auto"),
    ),
    "context_parallel_load_balance": _off("attention.order", "contiguous", "attention.order: zigzag"),
    "context_parallel_strategy": to("attention.context", lambda v: "ring" if v == "ring" else "all_to_all"),
    "shard_optimizer_over_data": unless_off("use mesh.fsdp with layout.zero: 1, which shards optimizer state only"),
    "base_config": meaningless(
        "a file with all defaults: what this one leaves out has spmdkit's defaults. Migrate it too if you changed it"
    ),
    "override_model_config": meaningless("task_args take precedence"),
    "reuse_example_batch": meaningless("for measurements of MaxText; the task defines its data"),
    "target_eval_loss": meaningless("a hook of yours returns sk.Stop: docs/adding.md"),
    **dict.fromkeys([*RATE, "opt_type", *ADAM], _LATER),
}
