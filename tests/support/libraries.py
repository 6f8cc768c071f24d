"""The same examples as data of each library: name -> (package, function that returns the data, exact, any number of
shards). `folder` has the files of `write_files`."""

import io
import tarfile
from pathlib import Path

import numpy as np

import spmdkit as sk
from spmdkit.data.streams.function import stream
from tests.support.streams import example

NUM, FILES = 320, 8


def numbered(i):
    """The example i, as a numpy integer and an array."""
    return {**example(0), "id": np.int32(i), "x": example(int(i))["x"]}


def table(ids):
    import pyarrow as pa

    ids = np.asarray(ids, np.int32)
    x = np.stack([example(int(i))["x"] for i in ids])
    return pa.table({"id": ids, "x": pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 3)})


def write_files(folder):
    """Writes eight Parquet files of four row groups if they are missing, and returns their names."""
    import pyarrow.parquet as pq

    names = [f"{folder}/{i}.parquet" for i in range(FILES)]
    for name, ids in zip(names, np.split(np.arange(NUM), FILES), strict=True):
        if not Path(name).exists():
            pq.write_table(table(ids), name, row_group_size=10)
    return names


def hugging_face(folder, files=FILES):
    import datasets

    datasets.disable_progress_bars()
    names = write_files(folder)[:files]
    return datasets.load_dataset("parquet", data_files=names, split="train", streaming=True, cache_dir=f"{folder}/hf")


def mapped(folder):
    return hugging_face(folder).map(lambda row: {**row, "id": row["id"] + 0}).filter(lambda row: row["id"] % 5 > 0)


def interleaved(folder):
    import datasets

    data = hugging_face(folder)
    return datasets.interleave_datasets([data, data.skip(30)], probabilities=[0.7, 0.3], seed=3)


def loader(kind, **options):
    import torch
    from torch.utils.data import DataLoader
    from torchdata.stateful_dataloader import StatefulDataLoader

    generator = torch.Generator().manual_seed(5)
    of_kind = StatefulDataLoader if kind == "torchdata" else DataLoader
    return of_kind([numbered(i) for i in range(NUM)], generator=generator, **options)


@stream
def sharded_loader(shard, num_shards, seed):
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader

    rows = [numbered(i) for i in range(shard, NUM, num_shards)]
    generator = torch.Generator().manual_seed(seed + shard)
    return StatefulDataLoader(rows, batch_size=3, shuffle=True, generator=generator)


@stream
def sharded_buffers(shard, num_shards, seed):
    import datasets

    ids = list(range(shard, NUM, num_shards))
    rows = datasets.Dataset.from_dict({"id": ids, "x": [example(i)["x"] for i in ids]})
    return rows.to_iterable_dataset().shuffle(seed=seed, buffer_size=16)


def grain_map():
    import grain

    return grain.MapDataset.source(range(NUM)).shuffle(seed=7).map(numbered)


def grain_rows(epochs=1):
    import grain

    return grain_map().repeat(epochs).to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))


def grain_mix():
    import grain

    other = grain_rows(None).map(lambda row: {**row})
    return grain.IterDataset.mix([grain_rows(None).filter(lambda row: row["id"] % 3 > 0), other], weights=[0.7, 0.3])


def arrow_files(folder):
    import pyarrow as pa

    for i, ids in enumerate(np.split(np.arange(NUM), FILES)):
        with pa.OSFile(f"{folder}/{i}.arrow", "wb") as sink, pa.ipc.new_file(sink, table(ids).schema) as writer:
            writer.write_table(table(ids), max_chunksize=10)
    return sk.parquet(f"{folder}/*.arrow")


def parquet_files(folder):
    write_files(folder)
    return sk.parquet(f"{folder}/*.parquet", ["x", "id"])


def tar_files(folder):
    """Returns eight tar files, one with names of more than 255 characters."""
    for i, ids in enumerate(np.split(np.arange(NUM), FILES)):
        with tarfile.open(f"{folder}/{i:02}.tar", "w") as file:
            for j in ids:
                key = f"{'long/' * 60 if i == 3 else 'part/'}{j:04}"
                for field, content in (("id", str(j).encode()), ("x.bin", example(int(j))["x"].tobytes())):
                    info = tarfile.TarInfo(f"{key}.{field}")
                    info.size = len(content)
                    file.addfile(info, io.BytesIO(content))
    return sk.tar(f"{folder}/{{00..{FILES - 1:02}}}.tar", decode_bytes)


def decode_bytes(sample):
    return {"id": np.int32(sample["id"]), "x": np.frombuffer(sample["x.bin"], np.float32)}


def tf_rows(width=3):
    import tensorflow as tf

    rows = tf.data.Dataset.range(NUM)
    return rows.map(lambda i: {"id": tf.cast(i, tf.int32), "x": tf.cast(i, tf.float32) + tf.range(float(width))})


def tf_shuffled(width=3, buffer=64):
    return tf_rows(width).shuffle(buffer, seed=9, reshuffle_each_iteration=False).prefetch(8)


LIBRARIES = {
    "tf.data": ("tensorflow", lambda folder: tf_rows(), True, True),
    "tf.data, shuffle": ("tensorflow", lambda folder: tf_shuffled(), True, True),
    "tf.data, batch": ("tensorflow", lambda folder: tf_shuffled().batch(7), True, False),
    "tf.data, large buffer": ("tensorflow", lambda folder: tf_shuffled(4096, 100), False, True),
    "parquet": ("pyarrow", parquet_files, True, True),
    "arrow files": ("pyarrow", arrow_files, True, True),
    "tar": ("tarfile", tar_files, True, True),
    "hf": ("datasets", hugging_face, True, True),
    "hf, map and filter": ("datasets", mapped, True, True),
    "hf, numpy": ("datasets", lambda folder: hugging_face(folder).with_format("numpy"), True, True),
    "hf, shuffle": ("datasets", lambda folder: hugging_face(folder).shuffle(seed=5, buffer_size=20), False, True),
    "hf, interleaved": ("datasets", interleaved, True, False),
    "hf, shuffle in a function": ("datasets", lambda folder: sharded_buffers, False, True),
    "torch": ("torchdata", lambda folder: loader("torch", batch_size=6, shuffle=True), False, False),
    "torchdata": ("torchdata", lambda folder: loader("torchdata", batch_size=6, shuffle=True), True, False),
    "torchdata in a function": ("torchdata", lambda folder: sharded_loader, True, True),
    "grain": ("grain", lambda folder: grain_rows(), True, True),
    "grain, batch": ("grain", lambda folder: grain_rows().batch(7), True, True),
    "grain, mix and filter": ("grain", lambda folder: grain_mix(), True, True),
}
