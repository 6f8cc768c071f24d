"""The stored output of processes: whole lines, rotated files, no secrets, and no slower than twice a copy by cat."""

import io
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
import time

import pytest
import yaml

from spmdkit.config import load_config
from spmdkit.launch.local import launch
from spmdkit.launch.logs import Logs
from spmdkit.launch.output import _copy


@pytest.fixture
def make(tmp_path):
    """Opens the logs of a run with these settings."""

    def opened(**log):
        (tmp_path / "config.yaml").write_text(yaml.safe_dump({"log": log}))
        logs = Logs()
        logs.open(tmp_path, 1)
        return logs

    return opened


def lines_of(folder, name="stdout"):
    """Returns file name -> lines, in the order of writing."""
    number = lambda path: int(path.stem.partition(".")[2] or 0)
    files = sorted((folder / "p000").glob(f"{name}*.txt"), key=number)
    return {path.name: path.read_text().splitlines(keepends=True) for path in files}


@pytest.mark.parametrize("seed", range(5))
def test_rotation_loses_no_complete_line(make, seed):
    random_ = random.Random(seed)
    lines = [f"{i} {'x' * random_.choice([0, 3, 40, 990, 2500])}\n" for i in range(100)]
    logs, rest = make(max_mb=0.001, backups=1000), lines
    while rest:
        count = random_.randint(1, 7)
        logs.add(0, "stdout", "".join(rest[:count]))
        rest = rest[count:]
    logs.close()
    files = lines_of(logs.folder)
    assert [line for each in files.values() for line in each] == lines
    assert len(files) > 5 and all(len("".join(each)) <= 1000 or len(each) == 1 for each in files.values())


def test_first_and_newest_files_are_retained(make):
    logs = make(max_mb=0.001, backups=2)
    for i in range(100):
        logs.add(0, "stdout", f"{i:099}\n")
    logs.close()
    files = lines_of(logs.folder)
    assert list(files) == ["stdout.txt", "stdout.8.txt", "stdout.9.txt"]
    assert [int(line) for each in files.values() for line in each] == [*range(10), *range(80, 100)]


def test_no_limit_keeps_one_file(make):
    logs = make(max_mb=None, backups=1)
    logs.add(0, "stderr", "x\n" * 1000)
    logs.close()
    assert list(lines_of(logs.folder, "stderr")) == ["stderr.txt"]


def test_lines_before_the_run_directory_are_stored(tmp_path):
    logs = Logs()
    logs.add(0, "stdout", "first\nsecond\n")
    logs.open(tmp_path, 1)
    logs.add(0, "stdout", "password=hunter2\n")
    logs.close()
    assert lines_of(logs.folder) == {"stdout.txt": ["first\n", "second\n", "password=***\n"]}


def test_defaults_of_the_logs_are_those_of_the_config(tmp_path):
    (tmp_path / "run.yaml").write_text("task: task.py:task\nsteps: 1\nbatch_size: 1\n")
    log, logs = load_config(tmp_path / "run.yaml").log, Logs()
    assert (logs._max_bytes, logs._backups) == (log.max_mb * 1e6, log.backups)


def copied(*blocks):
    """Returns what is shown, what is stored, and the tail, of blocks that a process writes."""
    read, write = os.pipe()
    shown, stored, tail = io.StringIO(), [], []
    with open(read, "rb") as source:
        copy = threading.Thread(target=_copy, args=(source, shown, "[0] ", threading.Lock(), stored.append, tail))
        copy.start()
        for block in blocks:
            os.write(write, block)
            time.sleep(0.01)  # most blocks are read separately; the result is the same if not
        os.close(write)
        copy.join()
    return shown.getvalue(), "".join(stored), tail


def test_blocks_are_copied_as_whole_lines():
    shown, stored, tail = copied(b"a", b"b\ncd\n", b"e\r\n", b"[Gloo] Rank f\n[Gloo] Rank 1\n", b"\n", b"g")
    assert stored == "ab\ncd\ne\nf\n\ng\n"
    assert shown == "[0] ab\n[0] cd\n[0] e\n[0] f\n[0] \n[0] g\n"
    assert tail == ["ab", "cd", "e", "f", "", "g"]


WRITER = """
import os, sys
note = os.environ.get("SPMDKIT_STEP_FILE")
if note:
    os.pwrite(os.open(note, os.O_WRONLY), os.fsencode(sys.argv[2]) + b"\\n", 64)
line = "step  120/2000  loss 2.3411  12345 examples/s  left 1m20s  input wait 2%"
for _ in range(int(sys.argv[1]) * 10**6 // len(line)):
    print(line)
"""


def processor_s():
    """Returns the processor time of this process and of its children that have exited."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def timed(run):
    """Returns (processor seconds, wall seconds) of a call."""
    before, start = processor_s(), time.monotonic()
    run()
    return processor_s() - before, time.monotonic() - start


@pytest.mark.processes
@pytest.mark.parametrize(("megabytes", "pairs"), [(20, 1), pytest.param(300, 5, marks=pytest.mark.slow)])
def test_output_takes_at_most_twice_a_copy_by_cat(tmp_path, megabytes, pairs, capfd):
    """Processor time, which does not depend on other load. The long form also compares the shortest wall times of up to
    five alternating pairs: until they meet the limit, so that load of the machine has to last for all of them."""
    environment, seconds = {**os.environ, "PYTHONUNBUFFERED": "1"}, []  # as under the launcher
    for pair in range(pairs):
        folder = tmp_path / str(pair)
        folder.mkdir()
        writer = [sys.executable, "-c", WRITER, str(megabytes), str(folder)]

        def cat(folder=folder, writer=writer):
            pipes = [f'"$@" | cat > {folder}/copy{i}' for i in range(2)]
            copies = [subprocess.Popen(["sh", "-c", pipe, "sh", *writer], env=environment) for pipe in pipes]
            assert [copy.wait() for copy in copies] == [0, 0]

        def by_launcher(writer=writer):
            assert launch(writer, 2) == 0

        seconds.append((*timed(cat), *timed(by_launcher)))
        stored = [(folder / f"logs/attempt_1/p00{i}").glob("stdout*.txt") for i in range(2)]
        expected = (folder / "copy0").stat().st_size
        assert [sum(path.stat().st_size for path in files) for files in stored] == [expected, expected]
        shutil.rmtree(folder)
        cat_cpu, cat_wall, cpu, wall = map(min, zip(*seconds, strict=True))
        with capfd.disabled():
            print(f"\n{2 * megabytes} MB: {cpu:.1f} s ({wall:.1f} s wall); by cat: {cat_cpu:.1f} s ({cat_wall:.1f} s)")
        if wall <= 2 * cat_wall:
            break
    assert cpu <= 2 * cat_cpu
    assert pairs == 1 or wall <= 2 * cat_wall
