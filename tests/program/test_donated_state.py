"""A second step with a state that was given away: an error of ours, where jaxlib would end the process."""

import subprocess
import sys
import timeit

import jax
import jax.numpy as jnp
import pytest

from spmdkit.step.state import check_not_donated

PROGRAM = """
import jax; jax.config.update("jax_platforms", "cpu"); jax.config.update("jax_num_cpu_devices", {num})
import jax.numpy as jnp, numpy as np, optax, spmdkit as sk
from spmdkit.errors import ConfigError
from spmdkit.program.program import Program
x = np.ones((8, 4), np.float32)
task = sk.Task(lambda key: jnp.ones(4), lambda w, b, key: sk.mean(b @ w), optax.adam(.1), train_data=x, eval_data=x)
program = Program(sk.Config(task="t.py:t", batch_size=8, mesh={{"data": {num}}}), task, jax.devices())
first = program.init()
state, _ = program.step(first, program.put(x))
for again in (lambda: program.step(first, program.put(x)), lambda: program.eval(first)):
    try:
        again()
    except ConfigError as error:
        print(error)
state, _ = program.step(state, program.put(x))
print("went on", int(state.step))
"""


@pytest.mark.parametrize("num", [1, 2])
def test_a_state_that_was_given_to_a_step_is_refused(num):
    """C16: on two CPU devices jaxlib 0.10.2 died by SIGSEGV."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(num=num)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("program.step: the state was donated to an earlier step") == 1
    assert done.stdout.count("program.eval: the state was donated to an earlier step") == 1
    assert "state, metrics = program.step(state, batch)" in done.stdout
    assert "went on 2" in done.stdout


def test_the_check_of_a_hundred_leaves_takes_less_than_a_step_would_notice():
    state = {f"leaf{i}": jnp.ones(2) for i in range(100)}
    check_not_donated(state, "program.step")
    taken = min(timeit.repeat(lambda: check_not_donated(state, "program.step"), number=20, repeat=10)) / 20
    assert taken < 200e-6, f"{taken * 1e6:.1f} us"  # some 20 us
    jax.block_until_ready(state)
