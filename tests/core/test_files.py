"""Files are there whole or not at all."""

import errno
import os
import stat

import numpy as np
import pytest

from spmdkit.errors import CheckpointWriteError, ConfigError
from spmdkit.foundation import files


@pytest.mark.parametrize("is_folder", [False, True])
def test_an_exception_leaves_the_old_file(tmp_path, is_folder):
    (tmp_path / "f").write_text("old")
    with pytest.raises(RuntimeError), files.atomic_path(tmp_path / "f") as partial:
        (partial / "inner").mkdir(parents=True) if is_folder else partial.write_text("half")
        raise RuntimeError
    assert (tmp_path / "f").read_text() == "old" and os.listdir(tmp_path) == ["f"]


def test_a_missing_folder_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="none/f: cannot be written: No such file"):
        files.write_text(tmp_path / "none" / "f", "text")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_full_disk_is_a_failed_write_and_no_config_error(tmp_path, number, monkeypatch):
    def full(*arguments, **keywords):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files, "replace", full)
    for write in (files.write_text, files.write_json):
        with pytest.raises(CheckpointWriteError, match=f"f: cannot be written: {os.strerror(number)}"):
            write(tmp_path / "f", "text")


@pytest.mark.parametrize(
    ("name", "why"),
    [("fifo", "it is a FIFO"), ("link", "it is a link"), ("folder", "Is a directory"), ("null", "a link")],
)
def test_only_regular_files_are_opened(tmp_path, name, why):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "null").symlink_to("/dev/null")
    with pytest.raises(OSError, match=why):
        files.read_regular(tmp_path / name)
    with pytest.raises(OSError, match="it is a device"):
        files.read_regular("/dev/null")
    assert files.read_regular(tmp_path / "file", 1) == b"x"
    with pytest.raises(OSError, match="it has 1 bytes, at most 0"):
        files.read_regular(tmp_path / "file", 0)


def test_a_file_or_folder_appears_whole(tmp_path):
    for content in (b"old", b"new"):
        files.replace(tmp_path / "f", content, mode=0o600)
    assert (tmp_path / "f").read_bytes() == b"new" and stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o600
    with files.atomic_path(tmp_path / "out") as partial:
        (partial / "inner").mkdir(parents=True)
        assert not (tmp_path / "out").exists()
    assert os.listdir(tmp_path / "out") == ["inner"] and sorted(os.listdir(tmp_path)) == ["f", "out"]


def test_scalars_of_any_library_are_numbers_in_json():
    import jax.numpy as jnp

    given = {"a": np.float32(0.5), "b": jnp.int32(3), "c": np.array(np.inf), "d": (jnp.bfloat16(1.5),)}
    assert files.strict_json(given) == {"a": 0.5, "b": 3, "c": "Infinity", "d": [1.5]}


def test_partial_files_of_killed_writers_are_removed(tmp_path):
    names = (".plan.json.d96553fc.partial", ".report.html.0123abcd.partial", ".partial", "mine.partial", "plan.json")
    for name in names:
        (tmp_path / name).write_text("half")
    (tmp_path / ".model.01234567.partial").mkdir()
    files.remove_unfinished(tmp_path, others=("report.html",))
    assert sorted(os.listdir(tmp_path)) == sorted(names[1:])
