"""Which GPUs the processes of one machine see."""

import pytest

from spmdkit.launch import gpu_assignment


def shown(seen, num, each=None):
    return [gpu_assignment.visible_gpus(seen, num, i, each).get(gpu_assignment.VISIBLE) for i in range(num)]


def test_processes_get_consecutive_gpus():
    eight = [str(i) for i in range(8)]
    assert shown(eight, 4) == ["0,1", "2,3", "4,5", "6,7"]
    assert shown(eight, 3) == ["0,1", "2,3", "4,5"] and shown(eight, 2, each=1) == ["0", "1"]
    assert shown(eight, 1) == [None] and shown([], 4) == [None] * 4
    assert shown(["0", "1"], 4) == [None] * 4 and shown(eight, 4, each=4) == [None] * 4, "there are not enough"


def test_visible_gpus_are_found(tmp_path):
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
def test_launcher_assigns_and_reports_gpus(run):
    result = run(
        "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])", CUDA_VISIBLE_DEVICES="4,5,6,7", JAX_PLATFORMS=""
    )
    assert sorted(result.out.splitlines()) == ["[0] 4,5", "[1] 6,7"], result
    assert "CUDA_VISIBLE_DEVICES: 4,5 for process 0, 6,7 for process 1" in result.err
