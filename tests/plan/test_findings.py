"""Each deliberately bad program is found, at the right line; good programs have no findings."""

import gzip
import inspect
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spmdkit.config import load_config
from spmdkit.foundation import plugins
from spmdkit.plan.collectives_bill import read_bill
from spmdkit.plan.compiled_step import read_program
from spmdkit.plan.document import plan_program
from spmdkit.plan.findings import (
    accumulation,
    allreduce_for_gather,
    exposed,
    padding,
    pointless_gather,
    unused_parameters,
)
from spmdkit.plan.hlo.text import parse
from spmdkit.plan.jaxpr_lines import paths
from spmdkit.plan.machine.target import parse_target
from spmdkit.plan.step_time import LinkTime
from spmdkit.program import compile_log
from spmdkit.program.program import Program
from tests.plan import bad_programs
from tests.plan.bad_programs import BOUND, good_loss, lines_to_blame, task
from tests.support.core_runs import program_of

pytestmark = pytest.mark.locations

SUBSTITUTE = parse_target("gpu:h100:2x4")
TWO_HOSTS = replace(SUBSTITUTE, compiler="gpu")
IN_PROCESS = (
    "silent_replication_of_a_parameter", "silent_replication_of_an_activation", "collective_in_accumulation_loop",
    "gather_of_unsharded", "float32_on_the_wire", "recompilation_risk", "donation_not_used", "repeated_work",
    "axis_crosses_slow_links", "many_small_all_reduces", "unused_parameter", "host_callback", "quadratic_scores",
    "dense_table_gradient", "padded_dim",
)  # fmt: skip


def findings_of(name, target=TWO_HOSTS):
    made, settings = getattr(bad_programs, name)()
    return read_program(program_of(made, **settings), target).findings


@pytest.mark.parametrize("name", IN_PROCESS)
def test_a_bad_program_is_found_at_its_line(name):
    code = name.split("_of_a")[0].replace("_", "-")
    found = [f for f in findings_of(name) if f.code == code]
    assert {f.source for f in found} & set(lines_to_blame(code)), found
    assert all(f.severity == "warning" and f.message and f.fix for f in found)
    assert name != "axis_crosses_slow_links" or "mesh: {replica: 2, fsdp: 4}" in found[0].fix


@pytest.mark.parametrize("name", ["silent_replication_of_an_activation", "float32_on_the_wire", "repeated_work"])
def test_cpu_devices_for_gpus_have_fewer_findings(name):
    assert name.split("_of_a")[0].replace("_", "-") not in {f.code for f in findings_of(name, SUBSTITUTE)}


GOOD = {
    "fsdp": {"mesh": {"fsdp": 8}, "batch_size": 512},
    "zero 2": {"mesh": {"fsdp": 8}, "layout": {"zero": 2}, "batch_size": 512, "microbatches": 2},
    "hybrid": {"mesh": {"replica": 2, "fsdp": 2, "tensor": 2}, "microbatches": 2, "batch_size": 512},
    "bfloat16": {"mesh": {"data": 8}, "precision": "bfloat16"},
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_program_has_no_findings(name):
    rules = [("up", ["embed", "mlp"]), ("down", ["mlp", "embed"])]
    program = program_of(task(careful_loss, rules=rules), **GOOD[name])
    assert read_program(program, replace(parse_target("gpu:h100:8"), compiler="gpu")).findings == ()


@pytest.mark.parametrize(
    ("op_name", "times"),
    [
        ("jit(f)/while/body/psum", 4),
        ("jit(f)/while/body/transpose(jvp(loss))/while/body/psum", 4),
        ("jit(f)/transpose(jvp(loss))/while/body/psum", 1),
        ("jit(f)/unknown/while/body/psum", 2),
    ],
)
def test_loops_inside_a_gradient_are_no_accumulation(op_name, times):
    step = SimpleNamespace(scans={"jit(f)/while": 4, "jit(f)/transpose(jvp(loss))/while": 8})
    assert accumulation._times(step, SimpleNamespace(op_name=op_name)) == times


def test_a_shard_as_large_as_a_gradient_is_no_finding():
    """A device's hidden[2048, 128] has as many elements as the gradients of `up`[256, 512] on two replicas."""
    rules = [("up", ["embed", "mlp"]), ("down", ["mlp", "embed"])]
    made = task(careful_loss, rules=rules, train_data=bad_programs.data(4096))
    program = program_of(made, mesh={"data": 2, "tensor": 4}, batch_size=4096, layout=BOUND)
    assert "silent-replication" not in {f.code for f in read_program(program, TWO_HOSTS).findings}


def test_work_that_replicas_share_is_no_finding():
    assert not [f for f in findings_of("shared_work") if f.code == "repeated-work"]


def test_flops_of_repeated_work_count_on_each_device():
    """The rollout times the weights, and the gradient of the weights."""
    made, settings = bad_programs.repeated_work()
    plan = plan_program(program_of(made, **settings), parse_target("gpu:h100:8"))
    assert plan["flops"] == plan["time"]["hlo_flops"] == 8 * plan["model_flops"] == 2 * 2 * 512 * 256 * 512


def careful_loss(params, batch, key):
    import spmdkit as sk

    x = sk.shard(batch["x"], "batch", None)
    h = jnp.tanh(sk.shard(x @ params["up"], "batch", "mlp"))
    return bad_programs.error(sk.shard(h @ params["down"], "batch", None), batch)


def test_every_detector_has_a_bad_program():
    elsewhere = ("small_batch", "rematerialization", "padding", "allreduce_for_gather", "exposed")
    assert len(plugins.names("findings")) == len(elsewhere) + len(IN_PROCESS) - 1  # one has two


SOURCES = """
from spmdkit.plan.machine.target import open_target, parse_target
machine = open_target(parse_target("{target}"))
import spmdkit as sk
from spmdkit.plan.compiled_step import read_program
from spmdkit.program.program import Program
from tests.plan import bad_programs
made, settings = bad_programs.{name}()
program = Program(sk.Config(task="t.py:t", steps=1, **settings), made, machine.devices)
findings = read_program(program, machine).findings
print(*[f.source for f in findings if "{part}" in f.message], sep="\\n")
"""


def in_process(target, name, part, **environment):
    """Returns what a process prints: the sources of the findings of a bad program, by a part of their message."""
    code, environment = SOURCES.format(target=target, name=name, part=part), os.environ | environment
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    return done


@pytest.mark.slow
def test_involuntary_rematerialization_is_read_from_the_log():
    """In a process: the tests keep XLA's warnings out of their output, and its log level is read once."""
    done = in_process("cpu:8", "full_rematerialization", "involuntary", TF_CPP_MIN_LOG_LEVEL="1")
    assert set(lines_to_blame("full-rematerialization")) & set(done.stdout.split())
    assert "Involuntary full rematerialization" in done.stderr, "the log still reaches the user's terminal"


def test_rematerialization_with_and_without_the_log(capfd):
    made, settings = bad_programs.full_rematerialization()
    program = program_of(made, **settings)
    name = program.traced.fun_name
    (path, *_) = (p for eqn, p in paths(program.traced.jaxpr, name) if eqn.primitive.name == "sharding_constraint")
    line = (
        f'[SPMD] Involuntary full rematerialization of %x = f32[128,4,128] copy(), metadata={{op_name="{path}'
        '/sharding_constraint"}} from sharding {devices=[2,1,1,4]<=[8]} to {devices=[1,2,4]<=[8]}'
    )
    program.compiled  # noqa: B018
    program.compile_log.clear()
    assert "full-rematerialization" in {f.code for f in read_program(program).findings}
    with compile_log.capture() as lines:
        os.write(2, line.encode() + b"\n")
    program.compile_log.extend(lines)
    (found,) = (f for f in read_program(program).findings if "involuntary" in f.message)
    assert "an array of 512.0 KiB" in found.message and found.source in lines_to_blame("full-rematerialization")
    assert line in capfd.readouterr().err, "the log still reaches the user's terminal"


PADDED = """HloModule padded, is_scheduled=true, num_partitions=1

ENTRY %main (x: f32[65536,4,2]) -> f32[65536,4,2] {
  %x = f32[65536,4,2]{2,1,0:T(8,128)} parameter(0), metadata={op_name="state.params['x']"}
  %y = f32[65536,8]{1,0:T(8,128)} bitcast(%x)
  ROOT %sin.1 = f32[65536,4,2]{2,1,0:T(8,128)} sine(%x), metadata={op_name="jit(f)/sin" source_file="model.py" source_line=7}
}
"""  # noqa: E501


def test_an_array_with_a_short_last_dim():
    """65536 x 4 x 2 float32 are 2 MiB; in tiles of 8 x 128 they take 65536 x 8 x 128 x 4 bytes = 256 MiB."""
    module = parse(PADDED)
    assert module.entry.root.shapes[0].padded_bytes == 2**28
    step = SimpleNamespace(module=module, memory=SimpleNamespace(peak_bytes=2**30))
    found = list(padding.find(step))
    assert "model.py:7" in [f.source for f in found]
    assert all("2.0 MiB and takes 256.0 MiB" in f.message for f in found)


CUT = """HloModule cut, is_scheduled=true, num_partitions=8

ENTRY %main (x: f32[8,64,64], layer: s32[]) -> f32[8,64,64] {{
  %x = f32[8,64,64]{{2,1,0}} parameter(0), metadata={{op_name="batch['x']"}}
  %layer = s32[] parameter(1)
  %zero = s32[] constant(0)
  %partition-id = u32[] partition-id()
  %device = s32[] convert(%partition-id)
  %whole = f32[8,64,64]{{2,1,0}} sine(%x)
  %part = f32[1,64,64]{{2,1,0}} dynamic-slice(%whole, %{at}, %zero, %zero), dynamic_slice_sizes={{1,64,64}}
  ROOT %all-gather = f32[8,64,64]{{2,1,0}} all-gather(%part), channel_id=1, replica_groups={{{{0,1,2,3,4,5,6,7}}}}, dimensions={{0}}, use_global_device_ids=true
}}
"""  # noqa: E501


@pytest.mark.parametrize("at, found", [("device", 1), ("layer", 0)])
def test_a_gather_of_a_part_of_a_copy(at, found):
    """XLA takes out what it recognises, so this one is written by hand."""
    module = parse(CUT.format(at=at))
    bill = read_bill(module, {"fsdp": 8})
    step = SimpleNamespace(module=module, bill=bill, scans={}, is_significant=lambda c: True)
    messages = [f.message for f in pointless_gather.find(step)]
    assert len(messages) == found and all("shard of an array that every device holds" in m for m in messages)


USED = """HloModule used, is_scheduled=true, num_partitions=8

ENTRY %main (x: f32[8,64]) -> f32[64,64] {{
  %x = f32[8,64]{{1,0}} parameter(0), metadata={{op_name="batch['x']"}}
  %cast = bf16[8,64]{{1,0}} convert(%x)
  %own = f32[8,64]{{1,0}} sine(%{read})
  ROOT %all-gather = bf16[64,64]{{1,0}} all-gather(%cast), channel_id=1, replica_groups={{{{0,1,2,3,4,5,6,7}}}}, dimensions={{0}}, use_global_device_ids=true
}}
"""  # noqa: E501


@pytest.mark.parametrize("read, found", [("x", 0), ("cast", 0), ("other", 1)])
def test_a_gather_of_an_argument_with_used_parts(read, found):
    module = parse(USED.format(read=read))
    bill = read_bill(module, {"fsdp": 8})
    step = SimpleNamespace(module=module, bill=bill, scans={}, is_significant=lambda c: True)
    messages = [f.message for f in pointless_gather.find(step)]
    assert len(messages) == found and all("before it is used" in m for m in messages)


def test_an_axis_inside_a_host_does_not_cross():
    """On two hosts of four devices, fsdp crosses and expert does not, though one collective spans both."""
    made, settings = bad_programs.axis_crosses_slow_links()
    program = program_of(made, **settings | {"mesh": {"fsdp": 2, "expert": 4}})
    found = [f for f in read_program(program, TWO_HOSTS).findings if f.code == "axis-crosses-slow-links"]
    assert [f.message.split(" (")[0] for f in found] == ["fsdp"]
    assert found[0].fix.startswith("mesh: {replica: 2, expert: 4}, if it fits")


@pytest.mark.tpu
def test_padding_by_the_tpu_compiler():
    done = in_process("tpu:v5e:2x4", "padding_waste", "padded to full tiles")
    assert set(done.stdout.split()) == set(lines_to_blame("padding-waste"))


def exposed_of(seconds, compiler="tpu"):
    """Returns the findings of a step of 10 ms that waits for a link."""
    time = SimpleNamespace(
        step_s=1e-2,
        links={"ici tensor": LinkTime(busy_s=8e-3, exposed_s=seconds, bytes=2**20), "ici fsdp": LinkTime(9e-3, 0.0, 9)},
        whole=SimpleNamespace(
            exposed={("ici tensor", "a.py:1"): seconds * 0.9, ("ici tensor", "a.py:2"): seconds * 0.1}
        ),
    )
    rows = [SimpleNamespace(source="a.py:1", cause="tensor activation")]
    step = SimpleNamespace(target=SimpleNamespace(compiler=compiler), time=time, bill=SimpleNamespace(rows=rows))
    return list(exposed.find(step))


def test_a_wait_for_a_link_is_found():
    (found,) = exposed_of(5e-3)
    assert (found.code, found.source) == ("exposed-communication", "a.py:1")
    assert "waits 5 ms of 10 ms for ici tensor (1.0 MiB a step), 4.5 ms of it for this line" in found.message
    assert "Fewer devices on this axis" in found.fix
    assert exposed_of(1e-3) == exposed_of(5e-3, compiler="cpu") == []


QUIET = {
    "a short loop of sums": ("many_small_all_reduces", "length=128", "length=64"),
    "a table of few rows": ("dense_table_gradient", "(4096, 128)", "(512, 128)"),
    "a table that is multiplied": (
        "dense_table_gradient",
        "error(h",
        "error((h @ params['table'].T) @ params['table']",
    ),
    "short attention": ("quadratic_scores", "1024", "256"),
    "heads that divide": ("padded_dim", "-1, 6, 128", "-1, 8, 96"),
}


@pytest.mark.parametrize("name", QUIET)
def test_a_repaired_program_has_no_finding(name):
    bad, old, new = QUIET[name]
    source = textwrap.dedent(inspect.getsource(getattr(bad_programs, bad)))
    assert old in source
    scope = dict(vars(bad_programs))
    exec(source.replace(old, new), scope)
    made, settings = scope[bad]()
    codes = {f.code for f in read_program(program_of(made, **settings), TWO_HOSTS).findings}
    assert bad.replace("_", "-") not in codes


def test_parameters_of_a_custom_step_are_not_reported():
    def train_step(state, batch):
        grads = jax.grad(lambda params: (params["up"] ** 2).sum())(state.params)
        return state.apply_gradients(grads), {"loss": batch["x"].mean()}

    program = program_of(task(None, train_step=train_step), mesh={"data": 8})
    assert list(unused_parameters.find(read_program(program))) == []


def test_a_python_number_is_a_note():
    count = optax.GradientTransformation(init=lambda params: {"scale": 0.5}, update=lambda g, s, p=None: (g, s))
    made = task(good_loss, optimizer=optax.chain(optax.sgd(0.1), count))
    found = [f for f in read_program(program_of(made, mesh={"data": 8})).findings if f.code == "recompilation-risk"]
    assert [f.severity for f in found] == ["note"] and "opt_state/1/scale" in found[0].message


def test_a_finding_about_the_config_names_its_line(tmp_path):
    (tmp_path / "small.yaml").write_text("task: t.py:t\nsteps: 5\nbatch_size: 8\nmesh: {data: 8}\n")
    made, _ = bad_programs.batch_too_small()
    program = Program(load_config(tmp_path / "small.yaml"), made, jax.devices())
    found = [f for f in read_program(program, TWO_HOSTS).findings if f.code == "batch-too-small"]
    assert [f.source for f in found] == [f"{tmp_path}/small.yaml:3"]


def test_a_gather_over_a_whole_torus():
    text = gzip.decompress((Path(__file__).with_name("texts") / "gather_over_a_torus.txt.gz").read_bytes()).decode()
    bill = read_bill(parse(text), {"data": 1, "fsdp": 64})
    on = lambda platform: SimpleNamespace(
        program=SimpleNamespace(zero=3, mesh=SimpleNamespace(devices=np.array([SimpleNamespace(platform=platform)]))),
        bill=bill,
    )
    (found,) = allreduce_for_gather.find(on("tpu"))
    assert found.code == "all-reduce-for-gather" and "63.0 MiB instead of 31.5 MiB" in found.message
    assert list(allreduce_for_gather.find(on("cpu"))) == []
