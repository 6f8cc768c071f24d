"""The table of chips: peak arithmetic, memory, links. A plan computes its time and its memory limit from it.

All figures are per *device*, as JAX counts devices: a TPU 7x chip is two devices, and its figures are half the chip's.
Rates are for one direction. All rates are peaks; the share that a program reaches is `Chip.efficiency`, an estimate
until `spmdkit plan --calibrate` measures it on the machine.

Source: TPU: cloud.google.com/tpu/docs, pages "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e", "TPU7x (Ironwood)" (compute,
memory, DCN); jax-ml.github.io/scaling-book, chapters "How to Think About TPUs" (ICI bytes/s of a link, wrap-around of
axes, DCN, about 1 us per hop) and "How to Think About GPUs" (NVLink, network of a DGX). GPU: NVIDIA data sheets, SXM
form, FLOP/s without sparsity: "A100 Tensor Core GPU", "H100 Tensor Core GPU", "H200 Tensor Core GPU", "DGX B200",
"GB200 NVL72", "L4 Tensor Core GPU"; memory of a device and its bytes/s: openxla/xla, target_config/specs (L4: data
sheet, and the memory that CUDA reports); network: data sheets "DGX A100", "DGX H100/H200", "DGX B200", "DGX GB200" (one
port per GPU of 200 or 400 Gb/s), L4: Google's g2-standard-96 (100 Gb/s for eight GPUs).
TPU float32: the matrix unit multiplies bfloat16, and XLA computes a float32 product (Precision.HIGHEST) in six such
passes; with the default precision it is one. GPU float32: TF32 with JAX's default precision, half of bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

GIB = 2**30

Kind = Literal["tpu", "gpu", "cpu"]


@dataclass(frozen=True)
class Link:
    """A link between devices. Rates are for one direction and one device (for a torus, one link of the device).

    Attributes:
        name: shown in plans: `ici`, `dcn`, `nvlink`, `pcie`, `network`, `cpu`.
        bytes_per_s: peak.
        latency_s: of one hop.
    """

    name: str
    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True)
class Efficiency:
    """The share of the peak that a well-written program reaches: for matrix products, memory, links, and kernels that
    are not XLA's (attention)."""

    matmul: float
    memory: float
    link: float
    kernel: float = 0.5


@dataclass(frozen=True)
class Chip:
    """One kind of device.

    Attributes:
        name: as in a target, for example `v5p`.
        device_kinds: JAX's names of the chip, for the target `here`.
        flops_per_s: dtype of a matrix product -> peak.
        memory_bytes: of one device.
        memory_bytes_per_s: of one device.
        inner: link between devices of a host or slice.
        outer: link between hosts (GPU) or slices (TPU).
        host_link: between a device and its host's memory, for offloaded state.
        efficiency: shares of the peaks that a program reaches.
        devices_per_chip: JAX devices of one chip.
        torus_dims: number of ICI axes; 0 if all devices are equally far from each other.
        devices_per_host: devices that share the inner link of a host (GPU).
        topologies: available slice shapes in chips, the small ones.
        cube: in larger slices every dim is a multiple of this; 0 if `topologies` is complete.
        largest: maximum length of each dim, sorted.
        wraps_at: a dim of a slice can be a ring if its length is a multiple of this (`Target.rings`).
        reserved_bytes: memory that is not available to a program.
        launch_s: cost of starting one instruction.
        cache_bytes: instructions that move fewer bytes are served by caches (CPU); 0: no caches.
        cache_bytes_per_s: rate of the caches.
        clock_hz: clock of the matrix unit, in which the TPU compiler estimates cycles.
    """

    name: str
    kind: Kind
    device_kinds: tuple[str, ...]
    flops_per_s: Mapping[str, float]
    memory_bytes: int
    memory_bytes_per_s: float
    inner: Link
    outer: Link
    host_link: Link
    efficiency: Efficiency
    devices_per_chip: int = 1
    torus_dims: int = 0
    devices_per_host: int = 1
    topologies: tuple[str, ...] = ()
    cube: int = 0
    largest: tuple[int, ...] = ()
    wraps_at: int = 0
    reserved_bytes: int = 0
    launch_s: float = 0.0
    cache_bytes: int = 0
    cache_bytes_per_s: float = 0.0
    clock_hz: float = 0.0

    @property
    def limit_bytes(self) -> int:
        """Bytes of one device that a program may use."""
        return self.memory_bytes - self.reserved_bytes

    def memory_s(self, num_bytes: float) -> float:
        """Returns the seconds in which one instruction moves `num_bytes`."""
        cached = num_bytes < self.cache_bytes
        return num_bytes / ((self.cache_bytes_per_s if cached else self.memory_bytes_per_s) * self.efficiency.memory)

    def peak(self, dtype: str) -> float:
        """Returns the peak FLOP/s of matrix products of a dtype; that of float32 for an unknown dtype, that of bfloat16
        for a float8 that the chip has no products of."""
        wider = "bfloat16" if dtype == "float8" else "float32"
        return self.flops_per_s.get(dtype, self.flops_per_s[wider])

    def products_s(self, by_dtype: Mapping[str, float]) -> float:
        """Returns the seconds of matrix products from dtype -> FLOPs."""
        return sum(flops / (self.peak(dtype) * self.efficiency.matmul) for dtype, flops in by_dtype.items())

    def kernel_s(self, by_dtype: Mapping[str, float]) -> float:
        """Returns the seconds of a kernel from dtype -> FLOPs."""
        return self.products_s(by_dtype) * self.efficiency.matmul / self.efficiency.kernel


_SLICES_2D = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_SLICES_3D = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")


def _tpu(
    name: str,
    device_kinds: tuple[str, ...],
    bf16: float,
    memory_gib: float,
    memory_bytes_per_s: float,
    ici: float,
    dcn: float,
    pcie: float,
    largest: tuple[int, ...],
    limit_gib: float,
    clock_hz: float,
    devices_per_chip: int = 1,
    float8: float = 0.0,
) -> Chip:
    """Returns a TPU from the figures of its chip.

    `limit_gib` is the memory available to a program, from the message of libtpu 0.0.42 for a program that is too large.
    """
    share, is_2d = 1 / devices_per_chip, len(largest) == 2
    peaks = {"bfloat16": bf16, "float32": bf16, "int8": 2 * bf16} | ({"float8": float8} if float8 else {})
    return Chip(
        name=name,
        kind="tpu",
        device_kinds=device_kinds,
        flops_per_s={dtype: peak * share for dtype, peak in peaks.items()},
        memory_bytes=int(memory_gib * GIB * share),
        memory_bytes_per_s=memory_bytes_per_s * share,
        inner=Link("ici", ici, 1e-6),
        outer=Link("dcn", dcn * share, 5e-5),
        host_link=Link("host", pcie * share, 1e-5),
        efficiency=Efficiency(matmul=0.75, memory=0.85, link=0.85),
        devices_per_chip=devices_per_chip,
        torus_dims=len(largest),
        topologies=_SLICES_2D if is_2d else _SLICES_3D,
        cube=0 if is_2d else 4,
        largest=largest,
        wraps_at=16 if is_2d else 4,
        reserved_bytes=int((memory_gib * share - limit_gib) * GIB),
        launch_s=5e-7,
        clock_hz=clock_hz,
    )


def _gpu(
    name: str,
    device_kinds: tuple[str, ...],
    bf16: float,
    memory_bytes: int,
    memory_bytes_per_s: float,
    inner: float,
    outer: float,
    pcie: float,
    devices_per_host: int = 8,
) -> Chip:
    """Returns a GPU: float32 products are TF32 (half of bfloat16), int8 and float8 (Ada, Hopper, Blackwell) twice;
    `inner` is the rate of NVLink."""
    peaks = {"bfloat16": bf16, "float16": bf16, "float32": bf16 / 2, "int8": 2 * bf16}
    return Chip(
        name=name,
        kind="gpu",
        device_kinds=device_kinds,
        flops_per_s=peaks if name.startswith("a100") else peaks | {"float8": 2 * bf16},
        memory_bytes=memory_bytes,
        memory_bytes_per_s=memory_bytes_per_s,
        inner=Link("pcie" if inner == pcie else "nvlink", inner, 3e-6),
        outer=Link("network", outer, 1e-5),
        host_link=Link("host", pcie, 1e-5),
        # matmul: fitted to published runs on H100 (docs/published.md)
        efficiency=Efficiency(matmul=0.53, memory=0.85, link=0.8),
        devices_per_host=devices_per_host,
        # JAX reserves 75 % of the memory unless XLA_PYTHON_CLIENT_MEM_FRACTION sets another share; CUDA itself and NCCL
        # need 1 to 2 GiB.
        reserved_bytes=2 * GIB,
        launch_s=2e-6,
    )


CHIPS: Mapping[str, Chip] = {
    chip.name: chip
    for chip in (
        # bfloat16 FLOP/s, GiB, bytes/s of memory, of an ICI link, of the DCN, of PCIe, largest slice, GiB of a program,
        # clock
        _tpu("v4", ("TPU v4",), 275e12, 32, 1.2e12, 45e9, 6.25e9, 16e9, (16, 16, 16), 30.75, 1.05e9),
        _tpu("v5e", ("TPU v5 lite", "TPU v5e"), 197e12, 16, 0.82e12, 45e9, 3.125e9, 16e9, (16, 16), 15.75, 1.5e9),
        _tpu("v5p", ("TPU v5", "TPU v5p"), 459e12, 96, 2.765e12, 90e9, 6.25e9, 16e9, (16, 16, 24), 95.74, 1.75e9),
        _tpu("v6e", ("TPU v6 lite", "TPU v6e"), 918e12, 32, 1.638e12, 90e9, 12.5e9, 32e9, (16, 16), 31.25, 1.75e9),
        _tpu("7x", ("TPU7x",), 2307e12, 192, 7.38e12, 90e9, 12.5e9, 32e9, (16, 24, 24), 94.75, 2.2e9, 2, 4614e12),
        # bfloat16 FLOP/s, bytes and bytes/s of memory, bytes/s of NVLink, of the network for one GPU, of PCIe (GB200:
        # NVLink-C2C), GPUs that NVLink connects
        _gpu("a100-40", ("NVIDIA A100-SXM4-40GB",), 312e12, 42_331_013_120, 1.555e12, 300e9, 25e9, 32e9),
        _gpu("a100-80", ("NVIDIA A100-SXM4-80GB",), 312e12, 85_100_068_864, 2.039e12, 300e9, 25e9, 32e9),
        _gpu("h100", ("NVIDIA H100 80GB HBM3", "NVIDIA H100"), 989.4e12, 84_942_979_072, 3.352e12, 450e9, 50e9, 64e9),
        _gpu("h200", ("NVIDIA H200",), 989.4e12, 151_397_597_184, 4.8e12, 450e9, 50e9, 64e9),
        _gpu("b200", ("NVIDIA B200",), 2250e12, 191_514_411_008, 7.672e12, 900e9, 50e9, 64e9),
        _gpu("gb200", ("NVIDIA GB200",), 2500e12, 197_897_748_480, 7.928e12, 900e9, 50e9, 225e9, 72),
        _gpu("l4", ("NVIDIA L4",), 121e12, 23_583_784_960, 0.3e12, 32e9, 1.5625e9, 32e9),
        # A placeholder for one fake device on a laptop's core; `--calibrate` replaces it with measurements of this
        # machine.
        Chip(
            name="cpu",
            kind="cpu",
            device_kinds=("cpu",),
            flops_per_s={"float32": 50e9, "bfloat16": 10e9},
            memory_bytes=4 * GIB,
            memory_bytes_per_s=5e9,
            inner=Link("cpu", 2e9, 5e-5),
            outer=Link("network", 1e9, 1e-4),
            host_link=Link("memory", 5e9, 1e-6),
            efficiency=Efficiency(1.0, 1.0, 1.0),
            launch_s=3e-6,
            cache_bytes=2**20,
            cache_bytes_per_s=10e9,
        ),
    )
}
"""Name in a target -> chip."""


TPU_PRODUCTS: Mapping[str, tuple[str, int]] = {
    "v4": ("v4", 2),
    "v5p": ("v5p", 2),
    "v5litepod": ("v5e", 1),
    "v5e": ("v5e", 1),
    "v6e": ("v6e", 1),
    "tpu7x": ("7x", 2),
}
"""Product -> (chip, cores of a chip): the number in `v5p-256` counts cores, in `v6e-256` chips.

Source: cloud.google.com/tpu/docs, the pages of the chips ("AcceleratorType")."""

GPU_MACHINES: Mapping[str, tuple[str, float]] = {
    "dgx-a100": ("a100-80", 25e9),
    "dgx-h100": ("h100", 50e9),
    "dgx-h200": ("h200", 50e9),
    "dgx-b200": ("b200", 50e9),
    "dgx-gb200": ("gb200", 50e9),
    "a2-highgpu-8g": ("a100-40", 1.5625e9),
    "a2-ultragpu-8g": ("a100-80", 1.5625e9),
    "a3-highgpu-8g": ("h100", 12.5e9),
    "a3-megagpu-8g": ("h100", 25e9),
    "a3-ultragpu-8g": ("h200", 50e9),
    "a4-highgpu-8g": ("b200", 50e9),
    "g2-standard-96": ("l4", 1.5625e9),
    "p4d.24xlarge": ("a100-40", 6.25e9),
    "p4de.24xlarge": ("a100-80", 6.25e9),
    "p5.48xlarge": ("h100", 50e9),
    "p5e.48xlarge": ("h200", 50e9),
    "p5en.48xlarge": ("h200", 50e9),
    "p6-b200.48xlarge": ("b200", 50e9),
}
"""Machine -> (chip, bytes/s of the network for one GPU); `dgx-gb200` is the rack of 72 GPUs, the others have eight.

Source: the data sheets of the DGX systems; cloud.google.com/compute/docs/gpus (GPU network bandwidth: a3-highgpu,
a3-megagpu, a3-ultragpu and a4 1,000, 1,800, 3,600 and 3,600 Gb/s, of which 800, 1,600, 3,200 and 3,200 are for the
GPUs; a2 and g2-standard-96 100 Gb/s); aws.amazon.com/ec2/instance-types, pages "P4", "P5", "P6" (400 Gb/s, 3,200
Gb/s)."""


def chip_of_device_kind(device_kind: str, platform: str) -> Chip | None:
    """Returns the chip of a JAX device, or None if it is not in the table."""
    for chip in CHIPS.values():
        if device_kind in chip.device_kinds:
            return chip
    close = [
        c
        for c in CHIPS.values()
        if c.kind == platform and any(f"{device_kind} ".startswith(f"{k} ") for k in c.device_kinds)
    ]
    return close[0] if close else None
