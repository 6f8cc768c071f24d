"""ssh: one process per host, started from this machine; the first failure ends all processes.

Every host has the project in the same folder and a shared run directory. Process 0 is on the first host, at `port`. The
first process that fails, Ctrl-C or TERM ends the others: `ssh -tt` hangs up the remote command, and on SIGHUP each
process saves and exits with 42. The user provides keys and known hosts: there is no prompt (`BatchMode`).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable

from spmdkit.errors import ConfigError
from spmdkit.launch.engines.base import AGAIN, REQUIRED, ClusterJob, Option, Rendered, restart_loop

OPTIONS = {
    "hosts": Option(REQUIRED, "hosts, separated by commas, as ssh and the others of them know them: host0,host1"),
    "folder": Option("", "folder of the project, the same on every host; empty: where launch is called"),
    "python": Option("python", "Python that has spmdkit, on every host"),
    "port": Option("8476", "port of process 0 on the first host"),
    "ssh": Option("ssh -tt -o BatchMode=yes -o ServerAliveInterval=10", "command that runs a line of shell on a host"),
    "setup": Option("", "a line of shell before the start, such as `source ~/venv/bin/activate`"),
}


def render(job: ClusterJob) -> Rendered:
    """Returns a script that starts all processes and waits for them, and the `bash` command for it.

    Raises: ConfigError when the number of hosts is not the number of processes.
    """
    hosts = [host.strip() for host in job.options["hosts"].split(",") if host.strip()]
    if len(hosts) != job.num_processes:
        raise ConfigError(
            f"-n {job.num_processes} with {len(hosts)} hosts ({', '.join(hosts)}): each host has one process. "
            f"Try -n {len(hosts)}."
        )
    port = job.whole("port", 1)
    first = hosts[0].rpartition("@")[2]
    setup = f"{job.options['setup']} && " if job.options["setup"] else ""
    line: Callable[[int], str] = lambda process: (
        f"cd {shlex.quote(job.folder)} && {setup}exec env SPMDKIT_COORDINATOR={first}:{port} "
        f"SPMDKIT_NUM_PROCESSES={len(hosts)} SPMDKIT_PROCESS_ID={process} {shlex.join(job.command())}"
    )
    starts = "\n".join(f"  start {shlex.join([host, line(process)])}" for process, host in enumerate(hosts))
    script = f"""#!/bin/bash
# {len(hosts)} processes, one per host. The first failure ends the others; 42 (stopped and saved) starts all again.
run() {{
  pids=()
  start() {{ {job.options["ssh"]} "$1" "$2" </dev/null & pids+=($!); }}
{starts}
  code=0; limit=
  while [ ${{#pids[@]}} -gt 0 ]; do
    for i in "${{!pids[@]}}"; do
      kill -0 "${{pids[i]}}" 2>/dev/null && continue
      wait "${{pids[i]}}"; ended=$?; unset "pids[i]"
      [ $code = 0 ] && code=$ended
      # Processes that stop on request save together and get time for it; after a failure none can continue.
      [ $code != 0 ] && [ -z "$limit" ] && limit=$((SECONDS + ($code == {AGAIN} ? {job.grace_s} : 5)))
    done
    [ -n "$limit" ] && [ $SECONDS -ge $limit ] && kill "${{pids[@]}}" 2>/dev/null
    sleep 0.2
  done
  return $code
}}
is_stopping=
stop() {{ is_stopping=1; limit=$((SECONDS + {job.grace_s})); kill -HUP "${{pids[@]}}" 2>/dev/null; }}
trap stop INT TERM HUP
{restart_loop(job, "run; code=$?", 2, f'  [ -n "$is_stopping" ] && exit {AGAIN}' + chr(10))}"""
    return Rendered({f"{job.name}.sh": script}, (("bash", f"{job.name}.sh"),), "bash and ssh")
