"""The devices of a GPU target for XLA's GPU compiler, which the extra `gpu-plan` installs; it needs no GPU and no CUDA.

The wheels `jax-cuda13-plugin` and `jax-cuda13-pjrt` contain the compiler. It compiles for a description of the GPU,
which is computed from the tables below and in chips.py. Kernels are not selected by measured time.

Source: figures of the descriptions: openxla/xla, xla/backends/gpu/target_config/specs (a100_sxm_40, a100_sxm_80,
h100_sxm, h200, b200, gb200). L4: NVIDIA, "Ada GPU Architecture" (58 multiprocessors, 48 MiB of L2 cache, 2.04 GHz) and
CUDA C++ Programming Guide, "Compute Capabilities" (8.9).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import jax

from spmdkit.errors import ConfigError
from spmdkit.foundation.constants import GPU_COMPILER
from spmdkit.mesh.chips import Chip

PACKAGES = ("jax-cuda13-plugin", "jax-cuda13-pjrt")


@dataclass(frozen=True)
class _Description:
    """A GPU, as its compiler needs it.

    Attributes:
        capability: CUDA compute capability.
        features: the instructions of exactly this capability are used (9.0a).
        cores: multiprocessors.
        fpus: float32 units of a multiprocessor.
        shared_bytes: shared memory of a multiprocessor; a block can use 1 KiB less.
        cache_bytes: L2.
        clock_ghz: highest clock.
        threads: of a multiprocessor.
        links: NVLinks; 0 on PCIe.
    """

    capability: tuple[int, int]
    features: str
    cores: int
    fpus: int
    shared_bytes: int
    cache_bytes: int
    clock_ghz: float
    threads: int = 2048
    links: int = 18


_DESCRIPTIONS: Mapping[str, _Description] = {
    "a100-40": _Description((8, 0), "NONE", 108, 64, 167936, 41943040, 1.41, links=12),
    "a100-80": _Description((8, 0), "NONE", 108, 64, 167936, 41943040, 1.41, links=12),
    "h100": _Description((9, 0), "ACCELERATED_FEATURES", 132, 128, 233472, 52428800, 1.98),
    "h200": _Description((9, 0), "ACCELERATED_FEATURES", 132, 128, 233472, 52428800, 1.98),
    "b200": _Description((10, 0), "ACCELERATED_FEATURES", 148, 128, 233472, 132644864, 1.965),
    "gb200": _Description((10, 0), "ACCELERATED_FEATURES", 152, 128, 233472, 135528448, 2.062),
    "l4": _Description((8, 9), "NONE", 58, 128, 102400, 50331648, 2.04, threads=1536, links=0),
}


def is_installed() -> bool:
    """Returns whether the extra `gpu-plan` is installed, in any version."""
    return importlib.util.find_spec("jax_cuda13_plugin") is not None and _library() is not None


def _library() -> Any:
    try:
        return importlib.util.find_spec("jax_plugins.xla_cuda13")
    except ModuleNotFoundError:
        return None


def is_compiler_process() -> bool:
    """Returns whether this process loads the compiler."""
    return GPU_COMPILER in os.environ


def check_version() -> None:
    """Raises ConfigError if the compiler is of another minor version than jax."""
    for package in PACKAGES:
        found = metadata.version(package)
        if found.split(".")[:2] != jax.__version__.split(".")[:2]:
            wanted = " ".join(f"{name}=={jax.__version__}" for name in PACKAGES)
            raise ConfigError(
                f"the GPU compiler is {package} {found}, and jax is {jax.__version__}. Both have to be of the same "
                f"minor version. Install it: pip install {wanted}."
            )


def gpu_devices(chip: Chip, hosts: int) -> tuple[Any, ...]:
    """Returns the devices of `hosts` full hosts, for the compiler alone. Loads the compiler into this process.

    Raises:
        ConfigError: the compiler is of another version than jax, or rejects the description.
    """
    from jax.experimental import topologies

    check_version()
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=description(chip), topology=f"1x{hosts}x{chip.devices_per_host}"
        )
    except (RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            f"target gpu:{chip.name}: the GPU compiler of jax {jax.__version__} reports: {str(error).splitlines()[0]}. "
            "It has to accept the description of the GPU. Install the version that is tested: pip install "
            "'spmdkit[gpu-plan]'."
        ) from error
    return tuple(topology.devices)


def description(chip: Chip) -> str:
    """Returns the description of a GPU, the text form of XLA's `GpuTargetConfigProto`."""
    gpu, name = _DESCRIPTIONS[chip.name], chip.device_kinds[0]
    links = f"device_interconnect_info {{ active_links: {gpu.links} }}" if gpu.links else ""
    return f"""
        gpu_device_info {{
          name: "{name}" device_vendor: "NVIDIA Corporation" device_address_bits: 64
          cuda_compute_capability {{
            major: {gpu.capability[0]} minor: {gpu.capability[1]} feature_extension: {gpu.features}
          }}
          core_count: {gpu.cores} fpus_per_core: {gpu.fpus} clock_rate_ghz: {gpu.clock_ghz}
          threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: {gpu.threads}
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
          thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          shared_memory_per_block: 49152 shared_memory_per_core: {gpu.shared_bytes}
          shared_memory_per_block_optin: {gpu.shared_bytes - 1024}
          device_memory_size: {chip.memory_bytes} memory_bandwidth: {int(chip.memory_bytes_per_s)}
          l2_cache_size: {gpu.cache_bytes} pcie_bandwidth: {int(chip.host_link.bytes_per_s)} {links}
          driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
          dnn_version: "9.10.0"
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 10 }}
        device_description_str: "{name}"
    """
