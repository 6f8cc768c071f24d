"""What the guard of a step costs on the wire and in bytes, read from the compiled program."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.step import step
from spmdkit.step.reducer_io import ReducerSlots
from tests.support.core_hlo import collectives
from tests.support.core_runs import MESHES, program_of


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
def test_check_and_norm_send_nothing_and_skip_one_scalar(mesh, monkeypatch):
    found = {}
    for policy in ("continue", "stop", "skip", "rollback", "nothing"):
        if policy == "nothing":
            monkeypatch.setattr(step, "guard_code", lambda *_: (None, None))
        program = program_of(wide(), on_nonfinite=policy.replace("nothing", "continue"), **MESHES[mesh])
        sent = collectives(program.compiled.as_text(), program.sizes)
        found[policy] = sorted((c.kind, sorted(c.axes), c.in_loop) for c in sent)
        found[policy, "bytes"] = program.compiled.cost_analysis()["bytes accessed"]
    assert found["stop"] == found["continue"] == found["nothing"]
    axes = sorted(axis for axis, size in program.sizes.items() if size > 1)
    for policy in ("skip", "rollback"):
        more = list(found[policy])
        for each in found["continue"]:
            more.remove(each)
        assert more == [("all-reduce", axes, False)], policy
    parts = np.prod([n for axis, n in MESHES[mesh]["mesh"].items() if axis in ("fsdp", "tensor")], initial=1)
    gradient = 4 * 2 * 256 * 128 / parts
    for policy in ("continue", "stop", "skip", "rollback"):  # one read for the norm and the check, an eighth added up
        assert found[policy, "bytes"] - found["nothing", "bytes"] <= 1.26 * gradient + 512, policy


def test_norm_of_clipping_costs_nothing(monkeypatch):
    found = []
    for is_recorded in (True, False):
        if not is_recorded:
            monkeypatch.setattr(ReducerSlots, "record_norm", lambda *_: None)
            monkeypatch.setattr(step, "guard_code", lambda *_: (None, None))
        program = program_of(wide(), clip_norm=1.0, on_nonfinite="continue", **MESHES["fsdp 8 zero 3"])
        sent = collectives(program.compiled.as_text(), program.sizes)
        kinds = sorted((c.kind, sorted(c.axes), c.in_loop) for c in sent)
        found.append((kinds, program.compiled.cost_analysis()["bytes accessed"]))
    assert found[0][0] == found[1][0] and found[0][1] - found[1][1] <= 512
