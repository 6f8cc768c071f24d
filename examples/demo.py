"""The program of `make demo`: trains the GPT of configs/demo.yaml as `spmdkit train` does, then shows a sample and the
loss.

    python examples/demo.py [key=value ...]

Trains on files of Python's standard library, evaluates on other files of it, prints a sample and compares the loss with
that of a model without context. Started again, it continues, or shows the finished run.
"""

from __future__ import annotations

import sys
from pathlib import Path

import gpt
import jax

import spmdkit as sk

CONFIG = Path(__file__).parent.parent / "configs" / "demo.yaml"
PROMPT = "def "


def main(*overrides: str) -> dict[str, float]:
    """Trains, samples and compares; returns the evaluation and the unigram model's loss."""
    config = sk.load_config(CONFIG, overrides)
    result = sk.train(config)
    evaluation = result.evaluation or result.program.eval(result.state)

    params = jax.device_get(result.program.eval_params(result.state))
    context = result.program.task.train_data["tokens"].shape[1] - 1
    print(f"\n--- sample after {PROMPT!r} " + "-" * 60)
    print(gpt.sample(params, PROMPT, num_bytes=400, context=context))
    print("-" * 86)

    text_bytes = {name: config.task_args[name] for name in ("train_bytes", "eval_bytes")}
    unigram = gpt.unigram_loss(*gpt.read_files(**text_bytes))
    print(f"\nOn {text_bytes['eval_bytes']:,} bytes of held-out files, in nats per byte:")
    print(f"  unigram model (how often each byte occurs): {unigram:.3f}")
    print(f"  this model:                                 {evaluation['loss']:.3f}")
    print(f"\nreport: {config.resolved_run_dir() / 'report.html'}")
    return {**evaluation, "unigram": unigram}


if __name__ == "__main__":
    main(*sys.argv[1:])
