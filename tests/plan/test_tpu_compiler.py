"""Plans by the real TPU compiler, on a machine without a TPU. Each in a process of its own: libtpu is loaded once."""

import subprocess
import sys

import pytest

from tests.support.plan_files import plan

pytestmark = [pytest.mark.tpu, pytest.mark.usefixtures("forked_python")]

_PERMUTE = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from spmdkit.plan.machine.target import open_target, parse_target
devices = sorted(open_target(parse_target("tpu:v5e:16x16")).devices, key=lambda device: device.coords[::-1])
mesh = Mesh(np.array(devices).reshape(16, 16), ("y", "x"))
ring = [(i, (i + 1) % 16) for i in range(16)]
step = jax.jit(jax.shard_map(lambda x: jax.lax.ppermute(x, "x", ring), mesh=mesh, in_specs=P("x"), out_specs=P("x")))
x = jax.ShapeDtypeStruct((16, 1024), "float32", sharding=NamedSharding(mesh, P("x")))
print(step.lower(x).compile().as_text().count("collective-permute-start("))
"""


def test_v5e_is_planned_by_its_own_compiler(tmp_path):
    found, errors = plan(tmp_path, "tpu:v5e:2x4")
    assert (found["compiler"], found["num_devices"], found["fits"]) == ("tpu", 8, True)
    assert found["memory"]["limit_bytes"] == int(15.75 * 2**30)
    assert {row["link"] for row in found["collectives"]} == {"ici"}
    assert found["time"]["hlo_flops"] == pytest.approx(found["flops"], rel=0.2)
    assert {tuple(place["coords"]) for place in found["places"]} == {(x, y, 0) for x in range(2) for y in range(4)}
    assert "Traceback" not in errors


def test_only_the_replica_axis_crosses_two_slices(tmp_path):
    found, _ = plan(tmp_path, "tpu:v5e:2x2*2", mesh={"fsdp": 4})  # replica: 2 since there are two slices
    assert found["mesh"]["replica"] == 2
    assert found["hosts_or_slices"] == 2
    assert {place["part"] for place in found["places"][:4]} == {0}
    crossing = {tuple(row["axes"]) for row in found["collectives"] if row["crosses"]}
    assert ("replica",) in crossing
    assert not any(row["crosses"] for row in found["collectives"] if row["axes"] == ["fsdp"])


def test_a_step_too_large_fails_with_78(tmp_path):
    wide = {"width": 32768, "layers": 2}
    found, errors = plan(tmp_path, "tpu:v5e:2x2", code=78, task_args=wide, mesh={"data": 4})
    assert not found["fits"]
    assert found["memory"]["peak_bytes"] > found["memory"]["limit_bytes"]
    assert found["findings"][0]["code"] == "does-not-fit"
    assert "a step needs" in errors and "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.parametrize("target", ["tpu:7x:2x2x1", "tpu:v4:2x2x2", "tpu:v5p:2x2x2", "tpu:v6e:2x4"])
def test_every_chip_sends_what_fsdp_needs(tmp_path, target):
    # 7x sends from its sparse cores (call-start); a v4 chip is two cores to the compiler, of which one is used.
    # With fewer rows its compiler exchanges the rows of a device in place of the gradients.
    found, _ = plan(tmp_path, target, mesh={"data": 2, "fsdp": 4}, batch_size=4096)
    assert (found["num_devices"], found["fits"]) == (8, True)
    gathered = sum(row["bytes"] for row in found["collectives"] if row["axes"] == ["fsdp"])
    assert gathered >= 0.6 * found["wire"]["least"]["fsdp"]  # bfloat16 passes of float32 products halve the gathers


def test_the_compiler_knows_the_rings():
    # v5e sends to a neighbour alone without blocking; without the wrap-around the last device of a ring has none.
    result = subprocess.run([sys.executable, "-c", _PERMUTE], capture_output=True, text=True, timeout=300)
    assert result.stdout.split() == ["1"], result.stderr[-2000:]
