"""`search`: the fastest mesh that fits. A model orders all legal candidates; the best are compiled.

Each compilation is a separate process (planner.py). The reported time is the prediction from the compiled program. The
estimates of the others are multiplied by the median of prediction / estimate of the compiled ones. Candidates of
different batch sizes are compared by seconds per example.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

from spmdkit.config import Config
from spmdkit.errors import ConfigError
from spmdkit.foundation.formatting import format_bytes
from spmdkit.plan.machine.target import Target
from spmdkit.plan.planner import Planner, call_all, planner_on
from spmdkit.plan.search.candidates import Candidate, candidates
from spmdkit.program.opening import task_of

Log = Callable[[str], None]
SAME = 1.01
"""Ratio of two times that the model does not distinguish."""


@dataclass(frozen=True)
class Ranking:
    """The result of a search: candidates, best first, and the number of compiled ones."""

    candidates: tuple[Candidate, ...]
    num_compiled: int

    @property
    def best(self) -> Candidate | None:
        """The fastest candidate that fits, or None."""
        return next((candidate for candidate in self.candidates if candidate.status == "best"), None)

    def nothing_fits(self) -> ConfigError:
        """Returns the error of a search in which no candidate fits; it names the nearest."""
        compiled = [c for c in self.candidates if c.document is not None]
        nearest = min(compiled, key=lambda c: c.document["memory"]["peak_bytes"], default=None)  # type: ignore[index]
        smallest = f" The smallest is {nearest.name}: {nearest.reason}." if nearest is not None else ""
        return ConfigError(
            f"--search found nothing that fits among {len(self.candidates)} candidates, {self.num_compiled} of them "
            f"compiled.{smallest} A step has to fit. Vary more (--search-over mesh,microbatches,remat), compile more "
            "(--compile), or take more devices."
        )


def search(config: Config, target: Target, search_over: Sequence[str], most_compiled: int, report: Log) -> Ranking:
    """Returns the candidates of a config on an opened target, compiled and ranked.

    Args:
        search_over: settings of `candidates.VARIED`; settings that the config leaves `auto` also vary.
        most_compiled: maximum number of candidates to compile.
        report: called with a line of progress.

    Raises:
        ConfigError: a search cannot vary the named setting, or no mesh is legal.
    """
    task = task_of(config)
    all_candidates = candidates(config, task, target, search_over)
    legal = [c for c in all_candidates if c.estimate_s is not None]
    report(f"{len(all_candidates)} candidates, {len(legal)} legal; compiling the best {min(most_compiled, len(legal))}")
    chosen = legal[:most_compiled]
    with planner_on(config, target) as (plan, workers):
        call_all([partial(_compile, candidate, plan, report) for candidate in chosen], workers)
    _scale_estimates(legal)
    for candidate in legal[most_compiled:]:
        close = [c for c in chosen if candidate.estimate_per_example_s <= SAME * c.estimate_per_example_s]
        candidate.equal = close[-1].name if close else None
        what = f"does not distinguish it from {candidate.equal}" if close else f"estimates {candidate.estimate_s:.3g} s"
        candidate.reason = f"the model {what}; {len(chosen)} before it were compiled"
    return Ranking(_rank(all_candidates), len(chosen))


def _scale_estimates(legal: Sequence[Candidate]) -> None:
    """Multiplies the estimates by one factor, so that they agree with the compiled programs."""
    ratios = [c.document["predicted_step_s"] / c.estimate_s for c in legal if c.document and c.estimate_s]
    factor = median(ratios or [1.0])
    for candidate in legal:
        candidate.estimate_s = factor * (candidate.estimate_s or 0.0)


def _rank(all_candidates: list[Candidate]) -> tuple[Candidate, ...]:
    """Returns the candidates best first: by predicted time if they fit, then by status and estimate."""
    fitting = sorted((c for c in all_candidates if c.status == "fits"), key=lambda c: c.predicted_per_example_s)
    if fitting:
        best = fitting[0]
        unit = "step" if all(c.batch_size == best.batch_size for c in all_candidates) else "time per example"
        best.status, best.reason = "best", f"the shortest predicted {unit} of those that fit"
        for candidate in fitting[1:]:
            ratio = candidate.predicted_per_example_s / best.predicted_per_example_s
            candidate.equal = best.name if ratio <= SAME else None
            candidate.reason = f"fits; {ratio:.2f} times the best {unit}"
    order = {"does not fit": 1, "not compiled": 2, "refused": 3}
    rest = [c for c in all_candidates if c not in fitting]
    return (*fitting, *sorted(rest, key=lambda c: (order[c.status], c.estimate_per_example_s)))


def _compile(candidate: Candidate, plan: Planner, report: Log) -> None:
    result = plan(candidate.changes)
    predicted = ""
    if isinstance(result, str):
        candidate.status, candidate.reason = "refused", result
    else:
        candidate.document, memory = result, result["memory"]
        candidate.status = "fits" if result["fits"] else "does not fit"
        needed, limit = (format_bytes(memory[name]) for name in ("peak_bytes", "limit_bytes"))
        candidate.reason = f"needs {needed} of {limit} a device"
        predicted = f", {result['predicted_step_s']:.3g} s" if result["fits"] else ""
        if result["fits"] and (exceeded := result["budget"]["exceeded"]):
            candidate.status, candidate.reason = "refused", "; ".join(exceeded)
    report(f"{candidate.name}: {candidate.status}{predicted}")
