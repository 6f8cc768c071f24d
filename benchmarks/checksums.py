"""What the checksums of a checkpoint cost: their processor time against the wall time of the saves that they protect.

    python benchmarks/checksums.py [--gib 1.0] [--saves 20] [--folder DIR] [--json FILE]

Saves a state of random floats, one after the other, as a run does (`Checkpoints`, keep 1), and reports the wall time of all. What the checksums
take of it is measured apart, since a save on a shared machine varies by more than they cost: the same bytes are encoded in memory by
tensorstore, with and without the crc32c codec, in turn, and the record and the small files are digested, all as a save does it. Needs almost four times the state's memory.

2026-11-23, two cores shared with others (load 22): 20 saves of 1 GiB took 323 s, of which checksums 5.4 s of processor time: 1.7 % of the wall
time, 7.5 % of the processor's (zstd takes the most). crc32c takes 0.2 to 0.3 s a GiB on one core, in tensorstore's threads; a quiet disk that
takes 1 GiB in 4 s leaves it at some 5 % in one thread. On a quiet machine the same day: 54 s, of which 4.3 s, 8 % (6.6 % of the processor's time):
above the goal of 3 %, which a disk of some 0.1 GiB/s meets.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parents[1]))

LEAF_MIB = 32
ROUNDS = 15


def state_of(gib: float) -> dict[str, Any]:
    """Returns leaves of 32 MiB of random floats."""
    import jax

    num = max(1, round(gib * 1024 / LEAF_MIB))
    make = jax.jit(lambda key: jax.random.normal(key, (LEAF_MIB * 2**18,)))
    return {f"leaf{i:03d}": make(jax.random.key(i)) for i in range(num)}


def encode(array: Any, codecs: list[dict[str, Any]]) -> float:
    """Returns the processor seconds that one array takes through `codecs` into memory."""
    import tensorstore as ts

    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "memory"},
        "metadata": {
            "shape": list(array.shape),
            "data_type": "float32",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(array.shape)}},
            "codecs": codecs,
        },
    }
    store = ts.open(spec, create=True).result()
    before = time.process_time()
    store.write(array).result()
    return time.process_time() - before


def crc_seconds_per_gib(array: Any) -> float:
    """Returns the processor seconds of crc32c over 1 GiB, compressed as a save does it: the median difference of neighbouring turns."""
    plain = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "zstd", "configuration": {"level": 1}}]
    both = [(encode(array, [*plain, {"name": "crc32c"}]), encode(array, plain)) for _ in range(ROUNDS + 1)][1:]
    return statistics.median(a - b for a, b in both) * 2**30 / array.nbytes


def digest_seconds(folder: Path) -> float:
    """Returns the processor seconds of digesting a step's record and small files."""
    from spmdkit.checkpoint import record

    before = time.process_time()
    for _ in range(ROUNDS):
        record.digest_small(folder, record.list_files(folder))
        record._digest_of(json.loads((folder / record.RECORD_FILE).read_text()))
    return (time.process_time() - before) / ROUNDS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--saves", type=int, default=20)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    import jax
    import numpy as np

    from spmdkit.checkpoint import Checkpoints

    state = jax.block_until_ready(state_of(options.gib))
    per_gib = crc_seconds_per_gib(np.asarray(state["leaf000"]))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        checkpoints = Checkpoints(Path(folder) / "checkpoints", keep=1)
        checkpoints.save(1, state, {"config": "x" * 4000})  # the first one opens orbax
        checkpoints.wait()
        processor, began = time.process_time(), time.monotonic()
        for step in range(2, options.saves + 2):
            checkpoints.save(step, state, {"config": "x" * 4000})
            checkpoints.wait()
        wall_s, processor_s = time.monotonic() - began, time.process_time() - processor
        digests_s = digest_seconds(checkpoints.directory / str(options.saves + 1))
        checkpoints.close()
    checksum_s = options.saves * (per_gib * options.gib + digests_s)
    found = {
        "saves": options.saves,
        "gib": options.gib,
        "wall_s": round(wall_s, 2),
        "processor_s": round(processor_s, 2),
        "crc32c_s_per_gib": round(per_gib, 4),
        "digests_s": round(digests_s, 5),
        "checksum_s": round(checksum_s, 3),
        "of_wall": round(checksum_s / wall_s, 4),
        "of_processor": round(checksum_s / processor_s, 4),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "load": round(os.getloadavg()[0], 1),
    }
    print(json.dumps(found, indent=2))
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=2) + "\n")
    if found["of_wall"] > 0.03:
        sys.exit("checksums take more than 3 % of the wall time of the saves")


if __name__ == "__main__":
    main()
