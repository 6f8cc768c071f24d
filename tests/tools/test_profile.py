"""`spmdkit profile` of traces in the form of a TPU and a GPU with known times. A real trace of a CPU is in
tests/common_tasks/test_training.py."""

import gzip
import threading
from types import SimpleNamespace

import jax
import pytest
from jax.profiler import ProfileData

from spmdkit.errors import ConfigError
from spmdkit.foundation.constants import PLAN_THREAD
from spmdkit.run.hooks import profile
from spmdkit.tools.profile import lines_of, summarize

EVENTS = [("fusion.1", 0, 40), ("all-gather-start.1", 30, 50), ("while.7", 0, 100), ("fusion.2", 90, 10)]
"""Name, start and duration in microseconds: communication from 30 to 80, alone from 40; idle from 80 to 90."""


def plane(name, line, event):
    """Returns the text of a plane with `EVENTS`; `event`: the fields that name the operation of a metadata id."""
    rows = "".join(
        f"events {{ metadata_id: {n} offset_ps: {start}000000 duration_ps: {length}000000 {event(n)} }}"
        for n, (_, start, length) in enumerate(EVENTS, 1)
    )
    names = "".join(
        f'event_metadata {{ key: {n} value {{ id: {n} name: "{"%" * (line == "XLA Ops")}{name} = f32[8]" }} }} '
        f'stat_metadata {{ key: {n + 9} value {{ id: {n + 9} name: "{name}" }} }}'
        for n, (name, *_) in enumerate(EVENTS, 1)
    )
    stat = 'stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }'
    return f'planes {{ name: "{name}" lines {{ name: "{line}" {rows} }} {names} {stat} }}'


FORMS = {
    "tpu": ("/device:TPU:0", "XLA Ops", lambda n: ""),
    "gpu": ("/device:GPU:0", "Stream #7", lambda n: f"stats {{ metadata_id: 1 ref_value: {n + 9} }}"),
}


def write(run_dir, text):
    folder = run_dir / "profile/plugins/profile/2026"
    folder.mkdir(parents=True)
    (folder / "host.xplane.pb").write_bytes(ProfileData.text_proto_to_serialized_xspace(text))


@pytest.mark.parametrize("form", FORMS)
def test_known_times_of_an_accelerator(form, tmp_path):
    write(tmp_path, plane(*FORMS[form]))
    found = summarize(tmp_path, 2)
    assert (found["devices"], found["steps"], found["step_s"]) == (1, [], pytest.approx(1e-4))
    assert [found[name] for name in ("collectives", "exposed", "idle")] == pytest.approx([0.5, 0.4, 0.1])
    first, second = found["operations"]
    assert (first["name"], first["collective"], first["share"]) == ("all-gather-start.1", True, 0.5)
    assert (second["name"], second["collective"], second["share"]) == ("fusion.1", False, 0.4)
    assert next(lines_of(found)).endswith("2026: no marked step, 1 device")


def test_a_fusion_with_a_collective_communicates(tmp_path):
    gpu, line, event = FORMS["gpu"]
    module = 'stats { metadata_id: 2 str_value: "jit_step" }'
    text = plane(gpu, line, lambda n: event(n) + module)
    write(
        tmp_path,
        text.replace(
            "stat_metadata { key: 1 ",
            'stat_metadata { key: 2 value { id: 2 name: "hlo_module" } } stat_metadata { key: 1 ',
        ),
    )
    program = """HloModule jit_step, entry_computation_layout={()->f32[8]}

%inside (p: f32[8]) -> f32[8] {
  %p = f32[8] parameter(0)
  ROOT %all-reduce.1 = f32[8] all-reduce(%p), replica_groups={{0,1}}
}

ENTRY %main () -> f32[8] {
  %c = f32[8] constant(0)
  ROOT %fusion.1 = f32[8] fusion(%c), kind=kCustom, calls=%inside, metadata={source_file="/a/b.py" source_line=7}
}
"""
    with gzip.open(tmp_path / "profile/step.hlo.gz", "wt") as file:
        file.write(program)
    found = summarize(tmp_path)
    assert found["collectives"] == pytest.approx(0.8) and found["operations"][1]["source"] == "/a/b.py:7"


def test_a_run_without_a_trace_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match=r"no trace .* Train with profile: \{steps"):
        summarize(tmp_path)
    write(tmp_path, 'planes { name: "/host:CPU" }')
    with pytest.raises(ConfigError, match="has no operation of a device"):
        summarize(tmp_path)


def test_a_trace_begins_after_the_plan(tmp_path, monkeypatch):
    order, written = [], threading.Event()
    plan = threading.Thread(target=written.wait, name=PLAN_THREAD, daemon=True)
    plan.start()
    monkeypatch.setattr(plan, "join", lambda timeout: order.append("plan"))
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: order.append(folder))
    hook = profile.make(SimpleNamespace(profile=SimpleNamespace(steps=(2, 3))))
    run = SimpleNamespace(directory=tmp_path, cluster=SimpleNamespace(num_processes=1))
    for step in (1, 2):
        hook.before_step(run, step, ())
    written.set()
    assert order == ["plan", str(tmp_path / "profile")]
