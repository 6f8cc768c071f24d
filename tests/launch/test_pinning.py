"""Which GPUs the processes of one machine see."""

import json
import sys

import pytest

from spmdkit.launch import launch, pinning


def shown(seen, num, each=None):
    return [pinning.pinned(seen, num, i, each).get(pinning.VISIBLE) for i in range(num)]


def test_processes_have_consecutive_gpus_of_their_own_and_one_alone_has_all():
    eight = [str(i) for i in range(8)]
    assert shown(eight, 4) == ["0,1", "2,3", "4,5", "6,7"]
    assert shown(eight, 3) == ["0,1", "2,3", "4,5"] and shown(eight, 2, each=1) == ["0", "1"]
    assert shown(eight, 1) == [None] and shown([], 4) == [None] * 4
    assert shown(["0", "1"], 4) == [None] * 4 and shown(eight, 4, each=4) == [None] * 4, "there are not enough"


def test_gpus_are_those_of_the_machine_or_those_that_are_left_by_who_lent_it(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert pinning.gpus({}, tmp_path) == ["0", "1"]
    assert pinning.gpus({"CUDA_VISIBLE_DEVICES": "GPU-5a, 3"}, tmp_path) == ["GPU-5a", "3"]
    assert (
        pinning.gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == pinning.gpus({"JAX_PLATFORMS": "cpu"}, tmp_path) == []
    )
    assert pinning.gpus({"JAX_PLATFORMS": "cuda,cpu"}, tmp_path) == ["0", "1"]


@pytest.mark.processes
def test_the_launcher_hands_each_process_its_own_and_says_so(tmp_path, capfd):
    (tmp_path / "show.py").write_text("import os, json; print(json.dumps(os.environ.get('CUDA_VISIBLE_DEVICES')))")
    env = {"PATH": "/usr/bin", "CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    assert launch([sys.executable, str(tmp_path / "show.py")], 2, env=env) == 0
    printed = capfd.readouterr()
    assert sorted(json.loads(line.rpartition("] ")[2]) for line in printed.out.splitlines()) == ["4,5", "6,7"], printed
    assert "CUDA_VISIBLE_DEVICES: 4,5 for process 0, 6,7 for process 1" in printed.err
