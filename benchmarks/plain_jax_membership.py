"""Membership on plain JAX, with the separate coordination service and nothing else of spmdkit: processes that lose one
of them continue in the next generation.

    python benchmarks/plain_jax_membership.py VICTIM WHERE SIZES

`0 collective 4,4,3`: 0 dies inside an all-reduce of generation 1 and is replaced, then another one dies and three
continue. The parent kills, writes that to a file, and holds one coordination service for each generation. A survivor
shuts down its Gloo connections when it reads that (`elastic/gloo_sockets.py`); NO_CUT=1 disables it.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

STEPS_AN_EPOCH, ELEMENTS = 6, 1 << 21


def member(me: int, order: Path, folder: Path) -> None:
    import jax
    import numpy as np
    from jax.extend.backend import clear_backends
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from spmdkit import compat
    from spmdkit.elastic.gloo_sockets import CollectiveTransport

    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    step, state, said = 0, np.zeros(ELEMENTS, np.float32), 0
    while True:
        while (told := json.loads(order.read_text()))["number"] == said:
            time.sleep(0.01)
        said, members, began = told["number"], told["members"], time.monotonic()
        if me not in members:
            break
        num, rank = len(members), members.index(me)
        with compat.without_local_service():
            jax.distributed.initialize(
                told["address"], num, rank, heartbeat_timeout_seconds=100_000, shutdown_timeout_seconds=5
            )
        client, wires = compat.coordination_client(), CollectiveTransport()
        with wires.noticed():
            devices = jax.devices()
        client.key_value_set(f"port/{rank}", json.dumps(wires.own))
        wires.others = {
            int(p) for r in range(num) for p in json.loads(client.blocking_key_value_get(f"port/{r}", 60_000))
        }
        mesh = Mesh(np.array(devices), ("data",))
        cut = NamedSharding(mesh, P("data"))
        psum = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()))
        newest = psum(
            jax.make_array_from_process_local_data(cut, np.array([step if rank == 0 else 0], np.int32), (num,))
        )
        if rank == 0:  # of a generation: one that has a state
            client.key_value_set("step", str(step))
        has = json.loads(client.blocking_key_value_get("step", 60_000))
        left = threading.Event()

        def watch(said: int = said, wires: Any = wires, left: Any = left) -> None:
            while not left.is_set():
                if json.loads(order.read_text())["number"] != said and "NO_CUT" not in os.environ:
                    wires.cut()
                time.sleep(0.02)

        watcher = threading.Thread(target=watch)
        watcher.start()
        print(
            f"[{me}] generation {said}: rank {rank} of {num}, entered in {time.monotonic() - began:.2f} s at step "
            f"{has}",
            flush=True,
        )
        step, why = has, ""
        state = np.full(ELEMENTS, float(has), np.float32)  # every step adds one
        try:
            while step < has + STEPS_AN_EPOCH or told["number"] < told["last"]:
                if (json.loads(order.read_text()))["number"] != said:
                    raise RuntimeError("told between steps")
                (folder / f"{me}.step").write_text(f"{said} {step}")
                local = np.full(ELEMENTS, 1.0 / num, np.float32)
                total = psum(jax.make_array_from_process_local_data(cut, local, (ELEMENTS * num,)))
                state = state + np.asarray(total)
                step += 1
        except Exception as error:  # noqa: BLE001
            why = f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
            error.__traceback__ = None
        out = time.monotonic()
        left.set()
        watcher.join()
        if not why:
            client.wait_at_barrier("done", 20_000)
        del mesh, cut, psum, devices, newest
        total = local = None
        jax.distributed.shutdown()
        clear_backends()
        jax.clear_caches()
        gc.collect()
        print(
            f"[{me}] left generation {said} at step {step} ({why or 'done'}), {time.monotonic() - out:.2f} s to "
            f"leave; {len(os.listdir('/proc/self/fd'))} descriptors",
            flush=True,
        )
        if not why:
            assert state[0] == step, (state[0], step)
            print(f"[{me}] DONE {step} {float(state[0])}", flush=True)
            break
    os._exit(0)


def parent(victim: int, where: str, sizes: list[int], folder: Path) -> int:
    from spmdkit.cluster.service import ServiceProcess, reserve_port

    order = folder / "order"
    members, service_processes, running, holders, number = [], [], {}, [], 0

    def print_line(members: list[int]) -> None:
        nonlocal number
        number += 1
        holder, port = reserve_port()
        service_process = ServiceProcess(len(members), -1)
        service_process.listen(f"127.0.0.1:{port}")
        service_process.wait_until_up(f"127.0.0.1:{port}")
        service_processes.append(service_process)
        holders.append(holder)
        beside = folder / "beside"
        beside.write_text(
            json.dumps({"number": number, "last": len(sizes), "members": members, "address": f"127.0.0.1:{port}"})
        )
        beside.replace(order)

    def start(me: int) -> None:
        env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
        running[me] = subprocess.Popen([sys.executable, __file__, "member", str(me), str(order), str(folder)], env=env)

    order.write_text(json.dumps({"number": 0}))
    members = list(range(sizes[0]))
    for me in members:
        start(me)
    print_line(members)
    for size in sizes[1:]:
        deadline = time.monotonic() + 60
        reached = lambda me: (
            (folder / f"{me}.step").exists() and (folder / f"{me}.step").read_text().split() >= [str(number), "2"]
        )
        while not all(reached(me) for me in members) and time.monotonic() < deadline:
            time.sleep(0.005)
        dies = members[victim]
        if where == "collective":  # it is stopped at the beginning of a step; the others wait in the ring for it
            running[dies].send_signal(signal.SIGSTOP)
            time.sleep(0.5)
        running[dies].kill()
        killed = time.monotonic()
        print(f"killed {dies}", flush=True)
        more = [max(running) + 1 + k for k in range(size - (len(members) - 1))]
        place = members.index(dies)
        members = [m for m in members if m != dies]
        members = (
            [*members[:place], *more, *members[place:]] if place else [*members, *more]
        )  # rank 0 is one that has a state
        for me in more:
            start(me)
        print_line(members)
        while not all(reached(me) for me in members) and time.monotonic() < deadline:
            time.sleep(0.005)
        print(f"recovered in {time.monotonic() - killed:.2f} s", flush=True)
    codes = [running[me].wait(timeout=60) for me in members]
    for service_process in service_processes:
        service_process.kill()
    print("codes", codes, flush=True)
    return max(codes)


if __name__ == "__main__":
    if sys.argv[1] == "member":
        member(int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        sys.exit(parent(int(sys.argv[1]), sys.argv[2], [int(s) for s in sys.argv[3].split(",")], Path(name)))
