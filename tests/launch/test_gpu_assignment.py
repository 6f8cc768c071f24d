"""Which GPUs the processes of one machine see."""

import pytest

from spmdkit.launch import gpu_assignment


def shown(seen, num, each=None):
    return [gpu_assignment.pinned(seen, num, i, each).get(gpu_assignment.VISIBLE) for i in range(num)]


def test_processes_have_consecutive_gpus_of_their_own_and_one_alone_has_all():
    eight = [str(i) for i in range(8)]
    assert shown(eight, 4) == ["0,1", "2,3", "4,5", "6,7"]
    assert shown(eight, 3) == ["0,1", "2,3", "4,5"] and shown(eight, 2, each=1) == ["0", "1"]
    assert shown(eight, 1) == [None] and shown([], 4) == [None] * 4
    assert shown(["0", "1"], 4) == [None] * 4 and shown(eight, 4, each=4) == [None] * 4, "there are not enough"


def test_gpus_are_those_of_the_machine_or_those_that_are_left_by_who_lent_it(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert gpu_assignment.gpus({}, tmp_path) == ["0", "1"]
    assert gpu_assignment.gpus({"CUDA_VISIBLE_DEVICES": "GPU-5a, 3"}, tmp_path) == ["GPU-5a", "3"]
    assert (
        gpu_assignment.gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path)
        == gpu_assignment.gpus({"JAX_PLATFORMS": "cpu"}, tmp_path)
        == []
    )
    assert gpu_assignment.gpus({"JAX_PLATFORMS": "cuda,cpu"}, tmp_path) == ["0", "1"]


@pytest.mark.processes
def test_the_launcher_hands_each_process_its_own_and_says_so(start):
    script = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    result = start(script, 2, CUDA_VISIBLE_DEVICES="4,5,6,7", JAX_PLATFORMS="").wait()
    assert sorted(result.out.splitlines()) == ["[0] 4,5", "[1] 6,7"], result
    assert "CUDA_VISIBLE_DEVICES: 4,5 for process 0, 6,7 for process 1" in result.err
