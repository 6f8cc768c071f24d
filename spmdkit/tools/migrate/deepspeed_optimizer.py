"""The sections `optimizer` and `scheduler` of DeepSpeed's JSON.

Source: DeepSpeed edaa722: `_configure_basic_optimizer` of deepspeed/runtime/engine.py, deepspeed/ops/{adam,lion,lamb},
csrc/adam/multi_tensor_adam.cu, csrc/lion/multi_tensor_lion.cu, deepspeed/runtime/lr_schedules.py; torch.optim.SGD and
Adagrad. A scheduler advances after each step, so the second step has its first value, and the first step the lowest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from spmdkit.tools.migrate.base import (
    AUTOMATIC,
    LOST,
    MAPPED,
    NO_OPTIMIZER,
    Migration,
    external,
    is_on,
    shown,
    unknown,
)

AUTO = {"lr": 5e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
"""What `auto` stands for if Hugging Face's TrainingArguments have their defaults."""

_ADAM = ("betas", "eps", "weight_decay")
_OPTIONS = {
    "adam": _ADAM,
    "adamw": _ADAM,
    "lamb": _ADAM,
    "lion": ("betas", "weight_decay"),
    "sgd": ("momentum", "nesterov", "weight_decay"),
    "adagrad": ("eps", "weight_decay", "initial_accumulator_value"),
}
"""Optimizer of optax -> its arguments, by DeepSpeed's names."""

_DEFAULTS: dict[str, dict[str, Any]] = {
    "adamw": {"weight_decay": 0.0},
    "lamb": {"eps": 1e-8},
    "lion": {"betas": [0.9, 0.999], "weight_decay": 0.0},
    "adagrad": {"lr": 0.01, "initial_accumulator_value": 0.0, "eps": 1e-10},
}
"""Defaults of DeepSpeed that differ from optax's. The learning rate of the others is 0.001."""

_NEUTRAL = {"bias_correction": True, "amsgrad": False, "maximize": False, "lr_decay": 0, "eps_inside_sqrt": False}
_NEUTRAL |= {"dampening": 0, "max_grad_norm": 0}
"""Arguments without a counterpart in optax -> the value that has no effect."""

_IMPLEMENTATION = re.compile(
    "set_grad_none|foreach|fused|capturable|differentiable|fp32_optimizer_states|cuda_aware|comm_backend_name|"
    "(var_)?freeze_step|var_update_scaler|local_step_(scaler|clipper)|coeff_beta|factor_(max|min|threshold)"
)
"""Arguments that select an implementation, or that belong to the compression of the 1-bit optimizers."""


def optimizer(migration: Migration, key: str, value: Any) -> None:
    """An optax optimizer with the same update, and the learning rate as a separate key. The arguments of optax that
    have another default are written out."""
    if not value:
        return migration.report(AUTOMATIC, key, value, "the task's optimizer")
    kind, params = str(value.get("type", "")), dict(value.get("params") or {})
    _others(migration, key, value)
    plain = kind.lower().removeprefix("onebit").removeprefix("zeroone")
    is_torch, is_decoupled = is_on(params.pop("torch_adam", False)), is_on(params.pop("adam_w_mode", True))
    name = "adamw" if plain == "adam" and is_decoupled else plain
    if name not in _OPTIONS:
        if "lr" in params:
            _rate(migration, f"{key}.params.lr", params["lr"], "")
        return migration.report(LOST, f"{key}.type", kind, NO_OPTIMIZER)
    defaults = {"lr": 0.001, **_DEFAULTS.get(name, {})}
    if is_torch and name == "adamw":
        defaults["weight_decay"] = 0.01
    chosen: dict[str, Any] = {"name": name}
    for option, argument in (defaults | params).items():
        path, note = f"{key}.params.{option}", "" if option in params else "DeepSpeed's default"
        if option == "lr":
            _rate(migration, path, argument, note)
        elif argument == "auto" and option in _OPTIONS[name]:
            new = _arguments(name, option, AUTO[option]) if option in AUTO else {}
            chosen |= new
            external(migration, path, f"optimizer.{option}", new)
        elif option in _OPTIONS[name]:
            new = _arguments(name, option, argument)
            chosen |= new
            why = ", ".join(f"optimizer.{k}: {shown(v)}" for k, v in new.items()) or "the default"
            migration.report(MAPPED, path, argument, f"{why}{note and f' ({note})'}")
            if (name, option) == ("adagrad", "eps") and argument > 1e-8:
                migration.report(LOST, path, argument, "it is added to the root; optax adds its eps under the root")
        else:
            _without_counterpart(migration, path, option, argument, params)
    migration.mapped(f"{key}.type", kind, "optimizer", chosen)
    if plain == "lamb":
        limits = f"{shown(params.get('min_coeff', 0.01))} to {shown(params.get('max_coeff', 10.0))}"
        why = (
            f"its trust ratio is limited to {limits} and precedes the bias correction; that of optax.lamb has no limits"
        )
        migration.report(LOST, f"{key}.type", kind, f"{why} and follows it")
    if plain != kind.lower():
        steps = params.get("freeze_step", params.get("var_freeze_step", 100_000))
        why = (
            f"its compression is a reducer here, over replicas: reducer: {{sign: {{warmup: {steps}}}}}; it freezes the "
        )
        migration.report(LOST, f"{key}.type", kind, f"{why}variance and corrects no bias, optax.{name} does")
    return None


def _others(migration: Migration, key: str, value: Mapping[str, Any]) -> None:
    for name in [name for name in value if name not in ("type", "params")]:
        if name == "legacy_fusion":
            migration.report(AUTOMATIC, f"{key}.{name}", value[name], "an implementation detail of DeepSpeed")
        else:
            unknown(migration, f"{key}.{name}", value[name])


def _rate(migration: Migration, path: str, value: Any, note: str) -> None:
    if value == "auto":
        migration.put("learning_rate", AUTO["lr"])
        return external(migration, path, "learning_rate", {"learning_rate": AUTO["lr"]})
    return migration.mapped(path, value, "learning_rate", float(value), note)


def _arguments(name: str, option: str, value: Any) -> dict[str, Any]:
    """Returns the arguments of optax for one of DeepSpeed. Weight decay that optax's function lacks is an L2 penalty in
    torch, before the moments."""
    if option == "betas":
        b1, b2 = value
        return {"b1": float(b1), "b2": float(b2)}
    if option == "weight_decay" and name in ("adam", "sgd", "adagrad"):
        return {"add_decayed_weights": float(value)} if float(value) else {}
    if (name, option) == ("adagrad", "eps"):
        return {"eps": 0.0}
    return {option: is_on(value) if option == "nesterov" else float(value)}


def _without_counterpart(migration: Migration, path: str, option: str, value: Any, params: Mapping[str, Any]) -> None:
    if option == "max_grad_norm" and value:
        return migration.mapped(path, value, "clip_norm", float(value))
    if _IMPLEMENTATION.fullmatch(option):
        return migration.report(AUTOMATIC, path, value, "an implementation detail of DeepSpeed's optimizer")
    if option in _NEUTRAL and (value == _NEUTRAL[option] or (option == "dampening" and not params.get("momentum"))):
        return migration.report(AUTOMATIC, path, value, "it has no effect")
    if option in (*_NEUTRAL, "min_coeff", "max_coeff"):
        return migration.report(LOST, path, value, "optax has no such argument")
    return unknown(migration, path, value)


def scheduler(migration: Migration, key: str, value: Any) -> None:
    """A learning rate with the same value at each step."""
    if not value or not value.get("type"):
        return migration.report(AUTOMATIC, key, value, "no scheduler")
    kind, params = str(value["type"]), dict(value.get("params") or {})
    rate = migration.config.get("learning_rate")
    _others(migration, key, value)
    if kind not in _SCHEDULERS:
        why = "a scheduler of torch: set learning_rate to an optax schedule"
        return migration.report(LOST, key, value, f"{why}{'' if rate is None else f' ({shown(rate)} is written)'}")
    defaults, form = _SCHEDULERS[kind]
    for option in [o for o in params if o not in defaults and (o, params[o]) != ("last_batch_iteration", -1)]:
        unknown(migration, f"{key}.params.{option}", params[option])
    given = {o: params.get(o, default) for o, default in defaults.items()}
    if open_values := [o for o, v in given.items() if v == "auto"]:
        highest = [given[o] for o in ("warmup_max_lr", "cycle_max_lr") if given.get(o) not in (None, "auto")]
        constant = float(highest[0]) if highest else AUTO["lr"] if rate is None else rate
        migration.put("learning_rate", constant)
        why = f"{', '.join(open_values)}: the trainer's own values, which are not in this file"
        repair = f"set learning_rate to a schedule ({shown(constant)} is written)"
        return migration.report(LOST, key, value, f"{why}: {repair}")
    given = {o: v[0] if isinstance(v, list) and len(v) == 1 else v for o, v in given.items()}
    needed = [o for o in ("total_num_steps", "cycle_min_lr", "cycle_max_lr") if given.get(o, 0) is None]
    uses_rate = kind == "WarmupCosineLR" or (kind == "WarmupLR" and given["warmup_max_lr"] is None)
    needed += ["the optimizer's lr"] if uses_rate and rate is None else []
    needed += [f"one value for all parameters, {o}" for o, v in given.items() if isinstance(v, list)]
    if needed:
        return migration.report(LOST, key, value, f"it needs {' and '.join(needed)}: set learning_rate to a schedule")
    notes = {"WarmupLR": "up to the optimizer's lr; DeepSpeed before June 2025: up to 0.001"}
    notes["WarmupDecayLR"] = "up to DeepSpeed's default, 0.001, and not the optimizer's lr"
    note = "" if params.get("warmup_max_lr") is not None else notes.get(kind, "")
    migration.mapped(key, value, "learning_rate", form(given, rate), note)
    if not uses_rate:
        other = {"kind": AUTOMATIC, "why": "the scheduler sets the rate"}
        migration.lines = [
            line._replace(**other) if line.key == "optimizer.params.lr" else line for line in migration.lines
        ]
    if any(given.get(f"cycle_{half}_stair_count") for half in ("first", "second")):
        migration.report(
            LOST, f"{key}.params.cycle_first_stair_count", given, "the rate rises and falls without stairs"
        )
    if given.get("cycle_momentum") and migration.config.get("optimizer", {}).get("name") not in ("sgd", "adagrad"):
        bounds = f"from {shown(given['cycle_max_mom'])} to {shown(given['cycle_min_mom'])} and back"
        why = f"the first beta moves {bounds}, and the second is 0.99; those of optax are constant. It is on by default"
        migration.report(LOST, f"{key}.params.cycle_momentum", True, why)
    return None


def _pieces(pieces: Mapping[int, Any]) -> Any:
    """Returns one schedule of those that begin at the given steps."""
    schedules, starts = list(pieces.values()), list(pieces)
    if len(schedules) == 1:
        return schedules[0]
    return {"name": "join_schedules", "schedules": schedules, "boundaries": starts[1:]}


def _linear(first: float, last: float, steps: int, begin: int = 0) -> dict[str, Any]:
    schedule = {"name": "linear_schedule", "init_value": first, "end_value": last, "transition_steps": steps}
    return schedule | ({"transition_begin": begin} if begin else {})


def _warmup(given: Mapping[str, Any], low: float, high: float, begin: int = 1) -> dict[str, Any]:
    """Returns the warm-up of step 0, or of a schedule that begins at step 1 (`begin` 0)."""
    if given["warmup_type"] == "linear":
        return _linear(low, high, _steps(given), begin)
    schedule = {"name": "log_warmup_schedule", "init_value": low, "peak_value": high, "warmup_steps": _steps(given)}
    return schedule | ({} if begin else {"offset": 1})


def _steps(given: Mapping[str, Any]) -> int:
    return max(2, int(given["warmup_num_steps"]))


def _warmup_lr(given: Mapping[str, Any], rate: Any) -> Any:
    high = rate if given["warmup_max_lr"] is None else given["warmup_max_lr"]
    return _warmup(given, float(given["warmup_min_lr"]), float(high))


def _warmup_decay_lr(given: Mapping[str, Any], rate: Any) -> Any:
    low, high = float(given["warmup_min_lr"]), float(given["warmup_max_lr"])
    left = int(given["total_num_steps"]) - _steps(given)
    return _pieces({0: _warmup(given, low, high), _steps(given) + 1: _linear(high, low, left) if left > 0 else low})


def _warmup_cosine_lr(given: Mapping[str, Any], rate: Any) -> Any:
    low, end, peak = float(given["warmup_min_ratio"]), float(given["cos_min_ratio"]), float(rate)
    left = max(1, int(given["total_num_steps"]) - _steps(given))
    pieces = {0: 0.0, 1: _warmup(given, low * peak, peak, begin=0)} if low else {0: _warmup(given, 0.0, peak)}
    cosine = {"name": "cosine_decay_schedule", "init_value": peak, "decay_steps": left, "alpha": end, "offset": 1}
    return _pieces({**pieces, _steps(given) + 1: cosine})


def _one_cycle(given: Mapping[str, Any], rate: Any) -> Any:
    low, high = float(given["cycle_min_lr"]), float(given["cycle_max_lr"])
    rise = int(given["cycle_first_step_size"])
    fall = rise if given["cycle_second_step_size"] is None else int(given["cycle_second_step_size"])
    if rise <= 0:
        raise ValueError("cycle_first_step_size is positive")
    pieces: dict[int, Any] = {0: _linear(low, high, rise)} | ({rise: _linear(high, low, fall)} if fall else {})
    interval, growth = given["decay_step_size"], float(given["decay_lr_rate"])
    decay = {"name": "power_schedule", "init_value": low, "transition_steps": interval, "growth": growth}
    return _pieces(pieces | {rise + fall: decay if interval and growth else low})


def _range_test(given: Mapping[str, Any], rate: Any) -> Any:
    low, steps = float(given["lr_range_test_min_lr"]), int(given["lr_range_test_step_size"])
    schedule = {"name": "power_schedule", "init_value": low, "transition_steps": steps, "power": 1.0}
    schedule["growth"] = float(given["lr_range_test_step_rate"])
    return schedule | ({"staircase": True} if is_on(given["lr_range_test_staircase"]) else {})


_WARMUP = {"warmup_min_lr": 0.0, "warmup_max_lr": None, "warmup_num_steps": 1000, "warmup_type": "log"}
_SCHEDULERS: dict[str, tuple[dict[str, Any], Callable[[Mapping[str, Any], Any], Any]]] = {
    "WarmupLR": (_WARMUP, _warmup_lr),
    "WarmupDecayLR": ({**_WARMUP, "warmup_max_lr": 0.001, "total_num_steps": None}, _warmup_decay_lr),
    "WarmupCosineLR": (
        {
            "total_num_steps": None,
            "warmup_min_ratio": 0.0,
            "warmup_num_steps": 1000,
            "cos_min_ratio": 0.0001,
            "warmup_type": "log",
        },
        _warmup_cosine_lr,
    ),
    "OneCycle": (
        {
            "cycle_min_lr": None,
            "cycle_max_lr": None,
            "decay_lr_rate": 0.0,
            "cycle_first_step_size": 2000,
            "cycle_second_step_size": None,
            "cycle_first_stair_count": 0,
            "cycle_second_stair_count": None,
            "decay_step_size": 0,
            "cycle_momentum": True,
            "cycle_min_mom": 0.8,
            "cycle_max_mom": 0.9,
            "decay_mom_rate": 0.0,
        },
        _one_cycle,
    ),
    "LRRangeTest": (
        {
            "lr_range_test_min_lr": 0.001,
            "lr_range_test_step_size": 2000,
            "lr_range_test_step_rate": 1.0,
            "lr_range_test_staircase": False,
        },
        _range_test,
    ),
}
"""Scheduler -> its arguments with their defaults (None: required, or that of another argument), and the schedule of
given arguments and the optimizer's rate."""
