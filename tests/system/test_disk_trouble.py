"""A disk that answers EIO, or has no inode left, while a real run saves: told, made up for, nothing left behind, the
same bits in the end.

What the file system answers is injected by the linker (every fsync below a folder) and by a file system of 80 inodes:
the run has no part in it.
The form of each without processes is in tests/run/test_failed_saves.py.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.slow]

EIO = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Where the file $BAD_DISK is there, what lies in a folder of checkpoints that is not committed cannot reach the disk. */
static int bad(int fd) {
    char link[64], path[4096];
    const char *flag = getenv("BAD_DISK");
    if (!flag || access(flag, F_OK)) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return strstr(path, "orbax-checkpoint-tmp") != NULL;
}
static int failed(void) {
    FILE *f = fopen(getenv("FIRED"), "a");
    if (f) { fputs("x", f); fclose(f); }
    errno = EIO;
    return -1;
}
int fsync(int fd) { return bad(fd) ? failed() : ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(fd); }
int fdatasync(int fd) { return bad(fd) ? failed() : ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(fd); }
"""  # noqa: E501


def events(folder, name):
    return [event for event in folder.events() if event["event"] == name]


def failures(folder):
    path = folder.path / "run" / "events.jsonl"
    return path.read_text().count("save_failed") if path.is_file() else 0


def ended_well(folder, child, undisturbed):
    """The run went on to its end, saved it, and left nothing that is not committed."""
    output, _ = child.communicate(timeout=120)
    assert child.returncode == 0, output
    assert "WARNING: saving step" in output and "Traceback" not in output
    names = sorted(path.name for path in (folder.path / "run" / "checkpoints").iterdir())
    assert names[-1].isdigit() and all(name.isdigit() for name in names), names
    folder.assert_equals(undisturbed)
    return output


PATIENT = ("train", "run.yaml", "task_args.pause_s=0.0005", "checkpoint.max_failures=99")


def test_temporary_eio_costs_saves_and_no_step(real_folder, undisturbed, helpers, monkeypatch):
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    folder = real_folder  # the linker reads LD_PRELOAD as a program begins
    (folder.path / "eio.c").write_text(EIO)
    library, flag, fired = (folder.path / name for name in ("eio.so", "bad_disk", "fired"))
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, folder.path / "eio.c", "-ldl"], check=True)
    for name, value in {"LD_PRELOAD": library, "BAD_DISK": flag, "FIRED": fired}.items():
        monkeypatch.setenv(name, str(value))
    flag.touch()
    child = folder.start(*PATIENT)
    try:
        helpers.wait_until(lambda: failures(folder) >= 2 or child.poll() is not None)
        flag.unlink()
        output = ended_well(folder, child, undisturbed)
    finally:
        helpers.end(child)
    assert fired.exists(), "the injection did not fire"
    assert "Input/output error" in output or "EIO" in output, output
    assert len(events(folder, "save_failed")) >= 2 and events(folder, "saved")


@contextlib.contextmanager
def few_inodes(folder: Path, number: int):
    """A file system in `folder` for so many files."""
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size=64m,nr_inodes={number}", "none", folder], capture_output=True
    )
    if made.returncode:
        pytest.skip("needs the right to mount")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_temporary_lack_of_inodes_costs_no_step(folder, undisturbed, helpers):
    with few_inodes(folder.path / "run", 150):
        child = folder.start(*PATIENT)
        try:
            helpers.wait_until(lambda: (folder.path / "run" / "metrics.jsonl").is_file() or child.poll() is not None)
            (folder.path / "run" / "others").mkdir()
            for number in range(1000):
                try:
                    (folder.path / "run" / "others" / str(number)).touch()
                except OSError:
                    break
            assert os.statvfs(folder.path / "run").f_favail == 0
            helpers.wait_until(lambda: failures(folder) >= 2 or child.poll() is not None)
            shutil.rmtree(folder.path / "run" / "others")
            output = ended_well(folder, child, undisturbed)
        finally:
            helpers.end(child)
        assert len(events(folder, "save_failed")) >= 2 and "No space left on device" in output
