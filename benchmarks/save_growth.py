"""How much a process grows with each save, and where: tensorstore alone, and `Checkpoints` with and without what it
works around.

    python benchmarks/save_growth.py [--saves 200] [--leaves 6]

tensorstore 0.1.86 never frees the Python objects that it makes of JSON: `experimental_collect_matching_metrics`, which
orbax 0.12.8 asks several times a save for a line of its log, and `KvStore.Spec.to_json`, which it calls for each array.
Neither is asked any more (`orbax_backend.patch_orbax`).
`--part names` shows CPython alone: its table of interned strings, made anew when names that nobody holds have filled
it.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from spmdkit.config.retention import Retention

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parents[1]))

CALLS = 2000


def resident_kib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def growth(call: Callable[[], object], times: int) -> float:
    """Returns KiB that the process grows by a call, after a tenth of the calls to warm up."""
    for _ in range(max(1, times // 10)):
        call()
    gc.collect()
    before = resident_kib()
    for _ in range(times):
        call()
    gc.collect()
    return (resident_kib() - before) / times


def alone() -> None:
    """Shows the two calls of tensorstore, without orbax and without us."""
    import tensorstore as ts

    with tempfile.TemporaryDirectory() as folder:
        spec = {"driver": "zarr3", "kvstore": f"file://{folder}/a/"}
        ts.open(spec, dtype="float32", shape=[8], create=True).result().write(1.0).result()
        metrics = growth(lambda: ts.experimental_collect_matching_metrics("/tensorstore/kvstore/"), CALLS)
        to_json = growth(lambda: ts.KvStore.Spec({"driver": "file", "path": f"{folder}/"}).to_json(), CALLS)
    print(f"experimental_collect_matching_metrics  {metrics:6.2f} KiB a call")
    print(f"KvStore.Spec.to_json                   {to_json:6.2f} KiB a call")


def names() -> None:
    """Shows by how much the process grows at once, as 50,000 names are held and 250,000 others are not, with the
    allocator as `train` sets it."""
    from spmdkit.program import allocator

    allocator.limit_arenas("cpu:1", {})
    allocator.disable_trimming()
    held = [sys.intern(f"held {i}") for i in range(50_000)]
    before = resident_kib()
    for i in range(250_000):
        sys.intern(f"gone {i}")
        if i % 100 == 0 and (now := resident_kib()) != before:
            if now - before > 1000:
                print(f"after {i:,} names that are gone: {now - before} KiB more; {len(held):,} of ours are held")
            before = now


def saving(num: int, leaves: int, worked_around: bool) -> None:
    """Shows `Checkpoints` over many saves of a small state."""
    import jax.numpy as jnp

    from spmdkit.checkpoint import Checkpoints, orbax_backend

    if not worked_around:
        orbax_backend.patch_orbax = lambda separate=False: None
    state = {"layer": {f"leaf{i}": jnp.ones(16) for i in range(leaves)}}
    with tempfile.TemporaryDirectory() as folder:
        checkpoints, step = Checkpoints(folder, retention=Retention(keep=1)), iter(range(1, 10**9))

        def save() -> None:
            checkpoints.save(next(step), state, {})
            checkpoints.wait()

        grown = growth(save, num)
        checkpoints.close()
    print(
        f"Checkpoints.save, {leaves} arrays, {'as it is' if worked_around else 'as orbax asks'}  {grown:6.2f} KiB a "
        "save"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--saves", type=int, default=200)
    parser.add_argument("--leaves", type=int, default=6)
    parser.add_argument("--part", choices=["names", "alone", "before", "now"])
    options = parser.parse_args()
    if options.part is None:
        for part in ("names", "alone", "before", "now"):  # each in a process of its own
            subprocess.run([sys.executable, *sys.argv, "--part", part], check=True)
    elif options.part == "names":
        names()
    elif options.part == "alone":
        alone()
    else:
        saving(options.saves, options.leaves, options.part == "now")


if __name__ == "__main__":
    main()
