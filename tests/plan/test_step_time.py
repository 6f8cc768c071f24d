"""The walk through the schedule: a product takes 2 ms, a gather over two devices 2 ms; everything else is free."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from spmdkit.mesh.chips import CHIPS, Efficiency, Link
from spmdkit.plan.collectives_bill import Bill, read_bill
from spmdkit.plan.hlo.text import parse
from spmdkit.plan.kernels import kernel_flops
from spmdkit.plan.machine.links import link_path_of
from spmdkit.plan.machine.target import parse_target
from spmdkit.plan.step_time import CYCLES, predict_time
from tests.plan.known_traffic import SIZES
from tests.plan.test_hlo import saved

INSIDE, ACROSS = "{{0,1},{2,3},{4,5},{6,7}}", "{{0,4},{1,5},{2,6},{3,7}}"
W, SHARD = "f32[1000,1000]{1,0}", "f32[500,1000]{1,0}"
MS = 1e-3


def machine(text="gpu:h100:2x4", compiler="gpu", **changes):
    target = parse_target(text)
    rates = {"flops_per_s": {"float32": 1e12}, "memory_bytes_per_s": 1e18, "launch_s": 0.0}
    links = {"inner": Link("nvlink", 1e9, 0.0), "outer": Link("network", 1e9, 0.0), "host_link": Link("host", 1e9, 0.0)}
    chip = replace(target.chip, **rates, **links, efficiency=Efficiency(1, 1, 1, 1), **changes)
    return replace(target, chip=chip, compiler=compiler, devices=())


def start(name, groups=INSIDE, operand="s"):
    return f"%{name} = ({SHARD}, {W}) all-gather-start(%{operand}), replica_groups={groups}, dimensions={{0}}"


def done(name):
    return f"%{name}.done = {W} all-gather-done(%{name})"


def gather(name, groups=INSIDE):
    return f"%{name} = {W} all-gather(%s), replica_groups={groups}, dimensions={{0}}"


def dot(name, operand="w"):
    return f"%{name} = {W} dot(%{operand}, %w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"


def loop(trips):
    config = f'backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'
    return f"%loop = (s32[], {SHARD}, {W}) while(%carry), condition=%condition, body=%body, {config}"


def program(*lines, body=(), more=""):
    """Returns a module: `lines` in its entry, after parameters s and w; `body` in a loop."""
    carry = f"(s32[], {SHARD}, {W})"
    entry = [f"%s = {SHARD} parameter(0)", f"%w = {W} parameter(1)", "%zero = s32[] constant(0)"]
    entry += [f"%carry = {carry} tuple(%zero, %s, %w)", *lines, f"ROOT %end = {W} bitcast(%w)"]
    inside = [f"%p = {carry} parameter(0)", f"%s = {SHARD} get-tuple-element(%p), index=1"]
    inside += [f"%w = {W} get-tuple-element(%p), index=2", *body, f"ROOT %next = {carry} tuple(%p, %s, %w)"]
    join = lambda rows: "\n  ".join(rows)
    return f"""HloModule m, is_scheduled=true, num_partitions=8
{more}
%condition (p: s32[]) -> pred[] {{
  %p = {carry} parameter(0)
  ROOT %less = pred[] constant(true)
}}

%body (p: s32[]) -> s32[] {{
  {join(inside)}
}}

ENTRY %main (s: f32[500,1000], w: f32[1000,1000]) -> f32[1000,1000] {{
  {join(entry)}
}}
"""


def timed(text, target=None, of=lambda bill: bill):
    module = parse(text)
    bill = of(read_bill(module, {"data": 2, "fsdp": 2, "tensor": 2}))
    time = predict_time(target or machine(), module, bill, range(8))
    assert time.step_s == pytest.approx(sum(time.parts().values()))
    return round(time.step_s / MS, 3), round(sum(link.exposed_s for link in time.links.values()) / MS, 3)


ASYNC = f"""
%wrapped (a: f32[500,1000]) -> f32[1000,1000] {{
  %a = {SHARD} parameter(0)
  ROOT %inner = {W} all-gather(%a), replica_groups={INSIDE}, dimensions={{0}}
}}
"""
WRAPPED = (
    f"%a.s = (({SHARD}), {W}) async-start(%s), calls=%wrapped",
    dot("d"),
    f"%a.u = (({SHARD}), {W}) async-update(%a.s), calls=%wrapped",
    f"%a.d = {W} async-done(%a.u), calls=%wrapped",
)


@pytest.mark.parametrize(
    ("lines", "body", "step_ms", "exposed_ms"),
    [
        pytest.param([start("a"), dot("d"), done("a")], (), 2, 0, id="a product between start and done"),
        pytest.param([dot("d"), start("a"), done("a")], (), 4, 2, id="the product before the start"),
        pytest.param([start("a"), done("a"), dot("d")], (), 4, 2, id="the product after the done"),
        pytest.param(
            [start("a"), dot("d"), done("a"), start("b"), done("b"), dot("e")], (), 6, 2, id="one of two overlaps"
        ),
        pytest.param([start("a"), start("b"), dot("d"), done("a"), done("b")], (), 4, 2, id="two share a link"),
        pytest.param([start("a"), start("b", ACROSS), dot("d"), done("a"), done("b")], (), 2, 0, id="two links"),
        pytest.param([start("a"), gather("b"), done("a"), dot("d")], (), 6, 4, id="a blocking one waits for its link"),
        pytest.param([gather("a"), dot("d")], (), 4, 2, id="blocking"),
        pytest.param([start("a"), dot("d")], (), 2, 0, id="never awaited: the end waits"),
        pytest.param(WRAPPED, (), 2, 0, id="wrapped, with an update"),
        pytest.param([dot("first"), loop(3)], [start("a"), dot("d"), done("a")], 8, 0, id="a loop, its first peeled"),
        pytest.param([loop(3)], [start("a"), done("a"), dot("d")], 12, 6, id="exposed in each iteration"),
        pytest.param([start("o", ACROSS), loop(3), done("o")], [start("a"), dot("d"), done("a")], 6, 0, id="nested"),
        pytest.param([start("o"), loop(3), done("o")], [start("a"), dot("d"), done("a")], 8, 2, id="nested, one link"),
        pytest.param([start("o"), loop(3), done("o")], [dot("d")], 6, 0, id="beside a loop"),
        pytest.param([start(f"a{n}") for n in range(2000)], (), 4000, 4000, id="a long queue"),
    ],
)
def test_a_collective_overlaps_between_start_and_done_alone(lines, body, step_ms, exposed_ms):
    assert timed(program(*lines, body=body, more=ASYNC)) == (step_ms, exposed_ms)


def test_fake_devices_of_a_gpu_start_when_operands_are_ready():
    text = program(dot("d"), gather("a"), dot("e"), dot("last", "a"))
    substitute = machine(compiler="cpu")
    of = lambda cause: lambda bill: Bill(tuple(replace(c, cause=cause) for c in bill.collectives), bill.sizes)
    assert timed(text, substitute, of("parameter gather")) == (6, 0)
    assert timed(text, substitute, of("activation")) == (8, 2)


SPREAD = """
%{name} (p: f32[500,1000]) -> f32[1000,1000] {{
  %p = f32[500,1000]{{1,0}} parameter(0)
  %g.{name} = f32[1000,1000]{{1,0}} all-gather(%p), channel_id=7, replica_groups={groups}, dimensions={{0}}{chain}, backend_config={{"async_collective_fusion_config":{{"flag_start":"2"}}}}
  ROOT %c = f32[1000,1000]{{1,0}} custom-call(%g.{name}), custom_call_target="{target}"
}}
"""  # noqa: E501


def test_a_spread_collective_takes_until_its_last_fusion():
    targets = {"first": "AsyncCollectiveStart", "middle": "Other", "last": "AsyncCollectiveDone"}
    more = "".join(SPREAD.format(name=n, target=t, groups=INSIDE, chain="") for n, t in targets.items())
    part = lambda name, config="": f"%f.{name} = {W} fusion(%s), kind=kCustom, calls=%{name}{config}"
    cycles = ', backend_config={"window_config":{"estimated_cycles":"1000000"}}'
    tpu = machine(clock_hz=1e9 * CYCLES)
    text = program(part("first"), part("middle", cycles), part("last"), more=more)
    assert timed(text, tpu) == (2, 1), "1 ms of cycles in the fusion between the two"
    text = program(part("first"), part("last"), part("middle", cycles), more=more)
    assert timed(text, tpu) == (3, 2)


def test_the_largest_number_of_cycles_is_no_estimate():
    line = dot("d") + f', backend_config={{"estimated_cycles":"{2**63 - 1}"}}'
    assert timed(program(line), machine(clock_hz=1e9)) == timed(program(dot("d")), machine(clock_hz=1e9))


def test_two_chains_of_one_channel_end_separately():
    chain = lambda n: f', frontend_attributes={{chain_id="{n}"}}'
    targets = {"first": "AsyncCollectiveStart", "last": "AsyncCollectiveDone"}
    more = "".join(
        SPREAD.format(name=f"{n}{c}", target=t, groups=INSIDE, chain=chain(c)) for n, t in targets.items() for c in "12"
    )
    part = lambda name: f"%f.{name} = {W} fusion(%s), kind=kCustom, calls=%{name}"
    text = program(part("first1"), part("first2"), part("last1"), dot("d"), part("last2"), more=more)
    assert timed(text, machine(clock_hz=1e9)) == (4, 2), "the product overlaps with the second chain"


def test_cycles_of_the_compiler_count_where_it_reports_them():
    line = dot("d") + ', backend_config={"window_config":{"estimated_cycles":"3000000"}}'
    assert timed(program(line), machine(clock_hz=1e9 * CYCLES)) == (3, 0)
    assert timed(program(line)) == (2, 0)


def test_copies_from_the_host_run_beside_the_instructions():
    host = "f32[1000,1000]{1,0:S(5)}"
    copy = f"%c = ({W}, {host}, u32[]) copy-start(%h)", f"%c.done = {W} copy-done(%c)"
    put = f'%h = {host} custom-call(), custom_call_target="AllocateBuffer"'
    assert timed(program(put, copy[0], dot("d"), copy[1])) == (4, 0)
    assert timed(program(put, dot("d"), *copy, dot("e"))) == (8, 0)
    module = parse(program(put, *copy))
    time = predict_time(machine(), module, Bill((), {}), range(8), host_bytes=10**9)
    assert time.seconds["host"] == pytest.approx(4 * MS), "the copies of the text, not the state's bytes"


def test_the_longest_branch_counts():
    more = "".join(
        f"%{n} (w: f32[1000,1000]) -> f32[1000,1000] {{\n  %w = {W} parameter(0)\n  {line}\n}}\n"
        for n, line in (("long", dot("x")), ("short", f"ROOT %y = {W} bitcast(%w)"))
    )
    branch = f"%b = {W} conditional(%zero, %w, %w), branch_computations={{%short, %long}}"
    assert timed(program(branch, more=more)) == (2, 0)


KERNELS = {
    "cudnn causal": (
        2 * 2 * 8 * 1024 * 16 * 1024 * 64 / 2,
        "bf16[8,1024,16,64] bf16[8,1024,16,64] bf16[8,1024,16,64]",
        'custom_call_target="__cudnn$fmhaSoftmax", backend_config={"mask_type":"CAUSAL"}',
    ),
    "cudnn backward": (
        5 * 2 * 8 * 1024 * 16 * 2048 * 64,
        "bf16[8,1024,16,64] bf16[8,2048,4,64] bf16[8,2048,4,64]",
        'custom_call_target="__cudnn$fmhaSoftmaxBackward", backend_config={"mask_type":"NO_MASK"}',
    ),
    "cublas": (
        2 * 64 * 32 * 128,
        "bf16[64,128] bf16[128,32]",
        'custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}',  # noqa: E501
    ),
    "cublas float8": (
        2 * 64 * 32 * 128,
        "f8e4m3fn[64,128] f8e5m2[128,32] f32[]",
        'custom_call_target="__cublas$lt$matmul$f8", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}',  # noqa: E501
    ),
    "splash_mha_dkv": (
        4 * 2 * 8 * 16 * 1024 * 1024 * 128 / 2,
        "bf16[8,16,1024,128] bf16[8,16,1024,128] bf16[8,16,1024,128]",
        'custom_call_target="tpu_custom_call"',
    ),
    "other": (0, "bf16[64,128]", 'custom_call_target="xla_ffi_python_gpu_callback"'),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_have_the_flops_of_their_arrays(name):
    flops, arrays, attributes = KERNELS[name]
    names = [f"%a.{n}" for n, _ in enumerate(arrays.split())]
    lines = [f"{a} = {shape} parameter({n})" for n, (a, shape) in enumerate(zip(names, arrays.split(), strict=True))]
    result = "bf16[64,32]" if "cublas" in name else "bf16[8]"
    kernel = f"ROOT %{name.replace(' ', '_')} = {result} custom-call({', '.join(names)}), {attributes}"
    module = parse("HloModule m\n\nENTRY %main (a: s32[]) -> s32[] {\n  " + "\n  ".join([*lines, kernel]) + "\n}\n")
    i = module.entry.root
    assert kernel_flops(i, module.operands(i)) == ({(arrays.split("[")[0], 1): flops} if flops else {})


def test_chips_of_the_tpu_compiler_have_a_clock():
    assert all((chip.clock_hz > 0) == (chip.kind == "tpu") for chip in CHIPS.values())


@pytest.mark.parametrize("name", ["accumulation", "conditional", "nested_scans", "ring_in_a_scan", "zero_2"])
def test_saved_tpu_texts_are_walked_to_their_end(name):
    module = saved(name)
    v5p = parse_target("tpu:v5p:2x2x2")
    devices = [SimpleNamespace(coords=(n % 2, n // 2 % 2, n // 4), slice_index=0) for n in range(8)]
    time = predict_time(v5p, module, read_bill(module, SIZES), devices)
    assert time.guessed == 0 and time.step_s == pytest.approx(sum(time.parts().values()))
    hidden_s = sum(link.busy_s - link.exposed_s for link in time.links.values())
    if name in ("nested_scans", "ring_in_a_scan"):  # instructions run between start and done of their permutations
        assert hidden_s > 0
    else:
        assert hidden_s == pytest.approx(0, abs=1e-12)


def test_opposite_directions_of_a_ring_are_separate_links():
    target = parse_target("tpu:v5p:4x4x4")
    devices = [SimpleNamespace(coords=(x, y, z), slice_index=0) for x, y, z in np.ndindex(4, 4, 4)]
    path = lambda op, *groups: link_path_of(target, devices, SimpleNamespace(op=op, groups=groups))
    forth, back = (path("collective_permute", *pairs) for pairs in ([(0, 1), (1, 2), (3, 0)], [(1, 0), (0, 3)]))
    assert (forth.channels, back.channels) == (("ici 2+",), ("ici 2-",))
    assert path("all_gather", (0, 1, 2, 3)).channels == ("ici 2+", "ici 2-")


def test_a_line_has_no_shorter_way_around():
    """The ends of the first dim of a slice of 4x4 (coordinates have three numbers on every TPU)."""
    devices = [SimpleNamespace(coords=(x, y, 0), slice_index=0) for x, y in np.ndindex(4, 4)]
    ends = SimpleNamespace(op="collective_permute", groups=[(12, 0)])
    assert link_path_of(parse_target("tpu:v5e:4x4"), devices, ends).channels == ("ici 0-",)
