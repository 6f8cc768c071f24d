"""Plans by XLA's GPU compiler, on a machine without a GPU."""

import os

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import spmdkit as sk
from spmdkit.config import parse_config
from spmdkit.errors import ConfigError, UserCodeError
from spmdkit.mesh.chips import CHIPS
from spmdkit.plan.machine.compiler_process import in_compiler_process
from spmdkit.plan.machine.target import open_target, parse_target
from spmdkit.program.opening import open_program, task_of
from tests.plan.save_texts import GPT
from tests.support.plan_files import plan

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("forked_python")]
CAUSES = {"tensor activation", "gradient reduction", "optimizer", "metrics"}


def make(devices):
    mesh = Mesh(devices.reshape(-1), ("dp",))
    step = jax.jit(lambda w, x: w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w))
    w = jax.ShapeDtypeStruct((256, 256), "bfloat16", sharding=NamedSharding(mesh, PartitionSpec()))
    x = jax.ShapeDtypeStruct((4096, 256), "bfloat16", sharding=NamedSharding(mesh, PartitionSpec("dp")))
    return step, (w, x)


@pytest.fixture(scope="module")
def gpt(tmp_path_factory):
    """The plan of a small GPT on two hosts of four H100, by processes that start Python."""
    return plan(tmp_path_factory.mktemp("gpt"), "gpu:h100:2x4", **GPT)[0]


def test_h100_is_planned_by_its_own_compiler(gpt):
    assert (gpt["compiler"], gpt["num_devices"], gpt["hosts_or_slices"], gpt["fits"]) == ("gpu", 8, 2, True)
    assert not any("CPU devices" in note for note in gpt["notes"])
    assert {row["link"] for row in gpt["collectives"]} == {"nvlink", "network"}
    assert any(row["async"] for row in gpt["collectives"])
    assert gpt["flops"] == pytest.approx(gpt["model_flops"], rel=0.02)  # cuDNN's attention included
    assert [f["code"] for f in gpt["findings"]] == ["exposed-communication"]  # a fifth of a step as small as this
    assert set(gpt["wire"]["by_cause"]) <= CAUSES


@pytest.mark.forms(2)
@pytest.mark.parametrize("chip", sorted(chip.name for chip in CHIPS.values() if chip.kind == "gpu"))
def test_every_chip_has_a_compiler(chip):
    found = sk.plan_step(make, target=f"gpu:{chip}:4").document
    assert (found["compiler"], found["chip"]) == ("gpu", chip)
    assert found["flops"] == pytest.approx(found["model_flops"])


def float8_step(machine):
    config = parse_config(GPT | {"precision": {"compute": "bfloat16", "matmul": "float8"}})
    return {"text": open_program(config, task_of(config), machine.devices).compiled.as_text()}


def test_products_in_float8_are_those_of_the_compiled_step():
    """In a layer 6 products forward, and 6 gradients each of the weight and of the operand."""
    text = in_compiler_process(float8_step, open_target(parse_target("gpu:h100:2x4")))["text"]
    products = [part for part in text.split("\n\n") if " dot(" in part or "__cublas$lt$matmul$f8" in part]
    assert sum("f8e4m3fn[" in part for part in products) == 18
    assert sum("f8e5m2[" in part for part in products) == 12


def test_errors_of_make_are_those_of_this_process():
    def wrong(devices):
        raise ValueError("no " + devices.flat[0].platform)

    with pytest.raises(UserCodeError, match=r"make raised ValueError at .*test_gpu_compiler.py:\d+: no gpu"):
        sk.plan_step(wrong, target="gpu:h100:4")


def test_a_crash_of_the_compiler_is_one_message():
    def crashes(devices):
        os.abort()

    with pytest.raises(ConfigError, match=r"the GPU compiler of target gpu:h100:4 crashed \(code -6\)"):
        sk.plan_step(crashes, target="gpu:h100:4")


def test_a_failure_of_the_compiler_is_one_message(tmp_path):
    names = ("xla_gpu_enable_while_loop_double_buffering", "xla_gpu_enable_pipelined_all_gather")
    options = dict.fromkeys(names, True)
    settings = {**GPT, "mesh": {"fsdp": 8}, "remat": "full", "compiler_options": options}
    found, errors = plan(tmp_path, "gpu:h100:8", code=78, **settings)
    assert found is None and "Traceback" not in errors
    assert "the compiler of gpu failed: Bad StatusOr access: INTERNAL: RET_CHECK failure" in errors
    assert f"Remove compiler_options ({', '.join(names)})" in errors and len(errors.strip().splitlines()) == 1


def test_a_search_compiles_for_the_gpu(tmp_path):
    found, _ = plan(tmp_path, "gpu:h100:4", "--search", "--compile", "1", mesh={"fsdp": 4})
    assert (found["compiler"], found["num_compiled"]) == ("gpu", 1)
