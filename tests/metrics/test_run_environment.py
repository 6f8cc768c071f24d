"""environment(): what a run ran on, and nothing secret."""

import json
import subprocess
from types import SimpleNamespace

import pytest

from spmdkit.metrics.environment import (
    device_groups,
    environment,
    git_state,
    numeric_variables,
    variables,
)

SECRET = "hunter2"


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    done = subprocess.run(
        ["git", *identity, "-C", str(folder), *arguments], check=True, capture_output=True, timeout=30
    )
    return done.stdout.decode().strip()


@pytest.fixture
def repository(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "task.py").write_text("a")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


def test_no_credential_is_recorded():
    environ = {
        "HOME": SECRET,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "MY_JAX_X": SECRET,
        "XLA_FLAGS_EXTRA": SECRET,
        "JAX_API_KEY": SECRET,
        "SPMDKIT_TOKEN": SECRET,
        "JAX_PASSWD": SECRET,
        "SPMDKIT_my_Credentials": SECRET,
        "JAX_COMPILATION_CACHE_DIR": f"https://user:{SECRET}@host/x",
        "XLA_FLAGS": f"--a=1 --b=AccountKey={SECRET}",
        "LIBTPU_INIT_ARGS": f"--c=https://hooks.slack.com/services/{SECRET}",
        "SPMDKIT_PROCESS_ID": "0",
    }
    found = variables(environ)
    assert SECRET not in json.dumps(found)
    assert found["XLA_FLAGS"] == "--a=1 --b=AccountKey=***" and found["SPMDKIT_PROCESS_ID"] == "0"
    assert found["JAX_API_KEY"] == "***" and found["JAX_COMPILATION_CACHE_DIR"] == "https://***@host/x"
    assert "HOME" not in found and "MY_JAX_X" not in found and "XLA_FLAGS_EXTRA" not in found


def test_an_unknown_variable_is_recorded_without_value():
    """`JAX_HEADER` may hold anything."""
    found = variables({"JAX_HEADER": "x-a: Bearer abc.def.ghi", "SPMDKIT_FOO": "text", "JAX_PLATFORMS": "cpu"})
    assert found == {"JAX_HEADER": "***", "SPMDKIT_FOO": "***", "JAX_PLATFORMS": "cpu"}


def test_everything_is_plain_json_with_versions_and_devices():
    cpu = SimpleNamespace(platform="cpu", device_kind="cpu")
    found = environment(devices=[cpu] * 8, num_processes=2, environ={})
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["devices"] == [{"platform": "cpu", "kind": "cpu", "count": 8}] and found["num_processes"] == 2
    assert {"jax", "jaxlib", "optax", "flax", "orbax-checkpoint", "grain", "numpy", "spmdkit"} == set(found["versions"])
    assert found["versions"]["jax"][0].isdigit() and found["git"] is None


def test_unlike_devices_are_counted_apart():
    devices = [SimpleNamespace(platform="gpu", device_kind=kind) for kind in ("H100", "H200", "H100")]
    assert [(d["kind"], d["count"]) for d in device_groups(devices)] == [("H100", 2), ("H200", 1)]


def test_commit_and_dirty_flag_of_the_folder(repository, monkeypatch):
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert git_state(repository)["dirty"] is False
    monkeypatch.delenv("GIT_DIR")
    assert git_state(repository)["commit"] == git(repository, "rev-parse", "HEAD")
    (repository / "untracked").write_text("b")
    assert git_state(repository)["dirty"] is False
    (repository / "task.py").write_text("b")
    assert git_state(repository)["dirty"] is True


def test_no_repository_commit_or_git_is_fine(tmp_path, monkeypatch):
    assert git_state(tmp_path / "missing") is None
    git(tmp_path, "init", "-q")
    assert git_state(tmp_path) is None
    monkeypatch.setenv("PATH", "")
    assert git_state(tmp_path) is None


def test_a_git_that_hangs_is_given_up(tmp_path, monkeypatch):
    (tmp_path / "git").write_text("#!/bin/sh\nexec /bin/sleep 3600\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path, timeout_s=0.2) is None


WRITES = [
    *("xla_dump_to=/tmp/a", "xla_dump_hlo_as_text", "xla_enable_dumping", "xla_gpu_log_minmax=true", "minloglevel=2"),
    *("xla_hlo_profile=true", "xla_gpu_generate_debug_info=true", "xla_force_host_platform_device_count=8"),
    *("xla_cpu_collective_call_terminate_timeout_seconds=40", "xla_gpu_per_fusion_autotune_cache_dir=/tmp/a"),
]
CAN_CHANGE_NUMBERS = [  # epi-log-ue, cata-log-ue, to-po-log-y
    *("xla_gpu_enable_reduction_epilogue_fusion=false", "xla_gpu_load_autotune_results_from=/tmp/a"),
    *("xla_gpu_algorithm_denylist_path=/tmp/a", "xla_cpu_enable_fast_math=true", "xla_gpu_topology_aware=true"),
    *("xla_use_catalogue=true", "xla_fingerprint=1"),
]


@pytest.mark.parametrize("flag", WRITES)
def test_flags_without_numbers_are_not_compared(flag):
    assert numeric_variables({"XLA_FLAGS": f"--{flag} --xla_a=1"}) == {"XLA_FLAGS": "--xla_a=1"}


@pytest.mark.parametrize("flag", CAN_CHANGE_NUMBERS)
def test_flags_that_change_numbers_are_compared(flag):
    assert numeric_variables({"XLA_FLAGS": f"--{flag}", "LIBTPU_INIT_ARGS": f"--{flag}"}) == {
        "LIBTPU_INIT_ARGS": f"--{flag}",
        "XLA_FLAGS": f"--{flag}",
    }
