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

QUICK_HLO = {
    **({"xla_cpu_use_fusion_emitters": False} if QUICK_XLA else {}),  # of jax 0.10 alone
    "xla_cpu_parallel_codegen_split_count": 1,
}
QUICK_LLVM = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""As set by `jax_disable_most_optimizations`."""
LLVM_OF_USERS = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
HLO_OF_USERS = {
    **({"xla_cpu_use_fusion_emitters": True} if QUICK_XLA else {}),
    "xla_cpu_parallel_codegen_split_count": 32,
}


def two_layers():
    def loss_fn(params, batch, key):
        h = jnp.tanh(sk.shard(batch["x"] @ params["up"], "batch", "mlp"))
        return sk.mean(((h @ params["down"] - batch["y"]) ** 2).sum(-1))

    x = np.linspace(-1, 1, 64 * 16, dtype=np.float32).reshape(64, 16)
    init = lambda key: {"up": jnp.full((16, 64), 0.01), "down": jnp.full((64, 16), 0.01)}
    rules = [("up", ["embed", "mlp"]), ("down", ["mlp", "embed"])]
    return sk.Task(init, loss_fn, optax.adam(1e-2), train_data={"x": x, "y": x**2}, rules=rules)


@pytest.fixture(scope="module")
def programs():
    """Returns the compiled step: quick, with all passes of LLVM, as users compile it; and the sizes of its mesh."""
    program = program_of(two_layers(), microbatches=4, **MESHES["data 2 x fsdp 2 x tensor 2"])
    options = (QUICK_HLO | QUICK_LLVM, QUICK_HLO | LLVM_OF_USERS, HLO_OF_USERS | LLVM_OF_USERS)
    return [program.lowered.compile(each) for each in options], program.sizes


def memory_of(program):
    memory = program.memory_analysis()
    return memory.alias_size_in_bytes, memory.argument_size_in_bytes, memory.output_size_in_bytes


def test_users_get_the_same_collectives_and_donation(programs):
    (quick, _, of_users), sizes = programs
    sent = lambda program: collections.Counter(
        (c.kind, frozenset(c.axes), c.in_loop) for c in collectives(program.as_text(), sizes)
    )
    assert sent(quick) and sent(quick) == sent(of_users)
    assert memory_of(quick) == memory_of(of_users)


def test_passes_of_llvm_change_nothing_that_is_read(programs):
    (quick, optimized, _), _ = programs
    assert quick.as_text() == optimized.as_text()
    assert quick.cost_analysis() == optimized.cost_analysis()
    assert str(quick.memory_analysis()) == str(optimized.memory_analysis())
