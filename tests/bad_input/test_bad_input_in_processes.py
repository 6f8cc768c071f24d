"""The same from outside: real processes, their exit codes and their whole output."""

import subprocess
import sys

import pytest

from tests.support.command_line import NEVER
from tests.support.environment import environment_of_a_user

pytestmark = pytest.mark.processes


def run(folder, *arguments, limit="unlimited"):
    """Returns (exit code, standard output, standard error) of `spmdkit` in a folder; no file may pass `limit`
    blocks."""
    command = ["sh", "-c", f'ulimit -f {limit}; exec "$0" "$@"', sys.executable, "-m", "spmdkit", *arguments]
    done = subprocess.run(
        command, cwd=folder.path, env=environment_of_a_user(), capture_output=True, text=True, timeout=90
    )
    for part in NEVER:
        assert part not in done.stdout + done.stderr, done.stdout + done.stderr
    return done.returncode, done.stdout, done.stderr


def test_a_loss_that_raises(folder):
    folder.write("def loss_fn(params, batch, key):\n    raise ValueError('not today')")
    code, output, error = run(folder, "train", "run.yaml")
    assert (code, output) == (70, "")
    assert error.startswith("loss_fn raised ValueError at ") and error.endswith("\nValueError: not today\n"), error
    assert "site-packages" not in error and "spmdkit/" not in error


@pytest.mark.slow
def test_a_checkpoint_above_the_file_size_limit(folder):
    folder.write(
        "def init(key): return {'w': jnp.zeros((4, 8)), 'b': jnp.zeros(8), 'unused': jax.random.normal(key, (300, 1000))}",
        config={"run_dir": "large"},
    )
    code, output, error = run(folder, "train", "run.yaml", limit=200)
    assert code == 74, output + error
    assert "saving step" in error and "intact are none yet" in error, error
    assert [path.name for path in (folder.path / "large/checkpoints").iterdir()] == []
