"""Slurm on hosts of tests/support/two_hosts.py: a controller, two nodes and munge, without systemd and cgroups."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.two_hosts import Hosts, hosts

CONF = """
ClusterName=one
SlurmctldHost=login(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={here}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={here}/state
SlurmdSpoolDir={here}/spool-%n
SlurmctldPidFile={here}/slurmctld.pid
SlurmdPidFile={here}/slurmd-%n.pid
SlurmctldLogFile={here}/slurmctld.log
SlurmdLogFile={here}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout=30
KillWait=5
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=0
MinJobAge=300
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
SlurmdParameters=config_overrides
NodeName=host0 NodeAddr=10.77.0.2 CPUs=4 RealMemory=4000 State=UNKNOWN
NodeName=host1 NodeAddr=10.77.0.3 CPUs=4 RealMemory=4000 State=UNKNOWN
"""


def missing() -> str:
    """Returns the parts of Slurm missing on this machine, or an empty text."""
    absent = [name for name in ("slurmctld", "slurmd", "sbatch", "munged") if shutil.which(name) is None]
    return f"no {', '.join(absent)} (packages slurm-wlm, munge)" if absent else ""


class Slurm:
    """A cluster `login`, `host0`, `host1`."""

    def __init__(self, machines: Hosts, folder: Path):
        self.machines, self._folder = machines, folder
        self.environ = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        for name in [name for name in self.environ if name.startswith(("SLURM_", "SBATCH_")) and name != "SLURM_CONF"]:
            del self.environ[name]

    def command(self, *words: str, cwd: Path | None = None, timeout: float = 60) -> str:
        """Returns the output of a Slurm command on the login host. Raises if it fails."""
        process = self.machines.start("login", words, env=self.environ, cwd=cwd)
        output = process.communicate(timeout=timeout)[0]
        assert process.returncode == 0, (words, output)
        return output

    def state(self, job: int) -> str:
        """Returns `JobState ExitCode Restarts` of a job: `COMPLETED 0:0 1`."""
        text = self.command("scontrol", "show", "job", str(job), "-o")
        told = dict(word.partition("=")[::2] for word in text.split())
        return f"{told['JobState']} {told['ExitCode']} {told['Restarts']}"

    def wait(self, job: int, timeout: float) -> str:
        """Returns the state in which a job has ended."""
        deadline = time.monotonic() + timeout
        while (state := self.state(job)).split()[0] in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED"):
            assert time.monotonic() < deadline, state
            time.sleep(0.5)
        return state


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Yields a running cluster with two idle nodes."""
    (folder / "slurm.conf").write_text(CONF.format(here=folder))
    (folder / "key").write_bytes(os.urandom(64))
    (folder / "key").chmod(0o400)
    names = [f"--{name}={folder}/munge.{name}" for name in ("socket", "pid-file", "log-file", "seed-file")]
    names = [f"--key-file={folder}/key", *names]
    with hosts(("login", "host0", "host1")) as machines:
        munge = subprocess.Popen(["munged", "--foreground", "--force", *names], stderr=subprocess.DEVNULL)
        try:
            made, quiet = Slurm(machines, folder), {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            machines.start("login", ["slurmctld", "-D", "-c"], env=made.environ, **quiet)
            for node in ("host0", "host1"):
                machines.start(node, ["slurmd", "-D", "-N", node], env=made.environ, **quiet)
            deadline = time.monotonic() + 60
            while True:
                with contextlib.suppress(AssertionError):
                    if made.command("sinfo", "-h", "-o", "%T %D").split() == ["idle", "2"]:
                        break
                assert time.monotonic() < deadline, (folder / "slurmctld.log").read_text()[-2000:]
                time.sleep(0.5)
            yield made
        finally:
            munge.kill()
            munge.wait()
