"""`mpirun` over two hosts that are network namespaces: three processes have the numbers of three local ones."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys

import pytest

from tests.engines import jobs
from tests.support import two_hosts

reason = two_hosts.missing() or ("" if shutil.which("mpirun") else "no mpirun (package openmpi-bin)")
pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.skipif(bool(reason), reason=reason)]

AGENT = """#!{python}
import json, os, sys
words = sys.argv[1:]
while words[0].startswith("-"):
    words.pop(0)
enter = json.loads({table!r})[words[0]]
os.execvp(enter[0], [*enter, "sh", "-c", " ".join(words[1:])])
"""
"""What mpirun is told to take for ssh: `[-x] HOST COMMAND`."""


def test_mpirun_over_two_hosts_has_the_numbers_of_a_local_run(tmp_path):
    expected = jobs.local(tmp_path / "local", 3, *jobs.THREE)
    folder, agent = jobs.project(tmp_path / "project"), tmp_path / "agent"
    with two_hosts.hosts() as machines:
        table = {name: machines.on(name, []) for name in machines.names}
        agent.write_text(AGENT.format(python=sys.executable, table=json.dumps(table)))
        agent.chmod(0o755)
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        own = ["--host", "host0:2,host1:1", "-np", "3", "--display-map", "--mca", "plm_rsh_agent", str(agent)]
        command = ["mpirun", *root, *own, sys.executable, "-m", "spmdkit", "train", "run.yaml", *jobs.THREE]
        process = machines.start("host0", command, cwd=folder, env=jobs.on_path())
        output = process.communicate(timeout=150)[0]
    assert process.returncode == 0, output
    assert jobs.losses(folder) == expected
    assert "3 processes: open_mpi (OMPI_COMM_WORLD_SIZE=3, OMPI_COMM_WORLD_RANK=0)" in output
    assert re.search(r"node: host1\b.*\n.*rank: 2", output), output
