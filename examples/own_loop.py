"""A custom Python loop: spmdkit shards the arrays, compiles the step and feeds it; your code does the rest.

    python examples/own_loop.py [CONFIG [key=value ...]]

The numbers are those of `spmdkit train` with the same config. Checkpoints, logs and signals are up to you.
"""

from __future__ import annotations

import sys
from pathlib import Path

import spmdkit as sk

CONFIG = Path(__file__).parent.parent / "configs" / "linear_regression.yaml"


def main(config: str | Path = CONFIG, *overrides: str) -> sk.TrainState:
    """Trains, prints the loss every 50 steps and the evaluation at the end. Returns the last state."""
    program = sk.build(config, overrides=overrides)
    state = program.init()
    for step, batch in program.batches():
        state, metrics = program.step(state, batch)  # dispatches; the old state is donated, so use only the new one
        if step % 50 == 0:
            print(f"step {step}: loss {float(metrics['loss']):.4f}")  # float() waits for the device
    print("evaluation:", ", ".join(f"{name} {value:.4f}" for name, value in program.eval(state).items()))
    return state


if __name__ == "__main__":
    main(*sys.argv[1:])
