"""What the guard of a step costs on the wire and in bytes, read from the compiled program."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from tests.support.core_hlo import collectives
from tests.support.core_runs import MESHES, program_of

pytestmark = pytest.mark.optimized


def wide():
    """Returns a task whose gradient is 256 KiB, so that reading it once shows."""
    init = lambda key: {"a": jnp.full((256, 128), 0.01), "b": jnp.full((128, 256), 0.01)}
    loss = lambda params, batch, key: sk.mean(((batch["x"] @ params["a"] @ params["b"]) ** 2).sum(-1))
    data = {"x": np.ones((64, 256), np.float32)}
    return sk.Task(
        init, loss, optax.adam(0.1), train_data=data, rules=[("a", ["embed", "mlp"]), ("b", ["mlp", "embed"])]
    )


@pytest.mark.forms(1)
@pytest.mark.parametrize("mesh", ["data 2 x fsdp 2 x tensor 2", "replica 2 x data 4", "fsdp 8 zero 2", "fsdp 8 zero 3"])
def test_check_sends_nothing_and_skip_one_scalar(mesh):
    found = {}
    for policy in ("continue", "stop", "skip", "rollback"):
        program = program_of(wide(), on_nonfinite=policy, **MESHES[mesh])
        sent = collectives(program.compiled.as_text(), program.sizes)
        found[policy] = sorted((c.kind, sorted(c.axes), c.in_loop) for c in sent)
        found[policy, "bytes"] = program.compiled.cost_analysis()["bytes accessed"]
    assert found["stop"] == found["continue"]
    axes = sorted(axis for axis, size in program.sizes.items() if size > 1)
    for policy in ("skip", "rollback"):
        more = list(found[policy])
        for each in found["continue"]:
            more.remove(each)
        assert more == [("all-reduce", axes, False)], policy
    parts = np.prod([n for axis, n in MESHES[mesh]["mesh"].items() if axis in ("fsdp", "tensor")], initial=1)
    gradient = 4 * 2 * 256 * 128 / parts
    for policy in ("stop", "skip", "rollback"):
        assert found[policy, "bytes"] - found["continue", "bytes"] <= 1.1 * gradient + 512, policy
