"""What the checksums of a checkpoint cost: the wall time of saves with and without them, and their processor time.

    python benchmarks/checksums.py [--gib 1.0] [--saves 20] [--pairs 0] [--folder DIR] [--json FILE]

Saves a state of random floats, one after the other, as a run does (`Checkpoints`, keep 1), and reports the wall time of
all. The seconds of the checksums are measured apart, since a save varies by more than they cost: the same bytes are
encoded in memory by tensorstore, several arrays at a time as a save does it, with and without checksums, in turn, and
the record and the small files are digested. `of_wall`: what the encoding takes longer by the clock, tensorstore having
a thread for each core, over the wall time of the saves. `of_wall_at_most`: the processor seconds of all threads over
it, as if one core did everything and nobody waited for the disk.

`--pairs N`: N saves with and N without checksums, in turn, each pair neighbours (the second one first in every other
pair); the mean of the differences with its standard error, their median with its interval, and the fastest of each,
wall and processor seconds. Ends with 1 where the mean is above 3 % by more than two standard errors. Needs almost four
times the state's memory.

2026-11-24, two cores alone: 20 saves of 1 GiB took 39.6 s, their checksums 0.044 s of the clock a GiB, 2.2 % of it; 1.9
s of the processor, 4.7 % of the wall time and 4.0 % of the processor's (0.073 and 0.079 s a GiB in two sittings before,
3.6 and 3.4 % of 41.1 and 46.4 s). With one other job of a quarter of a core: 68.0 s, at most 2.4 s of the processor. In
turn, 16 pairs on disk: +0.27 s a save with a standard error of 0.28, of 2.9 s; 20 pairs on tmpfs: -0.05 with 0.21, of
1.9 s: nothing that shows, and saves that vary by a second show no 3 % in 20 pairs. With a crc32c behind every chunk, as
it was before: 0.2 to 0.4 s a GiB, 8 % of 54 s on a quiet machine.
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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from spmdkit.config.retention import Retention

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parents[1]))

LEAF_MIB = 32
TOGETHER = 4
ROUNDS = 31
GOAL = 0.03


def state_of(gib: float) -> dict[str, Any]:
    """Returns leaves of 32 MiB of random floats."""
    import jax

    num = max(1, round(gib * 1024 / LEAF_MIB))
    make = jax.jit(lambda key: jax.random.normal(key, (LEAF_MIB * 2**18,)))
    return {f"leaf{i:03d}": make(jax.random.key(i)) for i in range(num)}


def without_checksums(build: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Returns the metadata of an array as a save writes it, but for the checksums of its chunks."""
    metadata = build(*args, **kwargs)
    codecs = metadata["codecs"][0]["configuration"]["codecs"]
    assert any(codec["configuration"].get("checksum") for codec in codecs if codec["name"] == "zstd")
    codecs[:] = [codec for codec in codecs if codec["name"] != "crc32c"]
    codecs[-1]["configuration"] = {"level": 1}
    return metadata


def builders() -> tuple[Callable[..., dict[str, Any]], Callable[..., dict[str, Any]]]:
    """Returns what makes the metadata of arrays with checksums, as in a run, and without them."""
    from orbax.checkpoint._src.serialization import tensorstore_utils

    from spmdkit.checkpoint import orbax_backend

    orbax_backend.patch_orbax()
    build = tensorstore_utils._build_zarr3_metadata
    return build, partial(without_checksums, build)


def encode(array: Any, build: Callable[..., dict[str, Any]]) -> tuple[float, float]:
    """Returns the processor seconds and the wall seconds that TOGETHER arrays take into memory, written at a time as a
    save does."""
    import tensorstore as ts

    metadata = build(array.shape, array.shape, True) | {"data_type": "float32"}
    spec = {"driver": "zarr3", "kvstore": {"driver": "memory"}, "metadata": metadata}
    stores = [ts.open(spec | {"path": f"{i}/"}, create=True).result() for i in range(TOGETHER)]
    processor, wall = time.process_time(), time.monotonic()
    for written in [store.write(array) for store in stores]:
        written.result()
    return time.process_time() - processor, time.monotonic() - wall


def seconds_per_gib(array: Any) -> tuple[float, float]:
    """Returns the processor seconds and the wall seconds of the checksums of 1 GiB: the median differences of
    neighbouring turns."""
    checked, plain = builders()
    both = [(encode(array, checked), encode(array, plain)) for _ in range(ROUNDS + 1)][1:]
    processor, wall = (statistics.median(a[of] - b[of] for a, b in both) for of in (0, 1))
    return processor * 2**30 / TOGETHER / array.nbytes, wall * 2**30 / TOGETHER / array.nbytes


def digest_seconds(folder: Path) -> float:
    """Returns the processor seconds of digesting a step's record and small files."""
    from spmdkit.checkpoint import record

    before = time.process_time()
    for _ in range(ROUNDS):
        record.digest_files(folder, record.list_files(folder))
        record._digest_of(json.loads((folder / record.RECORD_FILE).read_text()))
    return (time.process_time() - before) / ROUNDS


class Saves:
    """Saves of one state, one after the other."""

    def __init__(self, folder: Path, state: Any):
        from spmdkit.checkpoint import Checkpoints

        self._checkpoints, self._state, self.step = (
            Checkpoints(folder / "checkpoints", retention=Retention(keep=1)),
            state,
            0,
        )

    def save(self) -> float:
        """Returns the seconds until the next save is committed."""
        self.step += 1
        began = time.monotonic()
        self._checkpoints.save(self.step, self._state, {"config": "x" * 4000})
        self._checkpoints.wait()
        return time.monotonic() - began

    def close(self) -> Path:
        """Returns the folder of the last step."""
        self._checkpoints.close()
        return Path(self._checkpoints.directory) / str(self.step)


def in_turn(saves: Saves, pairs: int, gib: float) -> dict[str, Any]:
    """Returns what saves with checksums take more than their neighbours without, wall and processor seconds."""
    from orbax.checkpoint._src.serialization import tensorstore_utils

    ways = builders()
    wall: tuple[list[float], list[float]] = ([], [])
    processor: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs):
        for way in (0, 1) if pair % 2 == 0 else (1, 0):
            tensorstore_utils._build_zarr3_metadata = ways[way]
            before = time.process_time()
            wall[way].append(saves.save())
            processor[way].append(time.process_time() - before)
    tensorstore_utils._build_zarr3_metadata = ways[0]
    found: dict[str, Any] = {"pairs": pairs, "gib": gib}
    for name, (checked, plain) in {"wall": wall, "processor": processor}.items():
        found[name] = more([a - b for a, b in zip(checked, plain, strict=True)], gib) | {
            "with_s": round(sum(checked), 2),
            "without_s": round(sum(plain), 2),
            "fastest_s": [round(min(times), 4) for times in (checked, plain)],
        }
    mean_s, error_s = found["wall"]["mean_s_per_gib"]
    plain_s = statistics.mean(wall[1]) / gib
    return found | {
        "of_wall": [round(mean_s / plain_s, 4), round(error_s / plain_s, 4)],
        "is_above": mean_s - 2 * error_s > GOAL * plain_s,
    }


def more(differences: list[float], gib: float) -> dict[str, Any]:
    """Returns the mean of paired differences with its standard error, and their median with the 95 % interval of its
    rank, all in seconds a GiB."""
    per_gib = sorted(difference / gib for difference in differences)
    n = len(per_gib)
    off = max(0, int(n / 2 - 0.98 * n**0.5))
    return {
        "mean_s_per_gib": [round(statistics.mean(per_gib), 4), round(statistics.stdev(per_gib) / n**0.5, 4)],
        "median_s_per_gib": round(statistics.median(per_gib), 4),
        "median_between": [round(per_gib[off], 4), round(per_gib[n - 1 - off], 4)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--saves", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=0)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    import jax
    import numpy as np

    state = jax.block_until_ready(state_of(options.gib))
    per_gib, wall_per_gib = seconds_per_gib(np.asarray(state["leaf000"]))
    found: dict[str, Any] = {
        "gib": options.gib,
        "checksum_processor_s_per_gib": round(per_gib, 4),
        "checksum_wall_s_per_gib": round(wall_per_gib, 4),
    }
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        saves = Saves(Path(folder), state)
        saves.save()  # the first one opens orbax
        if options.saves:
            processor = time.process_time()
            wall_s = sum(saves.save() for _ in range(options.saves))
            processor_s = time.process_time() - processor
        if options.pairs > 1:
            found |= {"in_turn": in_turn(saves, options.pairs, options.gib)}
        digests_s = digest_seconds(saves.close())
    if options.saves:
        checksum_s = options.saves * (per_gib * options.gib + digests_s)
        found |= {
            "saves": options.saves,
            "wall_s": round(wall_s, 2),
            "processor_s": round(processor_s, 2),
            "digests_s": round(digests_s, 5),
            "checksum_processor_s": round(checksum_s, 3),
            "of_wall": round(options.saves * (wall_per_gib * options.gib + digests_s) / wall_s, 4),
            "of_wall_at_most": round(checksum_s / wall_s, 4),
            "of_processor": round(checksum_s / processor_s, 4),
        }
    found |= {
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "load": round(os.getloadavg()[0], 1),
    }
    print(json.dumps(found, indent=2))
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=2) + "\n")
    if found.get("in_turn", {}).get("is_above"):
        sys.exit("checksums take more than 3 % of the wall time of the saves")


if __name__ == "__main__":
    main()
