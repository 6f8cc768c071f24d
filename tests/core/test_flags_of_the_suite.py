"""The flags with which tests compile quickly change nothing that tests read from a compiled program."""

import collections

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from tests.support.core_hlo import collectives
from tests.support.core_runs import MESHES, program_of
from tests.support.environment import QUICK_XLA

pytestmark = pytest.mark.optimized

QUICK = {
    **({"xla_cpu_use_fusion_emitters": False} if QUICK_XLA else {}),  # of jax 0.10 alone
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
AS_USERS = {**({"xla_cpu_use_fusion_emitters": True} if QUICK_XLA else {}), "xla_cpu_parallel_codegen_split_count": 32}


def two_layers():
    def loss_fn(params, batch, key):
        h = jnp.tanh(sk.shard(batch["x"] @ params["up"], "batch", "mlp"))
        return sk.mean(((h @ params["down"] - batch["y"]) ** 2).sum(-1))

    x = np.linspace(-1, 1, 64 * 16, dtype=np.float32).reshape(64, 16)
    init = lambda key: {"up": jnp.full((16, 64), 0.01), "down": jnp.full((64, 16), 0.01)}
    rules = [("up", ["embed", "mlp"]), ("down", ["mlp", "embed"])]
    return sk.Task(init, loss_fn, optax.adam(1e-2), train_data={"x": x, "y": x**2}, rules=rules)


def test_users_get_the_same_collectives_and_donation():
    def read(options):
        mesh = MESHES["data 2 x fsdp 2 x tensor 2"]
        program = program_of(two_layers(), microbatches=4, compiler_options=options, **mesh)
        memory = program.compiled.memory_analysis()
        found = collectives(program.compiled.as_text(), program.sizes)
        sent = collections.Counter((c.kind, frozenset(c.axes), c.in_loop) for c in found)
        return sent, memory.alias_size_in_bytes, memory.argument_size_in_bytes, memory.output_size_in_bytes

    found = read(QUICK)
    assert found[0] and found == read(AS_USERS)
