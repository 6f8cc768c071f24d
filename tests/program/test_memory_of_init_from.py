"""Weights of a file are never in host memory as a whole, nor in the compile cache."""

import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.foundation.trees import named_leaves
from spmdkit.program.compile_cache import enable_cache
from tests.support.core_runs import program_of

st = pytest.importorskip("safetensors.numpy")

pytestmark = pytest.mark.compiles

MIB = 2**20


class Anonymous:
    """The peak growth of the memory of this process that is not a mapped file, in bytes."""

    def __enter__(self):
        self._before, self.peak, self._ended = self._now(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._ended.set()
        self._thread.join()

    def _watch(self):
        while not self._ended.wait(0.002):
            self.peak = max(self.peak, self._now() - self._before)

    def _now(self):
        [line] = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon")]
        return int(line.split()[1]) * 1024


def write(path, mib, num):
    """Writes `num` arrays, one after the other: the file is never in memory."""
    header, rows = {}, mib * MIB // num // 4 // 1024
    for i in range(num):
        start = i * rows * 4096
        header[f"w{i}"] = {"dtype": "F32", "shape": [rows, 1024], "data_offsets": [start, start + rows * 4096]}
    text = str(header).replace("'", '"').encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for i in range(num):
            for _ in range(rows // 1024):
                file.write(np.full((1024, 1024), i, np.float32).data)
    return rows


@pytest.mark.parametrize(
    ("mib", "num", "spare"), [(64, 2, 16), pytest.param(2048, 8, 256, marks=pytest.mark.slow)], ids=["64 MiB", "2 GiB"]
)
def test_each_device_reads_its_slice(tmp_path, monkeypatch, capsys, mib, num, spare):
    rows = write(tmp_path / "m.safetensors", mib, num)
    init = lambda key: {f"w{i}": jax.random.normal(key, (rows, 1024)) for i in range(num)}
    loss_fn = lambda params, batch, key: sk.mean(batch["x"] @ params["w0"][0, :1])
    task = sk.Task(init, loss_fn, optax.sgd(0.1), train_data={"x": np.ones((16, 1), np.float32)})
    program = program_of(task, mesh={"fsdp": 8}, batch_size=8, init_from=str(tmp_path / "m.safetensors"))
    paths = [path for path, _ in named_leaves(program.abstract_state) if path.startswith("params")]
    with Anonymous() as memory:
        started = time.monotonic()
        leaves = program.initial.leaves(paths)
        ours_s = time.monotonic() - started
    largest = mib / num / 8
    assert memory.peak <= (1.1 * mib + largest + spare) * MIB, memory.peak / MIB
    for i, path in enumerate(paths):
        assert leaves[path].sharding.shard_shape(leaves[path].shape) == (rows // 8, 1024)
        assert bool(jnp.all(leaves[path] == i))
    del leaves
    if mib > 64:
        started = time.monotonic()
        plain = st.load_file(tmp_path / "m.safetensors")
        jax.block_until_ready(
            [jax.device_put(plain[path[7:]], program.initial.loadable[path].sharding) for path in paths]
        )
        plain_s = time.monotonic() - started
        with capsys.disabled():
            print(f"\n{mib} MiB: {ours_s:.1f} s, a plain loader {plain_s:.1f} s, peak {memory.peak / MIB:.0f} MiB")
    monkeypatch.setenv("SPMDKIT_COMPILE_CACHE", str(tmp_path / "cache"))
    with enable_cache(sk.Config(task="t.py:t", compile_cache={"min_s": 0.0}).compile_cache, tmp_path):
        state = program.init()
        assert bool(jnp.all(state.params["w1"] == 1))
    cached = [path.stat().st_size for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert cached and max(cached) < 10 * MIB
