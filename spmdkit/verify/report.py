"""`spmdkit verify`: the report on all cases and mutants of a config, as plain values, and the exit code."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spmdkit.compat.user_mesh import ignores_user_settings
from spmdkit.config import Config, parameter_server
from spmdkit.errors import ConfigError, SpmdkitError, UserCodeError
from spmdkit.foundation import plugins
from spmdkit.foundation.files import write_requested
from spmdkit.foundation.formatting import format_error, shown
from spmdkit.foundation.json_output import print_json
from spmdkit.program import source_digest
from spmdkit.verify import cases
from spmdkit.verify.diagnosis import pattern
from spmdkit.verify.pool import Pool
from spmdkit.verify.table import print_report

GROUPS = "groups train separately"
SYNCS = {"stale": "gradients are applied late"}
"""Sync -> why it differs from synchronous training."""
MAX_NOISY = 4

Report = dict[str, Any]
Log = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class VerifyOptions:
    """The options of `spmdkit verify`.

    Attributes:
        batch_size_given: an override sets the batch size; otherwise a small batch size is chosen.
    """

    all_meshes: bool = False
    devices: int | None = None
    max_axis: int = 4
    microbatches: str | None = None
    steps: int = 3
    float64: bool = False
    jobs: int = 2
    mutants: bool = True
    batch_size_given: bool = False
    resume: Path | None = None
    locate: bool = False


def run_verify(config: Config, options: VerifyOptions, *, as_json: bool, html: Path | None = None) -> int:
    """Prints the report, and writes its page to `html`. Returns 0 if every case equals one device and every mutant is
    caught, else 1."""
    report = verify_config(config, options, lambda text: print(text, file=sys.stderr, flush=True))
    if html is not None:
        from spmdkit.verify.page import verify_page

        write_requested("--html", html, verify_page(report))
    if as_json:
        print_json(report)
    else:
        print_report(report)
    return 0 if report["passed"] else 1


@ignores_user_settings
def verify_config(config: Config, options: VerifyOptions, print_line: Log = lambda text: None) -> Report:
    """Returns the report on a config: cases, skipped cases, mutants, tolerances, and `passed`.

    Raises:
        ConfigError: the config, the task or its mesh is invalid.
        UserCodeError: a function of the task raised.
    """
    begin = time.perf_counter()
    parameter_server.refuse(config)
    for name, value in (("steps", options.steps), ("jobs", options.jobs), ("max-axis", options.max_axis)):
        if value < 1:
            raise ConfigError(f"--{name} is {value}. It must be at least 1. Leave it out for its default.")
    num_devices = cases.choose_devices(config, options.devices)
    microbatches = cases.parse_microbatches(options.microbatches, config)
    meshes = _meshes(config, options, num_devices)
    small_batch = cases.ROWS * num_devices * math.lcm(*microbatches)
    identity = {"task": _task_name(config), "task_digest": _digest(source_digest.texts(config))}
    spec = {
        "config": config.model_dump(),
        "source": str(config.source) if config.source else None,
        "batch_size": config.largest_batch if options.batch_size_given else small_batch,
        "steps": options.steps,
        "dtype": "float64" if options.float64 else "float32",
        "devices": num_devices,
        "locate": "all" if options.locate else "cases",
    }
    jobs = _case_jobs(meshes, microbatches)
    if options.mutants and num_devices > 1:
        from spmdkit.verify.mutants import MUTANTS

        jobs += [{"kind": "mutant", "name": mutant.name} for mutant in MUTANTS]
    digest = _digest([spec, identity, source_digest.package_digests()])
    results = _CaseResults(jobs, options.resume, digest, print_line)
    with Pool(spec | {"jobs": options.jobs}, max(1, min(options.jobs, len(results.missing)))) as pool:
        reference = pool.request({"kind": "reference"})
        if "error" in reference:
            raise _raised(reference["error"])
        known = reference["outcome"]
        moved, tolerance = known["moved"]["gradient"], known["tolerances"]["gradient"]
        print_line(f"one ulp in the input moves the gradient by {moved:.1e}: tolerance {tolerance:.1e}")
        pool.run(results.missing, results.add)
    report = _report(results.in_order(), known, spec | {"reducer_note": cases.reducer_note(config)})
    if not options.all_meshes and not any(case["mesh"] == meshes[0] for case in report["cases"]):
        raise ConfigError(report["skipped"][-1]["reason"])
    for row in (*report["cases"], *report["skipped"], *report["mutants"]):
        if "mesh" in row:
            row["mesh"] = {shown(axis): size for axis, size in row["mesh"].items()}
    return report | {"seconds": round(time.perf_counter() - begin, 1)} | identity


def _meshes(config: Config, options: VerifyOptions, num_devices: int) -> list[dict[str, int]]:
    if not options.all_meshes:
        return [cases.config_mesh(config, num_devices)]
    if not (meshes := cases.all_meshes(num_devices, options.max_axis)):
        raise ConfigError(
            f"--all finds no mesh of {num_devices} devices with axes of at most {options.max_axis}. "
            f"The sizes of the axes multiply to the devices. Try --max-axis {num_devices}."
        )
    return meshes


def _digest(value: Any) -> str:
    return source_digest.digest(json.dumps(value, sort_keys=True, default=str))


def _task_name(config: Config) -> str:
    target, name = config.task_reference()
    return config.task if target.endswith(".py") else f"{target}:{name}"


def _case_jobs(meshes: list[dict[str, int]], microbatches: list[int]) -> list[dict[str, Any]]:
    """Returns the cases: accumulation on one device first, then every mesh with every number of microbatches."""
    one: dict[str, int] = {}
    pairs = [(one, m) for m in microbatches if m > 1 and one not in meshes]
    pairs += [(mesh, m) for mesh in meshes for m in microbatches]
    # Evaluation and checkpoint round trip do not depend on microbatches, so each mesh checks them once.
    return [
        {"kind": "case", "mesh": mesh, "microbatches": m, "whole": mesh != one and m == microbatches[0]}
        for mesh, m in pairs
    ]


def _finished(resume: Path, digest: str) -> dict[str, dict[str, Any]]:
    outcomes = {}
    try:
        for line in resume.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            if entry["digest"] == digest:
                outcomes[entry["job"]] = dict(entry["outcome"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"--resume {resume} cannot be read ({type(error).__name__}). It holds the cases that an earlier verify "
            "has finished, a line each. Remove it, or name another."
        ) from error
    return outcomes


class _CaseResults:
    """Outcomes by job, including those read from the file of an earlier run."""

    def __init__(self, jobs: list[dict[str, Any]], resume: Path | None, digest: str, print_line: Log):
        self._jobs, self._resume, self._digest, self._print_line = jobs, resume, digest, print_line
        self._outcomes: dict[str, dict[str, Any]] = {}
        if resume is not None and resume.exists():
            self._outcomes = _finished(resume, digest)
        self.missing = [job for job in jobs if _key(job) not in self._outcomes]
        self._done = len(jobs) - len(self.missing)

    def add(self, job: dict[str, Any], response: dict[str, Any]) -> None:
        """Stores the response to a job, and appends it to the `--resume` file."""
        outcome = response.get("outcome") or _not_run(job, response["error"])
        self._outcomes[_key(job)] = outcome
        self._done += 1
        self._print_line(f"[{self._done}/{len(self._jobs)}] {_progress(outcome)}")
        if self._resume is not None:
            self._resume.parent.mkdir(parents=True, exist_ok=True)
            with self._resume.open("a", encoding="utf-8") as file:
                print(json.dumps({"digest": self._digest, "job": _key(job), "outcome": outcome}), file=file)

    def in_order(self) -> list[dict[str, Any]]:
        """Returns the outcomes in the order of the jobs."""
        return [self._outcomes[_key(job)] for job in self._jobs]


def _key(job: dict[str, Any]) -> str:
    return json.dumps(job, sort_keys=True)


def _not_run(job: dict[str, Any], error: dict[str, Any]) -> dict[str, Any]:
    diagnosis = {
        "kind": "does not run",
        "found": error["message"],
        "repair": (
            "The program was accepted and then failed to compile or run on this mesh. Use another mesh, or report it."
        ),
    }
    if job["kind"] == "mutant":
        return {"name": job["name"], "caught": False, "by": "does not run", "diagnosis": diagnosis}
    return {"mesh": job["mesh"], "microbatches": job["microbatches"], "passed": False, "diagnosis": diagnosis}


def _progress(outcome: dict[str, Any]) -> str:
    if "name" in outcome:
        if "not_applicable" in outcome:
            return f"mutant {outcome['name']}: not applicable, {outcome['not_applicable']}"
        return f"mutant {outcome['name']}: {'caught' if outcome['caught'] else 'NOT CAUGHT'} by {outcome['by']}"
    case = cases.describe_case(outcome["mesh"], outcome["microbatches"])
    if "skipped" in outcome:
        return f"{case}: not compared, {outcome['skipped']}"
    if outcome["passed"]:
        return f"{case}: equal, gradient {format_error(outcome['gradient_error'])} ({outcome['seconds']:.1f} s)"
    return f"{case}: DIFFERENT, {outcome['diagnosis']['kind']}: {outcome['diagnosis']['found']}"


def _report(outcomes: list[dict[str, Any]], known: dict[str, Any], spec: dict[str, Any]) -> Report:
    tried = [o for o in outcomes if "name" not in o]
    ran = [o for o in tried if "skipped" not in o]
    mutants = [o for o in outcomes if "name" in o]
    applied = [m for m in mutants if "not_applicable" not in m]
    failed, passed = ([c for c in ran if c["passed"] is wanted] for wanted in (False, True))
    notes = []
    if any(spec["config"]["precision"][key] != "float32" for key in ("compute", "params", "reduction")):
        notes.append(
            f"precision is {spec['dtype']} here, not the config's: what is compared is the mathematics, not the "
            "rounding"
        )
    if known["dtype"] != spec["dtype"]:
        notes.append(
            f"the task rounds to {known['dtype']} by itself (an astype, jnp.float32), so the tolerance is that of "
            f"{known['dtype']}"
        )
    if noisy := known["below_noise"]:
        notes.append(_noise(noisy))
    if not known["watched"]:
        notes.append(
            "the step reads its optimizer's state itself, so the gradient cannot be observed: the values compared as "
            "gradient and as update are the movement of the parameters"
        )
    if (sync := spec["config"]["sync"]) != "every_step":
        notes.append(
            f"sync {plugins.split(sync)[0]} is other mathematics ({SYNCS.get(plugins.split(sync)[0], GROUPS)}): what "
            "is compared is every_step"
        )
    if spec["reducer_note"]:
        notes.append(spec["reducer_note"])
    if all(not c["mesh"] for c in ran):
        notes.append("every case is on one device: name a mesh, or use --all")
    return {
        "passed": bool(ran) and not failed and all(m["caught"] for m in applied) and known["plain"].get("passed", True),
        "plain_jax": known["plain"],
        "tolerance": known["tolerances"]["gradient"],
        "tolerances": known["tolerances"],
        "one_ulp_moves": known["moved"],
        "below_noise": sorted(known["below_noise"]),
        "cases": ran,
        "skipped": [
            {"mesh": o["mesh"], "microbatches": o["microbatches"], "reason": o["skipped"]}
            for o in tried
            if "skipped" in o
        ],
        "pattern": pattern(failed, passed),
        "mutants": applied,
        "not_applicable": [
            {"name": m["name"], "reason": m["not_applicable"]} for m in mutants if "not_applicable" in m
        ],
        "notes": notes,
        "num_devices": spec["devices"],
        "batch_size": spec["batch_size"],
        "steps": spec["steps"],
        "dtype": spec["dtype"],
    }


def _noise(noisy: dict[str, tuple[int, int]]) -> str:
    """Returns the note on parameters with a gradient below noise, to which the optimizer applies noise steps."""
    named = [f"'{path}'" if num == of else f"'{path}' ({num} of {of} numbers)" for path, (num, of) in noisy.items()]
    more = f" and {len(named) - MAX_NOISY} more" if len(named) > MAX_NOISY else ""
    return (
        f"below noise: the gradient of {', '.join(named[:MAX_NOISY])}{more} is what rounding leaves (a bias that "
        "cancels, most often), and the optimizer makes steps of it, with other signs on every mesh. The gradient is "
        "compared; the steps are held to their size alone"
    )


def _raised(error: dict[str, Any]) -> SpmdkitError:
    return ConfigError(error["message"]) if error["code"] == ConfigError.exit_code else UserCodeError(error["message"])
