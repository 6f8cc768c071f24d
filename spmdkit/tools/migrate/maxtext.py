"""MaxText's YAML. Source: AI-Hypercomputer/maxtext, src/MaxText/configs/base.yml."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from spmdkit.tools.migrate.base import (
    AUTOMATIC,
    LOST,
    MAPPED,
    NO_OPTIMIZER,
    Migration,
    Rule,
    also_set,
    apply,
    automatic,
    flag,
    is_on,
    lost,
    lost_if_set,
    to,
    unknown,
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
    r"use_iota_embed|use_untrainable_positional_embedding|num_layers_per_pipeline_stage|routed_\w+|mtp_\w+|enable_dropout|"
    r"activations_in_float32|matmul_precision|dense_init_scale|attention_output_dim|mlp_activations_limit|cast_logits_to_fp32|causal_block_size|"
    r"moba\w*|block_diffusion_\w+|sinkhorn_\w+|dtype_mm|freeze_\w+_encoder_params|enable_padding_causal_mask|position_id_per_seconds|compress_ratios|"
    r"\w+_norm_with_scale|\w+_per_layer_input|num_kv_shared_layers|use_double_wide_mlp|use_audio|use_indexer|first_num_hash_layers|capacity_factor"
)
"""Settings that describe the model: they become keyword arguments of the task."""

PATTERNS: list[tuple[str, str]] = [
    (
        (
            r"(hf|grain|tfds|dataset|eval_dataset|tokenizer|tokenize|train|eval)_\w+|dataset\w*|max_corpus_chars|expansion_factor_\w+|add_(bos|eos)|packing|"
            r"eval_split|train_split|use_sft|sft_\w+|colocated_\w+|generate_padding_\w+|\w*image\w*|use_multimodal|"
            r"num_epoch|use_truncation|olmo_\w+|chat_template\w*|default_prompt|max_segments_per_seq|(video|audio)_\w+|use_audio_in_video"
        ),
        "the task defines its data: Task(train_data=...), any random-access source",
    ),
    (
        (
            r"(prefix_caching|decode|inference|prefill|ar|autoregressive|prometheus|jetstream|stack|return_log_prob|multi_sampling|pagedattn|paged)_\w+|"
            r"prompt|max_prefill\w*|load_from_prefill_dir|quantize_kvcache|kv_quant\w*|compute_axis_order|reshape_q|vllm\w*"
        ),
        "of serving, not of training",
    ),
    (
        r"quant_\w+|quantize\w*|quantization_\w+|use_qwix\w*|checkpoint_is_quantized|save_quantized\w*|replicate_quant_scale|act_quant\w*|use_qk_norm_quant",
        "quantised products are the model's own",
    ),
    (
        r"compile_topology\w*|compiled_trainstep_file|compile_xla_flags",
        "`spmdkit plan --target tpu:v5p:4x4x4` compiles for machines that are not here",
    ),
    (
        (
            r"\w*(goodput|badput|vertex|telemetry|cloud_logger|standard_logger|managed_mldiagnostics|gcp_\w+|heartbeat)\w*|gcs_metrics|tensorboard_dir|save_config_to_gcs|"
            r"metrics_file|enable_tensorboard|enable_structured\w*|log_config|record_internal_nn_metrics|"
            r"monitor_\w+|report_\w+|\w*wandb\w*|step_deviation_\w+"
        ),
        "metrics.jsonl, events.jsonl, config.yaml and report.html are always written; log.trackers for more",
    ),
    (
        r"collect_stack_trace|stack_trace_\w+|max_checkify|debug_sharding|hide_profiler_step_metric|dump_\w+",
        "stacks of all processes are shown when one hangs (watchdog); `spmdkit layout` and `plan` say what lies where",
    ),
    (
        (
            r"mesh_axes|logical_axis_rules|data_sharding|input_data_sharding_logical_axes|sharding_tolerance|custom_mesh\w*|allow_split_physical_axes|"
            r"optimize_mesh\w*|shard_mode|context_sharding|sharding_strategy|ulysses_context_sharding|override_logical_axis_rules"
        ),
        "mesh axes have fixed names; what of a model lies on which is layout.rules and layout.axes",
    ),
    (
        (
            r"scan_layers|param_scan_axis|force_unroll|scan_\w+|sa_\w+|megablox\w*|sparse_matmul|capacity_factor|use_ragged\w*|tile_\w+|wi_\w+|wo_\w+|"
            r"use_splash\w*|use_ring_of\w*|use_tokamax\w*|cost_estimate\w*|ragged_\w+|ring_scan_unroll|num_vocab_tiling|num_moe_\w+_chunks|use_custom_sort_vjp|"
            r"batch_split_factor|enable_nnx|pure_nnx\w*|te_comm_\w+|set_remat_policy_\w+|local_sa_\w+|use_tunix_\w+|use_batch_split_schedule|model_call_mode"
        ),
        "the model's own lines, or chosen by spmdkit.ops",
    ),
    (
        (
            r"hardware|num_slices|jax_\w+|xla_\w+|libtpu_\w+|enable_single_controller|subslice_shape|enable_jax_profiler|jax_profiler_port|skip_jax_distributed\w*|"
            r"shardy|remove_size_one_\w+|max_inflight_computations|tpu_num_\w+|dcn_bandwidth_\w+|generate_slice|use_pathways"
        ),
        "JAX finds its devices; a compilation cache and XLA's flags are set in the environment or compiler_options",
    ),
    (
        (
            r"\w*(load|restore)\w*_path|load_\w+|enable_single_replica_ckpt\w*|checkpoint_storage\w*|enable_orbax_v1|use_ocdbt|use_zarr3|\w*emergency\w*|local_checkpoint\w*|\w*multi_tier\w*|"
            r"checkpoint_\w+|source_checkpoint\w*|replicator\w*|use_replicator\w*|elastic\w*|use_ckpt\w*|save_checkpoint_on_\w+|async_checkpointing|force_q_layout"
        ),
        "the newest good checkpoint of run_dir is restored, on any mesh; saves are asynchronous",
    ),
    (
        r"(rl|grpo|dpo|sft|distill|lora|use_dpo|use_grpo|student|teacher)\w*",
        "the loss is the task's",
    ),
    (
        r"\w+_proj|mlpwi(_[01])?|mlpwo|context|attention_out|engram|decoder_layer_input",
        "of remat_policy: custom; name what is saved or offloaded: remat: {save: [...], offload: [...]}",
    ),
    (
        r"qk_clip_threshold|weight_sparsity_\w+|\w+_quantization_calibration_method|muon_\w+|skip_step_\w+|diloco_\w+|per_device_batch_size_\w+|global_rampup_\w+",
        "part of a switch: see its line, or it is off",
    ),
]
"""(names, why they need no key) of settings without an entry in a table; the first match counts."""  # fmt: skip

_REMAT = {name: name for name in ("full", "none", "minimal", "minimal_flash", "save_dot_except_mlp", "save_qkv_proj")}
_REMAT |= {"minimal_with_context": "minimal_flash"}


def migrate(settings: Mapping[str, Any], devices: int, folder: Path) -> Migration:
    """Returns the translation of the settings."""
    migration = Migration(devices)
    given = _with_base(migration, settings, folder)
    settings = DEFAULTS | given
    for key, value in settings.items():
        axis = _MESH.fullmatch(key)
        if axis is not None:
            apply(_axis, migration, key, value)
        elif key in TABLE:
            apply(TABLE[key], migration, key, value)
        elif MODEL.fullmatch(key):
            migration.mapped(key, value, f"task_args.{key}", value)
        else:
            rows = (automatic(why) for names, why in PATTERNS if re.fullmatch(names, key))
            next(rows, unknown)(migration, key, value)
    _optimizer(migration, settings)
    apply(lambda m, key, value: _rate(m, settings), migration, "learning_rate", settings["learning_rate"])
    _mesh(migration)
    note = "MaxText's default"
    migration.lines = [
        line if line.key in given else line._replace(why=f"{line.why} ({note})") for line in migration.lines
    ]
    return migration


def _with_base(migration: Migration, settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the settings, in addition to those of the files under `base_config` that are in the folder."""
    chain, file = [settings], folder
    while (base := chain[-1].get("base_config")) and len(chain) < 10:
        here = file if file.is_dir() else file.parent
        file = next((f / str(base) for f in (here, here.parent) if (f / str(base)).is_file()), here / str(base))
        if not file.is_file():
            if file.stem != "base":
                why = "the file is not there: its settings are missing"
                migration.report(LOST, "base_config", base, why)
            break
        read = yaml.safe_load(file.read_text())
        chain.append(read if isinstance(read, Mapping) else {})
    return {str(name): value for part in reversed(chain) for name, value in part.items()}


def _axis(migration: Migration, key: str, value: Any) -> None:
    """One size of the mesh. Data across slices is `replica`; the size of any other axis is the product of both."""
    where, name = _MESH.fullmatch(key).groups()  # type: ignore[union-attr]
    axis = "replica" if (where, name) == ("dcn", "data") else _AXES.get(name)
    if value == 1:
        return migration.report(AUTOMATIC, key, value, "a missing axis has size 1")
    if axis is None:
        return migration.report(LOST, key, value, "no such axis here: use its devices for another")
    if axis == "replica" and value == -1:
        return migration.report(AUTOMATIC, key, value, "one slice; for several, mesh.replica is their number")
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is no size of an axis")
    mesh = migration.config.setdefault("mesh", {})
    before = mesh.get(axis, 1)
    mesh[axis] = -1 if -1 in (before, value) else before * value
    return migration.report(MAPPED, key, value, f"mesh.{axis}: {mesh[axis]}")


def _mesh(migration: Migration) -> None:
    """MaxText's defaults, which a short file omits: fsdp takes the remaining devices of a slice, data the slices."""
    mesh = migration.config.setdefault("mesh", {})
    if -1 not in mesh.values():
        mesh.setdefault("replica" if "fsdp" in mesh else "fsdp", -1)
    for axis in [axis for axis, size in mesh.items() if size == -1][1:]:
        mesh.pop(axis)


def _optimizer(migration: Migration, settings: Mapping[str, Any]) -> None:
    """optax.adamw, which equals adam_pax, or optax.sgd. Source: maxtext e591f30, optimizers/optimizers.py."""
    kind = settings["opt_type"]
    name = {"adamw": "adamw", "adam_pax": "adamw", "sgd": "sgd"}.get(str(kind))
    if name is None:
        migration.report(LOST, "opt_type", kind, NO_OPTIMIZER)
    else:
        chosen = {"name": name}
        if name == "adamw":
            chosen |= {
                option: of(settings[key]) for key, (option, of) in ADAM.items() if settings.get(key) not in (None, "")
            }
        migration.mapped("opt_type", kind, "optimizer", chosen)
    for key, (option, _) in ADAM.items():
        if key in settings:
            why = (
                (MAPPED, f"optimizer.{option}")
                if name == "adamw"
                else (AUTOMATIC, f"{kind} has none, or is in the task")
            )
            migration.report(why[0], key, settings[key], why[1])


ADAM: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "adam_b1": ("b1", float),
    "adam_b2": ("b2", float),
    "adam_eps": ("eps", float),
    "adam_eps_root": ("eps_root", float),
    "adam_weight_decay": ("weight_decay", float),
    "mu_dtype": ("mu_dtype", str),
}
RATE = (
    "learning_rate",
    "lr_schedule_type",
    "warmup_steps_fraction",
    "learning_rate_schedule_steps",
    "cosine_learning_rate_final_fraction",
    "learning_rate_final_fraction",
    "wsd_decay_steps_fraction",
    "wsd_decay_style",
)


def _rate(migration: Migration, settings: Mapping[str, Any]) -> None:
    """Linear warm-up, a cosine decay or (wsd) a constant rate and then a decay, and 0 for the remaining steps. Source:
    maxtext e591f30, `create_learning_rate_schedule` of utils/maxtext_utils.py."""
    peak, num_steps = float(settings["learning_rate"]), int(settings.get("learning_rate_schedule_steps", -1))
    steps = int(settings["steps"])
    length = steps if num_steps == -1 else num_steps
    fraction = settings.get("learning_rate_final_fraction", settings.get("cosine_learning_rate_final_fraction", 0.1))
    last = peak * float(fraction)
    warmup = int(length * float(settings["warmup_steps_fraction"]))
    is_wsd = settings.get("lr_schedule_type", "cosine") == "wsd"
    decay = int(length * float(settings.get("wsd_decay_steps_fraction", 0.1))) if is_wsd else length - warmup
    is_linear = is_wsd and settings.get("wsd_decay_style", "linear") == "linear"
    falling: Any = last if decay == 1 and not is_linear else peak
    if decay > 1 and is_linear:
        falling = _linear(peak, last, decay - 1)
    elif decay > 1:
        cosine = {"name": "cosine_decay_schedule", "init_value": peak, "decay_steps": decay - 1}
        falling = cosine | {"alpha": float(fraction)}
    starts = [(0, _linear(0.0, peak, warmup)), (warmup, peak), (length - decay, falling), (length, 0.0)]
    ends = [warmup, length - decay, length, steps]
    pieces = [(start, piece) for (start, piece), end in zip(starts, ends, strict=True) if end > start]
    schedule: Any = pieces[0][1]
    if len(pieces) > 1:
        boundaries = [start for start, _ in pieces[1:]]
        schedule = {"name": "join_schedules", "schedules": [piece for _, piece in pieces], "boundaries": boundaries}
    migration.put("learning_rate", schedule)
    for key in RATE:
        if key in settings:
            migration.report(MAPPED, key, settings[key], "learning_rate")
    if steps == -1:
        migration.put("steps", length)


def _linear(first: float, last: float, steps: int) -> dict[str, Any]:
    return {"name": "linear_schedule", "init_value": first, "end_value": last, "transition_steps": steps}


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
        migration.put("remat", "full")
        return migration.report(AUTOMATIC, key, value, why)
    return migration.mapped(key, value, "remat", policy, "" if value in _REMAT else "the nearest")


def _period(migration: Migration, key: str, value: Any) -> None:
    if migration.config.get("checkpoint", {}) is None:
        migration.report(AUTOMATIC, key, value, "nothing is saved")
    else:
        migration.mapped(key, value, "checkpoint.every_steps", value)


def _of_trace(steps: Callable[[int, int, int], list[int]]) -> Rule:
    """`steps` has the first and last step of the trace and the value, and returns the new first and last step."""

    def rule(migration: Migration, key: str, value: Any) -> None:
        if "profile" not in migration.config:
            return migration.report(AUTOMATIC, key, value, "no trace")
        profile = migration.config["profile"]
        first, last = profile["steps"]
        profile["steps"] = steps(first, last, value)
        migration.report(MAPPED, key, value, "profile.steps")
        return None

    return rule


def _profiler(migration: Migration, key: str, value: Any) -> None:
    if value:
        migration.put("profile.steps", [2, 6])
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
    "gradient_clipping_threshold": when(lambda v: float(v) > 0, to("clip_norm", float), automatic("no clipping")),
    "dtype": _DTYPES("precision.compute"),
    "weight_dtype": _DTYPES("precision.params"),
    "grad_dtype": automatic("gradients are added over devices in precision.reduction, and stored in float32"),
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
    "skip_first_n_steps_for_profiler": _of_trace(lambda first, last, v: [v + 1, v + 1 + last - first]),
    "profiler_steps": _of_trace(lambda first, last, v: [first, first + v - 1]),
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
    "shard_optimizer_over_data": automatic("use mesh.fsdp with layout.zero: 1, which shards optimizer state only"),
    "base_config": automatic("its settings are read if it is in this folder; those of base.yml are known"),
    "override_model_config": automatic("task_args take precedence"),
    "reuse_example_batch": automatic("for measurements of MaxText; the task defines its data"),
    "target_eval_loss": lost_if_set("training ends at this loss: a hook of yours returns sk.Stop"),
    "training_objective": when(
        lambda v: v == "causal_lm", automatic("the loss is the task's"), lost("another loss: write it in the task")
    ),
    **dict.fromkeys(("use_dpo", "use_grpo", "use_sft"), lost_if_set("another loss: write it in the task")),
    "quantization": lost_if_set("quantized products are the model's: write them in the task"),
    "adamw_mask": lost_if_set("all leaves decay: make the optimizer in the task, optax.adamw(rate, mask=...)"),
    "trainable_parameters_mask": lost_if_set("all leaves are trained: name the others in the task"),
    "skip_step_on_spikes": lost_if_set("another rule here, for the loss: on_spike: {action: skip, z_score: 6}"),
    "enable_diloco": lost_if_set(
        "sync: {diloco: {every: 36, outer_optimizer: {name: sgd, learning_rate: 0.3, momentum: 0.9, nesterov: true}}}"
    ),
    "enable_rampup_batch_size": lost_if_set("batch_size is a schedule for this: {0: 256, 2000: 1024}"),
    **dict.fromkeys(("weight_sparsity_n", "weight_sparsity_m"), lost_if_set("sparse weights: write them in the task")),
    "abort_on_nan_loss": _off("on_nonfinite", "continue", "on_nonfinite: stop"),
    "abort_on_inf_loss": _off("on_nonfinite", "continue", "on_nonfinite: stop"),
    "use_qk_clip": lost_if_set("it changes parameters after the update: write it in the task's train_step"),
    **dict.fromkeys(
        ("load_parameters_path", "load_full_state_path", "lora_input_adapters_path"),
        lost_if_set("the first parameters are those of the task's init: load them there"),
    ),
    **dict.fromkeys([*RATE, "opt_type", *ADAM], _LATER),
}

DEFAULTS: dict[str, Any] = {
    "steps": 150_001,
    "per_device_batch_size": 12.0,
    "dtype": "bfloat16",
    "remat_policy": "full",
    "gradient_clipping_threshold": 1.0,
    "opt_type": "adamw",
    "adam_b1": 0.9,
    "adam_b2": 0.95,
    "adam_weight_decay": 0.1,
    "learning_rate": 3e-5,
    "warmup_steps_fraction": 0.1,
}
"""Settings of base.yml that have another default here. A file without them has these values."""
