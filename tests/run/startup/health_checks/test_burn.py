"""The odd one is named: by its bits, its rate, its links; and nobody where all are well."""

import jax
import numpy as np
import pytest

from spmdkit.mesh.mesh import make_mesh, resolve
from spmdkit.run.startup.health_checks import bandwidths, judge_burn_in, links
from spmdkit.run.startup.health_checks import burn_in_devices as burn_in_cluster
from spmdkit.run.startup.health_checks.bandwidth import _rounds


def seen(device, digests=("aa",), gflops=100.0, host=None, platform="gpu", kind="H200"):
    host = host or f"node{device // 4}"
    return {"device": device, "process": device // 4, "host": host, "platform": platform, "kind": kind, "digests": list(digests), "gflops": gflops}  # fmt: skip  # noqa: E501


def ring(num, slow=None):
    return [{"from": i, "to": (i + 1) % num, "gb_per_s": 1.0 if i == slow else 50.0} for i in range(num)]


def test_healthy_devices_compute_the_same_bits():
    devices = jax.devices()
    found = burn_in_cluster(devices, 0, 0.05)
    assert [one["device"] for one in found] == list(range(8)) and all(one["chains"] >= 2 for one in found)
    assert len({tuple(one["digests"]) for one in found}) == 1 and len(found[0]["digests"]) == 1
    verdict = judge_burn_in(found, links(devices, 0))
    assert verdict.wrong == [] and verdict.slow == []


@pytest.mark.parametrize("bit", [0, 22])
def test_device_with_one_flipped_bit_is_named(monkeypatch, bit):
    import spmdkit.run.startup.health_checks.burn_in as module

    right = module.operands

    def operands(size, device):
        a, b = right(size, device)
        if device.id == 5:
            a = a.copy()
            a.view(np.uint32)[17, 3] ^= np.uint32(1 << bit)
        return a, b

    monkeypatch.setattr(module, "operands", operands)
    found = module.burn_in_devices(jax.devices(), 0, 0.05)
    (said,) = judge_burn_in(found, []).wrong
    assert f"device 5 (process 0 on {found[0]['host']}) computes other bits than the 7 others of its kind" in said


def test_unstable_device_and_ties_are_named():
    (said,) = judge_burn_in([seen(0), seen(1, ["aa", "ab"]), seen(2)], []).wrong
    assert "device 1 (process 0 on node0) computes other bits from time to time: 2 results" in said
    (said,) = judge_burn_in([seen(0), seen(1, ["bb"])], []).wrong
    assert "there is no majority: device 0" in said and "device 1" in said
    assert judge_burn_in([seen(0), seen(1, ["bb"], kind="A100")], []).wrong == []


def test_slow_devices_and_links_are_reported():
    verdict = judge_burn_in([seen(i, gflops=60.0 if i == 6 else 100.0) for i in range(8)], ring(8, slow=2))
    assert verdict.wrong == []
    assert any("device 6 (process 1 on node1) is slow: 60 GFLOP/s, the median is 100" in line for line in verdict.slow)
    assert any("link between device 2 (process 0 on node0) and device 3" in line for line in verdict.slow)
    assert len(verdict.slow) == 2
    shared = [seen(i, gflops=10.0 if i == 1 else 100.0, platform="cpu", host="a") for i in range(4)]
    assert judge_burn_in(shared, ring(4, slow=1)).slow == [], "devices that are one CPU share its cores"


@pytest.mark.parametrize("num", range(1, 10))
def test_every_link_is_measured_once(num):
    pairs = _rounds(num)
    assert sorted(map(sorted, pairs)) == sorted(
        map(sorted, {frozenset((i, (i + 1) % num)) for i in range(num) if num > 1})
    )


def test_bandwidth_of_each_axis_is_measured():
    found = bandwidths(make_mesh(resolve({"data": 4, "tensor": 2}, 8), jax.devices()))
    assert set(found) == {"data", "tensor"} and all(rate > 0 for rate in found.values())
