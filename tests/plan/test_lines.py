"""Seconds by source line, the bubble of a pipeline, and the timeline of one layer."""

import itertools
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from spmdkit.errors import ConfigError
from spmdkit.foundation.formatting import shown_source
from spmdkit.ops.pipeline.schedule import StageSchedule
from spmdkit.plan.collectives_bill import read_bill
from spmdkit.plan.document import line_rows, timeline_of
from spmdkit.plan.hlo.text import parse
from spmdkit.plan.jaxpr_lines import idle_share
from spmdkit.plan.machine.target import parse_target
from spmdkit.plan.step_time import predict_time
from spmdkit.plan.timeline import BUBBLE
from spmdkit.plan.trace import trace, write_trace
from tests.plan.known_traffic import SIZES
from tests.plan.test_hlo import saved
from tests.plan.test_step_time import MS, W, done, dot, gather, loop, machine, program, start

AT = ', metadata={{op_name="{}" source_file="{}.py" source_line={}}}'


def time_of(text):
    module = parse(text)
    return predict_time(machine(), module, read_bill(module, SIZES), range(8)), module


def on_v5p(name, **changes):
    module = saved(name)
    devices = [SimpleNamespace(coords=(n % 2, n // 2 % 2, n // 4), slice_index=0) for n in range(8)]
    return predict_time(parse_target("tpu:v5p:2x2x2"), module, read_bill(module, SIZES), devices, **changes), module


@pytest.mark.parametrize("name, idle", [("fsdp_step", 0.0), ("zero2_step", 0.0), ("pipeline_step", 1 / 9)])
def test_lines_waits_and_bubble_sum_to_the_step(name, idle):
    time, _ = on_v5p(name, idle=idle, call_s=1e-5, host_bytes=1000)
    rows = line_rows(time)
    total = sum(row["seconds"] + row["exposed_s"] for row in rows) + time.seconds[BUBBLE]
    assert total == pytest.approx(time.step_s) == pytest.approx(sum(time.parts().values()))
    assert (time.seconds[BUBBLE] > 0) == (idle > 0)
    assert sum(row["flops"] for row in rows) == pytest.approx(time.hlo_flops)
    assert rows == sorted(rows, key=lambda row: -row["seconds"] - row["exposed_s"])
    assert sum(row["source"] is not None for row in rows) > 20


def test_a_line_has_its_products_and_its_waits():
    lines = [dot("d") + AT.format("mul", "a", 1), gather("g") + AT.format("gather", "b", 2), dot("e", "g")]
    time, _ = time_of(program(*lines[:2], lines[2] + AT.format("mul", "a", 1)))
    assert {source: (line.seconds.get("arithmetic", 0), line.exposed_s) for source, line in time.lines.items()} == {
        "a.py:1": (pytest.approx(4 * MS), 0),
        "b.py:2": (0, pytest.approx(2 * MS)),
    }


def test_a_fusion_is_at_the_line_of_its_product():
    inner = dot("inner", "p").replace("%w", "%p") + AT.format("dot", "own", 7)
    more = f"%fused (p: f32[]) -> f32[] {{\n  %p = {W} parameter(0)\n  {inner}\n  ROOT %n = {W} negate(%inner)\n}}\n"
    fusion = f"%f = {W} fusion(%w), kind=kOutput, calls=%fused" + AT.format("neg", "other", 1)
    time, _ = time_of(program(fusion, more=more))
    assert list(time.lines) == ["own.py:7"]


def test_only_ticks_of_a_pipeline_have_a_bubble():
    inside, outside = "jit(f)/jvp(spmdkit/pipeline)/while/body/closed_call/mul", "jit(f)/jvp(spmdkit/pipeline)/mul"
    lines = [dot("d") + AT.format(inside, "a", 1), dot("e") + AT.format(outside, "a", 2)]
    module = parse(program(*lines))
    time = predict_time(machine(), module, read_bill(module, SIZES), range(8), idle=0.25)
    assert time.seconds["arithmetic"] == pytest.approx(3.5 * MS)
    assert time.parts()[BUBBLE] == pytest.approx(0.5 * MS)


@pytest.mark.parametrize("stages, microbatches, chunks", [(2, 8, 1), (4, 16, 2)])
def test_the_idle_share_is_that_of_the_schedule(stages, microbatches, chunks):
    schedule = StageSchedule(stages, microbatches, chunks)
    first, last = schedule.first_backward, len(schedule.forward.valid)

    @jax.named_scope("spmdkit/pipeline")
    def step(x):
        for length in (first, last - first, first):
            x = jax.lax.scan(lambda x, _: (x * 2, None), x, length=length)[0]
        return x

    jaxpr = jax.make_jaxpr(step)(jnp.ones(3))
    idle = idle_share(jaxpr, "step", stages)
    assert idle == pytest.approx(1 - schedule.forward.valid.mean())
    assert idle_share(jaxpr, "step", 1) == 0 == idle_share(jax.make_jaxpr(jnp.sin)(1.0), "sin", 2)


def timeline(text):
    time, module = time_of(text)
    return timeline_of(SimpleNamespace(module=module), time)


def spans(found):
    return [(s["row"], s["kind"], round(s["start_s"] / MS), round(s["end_s"] / MS)) for s in found["spans"]]


def test_a_timeline_shows_what_overlaps():
    hidden = timeline(program(loop(3), body=[start("a"), dot("d"), done("a")]))
    assert spans(hidden) == [("compute", "run", 0, 2), ("nvlink fsdp", "transfer", 0, 2)]
    assert (hidden["iterations"], hidden["rows"]) == (3, ["compute", "nvlink fsdp"])
    exposed = timeline(program(loop(3), body=[start("a"), done("a"), dot("d")]))
    assert sorted(spans(exposed)) == [
        ("compute", "run", 2, 4), ("compute", "wait", 0, 2), ("nvlink fsdp", "transfer", 0, 2)
    ]  # fmt: skip


def test_a_step_without_a_large_loop_is_drawn_whole():
    found = timeline(program(dot("d"), gather("a"), dot("e", "a")))
    assert (found["title"], found["iterations"]) == ("The step", 1)
    assert [s["end_s"] - s["start_s"] for s in found["spans"]] == pytest.approx([2 * MS] * 4)


def test_a_trace_file_follows_the_event_format(tmp_path):
    time, module = on_v5p("pipeline_step")
    document = {"target": "tpu:v5p:2x2x2", "timeline": timeline_of(SimpleNamespace(module=module), time)}
    write_trace(document, tmp_path / "t.json")
    found = json.loads((tmp_path / "t.json").read_text())
    names = {e["tid"]: e["args"]["name"] for e in found["traceEvents"] if e["name"] == "thread_name"}
    events = [e for e in found["traceEvents"] if e["ph"] == "X"]
    assert {e["ph"] for e in found["traceEvents"]} == {"X", "M"}
    assert names[0] == "compute" and len(names) == len(set(names.values())) > 2
    assert {e["tid"] for e in events} == set(names)
    for tid in names:
        row = sorted((e["ts"], e["dur"]) for e in events if e["tid"] == tid)
        assert all(isinstance(x, float) and x >= 0 for at in row for x in at)
        assert all(a + b <= c + 1e-6 for (a, b), (c, _) in itertools.pairwise(row)), names[tid]
    assert {e["cat"] for e in events} >= {"instruction", "exposed", "transfer"}
    assert all(e["pid"] == 0 and e["name"] for e in events)


def test_a_trace_file_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    document = {"target": "cpu:8", "timeline": timeline(program(dot("d")))}
    assert trace(document)["traceEvents"]
    with pytest.raises(ConfigError, match=r"--timeline .* cannot be written"):
        write_trace(document, tmp_path / "file" / "t.json")
    with pytest.raises(ConfigError, match="has no program"):
        write_trace({"timeline": None}, tmp_path / "t.json")


def test_lines_of_libraries_are_shown_in_full(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shown_source("/usr/lib/python3/site-packages/optax/_src/transform.py:12") == "optax/_src/transform.py:12"
    assert shown_source(f"{tmp_path}/models/gpt.py:7") == "models/gpt.py:7"
    assert shown_source(None) == ""
