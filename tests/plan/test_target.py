"""Targets: what a name means, and what is said to one that means nothing."""

import jax
import pytest

from spmdkit.errors import ConfigError
from spmdkit.mesh.chips import CHIPS, chip_of_device_kind
from spmdkit.plan.machine.gpu_devices import check_version, description
from spmdkit.plan.machine.target import open_target, parse_target, target_of


@pytest.mark.parametrize(
    ("text", "num_devices", "parts"),
    [
        ("tpu:v5p:8x8x16", 1024, 1),
        ("tpu:v5p:4x4x4*2", 128, 2),
        ("tpu:v5e:16x16", 256, 1),
        ("tpu:v6e:2x4", 8, 1),
        ("tpu:7x:4x4x4", 128, 1),
        ("gpu:h100:64", 64, 8),
        ("gpu:h100:4", 4, 1),
        ("gpu:h200:2x4", 8, 2),
        ("cpu:8", 8, 1),
        ("v5p-256", 128, 1),
        ("tpu:v5p-128*2", 128, 2),
        ("v6e-256", 256, 1),
        ("v5litepod-256", 256, 1),
        ("tpu7x-128", 128, 1),
        ("a3-megagpu-8g", 8, 1),
        ("p5.48xlarge:4", 32, 4),
        ("dgx-h100:2", 16, 2),
        ("dgx-gb200", 72, 1),
        ("gpu:gb200:36", 36, 1),
        ("gpu:a100-80:16", 16, 2),
    ],
)
def test_devices_and_parts_of_a_target(text, num_devices, parts):
    target = parse_target(text)
    assert (target.num_devices, target.num_slices) == (num_devices, parts)


@pytest.mark.parametrize(
    ("text", "rings"),
    [
        ("tpu:v5e:16x16", (True, True)),
        ("tpu:v6e:8x16", (False, True)),
        ("tpu:v5e:8x8", (False, False)),
        ("tpu:v5p:4x4x8", (True, True, True)),
        ("tpu:v5p:2x4x4", (False, False, False)),
        ("tpu:7x:4x8x8", (True, True, True)),
    ],
)
def test_dims_of_a_slice_that_are_rings(text, rings):
    assert parse_target(text).rings == rings


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tup:v5p:2x2x1", "Did you mean 'tpu'?"),
        ("tpu:v5q:2x2x1", "Known: v4, v5e, v5p, v6e, 7x."),
        ("tpu:v5p:3x3x3", "multiples of 4 up to 16x16x24"),
        ("tpu:v5p:4x4", "v5p has no slice of shape '4x4'"),
        ("tpu:v5e:17x17", "one of 1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16"),
        ("tpu:v5p:4x4x4*0", "joins up to 64"),
        ("tpu:v5p:16x16x28", "Try --target tpu:v5p:16x16x24"),
        ("gpu:h300:8", "Did you mean 'h200'?"),
        ("gpu:a100:8", "Did you mean 'a100-40'"),
        ("gpu:h100:12", "Every host must be full. Try gpu:h100:8"),
        ("gpu:h100:8x", "hosts x GPUs"),
        ("v5p-250", "has 125 chips. The number of v5p-N counts cores, 2 of each chip. Try --target v5p-256"),
        ("v6e-250", "counts chips. Try --target v6e-256"),
        ("tpu:v5p:256", "Try --target v5p-256, the product with 128 chips"),
        ("p5.48xlarge:2x8", "Try --target p5.48xlarge:4"),
        ("cpu:0", "N from 1 to 4096"),
        ("here:2", "no machine"),
        ("", "A target is one of"),
    ],
)
def test_unknown_targets_are_refused_with_known_ones(text, said):
    with pytest.raises(ConfigError) as refused:
        parse_target(text)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_a_product_is_its_slice_or_its_machines():
    v5p, v6e, mega = map(parse_target, ("v5p-256", "v6e-256", "a3-megagpu-8g:2"))
    assert (v5p.name, v5p.topology, v6e.topology) == ("tpu:v5p:4x4x8", (4, 4, 8), (16, 16))
    assert "128 chips" in v5p.notes[0]
    assert parse_target("v5p-2048").topology == (8, 8, 16)
    assert (mega.chip.outer.bytes_per_s, mega.chip.devices_per_host) == (25e9, 8)
    assert parse_target(mega.name) == mega


def test_more_fake_devices_than_the_process_has():
    assert len(jax.devices()) == 8  # made once: the target would else make its own
    with pytest.raises(ConfigError, match=r"needs 64 fake CPU devices, found 8.*Start a new process"):
        open_target(parse_target("gpu:h100:64"))


def test_local_devices_and_chips():
    target = target_of(jax.devices())
    assert (target.num_devices, target.chip.name, target.is_here) == (8, "cpu", True)
    assert 0 < target.memory_limit_bytes < 2**45
    assert CHIPS["7x"].flops_per_s["bfloat16"] == 2307e12 / 2  # of one device
    assert all(0 < chip.limit_bytes <= chip.memory_bytes for chip in CHIPS.values())


def test_every_gpu_has_a_description():
    for chip in (chip for chip in CHIPS.values() if chip.kind == "gpu"):
        text = description(chip)
        assert f'name: "{chip.device_kinds[0]}"' in text and f"device_memory_size: {chip.memory_bytes} " in text
        assert text.count("{") == text.count("}")
        assert chip_of_device_kind(chip.device_kinds[0], "gpu") is chip
    assert chip_of_device_kind("NVIDIA L40S", "gpu") is None


def test_a_gpu_compiler_of_another_version_is_refused(monkeypatch):
    found = {"jax-cuda13-plugin": jax.__version__, "jax-cuda13-pjrt": "0.9.1"}
    monkeypatch.setattr("importlib.metadata.version", found.get)
    with pytest.raises(ConfigError, match=r"jax-cuda13-pjrt 0\.9\.1, and jax is .* pip install jax-cuda13") as e:
        check_version()
    assert e.value.exit_code == 78
    found["jax-cuda13-pjrt"] = f"{jax.__version__.rpartition('.')[0]}.99"
    check_version()


def test_a_missing_compiler_names_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'spmdkit\[tpu\]'"):
        open_target(parse_target("tpu:v5e:2x2"))
