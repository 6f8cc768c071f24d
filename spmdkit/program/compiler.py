"""The compiler options that spmdkit sets: options of XLA for each platform, each with its measured reason.

TPU. By default (libtpu 0.0.42) the compiler decomposes an all_gather over a fully wrapped torus (v5p 4x4x4, fsdp 64)
into an all_reduce of a buffer of zeros, and every reduce_scatter into an all_reduce and a slice: twice the bytes. The
reason is that its all_reduce uses all six links of a chip, and the TensorCore's all_gather only one ring. The options
move both to the SparseCores (v5p, v6e, 7x), which use several rings. On v5e they stay on the TensorCore, native.

Bytes relative to the formula, default -> with the options: v5p 4x4x4 with fsdp 64 and v6e 8x8 2.00 -> 1.00,
asynchronous; v5e 8x8 2.00 -> 1.00, half of the gathers asynchronous; v5p 2x2x2 1.33 -> 1.00. configs/llama_8b_v5p.yaml
sends 40.4 GiB per device and step, configs/llama_70b_v5p.yaml 262 GiB, without an all_reduce of more than a MiB.

Ahead-of-time compilations, 2026-11-21 (the first also in tests/ops/test_tensor_tpu.py); not run on a TPU.
`compiler_options` in the config overrides each option.
Source: AI-Hypercomputer/maxtext, benchmarks/xla_flags_library.py (the same options, for v6e and 7x).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from spmdkit import compat
from spmdkit.errors import ConfigError
from spmdkit.foundation import phase
from spmdkit.foundation.exhausted_memory import is_exhausted
from spmdkit.foundation.formatting import nearest
from spmdkit.mesh.chips import chip_of_device_kind

Value = bool | int | float | str

_TPU: Mapping[str, Value] = {
    "xla_enable_async_all_gather": True,
    "xla_tpu_prefer_async_allgather_to_allreduce": True,
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,
    "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter": True,  # native on v5e, which has no SparseCore
}
_SPARSE_CORE: Mapping[str, Value] = {
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": False,  # otherwise all_gathers stay on the TensorCore
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": True,
    "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": True,
    "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather": True,
    "xla_tpu_enable_sparse_core_reduce_scatter_v2": True,
    # The TensorCore's shape constraints, which would replace some with all_reduces: 8192 x 7168 over 256, 4096 x 128256
    # over 64.
    "xla_tpu_check_legacy_constraints_in_reduce_scatter_legalizer": False,
    "xla_tpu_use_tc_device_shape_on_sc": True,
    "xla_sc_disable_megacore_partitioning": True,
}
_WITH_SPARSE_CORE = ("v5p", "v6e", "7x")


_DETERMINISTIC_GPU: Mapping[str, Value] = {
    "xla_gpu_deterministic_ops": True,  # also disables autotuning, which selects by measured time
    "xla_gpu_exclude_nondeterministic_ops": True,  # an operation without a deterministic form fails the compilation
}


_QUICK: Mapping[str, Value] = {
    "xla_cpu_use_fusion_emitters": False,  # the older emitter
    "xla_cpu_parallel_codegen_split_count": 1,  # one LLVM module per program
}


@functools.cache
def quick_options() -> Mapping[str, Value]:
    """Returns options with which XLA's CPU backend compiles a small program in a fraction of the time. Options unknown
    to this version are omitted; empty on other platforms."""

    def is_known(name: str) -> bool:
        if jax.default_backend() != "cpu":
            return False
        alone: Any = {name: _QUICK[name]}
        try:
            jax.jit(lambda: 0).lower().compile(compiler_options=alone)
        except jax.errors.JaxRuntimeError:
            return False
        return True

    return {name: _QUICK[name] for name in _QUICK if is_known(name)}


def own_options(device: Any, deterministic: bool = False) -> Mapping[str, Value]:
    """Returns the options that spmdkit sets for this kind of device. CPU and TPU programs are always deterministic."""
    if device.platform in ("gpu", "cuda", "rocm") and deterministic:
        return _DETERMINISTIC_GPU
    if device.platform != "tpu":
        return {}
    chip = chip_of_device_kind(device.device_kind, device.platform)
    return {**_TPU, **_SPARSE_CORE} if chip is not None and chip.name in _WITH_SPARSE_CORE else _TPU


def options(devices: Sequence[Any], own: Mapping[str, Value | None], deterministic: bool = False) -> dict[str, Value]:
    """Returns the options of a program: spmdkit's for the platform, updated by the config's; null removes an option."""
    known = {**_TPU, **_SPARSE_CORE}
    for name, value in own.items():
        if value is None and name not in known:
            raise ConfigError(
                f"compiler_options.{name} is null, and spmdkit does not set it, so this has no effect. null removes "
                f"an option that spmdkit sets.{nearest(name, known)} Remove the line, or give a value."
            )
    merged = {**own_options(devices[0], deterministic), **own}
    return {name: value for name, value in merged.items() if value is not None}


def compile(
    lowered: jax.stages.Lowered, devices: Sequence[Any], own: Mapping[str, Value | None], deterministic: bool = False
) -> jax.stages.Compiled:
    """Returns the compiled program.

    Raises:
        ConfigError: the compiler rejects the config's options, or fails.
        JaxRuntimeError: a device has too little memory for the program.
    """
    chosen: Any = options(devices, own, deterministic) or None
    try:
        with phase.during("compile"):  # each compilation (auto, an evaluation) has the full time limit
            return compat.accept_narrow_arguments(lowered.compile(compiler_options=chosen))
    except RuntimeError as error:  # of JAX, or a plain one of XLA
        if is_exhausted(error):
            raise
        raise _rejected(error, devices[0].platform, own, deterministic) from error


def _rejected(error: RuntimeError, platform: str, own: Mapping[str, Value | None], deterministic: bool) -> ConfigError:
    """Returns the error of a program that the compiler does not compile, with the setting that causes it if known."""
    text = (str(error).splitlines() or [""])[0][:400]
    if named := [name for name in own if name in text]:
        return ConfigError(
            f"compiler_options.{named[0]}: {own[named[0]]!r}, and the compiler of {platform} reports: {text}. It must "
            "be an option of XLA on that platform, with a value of its type. Remove it, or fix its name or value."
        )
    if deterministic and "determinis" in str(error).lower():
        return ConfigError(
            f"deterministic is true, and the compiler of {platform} reports: {text}. An operation of the step has no "
            "deterministic form. Rewrite it (a scatter-add as a one-hot product or a sorted segment sum), or set "
            "deterministic: false."
        )
    repair = f"Remove compiler_options ({', '.join(own)})" if own else "Try another mesh"
    return ConfigError(
        f"the compiler of {platform} failed: {text}. It has to compile the program. {repair}, or report it with the "
        "config."
    )


def temp_bytes(stats: Any, platform: str) -> int:
    """Returns the bytes of temporaries that a program reserves on one device.

    TPU: `temp_size_in_bytes` counts loop buffers more than once (libtpu 0.0.42). `peak_memory_in_bytes` is the sum of
    arguments, outputs and temporaries without fragmentation: 1.3 % below the buffer assignment for
    configs/llama_8b_v5p.yaml, 3.5 % for configs/llama_70b_v5p.yaml (2026-11-22).

    Args:
        stats: `compiled.memory_analysis()`.
        platform: platform of the devices.
    """
    if platform != "tpu" or not stats.peak_memory_in_bytes:
        return int(stats.temp_size_in_bytes)
    new = max(stats.output_size_in_bytes - stats.alias_size_in_bytes, 0)
    used = max(stats.peak_memory_in_bytes - stats.argument_size_in_bytes - new, 0)
    return int(min(used, stats.temp_size_in_bytes))
