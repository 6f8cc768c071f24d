"""The predicted time: its instructions, its links, its rates, against numbers worked out by hand."""

import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from spmdkit.errors import ConfigError
from spmdkit.mesh.chips import CHIPS
from spmdkit.plan.collectives_bill import Bill
from spmdkit.plan.command import choose_target, make_plan
from spmdkit.plan.hlo.text import parse
from spmdkit.plan.machine.calibrate import calibrate, with_measured
from spmdkit.plan.machine.links import LinkPath, hops, link_path
from spmdkit.plan.machine.target import parse_target, target_of
from spmdkit.plan.step_time import predict_time
from tests.support.plan_files import config


def target(chip="v5p"):
    return replace(target_of(jax.devices()[:1]), chip=CHIPS[chip])


def predicted(fn, *shapes):
    arguments = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    module = parse(jax.jit(fn).lower(*arguments).compile().as_text())
    return predict_time(target(), module, Bill((), {}), jax.devices()[:1])


def test_a_large_product_takes_its_flops_or_bytes():
    n, chip = 1024, CHIPS["v5p"]
    time, highest = (
        predicted(lambda x, y, p=precision: jnp.matmul(x, y, precision=p), (n, n), (n, n))
        for precision in (None, "highest")
    )
    assert highest.seconds["arithmetic"] == pytest.approx(6 * 2 * n**3 / (chip.peak("float32") * 0.75))
    assert time.hlo_flops == 2 * n**3
    assert time.seconds["arithmetic"] + time.seconds["memory"] == pytest.approx(
        max(2 * n**3 / (chip.peak("float32") * 0.75), 3 * 4 * n * n / (chip.memory_bytes_per_s * 0.85))
    )


FLOAT8 = """HloModule product, is_scheduled=true

ENTRY %main (x: f8e4m3fn[4096,4096], y: f8e5m2[4096,4096]) -> bf16[4096,4096] {
  %x = f8e4m3fn[4096,4096] parameter(0)
  %y = f8e5m2[4096,4096] parameter(1)
  ROOT %z = bf16[4096,4096] dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}, operand_precision={highest,highest}
}
"""  # noqa: E501


@pytest.mark.parametrize(("name", "peak"), [("b200", 4500e12), ("l4", 242e12), ("a100-80", 312e12)])
def test_float8_products_take_one_pass(name, peak):
    time = predict_time(target(name), parse(FLOAT8), Bill((), {}), jax.devices()[:1])
    assert time.seconds["arithmetic"] == pytest.approx(2 * 4096**3 / (peak * CHIPS[name].efficiency.matmul))


KERNEL = """HloModule kernel, is_scheduled=true

ENTRY %main (x: s8[8], q: bf16[64,128]) -> bf16[64,128] {
  %x = s8[8]{0} parameter(0)
  %q = bf16[64,128]{1,0} parameter(1)
  ROOT %attend = bf16[64,128]{1,0} custom-call(%x, %q), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
{\\"block_q\\": 512}"
}}, metadata={op_name="jit(f)/pallas_call" stack_frame_id=3}, backend_config={"custom_call_config":{"body":"TUz","cost_estimate":{"flops":"459000000000","bytes_accessed":"305"}}}
}
"""  # noqa: E501


def test_a_kernel_costs_what_it_declares():
    """0.459 TFLOP in bfloat16, at 459 TFLOP/s of which a kernel reaches half: 2 ms. The text goes on over
    several lines."""
    time = predict_time(target(), parse(KERNEL), Bill((), {}), jax.devices()[:1])
    assert time.hlo_flops == 459e9
    assert time.seconds["arithmetic"] == pytest.approx(1e-3 / 0.5)


UPDATES = """HloModule updates, is_scheduled=true

%same (p: f32[16,256]) -> f32[16,256] {
  %p = f32[16,256]{1,0} parameter(0)
  ROOT %b = f32[16,256]{1,0} bitcast(%p)
}

%fused (p0: f32[16,256], p1: f32[16,256], p2: f32[1,256], p3: s32[]) -> (f32[16,256], f32[16,256], f32[1,256]) {
  %p0 = f32[16,256]{1,0} parameter(0)
  %p1 = f32[16,256]{1,0} parameter(1)
  %p2 = f32[1,256]{1,0} parameter(2)
  %p3 = s32[] parameter(3)
  %zero = s32[] constant(0)
  %form = f32[16,256]{1,0} fusion(%p1), kind=kLoop, calls=%same
  %double = f32[1,256]{1,0} add(%p2, %p2)
  %one = f32[16,256]{1,0} dynamic-update-slice(%p0, %p2, %p3, %zero)
  %two = f32[16,256]{1,0} dynamic-update-slice(%form, %double, %p3, %zero)
  ROOT %all = (f32[16,256]{1,0}, f32[16,256]{1,0}, f32[1,256]{1,0}) tuple(%one, %two, %double)
}

ENTRY %main (a: f32[16,256], b: f32[16,256], c: f32[1,256], i: s32[]) -> (f32[16,256], f32[16,256], f32[1,256]) {
  %a = f32[16,256]{1,0} parameter(0)
  %b = f32[16,256]{1,0} parameter(1)
  %c = f32[1,256]{1,0} parameter(2)
  %i = s32[] parameter(3)
  ROOT %f = (f32[16,256]{1,0}, f32[16,256]{1,0}, f32[1,256]{1,0}) fusion(%a, %b, %c, %i), kind=kLoop, calls=%fused
}
"""


def test_several_updates_in_place_cost_the_updates():
    """Written: two updates of 1 KiB and their source. Read: what is updated, the source, the position."""
    time = predict_time(target("cpu"), parse(UPDATES), Bill((), {}), jax.devices()[:1])
    assert time.memory_bytes == 3 * 1024 + 3 * 1024 + 4


def test_a_scan_reads_slices_of_its_stack():
    def layers(x, w):
        return jax.lax.scan(lambda c, wl: (jnp.tanh(c @ wl), None), x, w)[0]

    one, four = (predicted(layers, (256, 256), (n, 256, 256)) for n in (1, 4))
    assert four.hlo_flops == 4 * 2 * 256**3
    assert four.memory_bytes < 7 * one.memory_bytes  # reading all of the stack each time would be over 8 times


def test_a_convolution_counts_what_meets_the_input():
    conv = lambda x, w: jax.lax.conv_general_dilated(x, w, (2, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    assert predicted(conv, (2, 5, 5, 4), (3, 3, 4, 6)).hlo_flops == 2 * 2 * 6 * 4 * 7 * 13


def test_links_inside_and_across_hosts():
    hosts, devices = parse_target("gpu:h100:2x8"), range(16)
    inside, across = link_path(hosts, devices, range(8)), link_path(hosts, devices, range(16))
    assert (inside.link, inside.bytes_per_s, inside.crosses) == ("nvlink", 450e9, False)
    assert (across.link, across.bytes_per_s, across.crosses) == ("network", 400e9, True)
    assert link_path(hosts, devices, [0, 8]).bytes_per_s == 50e9


def chip(x, y, z, slice_index=0):
    return SimpleNamespace(coords=(x, y, z), slice_index=slice_index)


def test_links_of_a_torus():
    one, two = parse_target("tpu:v5p:4x4x4"), parse_target("tpu:v5p:4x4x4*2")
    devices = [chip(x, y, z) for z in range(4) for y in range(4) for x in range(4)]
    for num, links in ((4, 2), (2, 1), (16, 4), (64, 6)):  # x, a ring of four; half of it, a line; x and y; all
        assert link_path(one, devices, range(num)).bytes_per_s == links * 90e9
    crossing = link_path(two, [chip(0, 0, 0), chip(0, 0, 0, 1)], range(2))
    assert (crossing.link, crossing.bytes_per_s, crossing.crosses) == ("dcn", 6.25e9, True)


def test_a_collective_takes_its_bytes_and_its_hops():
    assert (hops("all_reduce", 8), hops("all_gather", 8), hops("collective_permute", 8)) == (8, 4, 1)
    assert LinkPath("ici", 1e9, 0.5, 1e-6).seconds(1e9, "all_gather", 8, runs=3) == pytest.approx(2 + 3 * 4e-6)


def test_measured_rates_are_stored_and_used(tmp_path, monkeypatch):
    file = tmp_path / "rates.json"
    monkeypatch.setenv("SPMDKIT_RATES", str(file))
    before = make_plan(config())
    monkeypatch.setattr("spmdkit.plan.machine.calibrate._seconds", lambda run: 0.25)
    rates = calibrate(target_of(jax.devices()))
    assert json.loads(file.read_text())["cpu 8"] == rates
    assert rates["flops_per_s"]["float32"] == 2 * 512**3 * 8 / 0.25
    measured, call_s = with_measured(choose_target(config(), None))
    assert measured.calibrated == rates["date"]
    assert (measured.chip.peak("float32"), call_s) == (rates["flops_per_s"]["float32"], 0.0025)
    after = make_plan(config())
    assert after["time"]["calibrated"] == rates["date"] and before["time"]["calibrated"] is None
    assert after["predicted_step_s"] > before["predicted_step_s"]  # a quarter of a second for everything is slow
    half = with_measured(target_of(jax.devices()[:4]))[0]
    assert half.chip.peak("float32") == 2 * measured.chip.peak("float32")  # four devices share what eight shared


def test_unreadable_rates_are_refused(tmp_path, monkeypatch):
    file = tmp_path / "rates.json"
    file.write_text("{")
    monkeypatch.setenv("SPMDKIT_RATES", str(file))
    with pytest.raises(ConfigError, match=r"rates.json cannot be read.*Remove it and measure again"):
        make_plan(config())
