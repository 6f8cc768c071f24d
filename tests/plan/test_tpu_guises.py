"""Collectives as the TPU compiler alone writes them: spread over fusions, and between slices. Texts cut from libtpu
0.0.42."""

from spmdkit.mesh.mesh import AXES
from spmdkit.plan.collectives_bill import read_bill
from spmdkit.plan.hlo.text import parse

SPREAD = """HloModule step, num_partitions=4

%{name} (p: bf16[1,16,64]) -> bf16[1,64,64] {{
  %p = bf16[1,16,64]{{2,1,0}} parameter(0)
  %all-gather.{name} = bf16[1,64,64]{{2,1,0}} all-gather(%p), channel_id=10, replica_groups={{{{0,1,2,3}}}}, dimensions={{1}}, use_global_device_ids=true, backend_config={{"async_collective_fusion_config":{{"flag_start":"2","flag_end":"8"}}}}
  ROOT %c = bf16[1,64,64]{{2,1,0}} custom-call(%all-gather.{name}), custom_call_target="{target}"
}}
"""
TEXT = (
    "HloModule step, num_partitions=4\n\n"
    + "".join(
        SPREAD.split("\n", 2)[2].format(name=name, target=target)
        for name, target in (("a", "AsyncCollectiveStart"), ("b", "Other"), ("d", "AsyncCollectiveDone"))
    )
    + """
ENTRY %main (x: bf16[1,16,64], g: f32[5,8,128]) -> f32[5,8,128] {
  %x = bf16[1,16,64]{2,1,0} parameter(0)
  %g = f32[5,8,128]{2,1,0} parameter(1)
  %f.1 = bf16[1,64,64]{2,1,0} fusion(%x), kind=kCustom, calls=%a
  %f.2 = bf16[1,64,64]{2,1,0} fusion(%x), kind=kOutput, calls=%b
  %f.3 = bf16[1,64,64]{2,1,0} fusion(%x), kind=kCustom, calls=%d
  %after-all = token[] after-all()
  %send = (f32[5,8,128]{2,1,0}, u32[], token[]) send(%g, %after-all), channel_id=2, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_reduce_operation="SUM",_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %recv = (f32[5,8,128]{2,1,0}, u32[], token[]) recv(%after-all), channel_id=1, is_host_transfer=true, frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}
  %send-done = token[] send-done(%send), channel_id=2, is_host_transfer=true
  %recv-done = (f32[5,8,128]{2,1,0}, token[]) recv-done(%recv), channel_id=1, is_host_transfer=true
  ROOT %r = f32[5,8,128]{2,1,0} get-tuple-element(%recv-done), index=0
}
"""
)
SIZES = dict.fromkeys(AXES, 1) | {"replica": 2, "fsdp": 4}


def test_a_collective_spread_over_fusions_counts_once():
    (gather, _) = read_bill(parse(TEXT), SIZES).collectives
    assert (gather.op, gather.axes, gather.bytes, gather.is_async) == ("all_gather", ("fsdp",), 3 * 16 * 64 * 2, True)


def test_a_transfer_between_slices_is_a_collective():
    (_, crossing) = read_bill(parse(TEXT), SIZES).collectives
    assert crossing.axes == ("replica",)
    assert (crossing.op, crossing.bytes, crossing.group_size) == ("all_reduce", 5 * 8 * 128 * 4, 2)
    assert crossing.groups == ((0, 4), (1, 5), (2, 6), (3, 7))
