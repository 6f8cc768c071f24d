"""What is rendered for Kubernetes, Kubeflow, Cloud TPU and ssh, run on two hosts with what their controllers set: the
numbers of a local run.

Hosts are network namespaces with names of their own (tests/support/two_hosts.py); a pod's DNS name is in their hosts
file.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

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
    own = {
        name.partition(".")[0]: host for name, host in (pods | nodes | slices).items()
    }  # as a pod's /etc/hosts has it
    with two_hosts.hosts(also=pods | nodes | slices | own) as made:
        yield made


def text_of(engine, *settings, num=2, restarts=0):
    (text,) = prepared(engine, ("train", "run.yaml"), num, settings, "run", restarts, 60).files.values()
    return text


def run(machines, folder, starts):
    """Runs [(host, hostname, command, variables)] together in a project; returns [(code, output)]."""
    started = [
        machines.start(host, command, hostname, cwd=folder, env=jobs.on_path(**env))
        for host, hostname, command, env in starts
    ]
    return [(output, p.returncode)[::-1] for p in started for output in [p.communicate(timeout=120)[0]]]


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


def test_the_pods_of_a_jobset_have_the_numbers_of_a_local_run(machines, tmp_path, expected):
    folder = jobs.project(tmp_path / "project")
    document = yaml.safe_load(text_of("kubernetes", "image=i", PYTHON, f"folder={folder}"))
    starts = [
        (f"host{i}", name, container_of(document)["command"], env) for i, (name, env) in enumerate(pods_of(document))
    ]
    ended = run(machines, container_of(document)["workingDir"], starts)
    assert [code for code, _ in ended] == [0, 0], ended
    assert jobs.losses(folder) == expected
    assert "2 processes: jobset (JOBSET_PODS=2, JOB_COMPLETION_INDEX=0), since it allocated this host" in ended[0][1]


def test_the_hosts_of_two_tpu_slices_have_the_numbers_of_a_local_run(machines, tmp_path, expected):
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
        starts.append((f"host{i}", name, container_of(document)["command"], env))
    ended = run(machines, folder, starts)
    assert [code for code, _ in ended] == [0, 0], ended
    assert jobs.losses(folder) == expected
    assert "2 processes: cloud_tpu (TPU_WORKER_ID=0 of 1 hosts, MEGASCALE_SLICE_ID=0 of 2)" in ended[0][1]


def test_the_pods_of_a_trainjob_have_the_numbers_of_a_local_run(machines, tmp_path, expected):
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
        starts.append((f"host{i}", f"run-node-0-{i}", trainer["command"], env))
    ended = run(machines, tmp_path, starts)
    assert [code for code, _ in ended] == [0, 0], ended
    assert jobs.losses(folder) == expected
    assert "2 processes: kubeflow (JAX_NUM_PROCESSES=2, JAX_PROCESS_ID=0)" in ended[0][1]


class Metadata(http.server.BaseHTTPRequestHandler):
    """The metadata server of a TPU VM: what it says of each worker is below /I/."""

    def do_GET(self):
        worker, _, attribute = self.path[1:].partition("/")
        told = {
            "agent-worker-number": worker,
            "worker-network-endpoints": self.server.endpoints,
            "tpu-env": self.server.environment.replace("WORKER", worker),
        }
        name = attribute.rpartition("/")[2]
        right = self.headers.get("Metadata-Flavor") == "Google" and name in told
        self.send_response(200 if right else 404)
        self.end_headers()
        self.wfile.write(told.get(name, "").encode() if right else b"")

    def log_message(self, *args):
        pass


@pytest.mark.parametrize(
    ("endpoints", "environment"),
    [
        ("node-a:7:10.77.0.1,node-b:8:10.77.0.2", "ACCELERATOR_TYPE: 'v4-16'\n"),
        ("host0,host1", ""),
        (
            "self",
            "MEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: 'WORKER'\nMEGASCALE_COORDINATOR_ADDRESS: '10.77.0.1:8080'\n",  # noqa: E501
        ),
    ],
    ids=["old format", "names", "two slices"],
)
def test_the_hosts_of_a_tpu_vm_ask_their_metadata_server(tmp_path, endpoints, environment):
    """The part of the script that makes a place of what the server says; `gcloud` runs the script."""
    text = text_of("tpu", "tpu=t", "zone=z")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        server.endpoints, server.environment = endpoints, environment
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = text[: text.index("starts=0")] + "env | grep ^SPMDKIT_ | sort\n"
        found = []
        for worker in range(2):
            # Of two slices each has one worker, number 0 there.
            script = (
                place.replace("worker=$(attribute agent-worker-number)", "worker=$(echo 0)")
                if endpoints == "self"
                else place
            )
            metadata = f"127.0.0.1:{server.server_port}/{worker}"
            env = jobs.environment(GCE_METADATA_HOST=metadata)
            found.append(subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True).stdout.split())
        server.shutdown()
    host = "host0" if endpoints == "host0,host1" else "10.77.0.1"
    for worker, told in enumerate(found):
        told = [line for line in told if "COMPILE_CACHE" not in line]
        assert told == [f"SPMDKIT_COORDINATOR={host}:8482", "SPMDKIT_NUM_PROCESSES=2", f"SPMDKIT_PROCESS_ID={worker}"]


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
"""A stand-in for gcloud: copies, and runs the command on every host of the TPU."""


@contextlib.contextmanager
def metadata_servers(machines):
    """Yields host -> where its metadata server is, on a loopback interface of its own."""
    with contextlib.ExitStack() as stack:
        found = {}
        for worker, name in enumerate(machines.names):
            with machines.inside(name):
                server = stack.enter_context(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata))
            server.endpoints, server.environment = (
                "node-a:7:10.77.0.1,node-b:8:10.77.0.2",
                "ACCELERATOR_TYPE: 'v4-16'\n",
            )
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.shutdown)
            found[name] = f"127.0.0.1:{server.server_port}/{worker}"
        yield found


@pytest.mark.parametrize("task", [jobs.TASK, jobs.DIES], ids=["undisturbed", "one is lost"])
def test_the_hosts_of_a_tpu_vm_have_the_numbers_of_a_local_run(machines, tmp_path, expected, task):
    """All that is rendered, run: gcloud's two commands, and the whole script on each host; the devices are CPUs."""
    folder = jobs.project(tmp_path / "project")
    (folder / "task.py").write_text(task)
    with metadata_servers(machines) as servers:
        hosts = {name: (machines.on(name, ["sh", "-c"]), at) for name, at in servers.items()}
        gcloud = tmp_path / "bin" / "gcloud"
        gcloud.parent.mkdir()
        gcloud.write_text(GCLOUD.format(python=sys.executable, hosts=json.dumps(hosts)))
        gcloud.chmod(0o755)
        env = jobs.on_path()
        env["PATH"] = f"{gcloud.parent}:{env['PATH']}"
        settings = [word for text in ("tpu=t", "zone=z", PYTHON, f"folder={folder}") for word in ("--set", text)]
        command = [sys.executable, "-m", "spmdkit", "launch", "--on", "tpu", "-n", "2", "--name", "run", *settings]
        done = subprocess.run(
            [*command, "--max-restarts", "1", "--", "train", "run.yaml"],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=150,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert jobs.losses(folder) == expected and (folder / "died").exists() == (task == jobs.DIES)
    assert "2 processes: spmdkit (SPMDKIT_NUM_PROCESSES=2, SPMDKIT_PROCESS_ID=0)" in done.stdout, done.stdout


def test_doctor_of_two_hosts_says_what_each_advertises_its_clock_bandwidth_and_where_all_can_write(machines, tmp_path):
    folder = jobs.project(tmp_path / "project")
    command = [sys.executable, "-m", "spmdkit", "doctor", "run.yaml", "--json"]
    place = {"SPMDKIT_COORDINATOR": "10.77.0.1:8477", "SPMDKIT_NUM_PROCESSES": "2"}
    ended = run(
        machines, folder, [(f"host{i}", f"host{i}", command, place | {"SPMDKIT_PROCESS_ID": str(i)}) for i in (0, 1)]
    )
    assert [code for code, _ in ended] == [0, 0], ended
    found = json.loads(next(line for line in ended[0][1].splitlines() if line.startswith("{")))
    for i, told in enumerate(found["hosts"].split("; ")):
        clock = r"clock [+-]0\.\d{3} s"
        assert re.fullmatch(rf"process {i} on host{i}, Gloo advertises 10\.77\.0\.{i + 1}, {clock}", told), told
    assert found["run directory"] == f"written by all: {folder / 'run'}"
    assert re.fullmatch(r"data [\d.]+ GB/s", found["bandwidth"]) and found["problems"] == []


def test_a_tpu_vm_script_starts_again_after_42_and_ends_with_a_final_code(tmp_path):
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
    """A stand-in for ssh: enters the host, and hangs up what it has started when it is ended, as `ssh -tt` does."""
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


def launched(folder, ssh, *more, **env):
    own = ("--name", "run", "--set", "hosts=host0,host1", "--set", ssh, "--set", PYTHON)
    command = [
        sys.executable,
        "-m",
        "spmdkit",
        "launch",
        "--on",
        "ssh",
        "-n",
        "2",
        *own,
        *more,
        "--",
        "train",
        "run.yaml",
    ]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    return subprocess.Popen(command, cwd=folder, env=jobs.on_path(**env), **options)


def test_ssh_on_two_hosts_has_the_numbers_of_a_local_run(machines, ssh, tmp_path, expected):
    folder = jobs.project(tmp_path / "project")
    process = launched(folder, ssh)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    assert jobs.losses(folder) == expected
    assert output.index("SPMDKIT_COORDINATOR=host0:8476") < output.index("training steps 1 to 40"), (
        "printed before it runs"
    )


def test_a_process_that_dies_on_one_host_ends_the_other_and_all_start_again(machines, ssh, tmp_path, expected):
    folder = jobs.project(tmp_path / "project")
    (folder / "task.py").write_text(jobs.DIES)
    process = launched(folder, ssh, "--max-restarts", "1")
    output = process.communicate(timeout=150)[0]
    assert process.returncode == 0, output
    assert jobs.losses(folder) == expected and (folder / "died").exists()
    assert "continuing at step 21" in output


def test_a_launcher_over_ssh_that_is_told_to_stop_lets_all_save_and_returns_42(machines, ssh, tmp_path):
    folder = jobs.project(tmp_path / "project")
    (folder / "task.py").write_text(jobs.SLOWLY)
    (folder / "run.yaml").write_text(jobs.CONFIG.replace("steps: 40", "steps: 800"))
    process = launched(folder, ssh)
    deadline = time.monotonic() + 90
    while not (folder / "run/metrics.jsonl").is_file() or len(jobs.losses(folder)) < 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    process.terminate()  # hands it on to the script
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 42, output
    steps = [int(path.name) for path in (Path(folder) / "run/checkpoints").iterdir() if path.name.isdigit()]
    assert max(steps) == max(event["step"] for event in jobs.events(folder, "preempted"))


@pytest.mark.parametrize("override", ["cluster.interface=auto", "cluster.interface=eth0"])
def test_hosts_whose_own_name_means_loopback_have_the_numbers_of_a_local_run(machines, tmp_path, expected, override):
    """Debian's `127.0.1.1 name`: without another address the first collective is refused on both."""
    folder = jobs.project(tmp_path / "project")
    command = [sys.executable, "-m", "spmdkit", "train", "run.yaml", override]
    place = {"SPMDKIT_COORDINATOR": "10.77.0.1:8476", "SPMDKIT_NUM_PROCESSES": "2"}
    ended = run(
        machines, folder, [(f"host{i}", "debian", command, place | {"SPMDKIT_PROCESS_ID": str(i)}) for i in (0, 1)]
    )
    assert [code for code, _ in ended] == [0, 0], ended
    assert jobs.losses(folder) == expected
    assert "note: Gloo advertises 10.77.0.1, " in ended[0][1]
