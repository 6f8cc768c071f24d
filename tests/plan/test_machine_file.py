"""A machine in YAML is a target: its figures are those of the file, and a wrong file is one message."""

import dataclasses
import json

import pytest

from spmdkit.errors import ConfigError
from spmdkit.mesh.chips import CHIPS
from spmdkit.plan.command import make_plan
from spmdkit.plan.machine.target import parse_target
from spmdkit.plan.sweep import family_target
from tests.support.plan_files import config


def described(chip):
    """Returns the keys of a file with every figure of a chip."""
    links = {"inner": chip.inner, "outer": chip.outer, "host": chip.host_link}
    figures = {
        "flops_per_s": dict(chip.flops_per_s),
        "links": {name: {"bytes_per_s": x.bytes_per_s, "latency_s": x.latency_s} for name, x in links.items()},
        "efficiency": dataclasses.asdict(chip.efficiency),
    }
    plain = {name: getattr(chip, name) for name in ("memory_bytes", "memory_bytes_per_s", "reserved_bytes")}
    return json.dumps({"hosts": 1, "devices_per_host": 8} | figures | plain)[1:-1]


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Writes cluster.yaml, which is in the current folder."""
    monkeypatch.chdir(tmp_path)
    return (tmp_path / "cluster.yaml").write_text


def test_a_described_machine_plans_as_the_known_one(file):
    h100 = CHIPS["h100"]
    file(f'{{"chip": "h200", {described(h100)}}}')
    own = parse_target("cluster.yaml").chip
    assert dataclasses.replace(own, name=h100.name, device_kinds=h100.device_kinds) == h100
    file(f'{{"chip": "h100", {described(h100)}}}')
    plans = [make_plan(config(), target) for target in ("cluster.yaml", "gpu:h100:8")]
    assert [plan.pop("target") for plan in plans] == ["cluster.yaml", "gpu:h100:8"]
    assert plans[0] == plans[1]


def test_figures_of_the_file_replace_those_of_the_chip(file):
    file("chip: h100\nhosts: 2\nlinks: {inner: {bytes_per_s: 64e9}}\nmemory_bytes: 94e9\n")
    two, four = parse_target("cluster.yaml"), parse_target("cluster.yaml:4")
    assert (two.num_devices, two.num_slices, four.num_devices, four.name) == (16, 2, 32, "cluster.yaml:4")
    assert two.chip.inner == dataclasses.replace(CHIPS["h100"].inner, bytes_per_s=64e9)
    assert two.chip.memory_bytes == 94_000_000_000 and two.chip.outer == CHIPS["h100"].outer
    assert family_target("cluster.yaml", 24) == "cluster.yaml:3"
    file("chip: v5p\ntopology: 2x2x2\nslices: 2\nflops_per_s: {bfloat16: 4e14}\n")
    slices = parse_target("cluster.yaml")
    assert (slices.num_devices, slices.num_slices, slices.topology) == (16, 2, (2, 2, 2))
    assert slices.chip.peak("bfloat16") == 4e14 and slices.compiler == "tpu"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hosts: 2\n", r"cluster.yaml: chip: is missing: .* Add chip: h100"),
        ("chip: h10\n", r"cluster.yaml:1: chip: is 'h10', .* Did you mean 'h100'"),
        ("chip: h100\nhost: 2\n", r"cluster.yaml:2: host: unknown key"),
        ("chip: h100\nmemory_bytes: -1\n", r"cluster.yaml:2: memory_bytes: should be greater than 0, found -1"),
        ("chip: v5p\nhosts: 2\n", r"cluster.yaml:2: hosts: has no effect for the TPU v5p\. Try topology"),
        ("chip: v5p\n", r"topology: is missing: .* Add topology: 4x4x4"),
        ("chip: v5p\ntopology: 3x3x3\n", r"v5p has no slice of shape '3x3x3'"),
        ("- 8\n", r"cluster.yaml:1: needs a mapping of keys"),
    ],
)
def test_a_wrong_file_is_one_message(text, message, file):
    file(text)
    with pytest.raises(ConfigError, match=message):
        parse_target("cluster.yaml")


def test_a_missing_file_is_named(file):
    with pytest.raises(ConfigError, match=r"no such file other.yaml\. It describes a machine"):
        parse_target("other.yaml")
