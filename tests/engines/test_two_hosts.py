"""What is rendered for Kubernetes, Kubeflow, Cloud TPU and ssh, run on two hosts with what their controllers set, and
mpirun: the numbers of a local run; and a host that vanishes.

Hosts are network namespaces with names of their own (tests/support/two_hosts.py); a pod's DNS name is in their hosts
file.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading

import pytest
import yaml

from spmdkit.launch.engines.submit import prepared
from tests.engines import jobs
from tests.support import two_hosts

reason = two_hosts.missing()
pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.skipif(bool(reason), reason=reason)]

PYTHON = f"python={sys.executable}"


@pytest.fixture(scope="module")
def machines():
    pods = {"run-workers-0-0.run": "host0", "run-workers-0-1.run": "host1"}
    nodes = {"run-node-0-0.run": "host0", "run-node-0-1.run": "host1"}
    slices = {"run-workers-1-0.run": "host1"}
    own = {name.partition(".")[0]: host for name, host in (pods | nodes | slices).items()}  # as a pod's /etc/hosts
    with two_hosts.hosts(also=pods | nodes | slices | own) as made:
        yield made


def text_of(engine, *settings, num=2, restarts=0):
    (text,) = prepared(engine, ("train", "run.yaml"), num, settings, "run", restarts, 60).files.values()
    return text


def run(machines, folder, starts):
    """Runs [(hostname, command, variables)] together in a project, one on each host; returns the output of the first
    when all have ended with 0."""
    started = [
        machines.start(f"host{i}", command, hostname, cwd=folder, env=jobs.on_path(**env))
        for i, (hostname, command, env) in enumerate(starts)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(started), outputs
    return outputs[0]


def pods_of(document: dict, replicas: int = 1) -> list[tuple[str, dict[str, str]]]:
    """Returns (name, variables) of each pod as the JobSet and the Job controllers make them.

    The annotations are those that jobset_controller.go writes on a pod's template (kubernetes-sigs/jobset 08dfbdf,
    `labelAndAnnotateObject`), the completion index is the Job controller's.
    """
    name, (replicated,) = document["metadata"]["name"], document["spec"]["replicatedJobs"]
    assert replicated["replicas"] == replicas
    spec, found = replicated["template"]["spec"], []
    c = document["spec"]["coordinator"]
    for job in range(replicas):
        for pod in range(spec["parallelism"]):
            annotations = {
                "jobset.sigs.k8s.io/coordinator": f"{name}-{c['replicatedJob']}-{c['jobIndex']}-{c['podIndex']}.{name}",
                "jobset.sigs.k8s.io/job-index": str(job),
                "jobset.sigs.k8s.io/replicatedjob-replicas": str(replicas),
            }
            (container,) = spec["template"]["spec"]["containers"]
            env = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "JOB_COMPLETION_INDEX": str(pod)}
            for variable in container.get("env", []):
                path = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
                key = re.fullmatch(r"metadata.annotations\['(.*)'\]", path)
                env[variable["name"]] = annotations[key[1]] if key else variable["value"]
            found.append((f"{name}-{replicated['name']}-{job}-{pod}", env))
    return found


def container_of(document):
    (replicated,) = document["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    return container


def test_jobset_pods_have_numbers_of_a_local_run(machines, tmp_path, expected):
    folder = jobs.project(tmp_path / "project")
    document = yaml.safe_load(text_of("kubernetes", "image=i", PYTHON, f"folder={folder}"))
    starts = [(name, container_of(document)["command"], env) for name, env in pods_of(document)]
    output = run(machines, container_of(document)["workingDir"], starts)
    assert jobs.losses(folder) == expected
    assert "2 processes: jobset (JOBSET_PODS=2, JOB_COMPLETION_INDEX=0), since it allocated this host" in output


def test_tpu_slices_have_numbers_of_a_local_run(machines, tmp_path, expected):
    """GKE's webhook sets what is set here, for pods that ask for google.com/tpu (docs/how-to/tpu-multislice); the
    devices are CPUs."""
    folder = jobs.project(tmp_path / "project")
    settings = ("image=i", PYTHON, f"folder={folder}", "tpu=tpu-v6e-slice", "topology=2x2", "slices=2")
    document = yaml.safe_load(text_of("kubernetes", *settings))
    assert container_of(document)["resources"]["limits"] == {"google.com/tpu": "4"}
    starts = []
    for i, (name, env) in enumerate(pods_of(document, replicas=2)):
        env |= {
            "TPU_WORKER_ID": "0",
            "TPU_WORKER_HOSTNAMES": f"run-workers-{i}-0.run",
            "MEGASCALE_NUM_SLICES": "2",
            "MEGASCALE_SLICE_ID": str(i),
            "MEGASCALE_COORDINATOR_ADDRESS": "run-workers-0-0.run:8080",
        }
        starts.append((name, container_of(document)["command"], env))
    output = run(machines, folder, starts)
    assert jobs.losses(folder) == expected
    assert "2 processes: cloud_tpu (TPU_WORKER_ID=0 of 1 hosts, MEGASCALE_SLICE_ID=0 of 2)" in output


def test_trainjob_pods_have_numbers_of_a_local_run(machines, tmp_path, expected):
    folder = jobs.project(tmp_path / "project")
    trainer = yaml.safe_load(text_of("kubeflow", "image=i", PYTHON, f"folder={folder}"))["spec"]["trainer"]
    starts = []
    for i in range(trainer["numNodes"]):
        env = {  # as pkg/runtime/framework/plugins/jax/jax.go sets it
            "JOB_COMPLETION_INDEX": str(i),
            "JAX_NUM_PROCESSES": str(trainer["numNodes"]),
            "JAX_PROCESS_ID": str(i),
            "JAX_COORDINATOR_ADDRESS": "run-node-0-0.run:29500",
        }
        starts.append((f"run-node-0-{i}", trainer["command"], env))
    output = run(machines, tmp_path, starts)
    assert jobs.losses(folder) == expected
    assert "2 processes: kubeflow (JAX_NUM_PROCESSES=2, JAX_PROCESS_ID=0)" in output


class Metadata(http.server.BaseHTTPRequestHandler):
    """The metadata server of a TPU VM: what it returns to each worker is below /I/."""

    def do_GET(self):
        worker, _, attribute = self.path[1:].partition("/")
        endpoints, environment = self.server.values
        values = {"agent-worker-number": worker, "worker-network-endpoints": endpoints, "tpu-env": environment}
        found = values.get(attribute.rpartition("/")[2]) if self.headers.get("Metadata-Flavor") == "Google" else None
        self.send_response(404 if found is None else 200)
        self.end_headers()
        self.wfile.write((found or "").replace("WORKER", worker).encode())

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def metadata_server(endpoints="node-a:7:10.77.0.1,node-b:8:10.77.0.2", environment="ACCELERATOR_TYPE: 'v4-16'\n"):
    """Yields HOST:PORT of a metadata server, on the loopback interface of this namespace."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        server.values = endpoints, environment
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


SLICES = "MEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: 'WORKER'\nMEGASCALE_COORDINATOR_ADDRESS: '10.77.0.1:8080'\n"


@pytest.mark.parametrize(
    ("endpoints", "environment", "host"),
    [("host0,host1", "", "host0"), ("self", SLICES, "10.77.0.1")],
    ids=["names", "two slices"],
)
def test_tpu_vm_hosts_read_their_metadata_server(endpoints, environment, host):
    """The part of the script that reads rank and coordinator from the server; `gcloud` runs the script."""
    text = text_of("tpu", "tpu=t", "zone=z")
    script = text[: text.index("starts=0")] + "env | grep ^SPMDKIT_ | sort\n"
    if endpoints == "self":  # of two slices each has one worker, number 0 there
        script = script.replace("worker=$(attribute agent-worker-number)", "worker=$(echo 0)")
    with metadata_server(endpoints, environment) as address:
        for worker in range(2):
            env = jobs.environment(GCE_METADATA_HOST=f"{address}/{worker}")
            output = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True).stdout
            found = [line for line in output.split() if "COMPILE_CACHE" not in line]
            rank = f"SPMDKIT_PROCESS_ID={worker}"
            assert found == [f"SPMDKIT_COORDINATOR={host}:8482", "SPMDKIT_NUM_PROCESSES=2", rank]


GCLOUD = """#!{python}
import json, os, shutil, subprocess, sys

words, hosts = sys.argv[1:], json.loads({hosts!r})  # name -> (words that run a command there, its metadata server)
assert words[:3] == ["compute", "tpus", "tpu-vm"] and words[words.index("--zone") + 1] == "z" and "--worker=all" in words
if words[3] == "scp":  # the hosts share a disk here
    shutil.copy(words[4], words[5].removeprefix("t:"))
else:
    command = next(word.removeprefix("--command=") for word in words if word.startswith("--command="))
    started = [subprocess.Popen([*on, command], env=os.environ | {{"GCE_METADATA_HOST": at}}) for on, at in hosts.values()]
    sys.exit(max(each.wait() for each in started))
"""  # noqa: E501
"""A substitute for gcloud: copies, and runs the command on every host of the TPU."""


@pytest.mark.parametrize("task", [jobs.TASK, jobs.DIES], ids=["undisturbed", "one is lost"])
def test_tpu_vm_has_numbers_of_a_local_run(machines, tmp_path, expected, task):
    """All that is rendered, run: gcloud's two commands, and the whole script on each host; the devices are CPUs."""
    folder = jobs.project(tmp_path / "project", task)
    with contextlib.ExitStack() as stack:
        hosts = {}
        for worker, name in enumerate(machines.names):
            with machines.inside(name):
                address = stack.enter_context(metadata_server())
            hosts[name] = machines.on(name, ["sh", "-c"]), f"{address}/{worker}"
        gcloud = tmp_path / "bin" / "gcloud"
        gcloud.parent.mkdir()
        gcloud.write_text(GCLOUD.format(python=sys.executable, hosts=json.dumps(hosts)))
        gcloud.chmod(0o755)
        env = jobs.on_path()
        env["PATH"] = f"{gcloud.parent}:{env['PATH']}"
        command = jobs.launch("tpu", 2, "tpu=t", "zone=z", PYTHON, f"folder={folder}", restarts=1)
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert jobs.losses(folder) == expected and (folder / "died").exists() == (task == jobs.DIES)
    assert "2 processes: spmdkit (SPMDKIT_NUM_PROCESSES=2, SPMDKIT_PROCESS_ID=0)" in done.stdout, done.stdout


def spmdkit(hostnames, *words):
    """Returns the starts of a command of spmdkit as processes that find each other."""
    command = [sys.executable, "-m", "spmdkit", *words]
    env = {"SPMDKIT_COORDINATOR": "10.77.0.1:8477", "SPMDKIT_NUM_PROCESSES": str(len(hostnames))}
    return [(name, command, env | {"SPMDKIT_PROCESS_ID": str(i)}) for i, name in enumerate(hostnames)]


def test_doctor_of_two_hosts_reports_addresses_and_clocks(machines, tmp_path):
    folder = jobs.project(tmp_path / "project")
    output = run(machines, folder, spmdkit(machines.names, "doctor", "run.yaml", "--json"))
    found = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    for i, told in enumerate(found["hosts"].split("; ")):
        clock = r"clock [+-]0\.\d{3} s"
        assert re.fullmatch(rf"process {i} on host{i}, Gloo advertises 10\.77\.0\.{i + 1}, {clock}", told), told
    assert found["run directory"] == f"written by all: {folder / 'run'}"
    assert re.fullmatch(r"data [\d.]+ GB/s", found["bandwidth"]) and found["problems"] == []


def test_tpu_vm_script_restarts_after_42(tmp_path):
    text = text_of("tpu", "tpu=t", "zone=z", "python=./fake", restarts=1)
    (tmp_path / "fake").write_text(
        "#!/bin/sh\nn=$(cat n 2>/dev/null || echo 0); echo $((n+1)) > n\nset -- 42 70 42 70\nshift $n; exit $1\n"
    )
    (tmp_path / "fake").chmod(0o755)
    loop = text[text.index("starts=0") :].replace("sleep 5", "sleep 0")
    ended = subprocess.run(["bash", "-c", loop], cwd=tmp_path, timeout=20)
    assert (ended.returncode, (tmp_path / "n").read_text().strip()) == (70, "4")  # 42, 70 (the one restart), 42, 70


@pytest.fixture
def ssh(machines, tmp_path):
    """A substitute for ssh: enters the host, and hangs up what it has started when it is ended, as `ssh -tt` does."""
    table = {name: machines.on(name, ["sh", "-c"]) for name in machines.names}
    path = tmp_path / "fake-ssh"
    path.write_text(
        f"#!{sys.executable}\n"
        "import json, os, signal, subprocess, sys\n"
        f"table = json.loads({json.dumps(json.dumps(table))})\n"
        "child = subprocess.Popen([*table[sys.argv[1]], sys.argv[2]], start_new_session=True)\n"
        "hang_up = lambda *_: os.killpg(child.pid, signal.SIGHUP)\n"
        "for number in (signal.SIGHUP, signal.SIGTERM): signal.signal(number, hang_up)\n"
        "code = child.wait(); sys.exit(code if code >= 0 else 128 - code)\n"
    )
    path.chmod(0o755)
    return f"ssh={path}"


def launched(folder, ssh, restarts=0, train=()):
    command = jobs.launch("ssh", 2, "hosts=host0,host1", ssh, PYTHON, restarts=restarts, train=train)
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    return subprocess.Popen(command, cwd=folder, env=jobs.on_path(), **options)


@pytest.mark.parametrize("task", [jobs.TASK, jobs.DIES], ids=["undisturbed", "one is lost"])
def test_ssh_has_numbers_of_a_local_run(machines, ssh, tmp_path, expected, task):
    folder = jobs.project(tmp_path / "project", task)
    process = launched(folder, ssh, restarts=1)
    output = process.communicate(timeout=150)[0]
    assert process.returncode == 0, output
    assert jobs.losses(folder) == expected and (folder / "died").exists() == (task == jobs.DIES)
    assert output.index("SPMDKIT_COORDINATOR=host0:8476") < output.index("training steps 1 to 40")  # before it runs
    assert ("continuing at step 21" in output) == (task == jobs.DIES)


def test_stopped_ssh_launcher_saves_and_returns_42(machines, ssh, tmp_path):
    folder = jobs.project(tmp_path / "project", jobs.SLOWLY)
    process = launched(folder, ssh, train=("steps=800",))
    jobs.wait_for_steps(folder, lambda: process.poll() is None)
    process.terminate()  # hands it on to the script
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 42, output
    jobs.assert_all_saved(folder)


@pytest.mark.parametrize("override", ["cluster.interface=auto", "cluster.interface=eth0"])
def test_loopback_names_have_numbers_of_a_local_run(machines, tmp_path, expected, override):
    """Debian's `127.0.1.1 name`: without another address the first collective is refused on both."""
    folder = jobs.project(tmp_path / "project")
    output = run(machines, folder, spmdkit(["debian"] * 2, "train", "run.yaml", override))
    assert jobs.losses(folder) == expected
    assert "note: Gloo advertises 10.77.0.1, " in output


AGENT = """#!{python}
import json, os, sys
words = sys.argv[1:]
while words[0].startswith("-"):
    words.pop(0)
enter = json.loads({table!r})[words[0]]
os.execvp(enter[0], [*enter, "sh", "-c", " ".join(words[1:])])
"""
"""What mpirun runs as ssh: `[-x] HOST COMMAND`."""


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun (package openmpi-bin)")
def test_mpirun_has_numbers_of_a_local_run(machines, tmp_path):
    expected = jobs.local(tmp_path / "local", 3, *jobs.THREE)
    folder, agent = jobs.project(tmp_path / "project"), tmp_path / "agent"
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


@pytest.mark.parametrize("dies", [True, False], ids=["with its processes", "cut off"])
def test_lost_first_host_ends_others_with_75(tmp_path, dies):
    """The host of process 0 and of the coordination service vanishes without a packet; JAX ends no other process."""
    folder, steps = jobs.project(tmp_path), ("steps=4000", "checkpoint.every_steps=1000", *jobs.THREE[:3])
    (folder / "task.py").write_text(jobs.SLOWLY)
    with two_hosts.hosts(("host0", "host1", "host2")) as machines:
        started = [
            machines.start(
                f"host{i}", command, cwd=folder, env=jobs.on_path(**env | {"SPMDKIT_COORDINATOR": "host0:7777"})
            )
            for i, (_, command, env) in enumerate(spmdkit(machines.names, "train", "run.yaml", *steps))
        ]
        jobs.wait_for_steps(folder, lambda: True, 120)
        machines.cut("host0")
        if dies:
            pids = subprocess.run(["ip", "netns", "pids", machines.space("host0")], capture_output=True, text=True)
            for pid in pids.stdout.split():
                os.kill(int(pid), signal.SIGKILL)
        outputs = [p.communicate(timeout=60)[0] for p in started[1:]]
    assert [p.returncode for p in started[1:]] == [75, 75], outputs
    for text in outputs:
        assert "the coordination service has not responded" in text and "silent" not in text
