"""Completion of the command line in bash, installed into an empty home directory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.environment import environment_of_a_user

pytestmark = pytest.mark.processes

COMPLETE = """
source ~/.bashrc
COMP_WORDS=(spmdkit {words}) COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
$(complete -p spmdkit | sed 's/.*-F \\([^ ]*\\) .*/\\1/') spmdkit
echo "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def bash(tmp_path):
    """Runs a command in bash, with an empty home directory and `spmdkit` on the path."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = environment_of_a_user() | {"HOME": str(tmp_path), "PATH": path, "SHELL": "/bin/bash"}

    def run(command):
        started = ["bash", "--norc", "-c", f"{command}\n:"]  # `:` keeps bash as the parent, which typer looks for
        done = subprocess.run(started, env=environment, capture_output=True, text=True, timeout=60, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_bash_completes_commands_after_install(bash, tmp_path):
    assert "bash completion installed" in bash("spmdkit --install-completion")
    assert ".bash_completions/spmdkit.sh" in (tmp_path / ".bashrc").read_text()
    assert bash(COMPLETE.format(words="tra")).split() == ["train"]
    assert bash(COMPLETE.format(words="checkpoint ins")).split() == ["inspect"]
