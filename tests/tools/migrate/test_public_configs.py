"""`spmdkit migrate` on public configs, against the formulas of the other projects: the learning rate of each step, and
the parameters after some steps."""

import json
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml

from spmdkit.config import build_optimizer, build_schedule, load_config
from spmdkit.tools.migrate import migrate

HERE = Path(__file__).parent
ROWS = {project: yaml.safe_load((HERE / f"{project}.yaml").read_text()) for project in ("deepspeed", "maxtext")}


def migrated(tmp_path, settings, project="deepspeed", devices=8):
    """Returns the config as plain values, and the settings that are lost."""
    file = tmp_path / "given.json"
    file.write_text(json.dumps(settings))
    result = migrate(file, project, devices)
    (tmp_path / "config.yaml").write_text(result.text)
    load_config(tmp_path / "config.yaml")
    return yaml.safe_load(result.text), result.lost


def rates(schedule, steps):
    built = build_schedule(schedule)
    return [built(step) if callable(built) else built for step in steps]


def deepspeed_rates(scheduler, base, num_steps):
    """The rates of the first steps: deepspeed/runtime/lr_schedules.py (edaa722). Step k has the rate of
    last_batch_iteration k - 1, since `scheduler.step()` follows `optimizer.step()`."""
    kind, p = scheduler["type"], scheduler["params"]
    warmup = max(2, p.get("warmup_num_steps", 1000))

    def ramp(i):
        return math.log(i + 1) / math.log(warmup) if p.get("warmup_type", "log") == "log" else i / warmup

    def warmup_lr(i, after):
        low, high = p.get("warmup_min_lr", 0.0), p.get("warmup_max_lr", base if kind == "WarmupLR" else 0.001)
        return low + (high - low) * (0 if i < 0 else ramp(i) if i < warmup else after(i))

    def cosine(i):
        if i < warmup:
            low = p.get("warmup_min_ratio", 0.0)
            return 0.0 if i < 0 else base * (low + (1 - low) * ramp(i))
        progress = min(1.0, (i - warmup + 1) / max(1, p["total_num_steps"] - warmup))
        last = p.get("cos_min_ratio", 0.0001)
        return base * (last + (1 - last) * (1 + math.cos(math.pi * progress)) / 2)

    def one_cycle(i):
        first = p.get("cycle_first_step_size", 2000)
        total = first + p.get("cycle_second_step_size", first)
        low, high = p["cycle_min_lr"], p["cycle_max_lr"]
        if i < total:
            x, ratio = (i + 1) / total % 1, first / total
            return low + (high - low) * (x / ratio if x <= ratio else (x - 1) / (ratio - 1))
        if not p.get("decay_step_size") or not p.get("decay_lr_rate"):
            return low
        return low / (1 + p["decay_lr_rate"] * (i - total + 1) / p["decay_step_size"])

    def range_test(i):
        intervals = (i + 1) / p.get("lr_range_test_step_size", 2000)
        intervals = math.floor(intervals) if p.get("lr_range_test_staircase") else intervals
        return p.get("lr_range_test_min_lr", 1e-3) * (1 + p.get("lr_range_test_step_rate", 1.0) * intervals)

    total = p.get("total_num_steps", 0)
    forms = {
        "WarmupLR": lambda i: warmup_lr(i, lambda i: 1.0),
        "WarmupDecayLR": lambda i: warmup_lr(i, lambda i: max(0.0, (total - i) / max(1.0, total - warmup))),
        "WarmupCosineLR": cosine,
        "OneCycle": one_cycle,
        "LRRangeTest": range_test,
    }
    return [forms[kind](step - 1) for step in range(num_steps)]


def maxtext_rates(s):
    """`create_learning_rate_schedule` of maxtext e591f30 (utils/maxtext_utils.py), with the defaults of base.yml."""
    steps, peak = s.get("steps", 150_001), float(s.get("learning_rate", 3e-5))
    length = s.get("learning_rate_schedule_steps", -1)
    length = steps if length == -1 else length
    last = peak * s.get("learning_rate_final_fraction", 0.1)
    warmup = int(length * s.get("warmup_steps_fraction", 0.1))
    is_wsd = s.get("lr_schedule_type") == "wsd"
    decay = int(length * s.get("wsd_decay_steps_fraction", 0.1)) if is_wsd else length - warmup

    def rate(step):
        if step < warmup:
            return peak * step / warmup
        if step >= length:
            return 0.0
        if step < length - decay:
            return peak
        part = (step - (length - decay)) / (decay - 1) if decay > 1 else 1.0
        if is_wsd and s.get("wsd_decay_style", "linear") == "linear":
            return peak + (last - peak) * (part if decay > 1 else 0.0)
        a = 0.5 * (math.cos(math.pi * part) + 1)
        return peak * a + last * (1 - a)

    return rate


@pytest.mark.parametrize(
    ("project", "row"),
    [(p, row) for p in ROWS for row in ROWS[p]],
    ids=[row["source"] for p in ROWS for row in ROWS[p]],
)
def test_public_config_has_the_stated_translation(tmp_path, project, row):
    config, lost = migrated(tmp_path, row["file"], project)
    schedule = config.pop("learning_rate", None)
    assert {k: v for k, v in config.items() if k not in ("task", "task_args")} == row["config"]
    assert lost == row["lost"]
    if project == "maxtext":
        expected = maxtext_rates(row["file"])
        steps = [k for k in (0, 1, 2, 3, 9, 10, 1000, 15_000, 15_001, 90_000, 149_999) if k < config["steps"]]
        np.testing.assert_allclose(rates(schedule, steps), [expected(k) for k in steps], rtol=2e-4, atol=1e-9)
    elif (scheduler := row["file"].get("scheduler")) and "scheduler" not in str(lost):
        given = row["file"].get("optimizer", {}).get("params", {}).get("lr")
        np.testing.assert_allclose(
            rates(schedule, range(1500)), deepspeed_rates(scheduler, given, 1500), rtol=1e-5, atol=1e-9
        )


def test_the_tables_have_twenty_configs_each():
    assert all(len({row["source"] for row in rows}) >= 20 for rows in ROWS.values())


WARMUPS = [{}, {"warmup_type": "linear"}, {"warmup_num_steps": 1}, {"warmup_num_steps": 7, "warmup_type": "linear"}]


@pytest.mark.parametrize(
    "scheduler",
    [
        *({"type": "WarmupLR", "params": {"warmup_num_steps": 20, **w}} for w in WARMUPS),
        {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": [0.02], "warmup_num_steps": 9}},
        *({"type": "WarmupDecayLR", "params": {"total_num_steps": 50, "warmup_num_steps": 20, **w}} for w in WARMUPS),
        {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_num_steps": 20, "warmup_min_lr": 1e-4}},
        *({"type": "WarmupCosineLR", "params": {"total_num_steps": 50, "warmup_num_steps": 20, **w}} for w in WARMUPS),
        *(
            {"type": "WarmupCosineLR", "params": {"total_num_steps": 50, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.2}
            | {"warmup_num_steps": 10, "warmup_type": kind}}
            for kind in ("log", "linear")
        ),
        {"type": "WarmupCosineLR", "params": {"total_num_steps": 9, "warmup_num_steps": 20}},
        {"type": "OneCycle", "params": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 15}},
        {
            "type": "OneCycle",
            "params": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 15, "decay_lr_rate": 0.5}
            | {"cycle_second_step_size": 7, "decay_step_size": 4},
        },
        {"type": "LRRangeTest", "params": {"lr_range_test_step_size": 10, "lr_range_test_step_rate": 5}},
        {"type": "LRRangeTest", "params": {"lr_range_test_step_size": 10, "lr_range_test_staircase": True}},
    ],
    ids=lambda s: f"{s['type']}-{','.join(map(str, s['params'].values()))}",
)  # fmt: skip
def test_deepspeed_scheduler_has_the_same_rate_at_each_step(tmp_path, scheduler):
    adam = {"type": "SGD", "params": {"lr": 0.01}}
    config, lost = migrated(tmp_path, {"train_batch_size": 8, "scheduler": scheduler, "optimizer": adam})
    plain = {k: v[0] if isinstance(v, list) else v for k, v in scheduler["params"].items()}
    expected = deepspeed_rates({**scheduler, "params": plain}, 0.01, 70)
    np.testing.assert_allclose(rates(config["learning_rate"], range(70)), expected, rtol=1e-5, atol=1e-9)
    assert lost == []


@pytest.mark.parametrize(
    "settings",
    [
        {"steps": 60, "learning_rate": 0.3},
        {"steps": 60, "learning_rate": 0.3, "learning_rate_schedule_steps": 40, "warmup_steps_fraction": 0.25},
        {"steps": 60, "learning_rate_schedule_steps": 100, "warmup_steps_fraction": 0.0},
        {"steps": -1, "learning_rate_schedule_steps": 50, "learning_rate_final_fraction": 0.5},
        {"steps": 60, "warmup_steps_fraction": 1.0},
        {"steps": 60, "lr_schedule_type": "wsd", "wsd_decay_steps_fraction": 0.3},
        {"steps": 60, "lr_schedule_type": "wsd", "wsd_decay_style": "cosine", "learning_rate_schedule_steps": 50},
        {"steps": 60, "lr_schedule_type": "wsd", "wsd_decay_steps_fraction": 0.02},
        {"steps": 60, "lr_schedule_type": "wsd", "wsd_decay_steps_fraction": 0.02, "wsd_decay_style": "cosine"},
        {"steps": 60, "lr_schedule_type": "wsd", "wsd_decay_steps_fraction": 0.0, "warmup_steps_fraction": 0.0},
        {"steps": 1},
    ],
)
def test_maxtext_has_the_same_rate_at_each_step(tmp_path, settings):
    config, lost = migrated(tmp_path, {"base_config": "base.yml", **settings}, "maxtext")
    steps = range(config["steps"])
    expected = maxtext_rates({**settings, "steps": len(steps)})
    np.testing.assert_allclose(
        rates(config["learning_rate"], steps), [expected(k) for k in steps], rtol=1e-4, atol=1e-9
    )
    assert lost == [] and len(steps) == (settings["steps"] if settings["steps"] > 0 else 50)


FACTORS = [1.0, 0.5, -0.002, -0.004, 0.3, -0.02]
"""The gradient of each step, as a multiple of the parameter."""


def torch_updates(kind, lr, p, betas=(0.9, 0.999), eps=1e-8, decay=0.0, momentum=0.0, nesterov=False, **_):
    """The parameter after the steps: csrc/adam/multi_tensor_adam.cu and
    csrc/lion/multi_tensor_lion.cu of DeepSpeed, torch.optim.SGD and Adagrad."""
    m = v = np.zeros_like(p)
    for t, factor in enumerate(FACTORS, 1):
        g = factor * p
        if kind in ("adam_l2", "sgd", "adagrad"):
            g = g + decay * p
        if kind in ("adam_l2", "adamw"):
            m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
            update = m / (1 - betas[0] ** t) / (np.sqrt(v / (1 - betas[1] ** t)) + eps)
            p = p - lr * (update + (decay * p if kind == "adamw" else 0))
        elif kind == "lion":
            update = np.sign(betas[0] * m + (1 - betas[0]) * g)
            p, m = p * (1 - lr * decay) - lr * update, betas[1] * m + (1 - betas[1]) * g
        elif kind == "sgd":
            m = momentum * m + g
            p = p - lr * (g + momentum * m if nesterov else m)
        elif kind == "adagrad":
            v = v + g * g
            p = p - lr * g / (np.sqrt(v) + 1e-10)
    return p


@pytest.mark.parametrize(
    ("kind", "name", "params", "reference"),
    [
        ("adamw", "AdamW", {}, {}),
        ("adamw", "Adam", {"betas": [0.8, 0.99], "eps": 1e-3, "weight_decay": 0.1}, {"betas": (0.8, 0.99), "eps": 1e-3, "decay": 0.1}),
        ("adamw", "AdamW", {"adam_w_mode": False, "weight_decay": 0.1}, {"decay": 0.1}),
        ("adamw", "Adam", {"torch_adam": True}, {"decay": 0.01}),
        ("adam_l2", "Adam", {"adam_w_mode": False, "weight_decay": 0.1, "torch_adam": True}, {"decay": 0.1}),
        ("adam_l2", "Adam", {"adam_w_mode": False}, {}),
        ("lion", "Lion", {}, {}),
        ("lion", "Lion", {"betas": [0.9, 0.95], "weight_decay": 0.1}, {"betas": (0.9, 0.95), "decay": 0.1}),
        ("sgd", "SGD", {}, {}),
        ("sgd", "SGD", {"momentum": 0.9, "weight_decay": 0.1, "dampening": 0}, {"momentum": 0.9, "decay": 0.1}),
        ("sgd", "SGD", {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "nesterov": True}),
        ("sgd", "SGD", {"dampening": 0.5}, {}),
        ("adagrad", "Adagrad", {}, {}),
        ("adagrad", "Adagrad", {"weight_decay": 0.1}, {"decay": 0.1}),
    ],
)  # fmt: skip
def test_deepspeed_optimizer_makes_the_same_updates(tmp_path, kind, name, params, reference):
    config, lost = migrated(tmp_path, {"train_batch_size": 8, "optimizer": {"type": name, "params": params}})
    rate = config["learning_rate"]
    assert rate == (0.01 if name == "Adagrad" else 0.001)  # the defaults of DeepSpeed and torch
    transformation = build_optimizer(config["optimizer"], 0.05)
    params = jnp.array([0.5, -2.0, 3.0])
    state = transformation.init(params)
    for factor in FACTORS:
        update, state = transformation.update(factor * params, state, params)
        params = optax.apply_updates(params, update)
    start = np.array([0.5, -2.0, 3.0])
    np.testing.assert_allclose(params, torch_updates(kind, 0.05, start, **reference), rtol=2e-5)
    assert lost == []


@pytest.mark.parametrize(
    ("optimizer", "lost"),
    [
        ({"type": "SGD", "params": {"momentum": 0.9, "dampening": 0.1}}, ["optimizer.params.dampening"]),
        ({"type": "Lamb", "params": {}}, ["optimizer.type"]),
        ({"type": "Lamb", "params": {"max_coeff": 0.3}}, ["optimizer.params.max_coeff", "optimizer.type"]),
        ({"type": "OneBitAdam", "params": {"freeze_step": 400}}, ["optimizer.type"]),
        ({"type": "MuAdamW", "params": {"lr": 0.1}}, ["optimizer.type"]),
        ({"type": "RMSprop", "params": {"lr": 0.1}}, ["optimizer.type"]),
        ({"type": "Adam", "params": {"amsgrad": True}}, ["optimizer.params.amsgrad"]),
        ({"type": "Adam", "params": {"amsgrad": False, "bias_correction": True}}, []),
        ({"type": "Adam", "params": {"bias_correction": False}}, ["optimizer.params.bias_correction"]),
        ({"type": "Adagrad", "params": {"lr_decay": 0.1, "eps": 0.1}}, ["optimizer.params.eps", "optimizer.params.lr_decay"]),
        ({"type": "AdamW", "params": {"lr": "auto"}}, ["optimizer.params.lr"]),
        ({"type": "AdamW", "params": {"decay": 0.1}}, ["optimizer.params.decay"]),
        ({"type": "SGD", "params": {"momentum": "auto"}}, ["optimizer.params.momentum"]),
        (None, []),
        ({"type": "Adam", "params": {"max_grad_norm": 1.0}}, []),
    ],
)  # fmt: skip
def test_what_changes_an_update_of_deepspeed_is_lost(tmp_path, optimizer, lost):
    assert migrated(tmp_path, {"train_batch_size": 8, "optimizer": optimizer})[1] == lost


@pytest.mark.parametrize(
    ("scheduler", "lost"),
    [
        ({"type": "CosineAnnealingLR", "params": {"T_max": 10}}, ["scheduler"]),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}, ["scheduler"]),
        ({"type": "WarmupDecayLR", "params": {}}, ["scheduler"]),
        ({"type": "WarmupLR", "params": {"warmup_min_lr": [0.0, 0.1]}}, ["scheduler"]),
        ({"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_first_step_size": 0}}, ["scheduler"]),
        (None, []),
        ({"type": "WarmupLR", "params": {"cooldown": 3}}, ["scheduler.params.cooldown"]),
        ({"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}}, ["scheduler.params.cycle_momentum"]),
        (
            {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_momentum": False} | {"cycle_first_stair_count": 9}},
            ["scheduler.params.cycle_first_stair_count"],
        ),
    ],
)  # fmt: skip
def test_what_changes_a_rate_of_deepspeed_is_lost(tmp_path, scheduler, lost):
    adam = {"type": "AdamW", "params": {"lr": 0.1}}
    assert migrated(tmp_path, {"train_batch_size": 8, "optimizer": adam, "scheduler": scheduler})[1] == lost


@pytest.mark.parametrize(("highest", "lost"), [(0.1, []), (None, ["optimizer.params.lr"])])
def test_a_rate_that_the_scheduler_replaces_is_not_lost(tmp_path, highest, lost):
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": highest, "warmup_num_steps": 5}}
    settings = {"train_batch_size": 8, "scheduler": scheduler}
    config, found = migrated(tmp_path, {**settings, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}})
    assert (config["learning_rate"]["peak_value"], found) == (highest or 5e-5, lost)
    assert ("before June 2025" in (tmp_path / "config.yaml").read_text()) == (highest is None)


@pytest.mark.parametrize(
    ("settings", "lost"),
    [
        ({}, []),
        ({"zero_optimization": {"stage": 3, "zenflow": {"topk_ratio": 0.1}}}, ["zero_optimization.zenflow"]),
        ({"data_efficiency": {"enabled": False, "seed": 3}, "compression_training": {"layer_reduction": {"enabled": False, "keep": 5}}}, []),
        ({"compression_training": {"layer_reduction": {"enabled": True}}, "elasticity": {"enabled": True}}, ["compression_training", "elasticity"]),
        ({"train_batch_size": "auto", "gradient_clipping": "auto"}, ["train_batch_size", "gradient_clipping"]),
        ({"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 9}}}, ["scheduler"]),
    ],
)  # fmt: skip
def test_sections_that_change_training_are_lost(tmp_path, settings, lost):
    assert sorted(migrated(tmp_path, {"train_batch_size": 8, **settings})[1]) == sorted(lost)


def test_a_missing_batch_size_is_lost(tmp_path):
    assert migrated(tmp_path, {"gradient_accumulation_steps": 2})[1] == ["batch size"]


def test_every_setting_of_the_two_sections_has_a_line(tmp_path):
    optimizer = {"type": "AdamW", "params": {"lr": 0.1}, "legacy_fusion": True, "groups": 2}
    scheduler = {"type": "WarmupLR", "params": {}, "interval": "epoch"}
    lost = migrated(tmp_path, {"train_batch_size": 8, "optimizer": optimizer, "scheduler": scheduler})[1]
    assert lost == ["optimizer.groups", "scheduler.interval"]


@pytest.mark.parametrize(
    ("settings", "optimizer", "lost"),
    [
        ({"opt_type": "adam_pax", "adam_eps": 1e-7}, {"name": "adamw", "b1": 0.9, "b2": 0.95, "weight_decay": 0.1, "eps": 1e-7}, []),
        ({"adam_eps_root": 0.1, "mu_dtype": "bfloat16"}, {"name": "adamw", "b1": 0.9, "b2": 0.95, "weight_decay": 0.1, "eps_root": 0.1, "mu_dtype": "bfloat16"}, []),
        ({"opt_type": "sgd"}, {"name": "sgd"}, []),
        ({"opt_type": "muon"}, None, ["opt_type"]),
        ({"adamw_mask": ["bias"], "opt_type": "sgd", "skip_step_on_spikes": True}, {"name": "sgd"}, ["adamw_mask", "skip_step_on_spikes"]),
        ({"opt_type": "sgd", "load_parameters_path": "gs://a/b", "quantization": "int8", "new_option": 3}, {"name": "sgd"}, ["load_parameters_path", "quantization", "new_option"]),
        ({"opt_type": "sgd", "base_config": "mine.yml", "new_option": False}, {"name": "sgd"}, ["base_config"]),
        ({"opt_type": "sgd", "enable_diloco": True, "diloco_sync_period": 9}, {"name": "sgd"}, ["enable_diloco"]),
    ],
)  # fmt: skip
def test_optimizers_of_maxtext_are_mapped_or_lost(tmp_path, settings, optimizer, lost):
    config, found = migrated(tmp_path, {"base_config": "base.yml", **settings}, "maxtext")
    assert (config.get("optimizer"), found) == (optimizer, lost)


def test_maxtext_reads_the_files_that_a_config_is_based_on(tmp_path):
    (tmp_path / "mine.yml").write_text("base_config: base.yml\nopt_type: sgd\nlearning_rate: 1e-2\nsteps: 5\n")
    config, lost = migrated(tmp_path, {"base_config": "mine.yml", "steps": 7, "warmup_steps_fraction": 1.0}, "maxtext")
    assert (config["optimizer"], config["steps"], lost) == ({"name": "sgd"}, 7, [])
    assert config["learning_rate"]["end_value"] == 0.01
