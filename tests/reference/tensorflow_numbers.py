"""What TensorFlow's own strategies give on the linear regression y = 2x: `make reference`, in an environment of its
own.

    .venv-reference/bin/python tests/reference/tensorflow_numbers.py [--write]

compares with tests/reference/golden.json, or writes it. Nothing of spmdkit runs here; test_golden.py compares spmdkit
with the file. Custom loops: Keras' `fit` under a strategy takes 0.4 s a step on CPUs.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")

import numpy as np
import tensorflow as tf

GOLDEN = Path(__file__).parent / "golden.json"
RATE, STEPS, REPLICAS = 0.1, 20, 4
PS_BATCH = 4


def data(num):
    """Returns (x, y) float32[num] of y = 2x, x from -1 to 1."""
    x = np.linspace(-1, 1, num, dtype=np.float32)
    return x, 2 * x


def mirrored():
    """Returns losses, w and b of 20 steps of SGD on the whole batch of 32, on 4 replicas of one CPU."""
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(REPLICAS)])
    x, y = data(32)
    dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(32).repeat())
    with strategy.scope():
        w, b = tf.Variable(0.0), tf.Variable(0.5)
        optimizer = tf.keras.optimizers.SGD(RATE)

    def replica(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((w * x + b - y) ** 2) / 32
        optimizer.apply_gradients(zip(tape.gradient(loss, [w, b]), [w, b], strict=True))
        return loss

    @tf.function
    def step(batch):
        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(replica, args=batch), axis=None)

    batches, found = iter(dataset), {"loss": [], "w": [], "b": []}
    for _ in range(STEPS):
        found["loss"].append(float(step(next(batches))))
        found["w"].append(float(w.numpy()))
        found["b"].append(float(b.numpy()))
    return {"replicas": REPLICAS, "rate": RATE, "batch_size": 32, "w0": 0.0, "b0": 0.5, **found}


def parameter_server(num_workers, updates_asked):
    """Returns w, b and the number of updates after so many asynchronous ones, a server and workers in this process."""
    ports = []
    for _ in range(num_workers + 1):
        with socket.create_server(("127.0.0.1", 0)) as server:
            ports.append(server.getsockname()[1])
    cluster = tf.train.ClusterSpec(
        {"ps": [f"127.0.0.1:{ports[0]}"], "worker": [f"127.0.0.1:{port}" for port in ports[1:]]}
    )
    servers = [tf.distribute.Server(cluster, job_name="ps", task_index=0)]
    servers += [tf.distribute.Server(cluster, job_name="worker", task_index=i) for i in range(num_workers)]
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, rpc_layer="grpc")
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        w, b, updates = tf.Variable(0.0), tf.Variable(0.5), tf.Variable(0, dtype=tf.int64)

    @tf.function
    def step(iterator):
        def replica(batch):
            x, y = batch
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((w * x + b - y) ** 2)
            of_w, of_b = tape.gradient(loss, [w, b])
            w.assign_sub(RATE * of_w)
            b.assign_sub(RATE * of_b)
            updates.assign_add(1)

        strategy.run(replica, args=(next(iterator),))

    dataset = lambda: tf.data.Dataset.from_tensor_slices(data(8)).batch(PS_BATCH).repeat()
    batches = iter(coordinator.create_per_worker_dataset(dataset))
    for _ in range(updates_asked):
        coordinator.schedule(step, args=(batches,))
    coordinator.join()
    found = {"workers": num_workers, "w": float(w.numpy()), "b": float(b.numpy()), "updates": int(updates.numpy())}
    return {"rate": RATE, "batch_size": PS_BATCH, "w0": 0.0, "b0": 0.5, **found}


def differs(found, golden):
    """Returns what is another than in the golden file."""
    wrong = []
    for name, of_name in found.items():
        kept = golden["tensorflow"].get(name, {})
        for key, value in of_name.items():
            if key not in kept or not np.allclose(value, kept[key], rtol=1e-5, atol=1e-6):
                wrong.append(f"{name}.{key}")
    return wrong


PARTS = {
    "mirrored": mirrored,
    "parameter_server_1": lambda: parameter_server(1, 20),
}


def part(name):
    """Returns the numbers of one strategy from a process of its own: a process meets one cluster."""
    ran = subprocess.run([sys.executable, __file__, name], stdout=subprocess.PIPE, text=True, timeout=240, check=True)
    return json.loads(ran.stdout.splitlines()[-1])


def main():
    """Runs one part, or all, and writes or compares."""
    if sys.argv[1:] and sys.argv[1] in PARTS:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * REPLICAS)
        print(json.dumps(PARTS[sys.argv[1]]()), flush=True)
        return 0
    found = {name: part(name) for name in PARTS}
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if "--write" in sys.argv:
        golden |= {"tensorflow_version": tf.__version__, "tensorflow": found}
        GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
        print(f"wrote {GOLDEN}", flush=True)
        return 0
    wrong = differs(found, golden)
    told = f"differ: {wrong}" if wrong else "the same"
    print(f"tensorflow {tf.__version__} against {golden['tensorflow_version']}: {told}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    code = main()
    os._exit(code)  # servers in this process have no end
