"""Reading compiled texts: saved ones of the TPU compiler, all spellings of groups, all forms of collectives."""

import gzip
from pathlib import Path

import pytest

from spmdkit.mesh.mesh import AXES
from spmdkit.plan.collectives_bill import read_bill
from spmdkit.plan.hlo.groups import replica_groups
from spmdkit.plan.hlo.readers import all_readers
from spmdkit.plan.hlo.text import Instruction, parse
from spmdkit.plan.machine.target import parse_target
from spmdkit.plan.step_time import predict_time
from tests.plan.known_traffic import PROGRAMS, SIZES, W, sent

TEXTS = Path(__file__).with_name("texts")


def saved(name):
    return parse(gzip.decompress((TEXTS / f"{name}.txt.gz").read_bytes()).decode())


@pytest.mark.parametrize("name", ["ring_in_a_scan", "nested_scans", "zero_2", "conditional", "accumulation"])
def test_saved_tpu_texts_have_the_hand_computed_bytes(name):
    assert sent(read_bill(saved(name), SIZES)) == PROGRAMS[name][1]["tpu"]


def test_a_gather_sent_as_an_all_reduce():
    """4096 x 4096 bfloat16 over 64 devices, zeros around each shard: 2 * 63/64 of all of it."""
    (c,) = read_bill(saved("gather_over_a_torus"), {"data": 1, "fsdp": 64}).collectives
    assert (c.op, c.emulated_op, c.axes) == ("all_reduce", "all_gather", ("fsdp",))
    assert c.bytes == 2 * 63 * 4096 * 4096 * 2 // 64


def test_an_all_reduce_sliced_in_its_fusion():
    """4096 rows over 4 devices are padded to 4480 by the compiler, which sends 288 of them on to realign the rest."""
    bill = read_bill(saved("scatter_in_a_fusion"), {"data": 2, "fsdp": 4})
    row = 4096 * 2
    assert [(c.op, c.axes, c.bytes) for c in bill.collectives] == [
        ("reduce_scatter", ("fsdp",), 3 * 4480 * row // 4),
        ("collective_permute", ("fsdp",), 288 * row),
    ]


FORMS = """HloModule forms, is_scheduled=true, num_partitions=8

%wrapped (p: f32[64,128]) -> f32[16,128] {
  %p = f32[64,128]{1,0} parameter(0)
  ROOT %rs = f32[16,128]{1,0} reduce-scatter(%p), replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add
}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (w: f32[64,128]) -> f32[64,128] {
  %w = f32[64,128]{1,0} parameter(0)
  %start = ((f32[64,128]{1,0}), f32[16,128]{1,0}, u32[]) async-start(%w), calls=%wrapped
  %update = ((f32[64,128]{1,0}), f32[16,128]{1,0}, u32[]) async-update(%start), calls=%wrapped
  %done = f32[16,128]{1,0} async-done(%update), calls=%wrapped
  %ag = (f32[16,128]{1,0}, f32[64,128]{1,0}) all-gather-start(%done), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
  %whole = f32[64,128]{1,0} all-gather-done(%ag)
  %ar = f32[64,128]{1,0} all-reduce-start(%whole), replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add
  %sum.1 = f32[64,128]{1,0} all-reduce-done(%ar)
  %self = f32[64,128]{1,0} collective-permute(%sum.1), source_target_pairs={{0,0},{1,1}}
  ROOT %sent = f32[64,128]{1,0} collective-broadcast(%self), replica_groups={{0,1,2,3,4,5,6,7}}, metadata={op_name="(a) b" source_file="x.py" source_line=3}
}
"""  # noqa: E501


def test_split_and_wrapped_collectives_count_once():
    module = parse(FORMS)
    bill = read_bill(module, SIZES)
    assert [(c.op, c.axes, c.bytes, c.is_async) for c in bill.collectives] == [
        ("reduce_scatter", ("fsdp",), 3 * W // 4, True),
        ("all_gather", ("fsdp",), 3 * W // 4, True),
        ("all_reduce", ("data",), W, True),
        ("broadcast", ("data", "fsdp"), W, False),
    ]
    assert bill.collectives[-1].source == "x.py:3"
    links = predict_time(parse_target("cpu:8"), module, bill, range(8)).links
    assert len(links) == 3
    for link in links.values():
        assert link.exposed_s == pytest.approx(link.busy_s), "nothing runs between start and done"


SPELLINGS = {
    "replica_groups={{0,1,2,3},{4,5,6,7}}": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "replica_groups={}": [[0, 1, 2, 3, 4, 5, 6, 7]],
    "replica_groups=[2,4]<=[8]": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "replica_groups=[4,2]<=[2,4]T(1,0)": [[0, 4], [1, 5], [2, 6], [3, 7]],
    "replica_groups=[2,4]<=[2,2,2]T(1,0,2)": [[0, 1, 4, 5], [2, 3, 6, 7]],
    "replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}": [[0, 4], [1, 5], [2, 6], [3, 7]],
    "replica_groups=mesh['a'=2,'b'=4], device_ids=([2,2,2]T(1,0,2)) {'a'}": [[0, 2], [1, 3], [4, 6], [5, 7]],
    "replica_groups=mesh['a'=2,'b'=4] {'a','b'}": [[0, 1, 2, 3, 4, 5, 6, 7]],
    "replica_groups=mesh['a'=8] {'a':(2)2}": [[0, 2], [1, 3], [4, 6], [5, 7]],
}


@pytest.mark.parametrize("text", SPELLINGS)
def test_every_spelling_of_groups_is_read(text):
    instruction = Instruction("x", "all-reduce", (), (), "", f"channel_id=1, {text}, to_apply=%add", "main", 0, True)
    assert sorted(sorted(group) for group in replica_groups(instruction, 8)) == SPELLINGS[text]


def test_an_unknown_spelling_of_groups_is_an_error():
    instruction = Instruction("x", "all-reduce", (), (), "", "replica_groups=@later<0>", "main", 0, True)
    with pytest.raises(ValueError, match="not known"):
        replica_groups(instruction, 8)


def test_sources_and_a_text_without_entry():
    module = saved("nested_scans")
    sources = {c.source for c in read_bill(module, SIZES).collectives}
    assert all(source and source.startswith("/home/user/known_traffic.py:") for source in sources)
    with pytest.raises(ValueError, match="ENTRY"):
        parse("HloModule nothing")


SPARSE_CORE = """HloModule m, num_partitions=4

%gathers (p: bf16[2,8], t: token[]) -> bf16[8,8] {
  %p = bf16[2,8]{1,0} parameter(0)
  %t = token[] parameter(1)
  ROOT %all-gather.1 = bf16[8,8]{1,0} all-gather(%p), replica_groups={{0,1,2,3}}, dimensions={0}
}, execution_thread="sparsecore"

ENTRY %main (x: bf16[2,8]) -> bf16[8,8] {
  %x = bf16[2,8]{1,0} parameter(0)
  %token = token[] custom-call(), custom_call_target="prepare"
  %kernel = bf16[2,8]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{
"xprof_metadata":"{\\"block_q\\": 512}"
}}, metadata={op_name="kernel"}
  %start = ((bf16[2,8]{1,0}, token[]), bf16[8,8]{1,0}) call-start(%kernel, %token), to_apply=%gathers
  ROOT %done = bf16[8,8]{1,0} call-done(%start)
}
"""


def test_a_collective_on_sparse_cores_after_a_kernel():
    sizes = dict.fromkeys(AXES, 1) | {"fsdp": 4}
    (row,) = read_bill(parse(SPARSE_CORE), sizes).collectives
    assert (row.op, row.axes, row.bytes, row.is_async) == ("all_gather", ("fsdp",), 3 / 4 * 8 * 8 * 2, True)


SPREAD = """
%{name} (p: bf16[1,16,64]) -> bf16[1,64,64] {{
  %p = bf16[1,16,64]{{2,1,0}} parameter(0)
  %all-gather.{name} = bf16[1,64,64]{{2,1,0}} all-gather(%p), channel_id=10, replica_groups={{{{0,1,2,3}}}}, dimensions={{1}}, backend_config={{"async_collective_fusion_config":{{"flag_start":"2","flag_end":"8"}}}}
  ROOT %c = bf16[1,64,64]{{2,1,0}} custom-call(%all-gather.{name}), custom_call_target="{target}"
}}
"""  # noqa: E501
BETWEEN_SLICES = """
ENTRY %main (x: bf16[1,16,64], g: f32[5,8,128]) -> f32[5,8,128] {
  %x = bf16[1,16,64]{2,1,0} parameter(0)
  %g = f32[5,8,128]{2,1,0} parameter(1)
  %f.1 = bf16[1,64,64]{2,1,0} fusion(%x), kind=kCustom, calls=%a
  %f.2 = bf16[1,64,64]{2,1,0} fusion(%x), kind=kOutput, calls=%b
  %f.3 = bf16[1,64,64]{2,1,0} fusion(%x), kind=kCustom, calls=%d
  %after-all = token[] after-all()
  %send = (f32[5,8,128]{2,1,0}, u32[], token[]) send(%g, %after-all), channel_id=2, is_host_transfer=true, frontend_attributes={_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %recv = (f32[5,8,128]{2,1,0}, u32[], token[]) recv(%after-all), channel_id=1, is_host_transfer=true, frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}
  %recv-done = (f32[5,8,128]{2,1,0}, token[]) recv-done(%recv), channel_id=1, is_host_transfer=true
  ROOT %r = f32[5,8,128]{2,1,0} get-tuple-element(%recv-done), index=0
}
"""  # noqa: E501


def test_collectives_spread_over_fusions_or_between_slices():
    """Cut from texts of libtpu 0.0.42."""
    targets = {"a": "AsyncCollectiveStart", "b": "Other", "d": "AsyncCollectiveDone"}
    spread = "".join(SPREAD.format(name=name, target=target) for name, target in targets.items())
    text = f"HloModule step, num_partitions=4\n{spread}{BETWEEN_SLICES}"
    gather, crossing = read_bill(parse(text), SIZES).collectives
    assert (gather.op, gather.axes, gather.bytes, gather.is_async) == ("all_gather", ("fsdp",), 3 * 16 * 64 * 2, True)
    assert (crossing.op, crossing.axes, crossing.bytes) == ("all_reduce", ("data",), 5 * 8 * 128 * 4)
    assert crossing.groups == ((0, 4), (1, 5), (2, 6), (3, 7))


READERS = """HloModule readers, is_scheduled=true

%fused (p.0: f32[8], p.1: f32[8]) -> bf16[8] {
  %p.0 = f32[8]{0} parameter(0)
  %p.1 = f32[8]{0} parameter(1)
  %cast = bf16[8]{0} convert(%p.0)
  %other = bf16[8]{0} convert(%p.1)
  ROOT %sum = bf16[8]{0} add(%cast, %other)
}

ENTRY %main (a: f32[8], b: f32[8], c: f32[8]) -> (bf16[8], f32[8], bf16[8]) {
  %a = f32[8]{0} parameter(0)
  %b = f32[8]{0} parameter(1)
  %c = f32[8]{0} parameter(2)
  %moved = f32[8]{0} copy(%a)
  %inside = bf16[8]{0} fusion(%moved, %b), kind=kLoop, calls=%fused
  %negated = f32[8]{0} negate(%b)
  %last = bf16[8]{0} convert(%c)
  ROOT %out = (bf16[8]{0}, f32[8]{0}, bf16[8]{0}) tuple(%inside, %negated, %last)
}
"""


@pytest.mark.parametrize(
    ("name", "steps", "found"),
    [("a", 8, True), ("c", 1, True), ("b", 8, False), ("a", 2, False), ("last", 8, False)],
)
def test_all_readers_through_copies_and_fusions(name, steps, found):
    module = parse(READERS)
    is_cast = lambda i: True if i.opcode == "convert" else None if i.opcode == "copy" else False
    (array,) = [i for i in module.instructions() if i.name == name]
    assert all_readers(module, array, is_cast, steps) is found
