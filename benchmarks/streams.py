"""Examples/s of each kind of data, next to a plain loop of the same library in the same process.

    python benchmarks/streams.py [KIND ...]
    python benchmarks/streams.py --wait      the time that steps of 10 ms wait for data

Batches of 256 rows of 512 int32 on the host, from 16 files of 1,000 rows. Each kind runs in its own process, which
alternates the plain loop and 1, 8 and 16 shards; medians of three. Rates are per second of processor time, which other
work on the machine changes little. Then memory, open files and the time to restore a position and read its first
batch. Kinds whose package is missing are left out.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter
from results import save

from spmdkit import parquet, stream, tar, tokens
from spmdkit.data import (
    CheckedStream,
    Schedule,
    StreamReader,
    StreamSchedule,
    check_stream,
    host_batches,
    open_source,
    open_stream,
)

FILES, ROWS, WIDTH, BATCH, BLOCK_S, WAITED = 16, 1000, 512, 256, 0.7, 200
FOLDER = Path(tempfile.gettempdir()) / "spmdkit-streams"
SCHEDULE = StreamSchedule(BATCH, "train_data", always_full=True)
ARRAY = np.random.default_rng(0).integers(0, 50_000, (FILES * ROWS, WIDTH), np.int32)


def write_files() -> None:
    FOLDER.mkdir(exist_ok=True)
    ARRAY.astype(np.uint16).tofile(FOLDER / "tokens.bin")
    writer = ArrayRecordWriter(str(FOLDER / "rows.array_record"), "group_size:1")
    for row in ARRAY:
        writer.write(row.tobytes())
    writer.close()
    for i, rows in enumerate(np.split(ARRAY, FILES)):
        with tarfile.open(FOLDER / f"{i:02}.tar", "w") as archive:
            for number, row in enumerate(rows):
                info = tarfile.TarInfo(f"{number:06}.x")
                info.size = row.nbytes
                archive.addfile(info, io.BytesIO(row.tobytes()))
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        return
    for i, rows in enumerate(np.split(ARRAY, FILES)):
        column = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), WIDTH)
        pq.write_table(pa.table({"x": column}), FOLDER / f"{i:02}.parquet", row_group_size=250)


@stream
def function(shard: int, num_shards: int, seed: int) -> Iterator[Any]:
    for i in range(shard, len(ARRAY), num_shards):
        yield {"x": ARRAY[i]}


def hugging_face(form: str | None = None) -> Any:
    import datasets

    datasets.disable_progress_bars()
    datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0
    files = sorted(map(str, FOLDER.glob("*.parquet")))
    return datasets.load_dataset("parquet", data_files=files, split="train", streaming=True).with_format(form)


def hugging_face_map() -> Any:
    import datasets

    datasets.disable_progress_bars()
    return datasets.Dataset.from_parquet(str(FOLDER / "00.parquet"), cache_dir=str(FOLDER)).with_format("numpy")


def arrow_chunks() -> Iterator[Any]:
    for table in hugging_face("arrow").iter(batch_size=100):
        yield {"x": table["x"].combine_chunks().flatten().to_numpy().reshape(-1, WIDTH)}


def loader(name: str, shard: int = 0, num_shards: int = 1) -> Any:
    import torch
    import torchdata.stateful_dataloader as stateful

    kind = stateful.StatefulDataLoader if name == "torchdata" else torch.utils.data.DataLoader
    rows = [{"x": ARRAY[i]} for i in range(shard, len(ARRAY), num_shards)]
    generator = torch.Generator().manual_seed(0)
    return kind(rows, batch_size=64, shuffle=True, generator=generator, collate_fn=stacked)


def stacked(rows: list[Any]) -> dict[str, np.ndarray]:
    return {"x": np.stack([row["x"] for row in rows])}


@stream
def torch_shards(shard: int, num_shards: int, seed: int) -> Any:
    return loader("torch", shard, num_shards)


@stream
def torchdata_shards(shard: int, num_shards: int, seed: int) -> Any:
    return loader("torchdata", shard, num_shards)


def grain_map() -> Any:
    import grain

    return grain.MapDataset.source(range(len(ARRAY))).shuffle(seed=1).map(lambda i: {"x": ARRAY[i]})


def grain_rows() -> Any:
    import grain

    return grain_map().to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))


def grain_slices(num: int) -> Iterator[Any]:
    """Yields the rows of `num` slices, in turn."""
    import grain

    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    slices = [iter(grain_map().slice(slice(i, None, num)).to_iter_dataset(options)) for i in range(num)]
    for rows in zip(*slices, strict=True):
        yield from rows


def array_records() -> Any:
    import grain

    records = grain.MapDataset.source(grain.sources.ArrayRecordDataSource([str(FOLDER / "rows.array_record")]))
    return records.shuffle(seed=1).map(lambda record: {"x": np.frombuffer(record, np.int32)})


def tar_files() -> Any:
    return tar(f"{FOLDER}/*.tar", lambda sample: {"x": np.frombuffer(sample["x"], np.int32)})


def tar_rows() -> Iterator[Any]:
    for path in sorted(FOLDER.glob("*.tar")):
        with tarfile.open(path) as file:
            for member in file:
                yield {"x": np.frombuffer(file.extractfile(member).read(), np.int32)}  # type: ignore[union-attr]


def shuffled(data: Any) -> Iterator[Any]:
    for i in np.random.default_rng(0).permutation(len(data)).tolist():
        yield data[i]


def parquet_chunks() -> Iterator[Any]:
    import pyarrow.parquet as pq

    for path in sorted(FOLDER.glob("*.parquet")):
        file = pq.ParquetFile(path)
        for group in range(file.num_row_groups):
            column = file.read_row_group(group)["x"].combine_chunks()
            yield {"x": column.flatten().to_numpy().reshape(-1, WIDTH)[np.random.permutation(len(column))]}


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Iterator[Any]], bool]] = {
    "`@sk.stream` function, rows": (lambda: function, lambda _: function(0, 1, 0), False),
    "grain `MapDataset` (indexed)": (grain_map, shuffled, False),
    "grain `IterDataset`": (grain_rows, iter, False),
    "grain `IterDataset`, plain loop over 8 slices": (grain_rows, lambda _: grain_slices(8), False),
    "ArrayRecord by grain (indexed)": (array_records, shuffled, False),
    "HF `Dataset` (indexed)": (hugging_face_map, shuffled, False),
    "HF `IterableDataset`, numpy rows": (lambda: hugging_face("numpy"), iter, False),
    "HF `IterableDataset`, tables": (hugging_face, lambda _: arrow_chunks(), True),
    "torch `DataLoader`, batches of 64": (lambda: torch_shards, lambda _: iter(loader("torch")), True),
    "torchdata loader, batches of 64": (lambda: torchdata_shards, lambda _: iter(loader("torchdata")), True),
    "`sk.parquet`": (lambda: parquet(f"{FOLDER}/*.parquet"), lambda _: parquet_chunks(), True),
    "`sk.tar`": (tar_files, lambda _: tar_rows(), False),
    "`sk.tokens` (indexed)": (lambda: tokens(FOLDER / "tokens.bin", WIDTH, "uint16"), shuffled, False),
}


def plain_batches(make: Callable[[], Iterator[Any]], chunked: bool) -> Iterator[Any]:
    """Yields stacked batches of a plain loop, epoch after epoch."""
    rows, waiting = list[Any](), 0
    while True:
        for element in make():
            rows.append(element)
            waiting += len(element["x"]) if chunked else 1
            if waiting >= BATCH and chunked:
                whole = np.concatenate([row["x"] for row in rows])
                yield whole[:BATCH]
                rows, waiting = [{"x": whole[BATCH:]}], len(whole) - BATCH
            elif waiting == BATCH:
                yield {name: np.stack([row[name] for row in rows]) for name in rows[0]}
                rows, waiting = [], 0


def our_batches(data: Any, shards: int) -> tuple[Iterator[Any], StreamReader | None]:
    """Returns the batches of spmdkit, and the reader of a stream."""
    if not isinstance(data, CheckedStream):
        schedule = Schedule(len(data), BATCH)
        return host_batches(data, schedule, None, 1, None), None
    places = np.arange(BATCH)
    reader = StreamReader(data, shards, {BATCH: [places]}, {BATCH: places}, True, 2)
    return reader.batches(1, sys.maxsize - 1, SCHEDULE), reader


def rate(batches: Iterator[Any]) -> float:
    """Returns rows per second of processor time over `BLOCK_S`, after the first batch."""
    next(batches)
    num, begin = 0, time.process_time()
    while (now := time.process_time()) - begin < BLOCK_S:
        next(batches)
        num += BATCH
    batches.close()  # type: ignore[attr-defined]
    return num / (now - begin)


def report_waits() -> None:
    """Prints the share of the time that steps of 10 ms wait for data that are in memory or memory-mapped."""
    import jax
    import jax.numpy as jnp
    import optax

    import spmdkit as sk

    np.save(FOLDER / "rows.npy", ARRAY)
    kinds = {
        "arrays in memory": {"x": ARRAY},
        "memory-mapped arrays": {"x": np.load(FOLDER / "rows.npy", mmap_mode="r")},
        "`sk.tokens`": tokens(FOLDER / "tokens.bin", WIDTH, "uint16"),
        "`@sk.stream` function, rows": function,
        "`sk.tar`": tar_files(),
        "`sk.tar`, `data.workers: 2`": tar_files(),
    }
    rows = []
    for name, data in kinds.items():
        task = sk.Task(lambda key: jnp.zeros(()), lambda p, b, k: sk.scalar(p), optax.sgd(1), train_data=data)
        config = sk.Config(
            task="t.py:t",
            batch_size=BATCH,
            steps=WAITED,
            mesh={},
            devices="cpu:1",
            data={"workers": 2 * ("workers" in name)},
        )
        program = sk.Program(config, task, jax.devices()[:1])
        shares, longest = [], 0.0
        for _ in range(5):
            waits = []
            with program.feed.stream(1, WAITED) as batches:
                begin = time.perf_counter()
                for _step, _batch, wait_s in batches:
                    waits.append(wait_s)
                    time.sleep(0.01)
            shares.append(sum(waits[2:]) / (time.perf_counter() - begin))
            longest = max(longest, *waits[2:])
        rows.append(
            {"kind": name, "share of a step of 10 ms spent waiting": median(shares), "longest, ms": 1e3 * longest}
        )
        print(rows[-1], file=sys.stderr, flush=True)
    finish("waiting", rows, "python benchmarks/streams.py --wait")


def usage() -> tuple[float, int]:
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resident / 2**20, len(os.listdir("/proc/self/fd"))


def measure(name: str) -> dict[str, Any]:
    make, loop, chunked = KINDS[name]
    opened = open_stream(make())
    data: Any = open_source(make()) if opened is None else check_stream(opened, "train_data", 0, 16, False)
    counts = (1, 8, 16) if opened is not None else (1,)
    result: dict[str, Any] = {"exact": opened is None or data.exact, "shards": {}}
    rates: dict[int, list[float]] = {num: [] for num in (0, *counts)}
    for _ in range(3):
        rates[0].append(rate(plain_batches(lambda: loop(make()), chunked)))
        for num in counts:
            rates[num].append(rate(our_batches(data, num)[0]))
    result["plain"] = median(rates[0])
    for num in counts:
        before, (batches, reader) = usage(), our_batches(data, num)
        for _ in range(8):
            next(batches)
        after, restore = usage(), None
        if reader is not None:
            at = json.loads(json.dumps(reader.position(8)))
            begin = time.perf_counter()
            reader.restore(8, at)
            next(reader.batches(9, 9, SCHEDULE))
            restore = time.perf_counter() - begin
        batches.close()  # type: ignore[attr-defined]
        result["shards"][num] = (median(rates[num]), after[0] - before[0], after[1] - before[1], restore)
    return result


def main(names: list[str]) -> None:
    write_files()
    if names == ["--wait"]:
        return report_waits()
    table = []
    for name in KINDS:
        if names and not any(each in name for each in names):
            continue
        done = subprocess.run([sys.executable, __file__, "--one", name], capture_output=True, text=True, timeout=300)
        if done.returncode:
            print(f"{name}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        rows = list(found["shards"].values())
        plain = found["plain"]
        table.append(
            {
                "kind": name,
                "plain rows/s": plain,
                "rows/s with 1, 8, 16 shards": " ".join(f"{row[0]:,.0f}" for row in rows),
                "ratio": " ".join(f"{row[0] / plain:.2f}" for row in rows),
                "MiB": " ".join(f"{row[1]:.0f}" for row in rows),
                "open files": " ".join(f"{row[2]}" for row in rows),
                "restore, s": "" if rows[0][3] is None else " ".join(f"{row[3]:.2f}" for row in rows),
            }
        )
        print(table[-1], file=sys.stderr, flush=True)
    finish("data", table, " ".join(["python benchmarks/streams.py", *names]))


def finish(name: str, rows: list[dict[str, Any]], command: str) -> None:
    """Saves a table and prints one JSON line."""
    save(name, rows, command)
    print(json.dumps({"benchmark": name, "rows": rows}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure(sys.argv[2])), flush=True)
        os._exit(0)  # without the exit handlers of the libraries
    main(sys.argv[1:])
