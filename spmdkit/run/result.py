"""`Result`: what `train` returns."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from spmdkit.metrics import read_lines
from spmdkit.program.program import Program
from spmdkit.run.hooks.base import Metrics
from spmdkit.run.run import Run
from spmdkit.step.state import TrainState


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of `train`.

    Attributes:
        state: the state after the last step.
        program: the program that trained it.
        run: the records of the run, closed.
        already_finished: the run was finished by an earlier start.
    """

    state: TrainState
    program: Program
    run: Run
    already_finished: bool = False

    def __repr__(self) -> str:
        logged = {k: v for k, v in self.run.last_logged.items() if k != "step"}
        evaluation = self.evaluation
        return (
            f"Result: step {self.run.step} of {self.run.config.num_steps}  {_shown(logged)}\n"
            f"  evaluation: {'none' if evaluation is None else _shown(evaluation)}\n"
            f"  run_dir: {self.run_dir}"
        )

    @property
    def run_dir(self) -> Path:
        """The directory of the run. Pass it as `run_dir` to continue the run."""
        return self.run.directory

    @property
    def history(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, of all starts of the run, with `split`: `train` or `eval`.
        `pandas.DataFrame(result.history)` is a table."""
        return [{"split": "train"} | line for line in read_lines(self.run.directory / "metrics.jsonl")]

    @property
    def evaluation(self) -> Metrics | None:
        """The metrics of the last evaluation in this process, otherwise of the last one that the run recorded; None
        without one."""
        if self.run.last_evaluation is not None:
            return self.run.last_evaluation
        recorded = [line for line in self.history if line["split"] == "eval"]
        return {k: v for k, v in recorded[-1].items() if k not in ("split", "step")} if recorded else None


def _shown(metrics: Metrics) -> str:
    return "  ".join(f"{name} {x:.4f}" for name, x in metrics.items() if isinstance(x, float))[:100]
