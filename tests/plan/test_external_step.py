"""`sk.plan_step` and `sk.bill` of steps that do not use spmdkit. The expected bytes are computed by hand."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import spmdkit as sk
from spmdkit.cli import main
from spmdkit.errors import ConfigError, UserCodeError
from tests.plan import external_steps as steps
from tests.support.command_line import Folder
from tests.support.command_line import alone as alone
from tests.support.messages import Parts

pytestmark = pytest.mark.locations

FILE = Path(steps.__file__)


@functools.cache
def plan(make, target="cpu:8"):
    return sk.plan_step(make, target=target).document


def sent(document, *axes, cause=None):
    """Returns the bytes over some axes, of a cause or of all."""
    rows = [row for row in document["collectives"] if tuple(row["axes"]) == axes]
    return sum(row["bytes"] for row in rows if cause in (None, row["cause"]))


def num_bytes(tree):
    return 4 * sum(x.size for x in jax.tree.leaves(tree))


def line_of(text):
    """Returns `file.py:12` of the only line with a text in the file of the steps."""
    (number,) = (n for n, line in enumerate(FILE.read_text().splitlines(), 1) if text in line)
    return f"{FILE}:{number}"


PARAMS = jax.eval_shape(steps.init_transformer)
BLOCKS, EMBED = num_bytes(PARAMS["blocks"]) // 2, num_bytes(PARAMS["embed"])  # blocks are sharded over tp
ACTIVATION = steps.BATCH // 4 * steps.LENGTH * steps.WIDTH * 4
TRANSFORMER = {
    # Each gradient crosses dp once, 2 (N-1)/N; that of the embedding is two arrays: of the lookup and of the logits.
    "dp": 2 * 3 / 4 * (BLOCKS + 2 * EMBED),
    # A layer sums over tp two activations forward, and four gradients of activations backward: of q, k, v, up.
    "tp": steps.LAYERS * (2 + 4) * 2 * 1 / 2 * ACTIVATION,
}
"""Bytes that a device sends per step."""


def test_handwritten_transformer_on_dp_and_tp():
    found = plan(steps.make_transformer)
    assert found["mesh"] == {"dp": 4, "tp": 2}
    assert found["num_params"] * 4 == num_bytes(PARAMS)
    assert sent(found, "dp", cause="gradient reduction") == pytest.approx(TRANSFORMER["dp"], abs=16)  # and the loss
    assert sent(found, "tp", cause="activation") == sent(found, "tp") == TRANSFORMER["tp"]
    lines = {row["source"] for row in found["collectives"] if row["axes"] == ["tp"]}
    assert {line_of("bhts,bshk,hkd->btd"), line_of('jax.nn.relu(x @ w["up"])')} <= lines
    assert found["memory"]["parts"]["parameters"] == BLOCKS + EMBED
    assert found["memory"]["parts"]["optimizer state"] == 2 * (BLOCKS + EMBED) + 4
    assert found["memory"]["parts"]["inputs"] == steps.BATCH // 4 * (steps.LENGTH + 1) * 4
    assert found["findings"] == []
    assert found["time"]["tokens_per_s"] > 0 and found["fits"]
    assert {row["path"] for row in found["layout"]} >= {"params/blocks/q", "opt_state/0/mu/embed", "inputs/tokens"}


def test_equinox_with_gathered_weights():
    found = plan(steps.make_equinox)
    whole = 4 * (16 * 64 + 64 + 64 * 64 + 64 + 64 * 16 + 16)
    assert sent(found, "workers", cause="parameter gather") == 7 * whole // 8
    # XLA's CPU compiler emits a reduce_scatter as an all_reduce and a slice; the loss is in the same operation.
    assert sent(found, "workers") == 7 * whole // 8 + 2 * 7 * (whole + 4) // 8
    gathered = next(row for row in found["collectives"] if row["op"] == "all_gather")
    assert (gathered["count"], gathered["source"]) == (6, line_of("eqx.filter_shard(model"))
    assert found["memory"]["parts"]["parameters"] == whole // 8
    assert found["memory"]["alias_bytes"] == 2 * whole // 8  # donate="all"


def test_explicit_mode_with_a_mesh_set_in_make():
    found = plan(steps.make_explicit)
    assert found["mesh"] == {"x": 4, "y": 2}
    rows, columns, products = 16 // 4, 24, 48 // 2
    assert sent(found, "x") == 2 * 3 * (products * columns * 4 + 4) // 4  # the gradient and the loss
    by_op = {row["op"]: row["bytes"] for row in found["collectives"] if row["axes"] == ["y"] and row["bytes"] > 4}
    assert by_op == {"all_reduce": rows * columns * 4, "all_gather": rows * columns * 4 // 2}
    assert jax.sharding.get_abstract_mesh().empty  # the mesh of `make` is not left in context


def test_flax_mnist_with_shardings_in_its_jit():
    found = plan(steps.make_mnist)
    whole = 4 * (9 * 4 + 4 + 64 * 256 + 256 + 256 * 10 + 10)
    assert sent(found, "batch", cause="gradient reduction") == sent(found, "batch") == 2 * 7 * (whole + 4) // 8
    assert found["memory"]["parts"]["parameters"] == found["memory"]["parts"]["optimizer state"] == whole
    assert found["memory"]["parts"]["inputs"] == 16 // 8 * (64 + 1) * 4
    by_code = {finding["code"]: finding for finding in found["findings"]}
    assert set(by_code) == {"donation-not-used", "recompilation-risk"}  # the step number is a Python number
    assert "and 12 more" in by_code["donation-not-used"]["message"]


def test_step_is_passed_with_its_arguments(tmp_path):
    step, arguments = steps.make_transformer(np.array(jax.devices()))
    direct = sk.plan_step(step, *arguments)
    same = ("mesh", "collectives", "collective_bytes", "memory", "flops", "findings")
    assert {key: direct.document[key] for key in same} == {key: plan(steps.make_transformer)[key] for key in same}
    text = str(direct)
    assert "dp 4 x tp 2" in text and "gradient" in text and "Findings  none" in text
    assert max(map(len, text.splitlines())) <= 100
    direct.write_timeline(tmp_path / "layer.json")
    assert json.loads((tmp_path / "layer.json").read_text())["traceEvents"]
    on_gpus = sk.plan_step(step, *arguments, target="gpu:h100:8").document
    assert {row["link"] for row in on_gpus["collectives"]} == {"nvlink"}
    assert on_gpus["collective_bytes"] == direct.document["collective_bytes"]


def test_bill_of_a_compiled_program():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    x = jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=NamedSharding(mesh, P("b")))
    compiled = jax.jit(lambda x: x.sum(0)).lower(x).compile()
    bill = sk.bill(compiled)
    assert (bill.bytes, bill.by("axes")) == (2 * 3 * 8 * 4 // 4, {("b",): 2 * 3 * 8 * 4 // 4})
    assert "48 B sent per device and step" in str(bill) and "test_external_step.py" in str(bill)
    assert str(sk.bill(jax.jit(jnp.sin).lower(1.0).compile())) == "0 B sent per device and step"
    with pytest.raises(ConfigError, match="has 8 devices, mesh has 2"):
        sk.bill(compiled, Mesh(np.array(jax.devices()[:2]), ("a",)))
    with pytest.raises(ConfigError, match=r"Pass jax.jit\(step\).lower"):
        sk.bill(x)


def test_mesh_of_the_caller_stays_in_context():
    mesh = jax.make_mesh((8,), ("rows",))
    x = jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=NamedSharding(mesh, P("rows")))
    with jax.set_mesh(mesh):
        found = sk.plan_step(jax.jit(lambda x: jax.sharding.reshard(x, P())), x).document
        assert jax.sharding.get_abstract_mesh() == mesh.abstract_mesh
    assert sent(found, "rows") == 16 * 8 * 4 * 7 // 8


def test_axes_are_those_of_the_step():
    """The arguments of a pmap, and of code that shards them itself, may be on a mesh with other names."""
    devices = np.array(jax.devices())
    rows = NamedSharding(Mesh(devices, "q"), P("q"))
    inside = lambda x: jax.lax.psum((x @ x.T).sum(), "d")
    step = jax.jit(jax.shard_map(inside, mesh=Mesh(devices, "d"), in_specs=P("d"), out_specs=P()))
    found = sk.plan_step(step, jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=rows)).document
    assert (found["mesh"], sent(found, "d"), found["layout"][0]["device_bytes"]) == ({"d": 8}, 7, 2 * 4 * 4)
    mapped = jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")
    found = sk.plan_step(mapped, jax.ShapeDtypeStruct((8, 100), jnp.float32)).document
    assert (found["mesh"], sent(found, "i")) == ({"i": 8}, 2 * 7 * 100 * 4 // 8)


@pytest.mark.parametrize(("shape", "crosses"), [((2, 4), True), ((4, 2), False)])
def test_axis_between_hosts_is_reported(shape, crosses):
    """An activation is summed over tp, which is the slower axis of the mesh in one case."""

    def make(devices):
        mesh = Mesh(devices.reshape(shape), ("tp", "dp") if crosses else ("dp", "tp"))
        array = lambda shape, *spec: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))
        return jax.jit(lambda w, x: x @ w), (array((64, 512), "tp"), array((256, 64), "dp", "tp"))

    found = sk.plan_step(make, target="gpu:h100:2x4").document
    assert sent(found, "tp") == 256 // 4 * 512 * 4
    assert [finding["code"] for finding in found["findings"]] == ["axis-crosses-slow-links"] * crosses


def one_device(devices):
    return jax.jit(jnp.sin), (jax.ShapeDtypeStruct((4,), jnp.float32),)


def no_pair(devices):
    return jax.jit(jnp.sin)


def not_jitted(devices):
    return jnp.sin.__wrapped__, (1.0,)


def indivisible(devices):
    return jax.jit(jnp.sin), (
        jax.ShapeDtypeStruct((9,), jnp.float32, sharding=NamedSharding(Mesh(devices, "d"), P("d"))),
    )


def no_array(devices):
    return jax.jit(jnp.sin), ("text",)


def raises(devices):
    return devices.reshape(3, 3)


WRONG = {
    one_device: "runs on 1 of the 8 devices of target cpu:8",
    no_pair: "It must return the jitted step and a tuple",
    indivisible: "JAX rejects the arguments of the step: IndivisibleError.*Fix that argument",
    no_array: "JAX rejects the arguments of the step: TypeError",
    not_jitted: "It must return the jitted step",
}


@pytest.mark.parametrize(("make", "message"), WRONG.items())
def test_wrong_make_is_one_message(make, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        sk.plan_step(make, target="cpu:8")


def test_wrong_arguments_are_one_message():
    step, arguments = steps.make_transformer(np.array(jax.devices()))
    with pytest.raises(ConfigError, match=r"not jitted, with 3 arguments.*Pass jax.jit\(step\)"):
        sk.plan_step(step.__wrapped__, *arguments)
    with pytest.raises(ConfigError, match=r"target cpu:4 is 4 devices of cpu, the step has 8.*Pass make\(devices\)"):
        sk.plan_step(step, *arguments, target="cpu:4")
    with pytest.raises(ConfigError, match="is 8 devices of v5e, the step has 8 of cpu"):
        sk.plan_step(step, *arguments, target="tpu:v5e:2x4")
    with pytest.raises(ConfigError, match="begins with 'tpux'"):
        sk.plan_step(step, *arguments, target="tpux:8")
    with pytest.raises(ConfigError, match=r"missing a required argument: 'opt_state'.*Pass the positional arguments"):
        sk.plan_step(step, arguments[0])
    with pytest.raises(UserCodeError, match=r"make raised ValueError at .*test_external_step.py"):
        sk.plan_step(raises, target="cpu:8")


def test_command_plans_a_function_of_a_file(alone, capsys, tmp_path):
    page, layer = tmp_path / "plan.html", tmp_path / "layer.json"
    files = ["--html", str(page), "--timeline", str(layer)]
    main(["plan", f"{FILE}:make_mnist", "--target", "cpu:8", "--json", *files])
    found = json.loads(capsys.readouterr().out)
    events = [e for e in json.loads(layer.read_text())["traceEvents"] if e["ph"] == "X"]
    assert len(events) == len(found["timeline"]["spans"]) > 0
    seconds = sum(row["seconds"] + row["exposed_s"] for row in found["lines"])
    assert seconds == pytest.approx(found["predicted_step_s"])
    assert found["collective_bytes"] == plan(steps.make_mnist)["collective_bytes"]
    assert (found["source"], found["mesh"]) == (f"{FILE}:make_mnist", {"batch": 8})
    assert "gradient reduction" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["make_mnst"], "Did you mean 'make_mnist'?"),
        (["BATCH"], "It must be a function make(devices)"),
        (["make_mnist", "seed=1"], "takes only --target, --json, --html and --timeline"),
        (["make_mnist", "--search"], "takes only --target, --json, --html and --timeline"),
        (["transformer_loss"], "does not take 1 positional arguments: missing a required argument: 'tokens'"),
    ],
)
def test_wrong_command_fails_with_78(alone, arguments, message, tmp_path, monkeypatch, capfd):
    folder = Folder(tmp_path, monkeypatch, capfd)
    command = ("plan", f"{FILE}:{arguments[0]}", *arguments[1:], "--target", "cpu:8")
    assert message in " ".join(folder.fails(78, Parts(), command=command).split())


@pytest.mark.tpu
def test_step_is_compiled_for_a_tpu():
    command = [sys.executable, "-m", "spmdkit", "plan", f"{FILE}:make_transformer", "--target", "tpu:v5e:2x4", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert (found["compiler"], found["mesh"]) == ("tpu", {"dp": 4, "tp": 2})
    assert {row["link"] for row in found["collectives"]} == {"ici"}
    assert sent(found, "dp") == pytest.approx(TRANSFORMER["dp"], abs=16)
    assert sent(found, "tp") == TRANSFORMER["tp"]
