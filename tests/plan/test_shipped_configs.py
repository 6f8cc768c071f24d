"""No shipped config has a finding: the costs that a user reads about first are not in our own examples."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spmdkit.config import load_config
from spmdkit.plan.command import make_plan

CONFIGS = Path(__file__).parents[2] / "configs"
LARGE = {"llama_8b_v5p": "tpu:v5p:4x4x4", "llama_70b_v5p": "tpu:v5p:8x8x16", "gpt_1b": "tpu:v5p:2x2x4"}
LITTLE_TEXT = ["task_args.train_bytes=65536", "task_args.eval_bytes=4096"]
PATHS = [pytest.param(path, marks=[pytest.mark.tpu] * (path.stem in LARGE)) for path in sorted(CONFIGS.glob("*.yaml"))]


def test_gpt_on_three_axes_has_no_findings():
    """In this process, one config of the GPT."""
    plan = make_plan(load_config(CONFIGS / "data_fsdp_tensor.yaml", LITTLE_TEXT), "cpu:8")
    assert {axis for axis, size in plan["mesh"].items() if size > 1} == {"data", "fsdp", "tensor"}
    assert plan["fits"] and plan["findings"] == []


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_shipped_config_has_no_findings(path):
    reads_text = "gpt.py" in path.read_text() and "random_tokens" not in path.read_text() and path.stem not in LARGE
    command = [sys.executable, "-m", "spmdkit", "plan", str(path), *(LITTLE_TEXT if reads_text else []), "--json"]
    ended = subprocess.run(
        [*command, "--target", LARGE.get(path.stem, "cpu:8")],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "1"},
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["findings"] == []
    assert "Involuntary full rematerialization" not in ended.stderr
