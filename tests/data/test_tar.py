"""`sk.tar`: samples, positions and errors."""

import contextlib
import gzip
import io
import tarfile

import numpy as np
import pytest

import spmdkit as sk
from spmdkit.errors import ConfigError, UserCodeError


def write(path, members):
    with tarfile.open(path, "w") as file:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.type = tarfile.REGTYPE if content is not None else tarfile.DIRTYPE
            info.size = len(content or b"")
            file.addfile(info, io.BytesIO(content or b""))


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def read(stream, state=None, epoch=0):
    """Returns [(state before, example)] of the only shard."""
    shard, found = stream.open(0, 1, 3, epoch, state), []
    with contextlib.closing(shard), contextlib.suppress(StopIteration):
        while True:
            found.append((shard.state(), next(shard)))
    return found


def test_members_with_one_key_are_a_sample(tmp_path):
    long = "d.ir/" * 60 + "0"
    names = ["a.jpg", "a.Seg.PNG", "a", "x/", ".hidden", "b.jpg", "x/b.jpg", f"{long}.jpg", f"{long}.cls"]
    write(tmp_path / "00.tar", [(name, None if name == "x/" else name.encode()) for name in names])
    write(tmp_path / "01.tar", [])
    write(tmp_path / "02.tar", [("a.jpg", b"")])
    stream = sk.tar(tmp_path / "{00..02}.tar", dict, shuffle=False)
    found = read(stream)
    assert [example for _, example in found] == [
        {"__key__": "a", "jpg": b"a.jpg", "seg.png": b"a.Seg.PNG"},
        {"__key__": "b", "jpg": b"b.jpg"},
        {"__key__": "x/b", "jpg": b"x/b.jpg"},
        {"__key__": long, "jpg": f"{long}.jpg".encode(), "cls": f"{long}.cls".encode()},
        {"__key__": "a", "jpg": b""},
    ]
    for i, (state, _) in enumerate(found):
        assert read(stream, state) == found[i:]


def test_files_are_read_in_the_order_of_the_epoch(tmp_path):
    for i in range(8):
        write(tmp_path / f"{i}.tar", [("a.cls", str(i).encode()), ("a.x.npy", npy(np.full(2, i, np.float32)))])
    stream = sk.tar([tmp_path / "{0..3}.tar", tmp_path / "[4-7].tar"])
    orders = [[int(example["cls"]) for _, example in read(stream, epoch=epoch)] for epoch in range(3)]
    assert all(sorted(order) == list(range(8)) for order in orders) and len(set(map(tuple, orders))) == 3
    assert all((example["x.npy"] == example["cls"]).all() for _, example in read(stream))
    assert stream.most_shards() == 8


def test_files_that_cannot_be_read(tmp_path):
    write(tmp_path / "0.tar", [])
    with pytest.raises(ConfigError, match=r"no file matches .*1\.tar"):
        sk.tar(tmp_path / "{0..1}.tar")
    write(tmp_path / "a.tar", [("a.jpg", b"x" * 5000)])
    with pytest.raises(ConfigError, match=r"sample a has a field jpg.*decode="):
        read(sk.tar(tmp_path / "a.tar"))
    (tmp_path / "cut.tar").write_bytes((tmp_path / "a.tar").read_bytes()[:2000])
    (tmp_path / "packed.tar").write_bytes(gzip.compress((tmp_path / "a.tar").read_bytes()))
    write(tmp_path / "twice.tar", [("a.jpg", b"1"), ("a.jpg", b"2")])
    for name, words in (("cut", "unexpected end"), ("packed", "header"), ("twice", "sample a has two members jpg")):
        with pytest.raises(UserCodeError, match=rf"{name}\.tar cannot be read at byte 0 \(.*{words}.*whole tar"):
            read(sk.tar(tmp_path / f"{name}.tar"))
