"""The script of docs/howto/clusters/mpirun.md, with a program in place of mpirun."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from spmdkit.errors import FINAL

PAGE = Path(__file__).parents[2] / "docs/howto/clusters/mpirun.md"
MPIRUN = """#!/bin/bash
trap 'exit 42' USR1
echo start >> starts
read -r code rest < codes
echo "$rest" > codes
[ "$code" = wait ] && { touch waiting; while true; do sleep 0.02; done; }
exit $code
"""


@pytest.fixture
def script(tmp_path):
    """Starts the script with these results of mpirun."""
    text = PAGE.read_text().split("```bash\n")[3].split("```")[0].replace("sleep 1", "sleep 0.01")
    (tmp_path / "script").write_text(text)
    (tmp_path / "mpirun").write_text(MPIRUN)
    (tmp_path / "mpirun").chmod(0o755)

    def start(*codes):
        (tmp_path / "codes").write_text(" ".join(map(str, codes)) + "\n")
        env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        return subprocess.Popen(["bash", "script"], cwd=tmp_path, env=env)

    start.folder = tmp_path
    return start


@pytest.mark.parametrize(
    ("codes", "last"),
    [((42, 42, 42, 42, 42, 0), 0), ((75, 137, 70, 0), 0), ((70, 70, 70, 70, 0), 70), *[((int(c),), c) for c in FINAL]],
)
def test_script_restarts_by_the_table(script, codes, last):
    assert script(*codes).wait(timeout=60) == last
    starts = (script.folder / "starts").read_text().count("start")
    assert starts == (4 if codes == (70, 70, 70, 70, 0) else len(codes))


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_script_saves_on_a_signal(script, sent):
    running = script(42, "wait")
    while not (script.folder / "waiting").exists():
        time.sleep(0.02)
    running.send_signal(sent)
    assert running.wait(timeout=60) == 42
