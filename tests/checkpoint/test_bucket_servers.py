"""Checkpoints in buckets of real protocols, by local servers: round trip, orbax alone, SIGKILL, runs on other disks and
of two processes."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from spmdkit.checkpoint import object_store
from tests.support.buckets import BUCKET, free_port, server
from tests.support.command_line import Folder
from tests.support.command_line import alone as alone
from tests.support.environment import environment_of_a_user

pytestmark = [pytest.mark.storage, pytest.mark.processes]

ROOT = Path(__file__).parents[2]

TASK = """
import time
import jax.numpy as jnp
import numpy as np
import optax
import spmdkit as sk

X = np.linspace(-1, 1, 256, dtype=np.float32).reshape(64, 4)

def loss_fn(params, batch, key):
    return sk.mean((batch["x"] @ params["w"] - 2 * batch["x"].sum(1)) ** 2)

@sk.task
def task(pause_s: float = 0.0):
    pause = lambda run, step, state: time.sleep(pause_s)
    hooks = [sk.Hook("pause", before_step=pause)]
    return sk.Task(lambda key: {"w": jnp.zeros(4)}, loss_fn, optax.adam(0.05), train_data={"x": X}, eval_data={"x": X}, hooks=hooks)
"""  # noqa: E501
CONFIG = """
task: task.py:task
task_args: {{pause_s: 0.02}}
run_dir: run
steps: 40
batch_size: 8
devices: cpu:2
mesh: {{data: 2}}
checkpoint: {{every_steps: 10, every_seconds: null, keep: 2, directory: "{url}"}}
eval: {{every_steps: 20}}
log: {{every_steps: 1, progress: plain}}
"""


@pytest.fixture(scope="module", params=["gs", "s3"])
def store(request):
    """(scheme, variables) of a server that lives as long as the module."""
    with server(request.param) as env:
        yield request.param, env


@pytest.fixture
def url(store, tmp_path):
    return f"{store[0]}://{BUCKET}/{tmp_path.name}/checkpoints"


@pytest.fixture(scope="module")
def undisturbed(store, tmp_path_factory):
    """The folder of a run without a kill."""
    at = f"{store[0]}://{BUCKET}/undisturbed/checkpoints"
    folder = host(tmp_path_factory.mktemp("undisturbed") / "run", at)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in store[1].items():
            patch.setenv(name, value)
        assert Folder(folder, patch, None).leaves("train", "run.yaml") == 0
    return folder


@pytest.fixture
def here(store, monkeypatch, capfd, alone):
    """A function that runs a command in this process, in a folder, and returns its output and its errors."""
    for name, value in store[1].items():
        monkeypatch.setenv(name, value)

    def run(folder, *arguments, code=0):
        capfd.readouterr()
        found = Folder(folder, monkeypatch, capfd).leaves(*arguments)
        output, errors = capfd.readouterr()
        check(found, code, output, errors)
        return output, errors

    return run


def env_of(store, **more):
    return environment_of_a_user() | store[1] | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | more


def host(folder, url):
    """A host's own folder with the task and the config: no other host sees it."""
    folder.mkdir()
    (folder / "task.py").write_text(TASK)
    (folder / "run.yaml").write_text(CONFIG.format(url=url))
    return folder


def spmdkit(store, folder, *arguments, **env):
    return subprocess.Popen(
        [sys.executable, "-m", "spmdkit", *arguments],
        cwd=folder,
        env=env_of(store, TMPDIR=str(folder), **env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def done(process, code=0, timeout_s=240):
    output, errors = process.communicate(timeout=timeout_s)
    check(process.returncode, code, output, errors)
    return output, errors


def check(found, code, output, errors):
    if found != code:
        pytest.fail(f"exit code {found}\n{output[-4000:]}\n{errors[-4000:]}")
    assert "canary-of-a-secret" not in output + errors and "Traceback" not in errors


def steps_of(folder):
    return [json.loads(line)["step"] for line in (folder / "run/metrics.jsonl").read_text().splitlines() if '"eval"' not in line]  # fmt: skip  # noqa: E501


def losses(folder):
    return [(x["step"], x["loss"]) for x in map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())]


def test_killed_run_resumes_from_bucket_on_empty_disk(store, url, undisturbed, here, tmp_path):
    first, second = host(tmp_path / "first", url), host(tmp_path / "second", url)
    run = spmdkit(store, first, "train", "run.yaml")
    wait_for_step(first, 23, run)
    run.kill()
    run.communicate(timeout=10)
    output, _ = here(second, "train", "run.yaml")
    assert "metrics.jsonl up to step" in output and "was fetched from" in output
    assert steps_of(second) == list(range(1, 41)) and losses(second) == losses(undisturbed)
    again, _ = here(second, "train", "run.yaml")
    assert "already finished" in again
    output, _ = here(second, "checkpoint", "ls", url, "--json")
    assert [(row["step"], row["complete"]) for row in json.loads(output)["checkpoints"]] == [(30, True), (40, True)]


def test_a_run_starts_from_the_weights_of_a_bucket(store, undisturbed, here, tmp_path):
    at = f"{store[0]}://{BUCKET}/undisturbed/checkpoints"
    output, _ = here(undisturbed, "eval", "run.yaml", "--json")
    warm = host(tmp_path / "warm", f"{at}/none")
    start = ("eval", "run.yaml", "--json", "--initial", "mesh={fsdp: 2}", f"init_from={at}@40")
    found, _ = here(warm, *start)
    assert json.loads(found)["loss"] == pytest.approx(json.loads(output)["loss"], rel=1e-5)
    _, errors = here(warm, *start[:-1], f"init_from={at}@7", code=79)
    assert "step 7 is requested" in errors and "has steps 30, 40" in errors


def wait_for_step(folder, step, run):
    deadline = time.monotonic() + 240
    while not (folder / "run/metrics.jsonl").exists() or max(steps_of(folder), default=0) < step:
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def start_two(store, folders):
    port = free_port()
    place = {"SPMDKIT_NUM_PROCESSES": "2", "SPMDKIT_COORDINATOR": f"127.0.0.1:{port}"}
    return [
        spmdkit(store, folder, "train", "run.yaml", SPMDKIT_PROCESS_ID=str(i), **place)
        for i, folder in enumerate(folders)
    ]


@pytest.mark.parametrize("store", [pytest.param("gs", marks=pytest.mark.slow), "s3"], indirect=True)
def test_two_processes_without_shared_disk_resume_from_bucket(store, url, undisturbed, here, tmp_path):
    """Where the kill meets a save, the other takes `watchdog.heartbeat_timeout_s` (30 s) to leave,
    and on a busy machine a save takes 5 s; 300 s are the limit."""
    folders = [host(tmp_path / name, url) for name in ("a", "b")]
    processes = start_two(store, folders)
    wait_for_step(folders[0], 23, processes[0])
    processes[1].kill()
    for process in processes:
        process.communicate(timeout=120)
    shutil.rmtree(folders[1])  # its host was replaced
    host(folders[1], url)
    for process in start_two(store, folders):
        done(process)
    assert steps_of(folders[0]) == list(range(1, 41))
    assert not (folders[1] / "run/metrics.jsonl").exists() and (folders[1] / "run/events.jsonl").exists()
    assert not any(path.is_file() for folder in folders for path in folder.glob("run/staging/**/*"))
    one = host(tmp_path / "one", url)
    output, _ = here(one, "eval", "run.yaml", "--json")  # what two have saved, one restores
    assert json.loads(output)["step"] == 40
    both = [[loss for _, loss in losses(folder)] for folder in (folders[0], undisturbed)]
    np.testing.assert_allclose(*both, rtol=1e-5)


@pytest.mark.parametrize("scheme", [pytest.param("gs", marks=pytest.mark.slow), "s3"])
def test_unresponsive_store_gives_a_message_without_traceback(scheme, monkeypatch, capfd, tmp_path):
    """The clients try for 16 s and 51 s."""
    fsspec = pytest.importorskip("fsspec")
    at = f"http://127.0.0.1:{free_port()}"
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
    for name, value in (keys | {"STORAGE_EMULATOR_HOST": at, "AWS_ENDPOINT_URL": at}).items():
        monkeypatch.setenv(name, value)
    forget = (fsspec.get_filesystem_class(scheme).clear_instance_cache, object_store._client.cache_clear)
    for clear in forget:  # the clients of other tests have another address
        clear()
    code = Folder(tmp_path, monkeypatch, capfd).leaves("checkpoint", "ls", f"{scheme}://{BUCKET}/runs/x")
    for clear in forget:
        clear()
    output, errors = capfd.readouterr()
    check(code, 75, output, errors)
    assert errors.count("\n") == 1 and f"{scheme}://{BUCKET}/runs/x could not be listed" in errors
    assert "again when it does" in errors
