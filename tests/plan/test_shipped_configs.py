"""No shipped config has a finding: the costs that a user reads about first are not in our own examples."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFIGS = Path(__file__).parents[2] / "configs"
LARGE = {"llama_8b_v5p": "tpu:v5p:4x4x4", "llama_70b_v5p": "tpu:v5p:8x8x16", "gpt_1b": "tpu:v5p:2x2x4"}
SMALL = sorted(path.stem for path in CONFIGS.glob("*.yaml") if path.stem not in LARGE)
IN_EVERY_RUN = ("data_fsdp_tensor", "digits_cnn")
LITTLE_TEXT = ["task_args.train_bytes=65536", "task_args.eval_bytes=4096"]


def plan(name, target):
    """Returns (the plan, what was written to the terminal), with the warnings of XLA."""
    path = CONFIGS / f"{name}.yaml"
    reads_text = "gpt.py" in path.read_text() and "random_tokens" not in path.read_text()
    command = [sys.executable, "-m", "spmdkit", "plan", str(path), "--target", target, "--json"]
    ended = subprocess.run(
        [*command, *(LITTLE_TEXT if reads_text else [])],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "1"},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout), ended.stderr


@pytest.mark.parametrize(
    "name", [name if name in IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.slow) for name in SMALL]
)
def test_a_small_config_has_no_findings_on_eight_fake_devices(name):
    found, errors = plan(name, "cpu:8")
    assert found["findings"] == []
    assert "Involuntary full rematerialization" not in errors


@pytest.mark.tpu
@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_a_large_config_has_no_findings_on_its_slice(name):
    found, errors = plan(name, LARGE[name])
    assert found["findings"] == []
    assert "Involuntary full rematerialization" not in errors
