"""Windows of token files, with document boundaries as nanoGPT and Megatron write them."""

import numpy as np
import pytest

import spmdkit as sk
from spmdkit.data.source import open_source
from spmdkit.data.tokens import HEADER, MAGIC
from spmdkit.errors import ConfigError

DOCUMENTS = [[5, 6, 7, 0], [8, 0], [9, 1, 2, 3, 4, 0], [1, 2, 0]]
"""Each ends with token 0. Windows of 4: the second document is in the second window."""
FLAT = np.concatenate(DOCUMENTS)


def megatron(folder, documents, code=4, dtype=np.int32):
    """Writes documents of one or two sequences."""
    sequences = [part for d in documents for part in (np.split(d, [2]) if len(d) > 3 else [d])]
    first = np.cumsum([0, *(2 if len(d) > 3 else 1 for d in documents)])
    sizes = np.array(list(map(len, sequences)), "<i4")
    pointers = (np.cumsum(sizes) - sizes).astype("<i8") * np.dtype(dtype).itemsize
    header = HEADER.pack(MAGIC, 1, code, len(sizes), len(first))
    (folder / "m.idx").write_bytes(header + sizes.tobytes() + pointers.tobytes() + first.astype("<i8").tobytes())
    np.concatenate(sequences).astype(dtype).tofile(folder / "m.bin")
    return folder / "m.bin"


@pytest.mark.parametrize("form", ["end", "megatron"])
def test_documents_of_windows(tmp_path, form):
    if form == "end":
        FLAT.astype(np.uint16).tofile(tmp_path / "t.bin")
        data = sk.tokens(tmp_path / "t.bin", context=4, dtype="uint16", end=0)
    else:
        data = sk.tokens(megatron(tmp_path, DOCUMENTS), context=4)
    assert len(data) == 3
    number = np.repeat(np.arange(4), list(map(len, DOCUMENTS)))
    place = np.concatenate([np.arange(len(d)) for d in DOCUMENTS])
    source = open_source(data)
    rows = source.gather(np.array([2, 0, 1]))
    for row, i in enumerate([2, 0, 1]):
        window = slice(4 * i, 4 * i + 4)
        np.testing.assert_array_equal(rows["inputs"][row], FLAT[window])
        np.testing.assert_array_equal(rows["targets"][row], FLAT[4 * i + 1 : 4 * i + 5])
        np.testing.assert_array_equal(rows["segment_ids"][row], number[window] - number[4 * i])
        np.testing.assert_array_equal(
            rows["positions"][row], np.where(number[window] == number[4 * i], np.arange(4), place[window])
        )
        np.testing.assert_array_equal(rows["target_mask"][row], number[window] == number[4 * i + 1 : 4 * i + 5])
    assert {x.dtype.name for x in rows.values()} == {"int32", "bool"}
    assert not source.in_memory


def test_a_flat_file_without_boundaries(tmp_path):
    FLAT.astype(np.uint16).tofile(tmp_path / "t.bin")
    example = sk.tokens(tmp_path / "t.bin", context=14, dtype="uint16")[0]
    assert example.keys() == {"inputs", "targets"}
    np.testing.assert_array_equal(example["inputs"], FLAT[:14])


def test_bad_files_are_rejected(tmp_path):
    with pytest.raises(ConfigError, match=r"not a file"):
        sk.tokens(tmp_path / "none.bin", 4, "uint16")
    (tmp_path / "t.bin").write_bytes(b"12345")
    with pytest.raises(ConfigError, match=r'dtype="uint16"'):
        sk.tokens(tmp_path / "t.bin", 4)
    for context, dtype in ((1, "uint16"), (5, "uint8")):
        with pytest.raises(ConfigError, match=rf"5 bytes.*context={context}"):
            sk.tokens(tmp_path / "t.bin", context, dtype)
    with pytest.raises(ConfigError, match=r"context is 0.*at least 1 token"):
        sk.tokens(tmp_path / "t.bin", 0, "uint8")
    path = megatron(tmp_path, DOCUMENTS)
    with pytest.raises(ConfigError, match=r"Remove dtype="):
        sk.tokens(path, 4, "uint16")
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ConfigError, match=r"56 bytes, and m.idx describes 60 bytes"):
        sk.tokens(path, 4)
    for data in (b"", (tmp_path / "m.idx").read_bytes()[:-1]):
        (tmp_path / "m.idx").write_bytes(data)
        with pytest.raises(ConfigError, match=r"not an index of Megatron"):
            sk.tokens(path, 4)
