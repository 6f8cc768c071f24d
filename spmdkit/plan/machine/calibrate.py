"""`calibrate`: measures this machine: matrix products, memory, launch overhead, collectives.

    <cache>/spmdkit/rates.json      {"cpu 8": {"date": ..., "flops_per_s": {...}, ...}, "NVIDIA H100 80GB HBM3 8": ...}

`<cache>` is `$XDG_CACHE_HOME`, else `~/.cache`; `SPMDKIT_RATES` names another file. All devices are measured
concurrently, as in training, so fake devices that share two cores get their share. Plans of `here` and `cpu:N` use the
rates of the same kind of device, rescaled for another number of fake devices.

    time of a product     2 n^3 FLOPs, n = 512 (CPU) or 8,192, for each dtype
    time of a copy        y = 2 x + 1 of an array far larger than the caches, and of one of 256 KiB
    launch                a chain of products of 8 x 8, so small that launch overhead dominates the time
    call                  a compiled function of one number, from Python
    collectives           all_reduce over all devices, 4 KiB to 8 MiB: bytes sent / rate + hops x latency, least squares

Calibration takes about ten seconds. Results are medians of five; they include other load on the machine.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from spmdkit import compat
from spmdkit.errors import ConfigError
from spmdkit.foundation.files import user_cache, write_requested
from spmdkit.mesh.chips import Efficiency
from spmdkit.plan.machine.links import hops
from spmdkit.plan.machine.target import Target

REPEATS = 5
Rates = dict[str, Any]


def rates_file() -> Path:
    """Returns the file that stores the rates of this machine."""
    return Path(os.environ.get("SPMDKIT_RATES") or user_cache(os.environ) / "rates.json")


def calibrate(machine: Target) -> Rates:
    """Measures the devices of a target, adds the result to the file and returns it.

    Raises:
        ConfigError: the devices are not on this machine, or the file cannot be written.
    """
    devices = machine.devices
    if not machine.is_here or any(d.process_index != jax.process_index() for d in devices):
        raise ConfigError(
            f"--calibrate measures the devices of this process, and the target is {machine.name}. Rates of other "
            "machines are those of the chip table. Use --target here or --target cpu:8."
        )
    rates = _measure(devices)
    file = rates_file()
    known = _read(file)
    known[f"{devices[0].device_kind} {len(devices)}"] = rates
    write_requested("SPMDKIT_RATES", file, json.dumps(known, indent=2) + "\n")
    return rates


def with_measured(target: Target) -> tuple[Target, float]:
    """Returns the target with the rates measured for its kind of device, and the seconds of one call.

    Without measured rates: the target unchanged, and 0.
    """
    if not target.is_here or not target.devices:
        return target, 0.0
    known, kind, chip = _read(rates_file()), target.devices[0].device_kind, target.chip
    measured = [int(name.rpartition(" ")[2]) for name in known if name.rpartition(" ")[0] == kind]
    if not measured:
        return target, 0.0
    nearest = min(measured, key=lambda n: abs(n - target.num_devices))
    rates = known[f"{kind} {nearest}"]
    # Fake devices share one machine: the sum of their rates is constant.
    share = nearest / target.num_devices if chip.kind == "cpu" else 1.0
    inner, link_efficiency = chip.inner, chip.efficiency.link
    if rates["link_bytes_per_s"] is not None:
        link_bytes_per_s = rates["link_bytes_per_s"] * share
        inner = replace(inner, bytes_per_s=link_bytes_per_s, latency_s=rates["link_latency_s"])
        link_efficiency = 1.0
    chip = replace(
        chip,
        flops_per_s={**chip.flops_per_s, **{dtype: rate * share for dtype, rate in rates["flops_per_s"].items()}},
        memory_bytes_per_s=rates["memory_bytes_per_s"] * share,
        inner=inner,
        launch_s=rates["launch_s"] / share,
        cache_bytes_per_s=rates["cache_bytes_per_s"] * share,
        efficiency=Efficiency(1.0, 1.0, link_efficiency),  # measured rates are reached in full
    )
    return replace(target, chip=chip, calibrated=rates["date"]), float(rates["call_s"])


def _read(file: Path) -> dict[str, Any]:
    try:
        stored = json.loads(file.read_text())
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # also a home directory of another user
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{file} cannot be read ({type(error).__name__}). It holds the rates of this machine. Remove it and "
            "measure again: spmdkit plan CONFIG --calibrate."
        ) from error
    return stored if isinstance(stored, dict) else {}


# ---- measuring -------------------------------------------------------------------------------------------------------


def _measure(devices: Sequence[Any]) -> Rates:
    mesh = compat.auto_mesh(np.array(devices), ("all",))
    on_cpu = devices[0].platform == "cpu"
    dtypes = ("float32",) if on_cpu else ("float32", "bfloat16")
    link = _link(mesh) if len(devices) > 1 else (None, None)
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
        "device_kind": devices[0].device_kind,
        "num_devices": len(devices),
        "flops_per_s": {dtype: _product(mesh, dtype, 512 if on_cpu else 8192) for dtype in dtypes},
        "memory_bytes_per_s": _memory(mesh, (2**25 if on_cpu else 2**29)),
        "cache_bytes_per_s": _memory(mesh, 2**18, 64),
        "launch_s": _launch(mesh),
        "call_s": _call(devices[0]),
        "link_bytes_per_s": link[0],
        "link_latency_s": link[1],
    }


def _seconds(run: Callable[[], Any]) -> float:
    """Returns the median time of a call, compiled and warm."""
    jax.block_until_ready(run())
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _each(mesh: Any, body: Callable[[jax.Array], jax.Array], shape: tuple[int, ...], dtype: str) -> float:
    """Returns the seconds of `body` on all devices concurrently, each with an array of `shape`."""
    sharding = NamedSharding(mesh, PartitionSpec("all"))
    x = jax.jit(lambda: jnp.full((mesh.size, *shape), 0.01, dtype), out_shardings=sharding)()
    spec = sharding.spec
    run = jax.jit(jax.shard_map(lambda x: body(x[0])[None], mesh=mesh, in_specs=spec, out_specs=spec))
    return _seconds(lambda: run(x))


def _product(mesh: Any, dtype: str, n: int, times: int = 8) -> float:
    body = lambda x: lax.fori_loop(0, times, lambda _, y: (y @ x) * jnp.asarray(0.1, x.dtype), x)
    return 2 * n**3 * times / _each(mesh, body, (n, n), dtype)


def _memory(mesh: Any, num_bytes: int, times: int = 4) -> float:
    body = lambda x: lax.fori_loop(0, times, lambda _, y: y * 2 + 1, x)
    return 2 * num_bytes * times / _each(mesh, body, (num_bytes // 4,), "float32")


def _launch(mesh: Any, length: int = 64) -> float:
    body = lambda x: functools.reduce(lambda y, _: y @ x, range(length), x)
    return _each(mesh, body, (8, 8), "float32") / length


def _call(device: Any) -> float:
    x = jax.device_put(np.float32(1), device)
    add = jax.jit(lambda x: x + 1)
    return _seconds(lambda: [add(x) for _ in range(100)]) / 100


def _link(mesh: Any) -> tuple[float, float]:
    """Returns (bytes per second, seconds of a hop) of an all_reduce over all devices, by a linear fit of its times."""
    n = mesh.size
    sizes = [2**k for k in (12, 15, 18, 20, 22, 23)]
    once = lambda _, y: compat.as_varying(lax.psum(y, "all") * (1 / n), ("all",))
    body = lambda x: lax.fori_loop(0, 4, once, x)
    times = [_each(mesh, body, (size // 4,), "float32") / 4 for size in sizes]
    sent = [2 * (n - 1) / n * size for size in sizes]
    # Fits relative errors: otherwise the largest array would dominate.
    matrix = np.array([[b / t, 1 / t] for b, t in zip(sent, times, strict=True)])
    per_byte, fixed = np.linalg.lstsq(matrix, np.ones(len(times)), rcond=None)[0]
    return 1 / max(float(per_byte), 1e-15), max(float(fixed), 0.0) / hops("all_reduce", n)


def describe(rates: Mapping[str, Any]) -> str:
    """Returns the rates in one line."""
    products = ", ".join(f"{dtype} {rate / 1e9:.4g} GFLOP/s" for dtype, rate in rates["flops_per_s"].items())
    link = ""
    if (link_bytes_per_s := rates["link_bytes_per_s"]) is not None:
        link = f", links {link_bytes_per_s / 1e9:.3g} GB/s and {rates['link_latency_s'] * 1e6:.3g} us a hop"
    return (
        f"each of {rates['num_devices']} {rates['device_kind']}: {products}, memory "
        f"{rates['memory_bytes_per_s'] / 1e9:.3g} GB/s, launch {rates['launch_s'] * 1e6:.3g} us{link}"
    )
