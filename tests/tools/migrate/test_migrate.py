"""`spmdkit migrate`: files as their projects' documentation shows them, what comes of each setting, and that `config
check` takes it.

On 2026-11-23 it was run on every config in the repositories of the three projects: accelerate 16cb6eb (28 files),
microsoft/DeepSpeedExamples 83757d9 (70) and maxtext e591f30 (122). `config check` takes what comes of 212; 5 are
templates with placeholders and no JSON, 3 are no training configs.
"""

import json

import pytest
import yaml

from spmdkit.config import load_config
from spmdkit.errors import ConfigError
from spmdkit.tools.migrate import migrate
from spmdkit.tools.migrate.base import AUTOMATIC, LOST
from tests.support.command_line import Folder

ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 2
main_process_ip: 10.0.0.1
main_training_function: main
downcast_bf16: 'no'
gpu_ids: all
fsdp_config:
  fsdp_sharding_strategy: HYBRID_SHARD
  fsdp_offload_params: true
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
"""

DEEPSPEED = {
    "train_batch_size": 256,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_clipping": 1.0,
    "steps_per_print": 50,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "torch_adam": True}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 10000, "warmup_num_steps": 500, "cos_min_ratio": 0.1}},
    "zero_optimization": {
        "stage": 2,
        "overlap_comm": True,
        "reduce_bucket_size": 5e8,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    },
    "wall_clock_breakdown": False,
    "sparse_gradients": True,
    "my_own_setting": 3,
}  # fmt: skip

MAXTEXT = """
base_config: base.yml
run_name: first
steps: 1000
per_device_batch_size: 2
gradient_accumulation_steps: 4
dtype: bfloat16
weight_dtype: float32
remat_policy: minimal
dcn_data_parallelism: 2
ici_fsdp_parallelism: -1
ici_tensor_parallelism: 4
ici_expert_parallelism: 2
dcn_expert_parallelism: 2
base_emb_dim: 512
vocab_size: 32000
max_target_length: 1024
learning_rate: 3.e-4
warmup_steps_fraction: 0.1
cosine_learning_rate_final_fraction: 0.1
gradient_clipping_threshold: 1.0
opt_type: adamw
adam_b1: 0.9
adam_b2: 0.95
adam_weight_decay: 0.1
enable_checkpointing: true
checkpoint_period: 200
eval_interval: 100
init_weights_seed: 3
dataset_type: synthetic
tokenizer_path: assets/tokenizer.llama2
attention: flash
decode_sampling_strategy: greedy
profiler: xplane
skip_first_n_steps_for_profiler: 5
profiler_steps: 3
"""


def migrated(tmp_path, name, text, **options):
    """Returns (the config as plain values, the lines of each kind); `config check` has taken it."""
    file = tmp_path / name
    file.write_text(text)
    printed = migrate(file, **options).text
    (tmp_path / "config.yaml").write_text(printed)
    load_config(tmp_path / "config.yaml")
    kinds, kind = {}, None
    for line in printed.splitlines():
        if line.startswith("#   "):
            kinds.setdefault(kind, []).append(line[4:])
        elif line.startswith("# ") and line.endswith(":"):
            kind = line[2:-1]
    return yaml.safe_load(printed), kinds


def test_an_accelerate_file_with_hybrid_shards(tmp_path):
    config, kinds = migrated(tmp_path, "default_config.yaml", ACCELERATE)
    expected = {"precision": "bfloat16", "layout": {"zero": 3}, "offload": ["params", "optimizer"], "remat": "full"}
    assert config == {"task": "task.py:task", "mesh": {"replica": 2, "fsdp": -1}} | expected
    assert LOST not in kinds
    assert sum(map(len, kinds.values())) == 8 + 7  # a line for each setting
    assert any("main_process_ip: 10.0.0.1 -> processes find each other" in line for line in kinds[AUTOMATIC])
    assert any("main_training_function: main -> a config names the task" in line for line in kinds[AUTOMATIC])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("distributed_type: 'NO'", {}),
        ("distributed_type: MULTI_GPU\nmixed_precision: fp16", {"mesh": {"data": -1}, "precision": "bfloat16"}),
        ("distributed_type: XLA\ndowncast_bf16: 'yes'\nmixed_precision: 'no'", {"mesh": {"data": -1}}),
        (
            "distributed_type: XLA\ndowncast_bf16: 'yes'\nmixed_precision: bf16",
            {"mesh": {"data": -1}, "precision": {"compute": "bfloat16", "params": "bfloat16"}},
        ),
        ("distributed_type: MULTI_GPU\ngpu_ids: 0,2", {"mesh": {"data": -1}, "devices": [0, 2]}),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: SHARD_GRAD_OP}", {"mesh": {"fsdp": -1}, "layout": {"zero": 2}}),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: NO_SHARD}", {"mesh": {"data": -1}}),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_reshard_after_forward: false}", {"mesh": {"fsdp": -1}, "layout": {"zero": 2}}),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 1, gradient_accumulation_steps: 4, gradient_clipping: 1.0}",
            {"mesh": {"fsdp": -1}, "layout": {"zero": 1}, "microbatches": 4, "clip_norm": 1.0},
        ),
        (
            ("distributed_type: FSDP\nparallelism_config: {parallelism_config_dp_replicate_size: 2, parallelism_config_dp_shard_size: 2, "
            "parallelism_config_tp_size: 2}"),
            {"mesh": {"replica": 2, "fsdp": 2, "tensor": 2}},
        ),
        (
            "distributed_type: MEGATRON_LM\nmegatron_lm_config: {megatron_lm_tp_degree: 2, megatron_lm_pp_degree: 2, megatron_lm_num_micro_batches: 4}",
            {"mesh": {"data": -1, "tensor": 2, "pipeline": 2}, "pipeline": {"microbatches": 4}},
        ),
    ],
)  # fmt: skip
def test_accelerates_ways_to_distribute(tmp_path, text, expected):
    assert migrated(tmp_path, "a.yaml", text)[0] == {"task": "task.py:task", **expected}


@pytest.mark.parametrize("drop_last", [None, False, True])
def test_deepspeeds_last_batch_is_written_out(tmp_path, drop_last):
    """DeepSpeed retains the last short batch by default, and spmdkit drops it."""
    settings = {"train_batch_size": 8} | ({} if drop_last is None else {"dataloader_drop_last": drop_last})
    config, kinds = migrated(tmp_path, "ds.json", json.dumps(settings))
    assert config["data"] == {"drop_remainder": bool(drop_last)}
    (line,) = [line for line in kinds["mapped"] if line.startswith("dataloader_drop_last")]
    assert ("DeepSpeed's default" in line) is (drop_last is None)


def test_accelerate_file_names_a_deepspeed_file(tmp_path):
    (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": {"stage": 3}, "gradient_clipping": 0.5}))
    text = "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: zero.json, zero3_init_flag: true}"
    config, kinds = migrated(tmp_path, "a.yaml", text)
    assert (config["mesh"], config["layout"], config["clip_norm"]) == ({"fsdp": -1}, {"zero": 3}, 0.5)
    assert any("zero_optimization.stage: 3" in line for line in kinds["mapped"])


def test_a_deepspeed_file(tmp_path):
    config, kinds = migrated(tmp_path, "ds_config.json", json.dumps(DEEPSPEED), devices=8)
    assert (config["batch_size"], config["microbatches"]) == (256, 4)  # 256 = 8 a device * 8 devices * 4
    assert config["mesh"] == {"fsdp": -1} and config["layout"] == {"zero": 2} and config["offload"] == ["optimizer"]
    assert config["optimizer"] == {"name": "adamw", "b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    assert config["learning_rate"]["name"] == "join_schedules"
    assert (config["precision"], config["clip_norm"], config["log"]) == ("bfloat16", 1.0, {"every_steps": 50})
    assert [line.split(":")[0] for line in kinds[LOST]] == ["my_own_setting"]
    for part in ("sparse_gradients: true -> embeddings are named: reducer: {sparse_rows: {leaves: [PATH], rows: N}}",):
        assert any(part in line for line in kinds[AUTOMATIC]), kinds


@pytest.mark.parametrize(
    ("kind", "params", "name"),
    [
        ("WarmupLR", {"warmup_max_lr": 0.01}, "log_warmup_schedule"),
        ("WarmupCosineLR", {"total_num_steps": 100, "warmup_num_steps": 10}, "join_schedules"),
    ],
)
def test_a_schedule_holds_wherever_it_stands(tmp_path, kind, params, name):
    scheduler, optimizer = {"type": kind, "params": params}, {"type": "Adam", "params": {"lr": 0.01}}
    first = {"train_batch_size": 8, "scheduler": scheduler, "optimizer": optimizer}
    last = {"train_batch_size": 8, "optimizer": optimizer, "scheduler": scheduler}
    one, other = (migrated(tmp_path, "ds.json", json.dumps(x))[0]["learning_rate"] for x in (first, last))
    assert one == other and one["name"] == name


def test_deepspeed_batch_per_device_and_external_learning_rate(tmp_path):
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": "auto"}},
        "bf16": {"enabled": "auto"},
    }
    config, kinds = migrated(tmp_path, "ds.json", json.dumps(settings), devices=16)
    assert (config["batch_size"], config["microbatches"], config["mesh"]) == (128, 2, {"data": -1})
    assert [line.split(" -> ")[0] for line in kinds[LOST]] == ["optimizer.params.lr: auto"]
    assert config["learning_rate"] == 5e-5
    assert "bf16.enabled: auto -> the trainer's own value: set precision" in kinds[AUTOMATIC]


def test_a_maxtext_file(tmp_path):
    config, kinds = migrated(tmp_path, "train.yml", MAXTEXT, devices=8)
    assert config["mesh"] == {"replica": 2, "fsdp": -1, "tensor": 4, "expert": 4}
    assert (config["batch_size"], config["microbatches"], config["steps"], config["seed"]) == (64, 4, 1000, 3)
    assert config["precision"] == {"compute": "bfloat16", "params": "float32"}
    assert config["task_args"] == {"base_emb_dim": 512, "vocab_size": 32000, "max_target_length": 1024}
    assert config["learning_rate"]["boundaries"] == [100]
    assert config["optimizer"] == {"name": "adamw", "b1": 0.9, "b2": 0.95, "weight_decay": 0.1}
    assert config["checkpoint"] == {"every_steps": 200} and config["eval"] == {"every_steps": 100}
    assert (config["profile"], config["remat"]) == ({"steps": [6, 8]}, "minimal")
    assert config["run_dir"] == "runs/first" and LOST not in kinds
    automatic = {line.split(":")[0] for line in kinds[AUTOMATIC]}
    assert automatic >= {"dataset_type", "tokenizer_path", "decode_sampling_strategy", "base_config"}


def test_every_setting_has_one_line(tmp_path):
    text = "distributed_type: FSDP\nfsdp_config: {fsdp_offload_params: false, new: 1}\nother: [1, 2]\ndynamo_config: {backend: x}"
    _, kinds = migrated(tmp_path, "a.yaml", text)
    keys = sorted(line.split(":")[0] for lines in kinds.values() for line in lines)
    assert keys == ["distributed_type", "dynamo_config", "fsdp_config.fsdp_offload_params", "fsdp_config.new", "other"]
    assert sorted(line.split(":")[0] for line in kinds[LOST]) == ["fsdp_config.new", "other"]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("a.json", {"train_batch_size": 16, "optimizer": "Adam"}),
        ("a.json", {"train_batch_size": 16, "optimizer": {"type": "Adam", "params": {"betas": 0.9}}}),
        ("a.json", {"train_batch_size": 16, "zero_optimization": True}),
        ("a.json", {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 0}),
        ("a.json", {"train_batch_size": 16, "gradient_accumulation_steps": 0}),
        ("a.json", {"train_batch_size": 16, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}, "scheduler": {"type": "WarmupCosineLR", "params": {}}}),
        ("a.json", {"train_batch_size": 16, "communication_data_type": []}),
        ("a.yaml", {"distributed_type": "FSDP", "fsdp_config": "full"}),
        ("a.yaml", {"distributed_type": "DEEPSPEED", "deepspeed_config": {"gradient_clipping": "much"}}),
        ("a.yaml", {"base_config": "base.yml", "steps": "many"}),
        ("a.yaml", {"base_config": "base.yml", "per_device_batch_size": [2]}),
        ("a.yaml", {"base_config": "base.yml", "learning_rate": None}),
        ("a.yaml", {"base_config": "base.yml", "ici_data_parallelism": "all"}),
        ("a.json", {"train_batch_size": 8, "zero_optimization": {"stage": 9}}),
        ("a.yaml", {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 9}}),
        ("a.yaml", {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "zero.json"}}),
    ],
)  # fmt: skip
def test_value_of_wrong_form_is_reported_and_skipped(tmp_path, name, settings):
    (tmp_path / "zero.json").write_text("{]")
    _, kinds = migrated(tmp_path, name, json.dumps(settings) if name.endswith("json") else yaml.safe_dump(settings))
    last = list(settings)[-1]
    assert any(line.startswith(last) for line in kinds[LOST]), kinds


def test_impossible_number_is_reported_at_the_top(tmp_path):
    (tmp_path / "a.yaml").write_text("distributed_type: MULTI_GPU\ngradient_accumulation_steps: -4\n")
    second = migrate(tmp_path / "a.yaml").text.splitlines()[1]
    assert second.startswith("# NOT ACCEPTED YET: microbatches") and "-4" in second


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("a.yaml", "lr: 3", ["its settings (lr)", "accelerate, deepspeed, maxtext", "--project"]),
        ("a.json", "{]", ["cannot be read as .json", "Fix that line"]),
        ("a.yaml", "- 1", ["found list", "mapping"]),
        ("a.yaml", "", ["found nothing"]),
        ("a.yaml", "a: [", ["cannot be read as .yaml"]),
    ],
)
def test_unknown_config_is_refused(tmp_path, name, text, parts):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as refused:
        migrate(tmp_path / name)
    assert all(part in str(refused.value) for part in parts), str(refused.value)


def test_command_prints_the_config_or_refuses_with_78(tmp_path, monkeypatch, capfd):
    (tmp_path / "a.yaml").write_text(ACCELERATE)
    folder = Folder(tmp_path, monkeypatch, capfd)
    assert folder.leaves("migrate", "a.yaml") == 0
    assert "mesh: {replica: 2, fsdp: -1}" in capfd.readouterr().out
    for arguments, part in (
        (["nothing.yaml"], "No such file"),
        (["a.yaml", "--project", "keras"], "maxtext"),
        (["a.yaml", "--devices", "0"], "at least 1"),
    ):
        assert folder.leaves("migrate", *arguments) == 78
        error = capfd.readouterr().err
        assert part in error and "Traceback" not in error


def test_lost_settings_are_at_the_top_with_exit_code_1(tmp_path, monkeypatch, capfd):
    settings = {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"momentum": 0.9, "dampening": 0.1}}}
    (tmp_path / "ds.json").write_text(json.dumps(settings))
    folder = Folder(tmp_path, monkeypatch, capfd)
    assert folder.leaves("migrate", "ds.json") == 1
    printed, error = capfd.readouterr()
    lines = printed.splitlines()
    assert lines[1:4] == ["#", f"# {LOST}:", "#   optimizer.params.dampening: 0.1 -> optax has no such argument"]
    assert yaml.safe_load(printed)["optimizer"] == {"name": "sgd", "momentum": 0.9}
    assert (
        "1 setting(s) change training" in error and "optimizer.params.dampening" in error and "--accept-lost" in error
    )
    assert folder.leaves("migrate", "ds.json", "--accept-lost") == 0
    assert capfd.readouterr() == (printed, "")
