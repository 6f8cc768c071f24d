"""The check that ends each test of a fault: whatever a job may leave behind is found, and an empty folder is not
complained of."""

import fcntl
import json
import socket
import subprocess
import sys


def test_processes_ports_locks_and_temporary_files_that_are_left_are_found(job):
    assert job.left(0) == []
    run = job.folder / "run"
    run.mkdir()
    (job.folder / "tmpabc").mkdir()
    (run / ".plan.json.0123abcd.partial").touch()
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        (run / "run.lock").open("w") as lock,
        subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()"], cwd=job.folder, stdin=subprocess.PIPE
        ) as process,
    ):
        port = server.getsockname()[1]
        (run / "environment.json").write_text(json.dumps({"variables": {"SPMDKIT_SERVICE": f"127.0.0.1:{port}"}}))
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = "\n".join(job.left(0))
        for what in (
            f"process {process.pid}: ",
            f"port {port}",
            f"lock {run / 'run.lock'}",
            "tmpabc of TMPDIR",
            ".partial, half",
        ):
            assert what in found, (what, found)
        process.stdin.close()
    (run / ".plan.json.0123abcd.partial").unlink()
    (job.folder / "tmpabc").rmdir()
    assert job.left(5) == []
