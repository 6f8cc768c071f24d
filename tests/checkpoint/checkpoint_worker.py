"""What the checkpoint tests run in other processes: `python checkpoint_worker.py COMMAND DIRECTORY ...`."""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

from spmdkit.checkpoint import Checkpoints, ignored_entries, location, object_store, run_lock
from spmdkit.checkpoint import checkpoints as save_module
from spmdkit.cluster import Cluster
from spmdkit.cluster.store import open_store
from spmdkit.config.retention import Retention
from spmdkit.errors import SpmdkitError
from tests.support.buckets import shared_client


def value_of(step: int, num_rows: int = 8) -> np.ndarray:
    """Returns the content of the state of a step, known to reader and writer."""
    return np.random.default_rng(step).standard_normal((num_rows, 4096)).astype(np.float32)


def save_for_ever(directory: str) -> None:
    """Saves steps one after another until it is killed; prints each step that was reported committed."""
    checkpoints = Checkpoints(directory, retention=Retention(keep=3))
    step = checkpoints.latest() or 0
    print("ready", flush=True)
    while True:
        step += 1
        checkpoints.save(step, {"w": jnp.asarray(value_of(step)), "step": jnp.int32(step)}, {"step": step})
        for done in checkpoints.new_commits():
            print(done, flush=True)


def save_with_quick_retention(directory: str) -> None:
    """Saves as fast as it goes, and keeps one, until it is killed."""
    checkpoints = Checkpoints(directory, retention=Retention(keep=1))
    step = 0
    while True:
        step += 1
        checkpoints.save(step, {"params": {"w": jnp.asarray(value_of(step))}}, {})


def save_with_small_files(directory: str) -> None:
    """Saves a step that fits, two that meet the limit on file sizes (as a full disk would), and one that fits."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    checkpoints = Checkpoints(directory)
    checkpoints.save(1, {"w": jnp.asarray(value_of(1))}, {})
    checkpoints.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    for step, ask in ((2, checkpoints.wait), (3, lambda: checkpoints.save(9, {"w": jnp.ones(1)}, {}))):
        checkpoints.save(step, {"w": jnp.asarray(value_of(step))}, {})
        try:
            ask()
        except SpmdkitError as error:
            print(type(error).__name__, error.exit_code, error, flush=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    checkpoints.save(4, {"w": jnp.asarray(value_of(4))}, {})
    checkpoints.close()
    print("steps", checkpoints.steps(), "ignored", ignored_entries(checkpoints.directory), flush=True)


def hold_lock(run_dir: str) -> None:
    with run_lock(run_dir):
        print("held", flush=True)
        signal.pause()


def process(directory: str, address: str, process_id: str, num_processes: str, commands: str) -> None:
    """One of several real processes, each with two devices: each command saves or restores a state that is sharded over
    all of them, in `directory/NAME` for `COMMAND:NAME`, or in NAME where that is an address."""
    num_processes, process_id = int(num_processes), int(process_id)
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(
        address,
        num_processes,
        process_id,
        initialization_timeout=60,
        heartbeat_timeout_seconds=10,
        shutdown_timeout_seconds=15,
    )
    from jax.experimental import multihost_utils

    from spmdkit import compat
    from spmdkit.cluster.barrier import Client

    jax.devices()  # which need JAX's own client
    compat.replace_coordination_client(Client(compat.coordination_client(), num_processes))  # as `join` does

    def forbidden(name: str) -> None:
        raise AssertionError(f"sync_global_devices({name!r}) waits indefinitely")

    multihost_utils.sync_global_devices = forbidden
    client = shared_client(Path(directory) / "bucket")
    object_store._client = lambda scheme: client
    for part in commands.split(","):
        command, _, name = part.partition(":")
        cluster = Cluster(
            process_index=process_id,
            num_processes=num_processes,
            devices=[],
            store=open_store(),
            namespace=part.replace("/", "."),
        )
        checkpoints = Checkpoints(
            name if location.is_url(name) else f"{directory}/{name}",
            retention=Retention(),
            timeout_s=600 if command == "lose_one" else 60,
            is_main=process_id == 0,
            num_processes=num_processes,
            cluster=cluster,
        )
        cluster.barrier("opened")
        globals()[f"run_{command}"](checkpoints, process_id)
        if command != "lose_one":
            checkpoints.close()
    print("done", flush=True)
    if "lose_one" in commands:
        os._exit(0)
    jax.distributed.shutdown()


def shardings() -> dict:
    from tests.support.checkpoint_states import mesh_of

    mesh = mesh_of(jax.device_count(), axes=("data",))
    spec = jax.sharding.PartitionSpec
    return {
        "split": jax.sharding.NamedSharding(mesh, spec("data")),
        "whole": jax.sharding.NamedSharding(mesh, spec()),
        "empty": jax.sharding.NamedSharding(mesh, spec()),
    }


def global_state(step: int) -> dict:
    values = {"split": value_of(step, 24), "whole": value_of(step)[:3], "empty": np.zeros((0, 2), np.float32)}
    return {
        name: jax.make_array_from_callback(values[name].shape, sharding, lambda index, v=values[name]: v[index])
        for name, sharding in shardings().items()
    }


def run_save(checkpoints: Checkpoints, process_id: int) -> None:
    for step in (1, 2, 3, 4):
        checkpoints.save(step, global_state(step), {"seed": step}, {"loss": float(step)})
    checkpoints.wait()
    if process_id == 0:  # It deletes; the others may see the old step a moment longer.
        assert checkpoints.steps() == [2, 3, 4], checkpoints.steps()


def run_restore(checkpoints: Checkpoints, process_id: int) -> None:
    for step in (3, 4):
        want = global_state(step)
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), want)
        state, record = checkpoints.restore(step, abstract)
        assert record == {"seed": step}
        for name in want:
            for got, asked in zip(state[name].addressable_shards, want[name].addressable_shards, strict=True):
                assert got.device == asked.device
                assert np.asarray(got.data).tobytes() == np.asarray(asked.data).tobytes(), name


def run_full_disk(checkpoints: Checkpoints, process_id: int) -> None:
    """Process 0 alone finds the disk full; every process reports it immediately."""
    right = save_module.refusal_reason
    if process_id == 0:
        save_module.refusal_reason = lambda *_: "no room"
    try:
        checkpoints.save(1, global_state(1), {})
    except SpmdkitError as error:
        print(type(error).__name__, error, flush=True)
    save_module.refusal_reason = right


def run_lose_one(checkpoints: Checkpoints, process_id: int) -> None:
    """One process fails to write its part, process 0 to make the folder, one to upload a separate part: both report it
    immediately, keep what is committed, and save again."""
    from orbax.checkpoint._src.path import atomicity
    from orbax.checkpoint._src.serialization import tensorstore_utils

    fired = []

    def broken(*args, **kwargs):
        fired.append(1)
        raise OSError("No space left on device")

    async def broken_later(*args, **kwargs):
        broken()

    def ends(step: int) -> None:
        checkpoints.save(step, global_state(step), {})
        ended = checkpoints.finish_save()
        print(ended.why, ended.committed, flush=True)
        assert ended.why and not ended.committed

    def works(step: int) -> None:
        checkpoints.save(step, global_state(step), {})
        assert checkpoints.finish_save() == ("", True)

    works(1)
    separate = location.is_url(str(checkpoints.directory))
    cases = [
        (2, 1, tensorstore_utils, "ArrayWriteSpec", broken),
        (3, 0, atomicity, "create_all" if separate else "_create_paths", broken_later),
        *([(4, 1, location, "upload", broken)] if separate else []),
    ]
    for step, by, module, name, instead in cases:
        real = getattr(module, name)
        if process_id == by:
            setattr(module, name, instead)
        ends(step)
        assert bool(fired) == (process_id == by), "the injection did not fire, or where it should not"
        setattr(module, name, real)
        fired.clear()
        works(step)  # the same step, again
    found = checkpoints.steps(), ignored_entries(checkpoints.directory)
    assert found == ([1, *(step for step, *_ in cases)][-3:], []), found


def run_killed(checkpoints: Checkpoints, process_id: int) -> None:
    """Process VICTIM is killed as it writes the object DIES_AT of step 2."""
    client = object_store._client("s3")
    right = client.pipe_file

    def dies(key: str, content: bytes) -> None:
        if process_id == int(os.environ["VICTIM"]) and key.endswith(os.environ["DIES_AT"]):
            os.kill(os.getpid(), signal.SIGKILL)
        right(key, content)

    client.pipe_file = dies
    checkpoints._timeout_s = checkpoints._barrier._timeout_s = 5
    for step in (1, 2):
        checkpoints.save(step, global_state(step), {"seed": step})
        assert (step == 1) == checkpoints.finish_save().committed
    os._exit(0)


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    {
        "loop": save_for_ever,
        "quick": save_with_quick_retention,
        "small": save_with_small_files,
        "lock": hold_lock,
        "process": process,
    }[name](*arguments)
