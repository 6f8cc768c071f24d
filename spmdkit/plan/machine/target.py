"""`open_target`: the machine that a plan is for; it need not be the machine that the plan is computed on.

    tpu:v5p:8x8x16      1,024 chips of one slice; compiled by the real TPU compiler, on this machine (extra `tpu`)
    tpu:v5p:4x4x4*2     two such slices, joined by the data centre's network
    gpu:h100:64         64 GPUs in hosts of eight; gpu:h200:8x8 is 8 hosts x 8 GPUs; compiled by the real GPU compiler
                        in a separate process (extra `gpu-plan`), without it for fake CPU devices
    v5p-256, v6e-256    the product: v5p-256 has 256 cores, which are 128 chips (4x4x8)
    a3-megagpu-8g:4     four of these machines, with their network; also p5.48xlarge
    cluster.yaml        a machine that the user describes (machine_file.py); cluster.yaml:4 has four hosts or slices
    cpu:8               8 fake devices of this machine
    here                the devices of this machine

Exact for `tpu`, and for `gpu` with the extra: the program, its collectives and its memory, since the compiler is that
of the machine. The GPU compiler selects some kernels by measured time, which needs a GPU: those may differ. For fake
CPU devices only the collectives of the strategy are exact: XLA's CPU compiler fuses, schedules and allocates
differently. Times are modelled on every target; `here` and `cpu` use measured rates after `--calibrate`.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

import jax

from spmdkit import compat
from spmdkit.cluster.join import num_threads
from spmdkit.errors import ConfigError
from spmdkit.foundation.constants import MAX_FAKE_DEVICES, fake_devices
from spmdkit.foundation.formatting import nearest
from spmdkit.mesh.chips import CHIPS, GPU_MACHINES, TPU_PRODUCTS, Chip, chip_of_device_kind
from spmdkit.plan.machine.gpu_devices import gpu_devices, is_compiler_process, is_installed
from spmdkit.program.memory import memory_limit

_FORMS = (
    "tpu:v5p:4x4x4, tpu:v5p:4x4x4*2 (two slices), gpu:h100:64, gpu:h200:8x8 (hosts x GPUs), v5p-256, "
    "a3-megagpu-8g:4, cluster.yaml (your own machine), cpu:8, here"
)
# libtpu reads these when it is loaded; they disable its search for a TPU and allow concurrent plans.
_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}


@dataclass(frozen=True)
class Target:
    """A machine.

    Attributes:
        name: as requested.
        chip: figures of one device.
        num_devices: number of JAX devices.
        num_slices: number of TPU slices or GPU hosts, connected only by the outer link.
        topology: shape of one slice in chips; empty without a torus.
        devices: JAX devices, abstract if they are not on this machine; empty until `open_target`.
        compiler: `tpu`, `cpu` or `gpu`: the compiler of the program.
        notes: limits of the plan's accuracy.
        is_here: whether the program can run on these devices.
        limit_bytes: the limit that the backend reports, if any.
        calibrated: date of the rates measured on this machine; None: rates of the chip table.
    """

    name: str
    chip: Chip
    num_devices: int
    num_slices: int = 1
    topology: tuple[int, ...] = ()
    devices: Sequence[Any] = ()
    compiler: str = "cpu"
    notes: tuple[str, ...] = ()
    is_here: bool = False
    limit_bytes: int | None = None
    calibrated: str | None = None

    @property
    def memory_limit_bytes(self) -> int:
        """Bytes of one device that a program may use."""
        return self.limit_bytes if self.limit_bytes is not None else self.chip.limit_bytes

    @property
    def rings(self) -> tuple[bool, ...]:
        """For each dim of a slice, whether it is a ring. A slice of v5e and v6e: a dim of 16 chips. A slice of the
        others: all three dims, if each is a multiple of 4 chips; a smaller slice has lines only.

        Source: Google Cloud TPU documentation, topologies of each version; MaxText 0.2.4,
        `accelerator_to_spec_map.py`."""
        wraps = tuple(length % self.chip.wraps_at == 0 for length in self.topology)
        return wraps if self.chip.torus_dims == 2 else (all(wraps),) * len(wraps)


def parse_target(text: str) -> Target:
    """Returns the target of a text, without its devices; loads no compiler and no device.

    Raises:
        ConfigError: an unknown form, chip or topology; the message lists the valid ones.
    """
    if ".yaml" in text or ".yml" in text:
        from spmdkit.plan.machine.machine_file import read_machine  # pydantic takes 50 ms to build its sections

        described = read_machine(text.strip())
    else:
        described = None
    if described is not None:
        chip, shape = described
        parsed = (_parse_tpu if chip.kind == "tpu" else _parse_gpu)(text.strip(), chip, shape)
        return replace(parsed, name=text.strip())
    if (product := _product(text.strip())) is not None:
        return product
    kind, _, rest = text.strip().partition(":")
    if kind == "here" and not rest:
        return Target("here", CHIPS["cpu"], 0, is_here=True)
    if kind == "cpu":
        count = fake_devices(text.strip())
        if count is None:
            raise ConfigError(
                f"target {text!r} has {rest or 'no number'} of fake CPU devices. It is cpu:N with N from 1 to "
                f"{MAX_FAKE_DEVICES}. Try --target cpu:8."
            )
        return Target(f"cpu:{count}", CHIPS["cpu"], count)
    if kind not in ("tpu", "gpu"):
        raise ConfigError(
            f"target {text!r} begins with {kind!r}, which is no machine.{nearest(kind, ('tpu', 'gpu', 'cpu', 'here'))} "
            f"A target is one of {_FORMS}. Try --target cpu:8."
        )
    name, _, shape = rest.partition(":")
    names = [chip.name for chip in CHIPS.values() if chip.kind == kind]
    if name not in names:
        longer = [n for n in names if name and n.startswith(name)]
        near = f" Did you mean {longer[0]!r}?" if longer else nearest(name, names)
        raise ConfigError(
            f"target {text!r} names the {kind.upper()} {name!r}, which the table does not hold.{near} "
            f"Known: {', '.join(names)}. Try --target {'tpu:v5p:4x4x4' if kind == 'tpu' else 'gpu:h100:8'}."
        )
    return (_parse_tpu if kind == "tpu" else _parse_gpu)(text, CHIPS[name], shape)


def _product(text: str) -> Target | None:
    """Returns the target of a product name (`v5p-256`, `a3-megagpu-8g:4`), or None."""
    match = re.fullmatch(rf"(?:tpu:)?({'|'.join(TPU_PRODUCTS)})-([1-9]\d{{0,5}})((?:\*.*)?)", text)
    if match:
        name, cores = TPU_PRODUCTS[match[1]]
        chip, chips = CHIPS[name], int(match[2]) / cores
        shape = min((s for s in _slices(chip) if math.prod(s) == chips), key=sum, default=None)
        if shape is None:
            counts = sorted({math.prod(s) * cores for s in _slices(chip)}, key=lambda n: (abs(n - int(match[2])), n))
            raise ConfigError(
                f"target {text!r}: no slice of {name} has {chips:g} chips. The number of {match[1]}-N counts "
                f"{'chips' if cores == 1 else f'cores, {cores} of each chip'}. Try --target {match[1]}-{counts[0]}."
            )
        target = _parse_tpu(text, chip, "x".join(map(str, shape)) + match[3])
        note = f"{text} is {'x'.join(map(str, shape))}: {chips:g} chips in a slice."
        return replace(target, notes=(note, *target.notes))
    machine, _, count = text.removeprefix("gpu:").partition(":")
    if machine not in GPU_MACHINES:
        return None
    name, bytes_per_s = GPU_MACHINES[machine]
    hosts = _sizes(count or "1")
    if len(hosts) != 1:
        raise ConfigError(f"target {text!r} has {count!r} machines. It is a number. Try --target {machine}:4.")
    chip = replace(CHIPS[name], outer=replace(CHIPS[name].outer, bytes_per_s=bytes_per_s))
    return replace(_parse_gpu(text, chip, f"{hosts[0]}x{chip.devices_per_host}"), name=f"{machine}:{hosts[0]}")


def _parse_gpu(text: str, chip: Chip, shape: str) -> Target:
    sizes = _sizes(shape)
    total = math.prod(sizes)
    if len(sizes) not in (1, 2) or total > MAX_FAKE_DEVICES:
        raise ConfigError(
            f"target {text!r} has the size {shape!r}. It is a number of GPUs, or hosts x GPUs of a host, at most "
            f"{MAX_FAKE_DEVICES} in all. Try --target gpu:{chip.name}:64 or gpu:{chip.name}:8x8."
        )
    if len(sizes) == 2:
        chip = replace(chip, devices_per_host=sizes[1])
    hosts, rest = divmod(total, chip.devices_per_host)
    if hosts and rest:
        raise ConfigError(
            f"target {text!r} puts {total} GPUs into hosts of {chip.devices_per_host}, found a remainder of {rest}. "
            f"Every host must be full. Try gpu:{chip.name}:{total - rest}, or gpu:{chip.name}:HOSTSxGPUS."
        )
    chip = replace(chip, devices_per_host=total if not hosts else chip.devices_per_host)
    return Target(f"gpu:{chip.name}:{shape}", chip, total, num_slices=max(1, hosts))


def _parse_tpu(text: str, chip: Chip, shape: str) -> Target:
    name = chip.name
    slice_shape, star, count = shape.partition("*")
    dims, counts = _sizes(slice_shape), _sizes(count) if star else (1,)
    product = next(product for product, (of, _) in TPU_PRODUCTS.items() if of == name)
    if len(dims) == 1 and any(math.prod(s) * TPU_PRODUCTS[product][1] == dims[0] for s in _slices(chip)):
        raise ConfigError(
            f"target {text!r}: a slice of {name} has {chip.torus_dims} dims, found one number. Try --target "
            f"{product}-{dims[0]}, the product with {dims[0] // TPU_PRODUCTS[product][1]} chips."
        )
    if len(counts) != 1 or counts[0] > 64 or not _available(chip, dims):
        raise ConfigError(
            f"target {text!r}: {name} has no slice of shape {shape!r}. A slice of {name} is {_shapes(chip)}; *N joins "
            f"up to 64 of them. Try --target tpu:{name}:{_nearest_shape(chip, dims)}."
        )
    num_slices = counts[0]
    chips = math.prod(dims) * num_slices
    notes = []
    if name == "7x":
        notes.append(f"A 7x chip is two devices to JAX: {chips} chips are {2 * chips} devices.")
    if name == "v4":
        notes.append(
            "The ahead-of-time compiler sees two cores in a v4 chip, where the machine has one device: the step was "
            "compiled for one core of each chip. Mesh and wire are the machine's; a step that needs more than a "
            "core's 15.25 GiB has no program to read."
        )
    if num_slices > 1:
        notes.append(
            f"{num_slices} slices are joined by the data centre's network, {chip.outer.bytes_per_s:.3g} bytes/s of a "
            "device."
        )
    devices = chips * chip.devices_per_chip
    return Target(f"tpu:{name}:{shape}", chip, devices, num_slices, dims, compiler="tpu", notes=tuple(notes))


def _sizes(text: str) -> tuple[int, ...]:
    """Returns the numbers of `4x4x4`; empty if a part is not a number."""
    parts = text.split("x")
    return tuple(map(int, parts)) if all(re.fullmatch(r"[1-9][0-9]{0,5}", part) for part in parts) else ()


def _available(chip: Chip, dims: tuple[int, ...]) -> bool:
    if "x".join(map(str, dims)) in chip.topologies:
        return True
    if not chip.cube or len(dims) != chip.torus_dims:
        return False
    fits = all(n <= most for n, most in zip(sorted(dims), chip.largest, strict=True))
    return fits and all(n % chip.cube == 0 for n in dims)


def _shapes(chip: Chip) -> str:
    more = f", or AxBxC of multiples of {chip.cube} up to {'x'.join(map(str, chip.largest))}" if chip.cube else ""
    return f"one of {', '.join(chip.topologies)}{more}"


def _nearest_shape(chip: Chip, dims: tuple[int, ...]) -> str:
    """Returns the available shape with the number of chips nearest to the requested one."""
    requested = math.prod(dims) if dims else 16
    return "x".join(map(str, min(_slices(chip), key=lambda shape: abs(math.prod(shape) - requested))))


def _slices(chip: Chip) -> list[tuple[int, ...]]:
    """Returns the available shapes, without the long ones."""
    options = [tuple(map(int, shape.split("x"))) for shape in chip.topologies]
    lengths = [range(chip.cube, most + 1, chip.cube) for most in chip.largest] if chip.cube else []
    return options + ([(a, b, c) for a, b, c in itertools.product(*lengths) if a <= b <= c <= 2 * b] if lengths else [])


# ---- devices ---------------------------------------------------------------------------------------------------------


def open_target(target: Target) -> Target:
    """Returns the target with its devices. If they are not on this machine, this process is bound to the CPU.

    A GPU target with the extra `gpu-plan` has no devices in this process: call `in_compiler_process`.

    Raises:
        ConfigError: the extra `tpu` is missing or too new, or JAX has already created too few fake devices.
    """
    if target.devices:
        return target
    if target.compiler == "tpu":
        return replace(target, devices=_tpu_devices(target))
    if target.is_here:
        return target_of(jax.devices())
    if target.chip.kind == "gpu" and is_installed():
        return replace(target, compiler="gpu", devices=_gpu_devices(target) if is_compiler_process() else ())
    return with_fake_devices(target)


def with_fake_devices(target: Target) -> Target:
    """Returns the target with fake CPU devices in place of its own.

    Raises:
        ConfigError: JAX has already created fewer devices.
    """
    devices = _fake_devices(target.num_devices, target.name)
    if target.chip.kind == "cpu":
        return replace(target, devices=devices, limit_bytes=memory_limit(devices), is_here=True)
    return replace(target, devices=devices, notes=(*target.notes, *substitute_notes(target)))


def substitute_notes(target: Target) -> tuple[str, ...]:
    """Returns what is unreliable in the plan of a GPU target that is compiled for CPU devices."""
    note = (
        f"The step is compiled for {target.num_devices} CPU devices in place of GPUs. Exact: parameters, optimizer "
        "state, the collectives of the strategy. Unreliable: step time, MFU, temporaries and peak memory, FLOPs of "
        "kernels, number and merging of collectives. Findings that this compiler causes are omitted. Install the GPU "
        "compiler, which needs no GPU: pip install 'spmdkit[gpu-plan]'."
    )
    return (note,) if target.chip.kind == "gpu" else ()


def _gpu_devices(target: Target) -> tuple[Any, ...]:
    return gpu_devices(target.chip, target.num_devices // target.chip.devices_per_host)


def target_of(devices: Sequence[Any], name: str = "here") -> Target:
    """Returns the target of existing devices: their chip, memory limit and hosts."""
    first = devices[0]
    chip = chip_of_device_kind(first.device_kind, first.platform)
    notes = []
    if chip is None:
        chip = CHIPS["cpu"] if first.platform == "cpu" else CHIPS["h100"] if first.platform == "gpu" else CHIPS["v5e"]
        notes.append(f"The chip table does not hold {first.device_kind!r}: times are those of {chip.name}.")
    hosts = len({d.process_index for d in devices})
    if chip.kind == "gpu":
        chip = replace(chip, devices_per_host=max(1, len(devices) // hosts))
    bounds = tuple(max(axis) + 1 for axis in zip(*(getattr(d, "coords", ()) for d in devices), strict=True))
    slices = len({getattr(d, "slice_index", 0) or 0 for d in devices}) if chip.kind == "tpu" else hosts
    return Target(
        name,
        chip,
        len(devices),
        num_slices=slices,
        topology=bounds if chip.kind == "tpu" else (),
        devices=tuple(devices),
        compiler=first.platform,
        notes=tuple(notes),
        is_here=True,
        limit_bytes=memory_limit(devices),
    )


def _fake_devices(count: int, name: str) -> tuple[Any, ...]:
    if not compat.backends_initialized():
        os.environ.setdefault("NPROC", str(num_threads(min(count, 16))))
        jax.config.update("jax_platforms", "cpu")
        existing: int = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
        jax.config.update("jax_num_cpu_devices", max(count, existing))
    found = jax.devices("cpu")
    if len(found) < count:
        raise ConfigError(
            f"target {name} needs {count} fake CPU devices, found {len(found)}. JAX creates its devices once, at its "
            f"first use. Start a new process: spmdkit plan CONFIG --target {name}."
        )
    return tuple(found[:count])


def _tpu_devices(target: Target) -> tuple[Any, ...]:
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            f"target {target.name} needs the TPU compiler (package libtpu), which is not installed. It runs on any "
            "x86 machine and needs no TPU. Install the extra: pip install 'spmdkit[tpu]'. Without it: --target "
            "gpu:h100:8, cpu:8 or here."
        )
    os.environ.update(_TPU_ENVIRONMENT | os.environ)
    if not compat.backends_initialized():
        jax.config.update("jax_platforms", "cpu")
    from jax.experimental import topologies

    options: dict[str, Any] = {"wrap": [*target.rings, False][:3]}  # libtpu's default has lines only
    if target.num_slices > 1:
        options["num_slices"] = target.num_slices
    if target.topology in ((1, 1), (2, 4)):
        # Hosts of v5e and v6e with one or eight chips; the default is four.
        options["chips_per_host_bounds"] = [*target.topology, 1]
    name = f"{'tpu7x' if target.chip.name == '7x' else target.chip.name}:{'x'.join(map(str, target.topology))}"
    try:
        devices = topologies.get_topology_desc(name, platform="tpu", **options).devices
        if target.chip.devices_per_chip == 1:  # a v4 chip is one device only on a real v4
            devices = [d for d in devices if not getattr(d, "core_on_chip", 0)]
        problem = "" if len(devices) == target.num_devices else f"it has {len(devices)} devices"
    except Exception as error:  # noqa: BLE001 - any error of libtpu
        problem = str(error).splitlines()[0]
    if problem:
        raise ConfigError(
            f"target {target.name}: libtpu {metadata.version('libtpu')} does not know the topology {name} of "
            f"{target.num_devices} devices ({problem}). It has to match jax {jax.__version__}. Install the pair that "
            "is tested: pip install 'spmdkit[tpu]'."
        )
    return tuple(devices)
