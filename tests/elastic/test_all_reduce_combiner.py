"""Reductions of processes that go on without a dead one: each a collective of its own, so that none begins after the
first that fails."""

import os
import subprocess
import sys

import pytest

from spmdkit.compat import membership as compat_membership
from tests.support.environment import environment_of_a_user

PROGRAM = """
import sys
from spmdkit.compat import membership as compat_membership
if sys.argv[1] == "combiner disabled":
    compat_membership.disable_all_reduce_combiner()
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
jax.config.update("jax_num_cpu_devices", 2)
both = jax.shard_map(lambda a, b: jax.lax.psum((a, b), "x"), mesh=jax.sharding.Mesh(jax.devices(), "x"), in_specs=P("x"), out_specs=P())
text = jax.jit(both).lower(jnp.ones(4), jnp.ones((6, 2))).compile().as_text()
print(sum(" all-reduce(" in line for line in text.splitlines()))
"""  # noqa: E501


@pytest.mark.parametrize(("how", "num"), [("default", 1), ("combiner disabled", 2)])
def test_all_reduces_are_not_combined(how, num):
    env = environment_of_a_user() | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
    run = subprocess.run([sys.executable, "-c", PROGRAM, how], env=env, capture_output=True, text=True, timeout=120)
    assert run.stdout.strip() == str(num), run.stderr


def test_xla_flags_of_the_environment_are_kept(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp/x --xla_disable_hlo_passes=algsimp")
    compat_membership.disable_all_reduce_combiner()
    once = os.environ["XLA_FLAGS"]
    assert once.endswith(" --xla_disable_hlo_passes=algsimp,cpu-all-reduce-combiner")
    assert once.startswith("--xla_dump_to=/tmp/x ")
    compat_membership.disable_all_reduce_combiner()
    assert os.environ["XLA_FLAGS"] == once
