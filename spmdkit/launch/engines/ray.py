"""Ray: a placement group with one bundle per process, by default on different hosts; an actor in each starts an spmdkit
process.

The rendered driver runs on a machine of the cluster. It sets the rank of each process (SPMDKIT_*; process 0 is on the
host of the first bundle). When a process fails, it restarts all with new actors: always after 42, otherwise up to
`--max-restarts` times. Ray's `max_restarts` restarts a single actor, which cannot join the others. ray.train's
JaxTrainer cannot run a command: no signals, no exit codes (cluster/environments/ray.py, docs/howto/clusters/ray.md).
Source: Ray 2.60, ray/train/v2/jax/config.py; docs.ray.io/en/latest/ray-core/scheduling/placement-group.html.
"""

from __future__ import annotations

from spmdkit.errors import ConfigError
from spmdkit.launch.engines.base import AGAIN, FINAL, ClusterJob, Option, Rendered

STRATEGIES = ("STRICT_SPREAD", "SPREAD", "PACK", "STRICT_PACK")

LOCAL = "local"
"""The address that starts a Ray instance for this run only, on this machine's loopback interface."""

OPTIONS = {
    "address": Option("auto", "HOST:PORT of the head; auto: the cluster that this machine is in; local: a Ray of this run alone, on this machine"),
    "cpus": Option("1", "CPUs that Ray sets aside for each process"),
    "gpus": Option("0", "GPUs of each process; 0: Ray hides them all"),
    "tpus": Option("0", "TPU chips of each process"),
    "strategy": Option("STRICT_SPREAD", "how Ray places processes: STRICT_SPREAD is a host for each, PACK few hosts; local packs"),
    "wait_s": Option("600", "seconds to wait until the cluster has room for all"),
    "folder": Option("", "folder to run in, the same on every host; empty: where launch is called"),
    "python": Option("python", "Python that has spmdkit, and Ray, on every host"),
}  # fmt: skip

HERE = "# What follows is all that this job is.\n"

DRIVER = '''
import ctypes
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

# What follows is all that this job is.

os.environ["RAY_DEDUP_LOGS"] = "0"  # two processes may say the same
if importlib.util.find_spec("ray") is None:
    print(f"this Python ({sys.executable}) has no Ray: pip install 'spmdkit[ray]'", file=sys.stderr)
    sys.exit(78)
own = None
if ADDRESS == "local":  # before Ray is imported, which reads its token then
    from spmdkit.errors import ConfigError
    from spmdkit.parameter_server.ray_local import LocalRay

    own = LocalRay(Path(__file__).resolve().parent, NUM * BUNDLE["CPU"], 0, log_to_driver=True)
    try:
        own.start()
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(78)

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

TERM_WITH_ME = (1, signal.SIGTERM)  # prctl(PR_SET_PDEATHSIG): whoever loses its actor saves and leaves
is_stopping = False


class Host:
    """An actor: starts one process, and waits for it in one of its threads."""

    process = None

    def meeting(self):
        """Returns (address of this host, a port that is free on it)."""
        address = ray.util.get_node_ip_address()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family) as free:
            free.bind((address, 0))
            return f"[{address}]" if ":" in address else address, free.getsockname()[1]

    def run(self, place):
        """Returns how the process ended: its code, 128 + n after signal n."""
        env = os.environ | place | {"PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(COMMAND, cwd=FOLDER, env=env, start_new_session=True, preexec_fn=lambda: ctypes.CDLL(None).prctl(*TERM_WITH_ME))
        code = self.process.wait()
        return code if code >= 0 else 128 - code

    def signal(self, number):
        """Sends a signal; KILL goes to the process's children too."""
        if self.process is not None and self.process.poll() is None:
            (os.killpg if number == signal.SIGKILL else os.kill)(self.process.pid, number)


def say(text):
    print(f"spmdkit on ray: {text}", flush=True)


def placed():
    """Returns a placement group with room for all, or ends with 75."""
    group, end = placement_group([BUNDLE] * NUM, strategy=STRATEGY), time.monotonic() + WAIT_S
    while not group.wait(min(30, max(1, end - time.monotonic()))):
        nodes = [{k: v for k, v in node["Resources"].items() if k in BUNDLE} for node in ray.nodes() if node["Alive"]]
        say(f"no room yet for {NUM} x {BUNDLE} ({STRATEGY}); hosts have {nodes}")
        if is_stopping or time.monotonic() > end:
            remove_placement_group(group)
            sys.exit(AGAIN if is_stopping else 75)
    return group


def attempt():
    """Starts all and returns the code of the first that failed, or 0; no process is left afterwards."""
    group = placed()
    hosts = []
    try:
        taken = {"num_cpus": BUNDLE["CPU"], "num_gpus": BUNDLE.get("GPU", 0), "resources": {k: v for k, v in BUNDLE.items() if k not in ("CPU", "GPU")}}
        for i in range(NUM):
            at = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i)
            hosts.append(ray.remote(max_restarts=0, max_concurrency=4, scheduling_strategy=at, **taken)(Host).remote())
        address, port = ray.get(hosts[0].meeting.remote())
        place = {"SPMDKIT_COORDINATOR": f"{address}:{port}", "SPMDKIT_NUM_PROCESSES": str(NUM)}
        return watched(hosts, {host.run.remote(place | {"SPMDKIT_PROCESS_ID": str(i)}): i for i, host in enumerate(hosts)})
    except ray.exceptions.RayError as error:
        say(f"a host was lost before all had started ({type(error).__name__})")
        return 137
    finally:
        for host in hosts:
            ray.kill(host)
        remove_placement_group(group)


def watched(hosts, runs):
    """Waits for all. Processes that stop on request save together and get time for it; after a failure none can continue."""
    code, limit, is_terminated = 0, None, False
    while runs:
        for ref in ray.wait(list(runs), timeout=0.5)[0]:
            process = runs.pop(ref)
            try:
                ended = ray.get(ref)
            except ray.exceptions.RayError as error:
                say(f"the host of process {process} was lost ({type(error).__name__})")
                ended = 137
            if ended:
                say(f"process {process} ended with {ended}")
            code = code or ended
            if code and limit is None:
                limit = time.monotonic() + (GRACE_S if code == AGAIN else 5)
        number = None
        if is_stopping and not is_terminated:
            is_terminated, limit, number = True, time.monotonic() + GRACE_S, signal.SIGTERM
        elif limit is not None and time.monotonic() > limit:
            limit, number = time.monotonic() + 5, signal.SIGKILL
        if number is not None:
            for process in runs.values():
                hosts[process].signal.remote(number)
    return code


def stop(*_):
    global is_stopping
    is_stopping = True


def connect():
    """Joins the cluster; exits with 75 where none responds."""
    host, _, port = ADDRESS.rpartition(":")
    try:
        if host:  # Ray would retry for minutes where no process listens
            socket.create_connection((host.removeprefix("ray://").strip("[]"), int(port)), 10).close()
        ray.init(address=ADDRESS, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        why = str(error).splitlines()[0]
        say(f"no Ray cluster responds at address {ADDRESS} ({why}). On the first host: ray start --head; on the others: ray start --address=HOST:6379")
        sys.exit(75)


def main():
    starts = 0
    if own is None:
        connect()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    try:
        while True:
            code = attempt()
            if code in (0, *FINAL):
                return code
            if is_stopping:
                return AGAIN
            if code != AGAIN:
                if starts >= RESTARTS:
                    return code
                starts += 1
                say(f"starting all again, restart {starts} of {RESTARTS}")
            time.sleep(2)
    finally:
        ray.shutdown()
        if own is not None:
            own.close()


if __name__ == "__main__":
    sys.exit(main())
'''


def render(job: ClusterJob) -> Rendered:
    """Returns the driver and the command that runs it.

    Raises: ConfigError for an unknown strategy or an invalid number.
    """
    strategy, address = job.options["strategy"], job.options["address"]
    if strategy not in STRATEGIES:
        raise ConfigError(f"--set strategy={strategy}: Ray has {', '.join(STRATEGIES)}. Try --set strategy=SPREAD.")
    bundle = {"CPU": job.whole("cpus", 1), "GPU": job.whole("gpus"), "TPU": job.whole("tpus")}
    settings = {
        "COMMAND": job.command(),
        "FOLDER": job.folder,
        "ADDRESS": address,
        "NUM": job.num_processes,
        "BUNDLE": {kind: number for kind, number in bundle.items() if number},
        "STRATEGY": "PACK" if address == LOCAL else strategy,
        "RESTARTS": job.max_restarts,
        "GRACE_S": job.grace_s,
        "WAIT_S": job.whole("wait_s", 1),
        "AGAIN": AGAIN,
        "FINAL": FINAL,
    }
    head = (
        f'"""{job.num_processes} processes of spmdkit on Ray. The first failure ends the others; '
        f'{AGAIN} (stopped and saved) starts all again."""\n'
    )
    script = head + DRIVER.replace(HERE, "\n".join(f"{name} = {value!r}" for name, value in settings.items()) + "\n", 1)
    name = f"{job.name}.py"
    return Rendered({name: script}, ((job.options["python"], name),), "a Python with Ray, on a machine of the cluster")
