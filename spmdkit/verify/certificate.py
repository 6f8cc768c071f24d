"""A certificate: what `verify` has proven, of which task and which mathematics, on which meshes. `train` can require
one.

It holds for the text of the task and of all that it imports from the user's project, for the settings that decide what
is computed, for spmdkit and the versions that it was made with, and for the meshes that it lists. It does not hold for
sizes: `verify` runs a small model, so whole numbers among `task_args`, batch sizes, steps and learning rates may
differ.

It needs mutants: a comparison that was not shown to see mistakes proves nothing about several devices.

Its seal is a digest of all that it says, without a key: a file that was changed, cut short or written by hand is
refused. It guards against mistakes (a proof of last week, of another branch, edited to fit); whoever means to deceive
can compute a seal too, or run a changed spmdkit.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from spmdkit.config import Config
from spmdkit.errors import ConfigError
from spmdkit.foundation import files, redact
from spmdkit.program import source_digest

FORMAT = 3
MATHEMATICS = ("optimizer", "clip_norm", "ema", "reducer", "sync", "model_state", "placement")
"""Keys of a config that decide what a step computes, and that a proof is about, whole."""

PACKAGES = ("jax", "jaxlib", "optax", "flax", "numpy")


def identity(config: Config) -> dict[str, Any]:
    """Returns what a proof is about: the task's name and the digest of its text, and the mathematics of the config."""
    target, name = config.task_reference()
    shown = config.task if target.endswith(".py") else f"{target}:{name}"
    return {"task": shown, "task_digest": task_digest(config), "mathematics": mathematics(config)}


def mathematics(config: Config) -> dict[str, Any]:
    """Returns the settings that decide what is computed, without sizes and rates."""
    values = config.model_dump()
    found = {key: values[key] for key in MATHEMATICS}
    found["layout"] = {key: values["layout"][key] for key in ("rules", "axes", "fsdp", "zero")}
    found["data"] = {"remainder": values["data"]["remainder"]}
    found["task_args"] = {k: _without_sizes(v) for k, v in values["task_args"].items() if not _is_size(v)}
    if isinstance(found["optimizer"], dict):
        found["optimizer"] = {k: v for k, v in found["optimizer"].items() if k != "learning_rate"}
    return json.loads(json.dumps(redact.without(found)))


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _without_sizes(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_sizes(v) for k, v in value.items() if not _is_size(v)}
    return value


def task_digest(config: Config) -> str:
    """Returns the digest of the files that the config names and of all that they import from their own project."""
    return digest(source_digest.texts(config))


def package_digest() -> str:
    """Returns the digest of spmdkit's own files."""
    return digest(source_digest.package_digests())


def versions() -> dict[str, str]:
    """Returns the versions that a proof is of: of Python without the last part."""
    from spmdkit.foundation.version import __version__

    python = ".".join(platform.python_version_tuple()[:2])
    return {"spmdkit": __version__, "python": python} | {name: metadata.version(name) for name in PACKAGES}


def digest(value: Any) -> str:
    """Returns 16 hex digits that change when anything in a plain value does."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def write(path: Path, report: Mapping[str, Any]) -> None:
    """Writes the certificate of a report, passed or not.

    Raises:
        ConfigError: the file cannot be written.
    """
    proven = [{"mesh": c["mesh"], "microbatches": c["microbatches"]} for c in report["cases"] if c["passed"]]
    certificate = {
        "format": FORMAT,
        "passed": report["passed"],
        **{key: report[key] for key in ("task", "task_digest", "mathematics", "dtype", "tolerances")},
        "proven": proven,
        "mutants_caught": [m["name"] for m in report["mutants"] if m["caught"]],
        "mutants_not_applicable": [m["name"] for m in report["not_applicable"]],
        "versions": versions(),
        "spmdkit_digest": package_digest(),
    }
    certificate["seal"] = _seal(certificate)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, f"{json.dumps(certificate, indent=2)}\n".encode())
    except OSError as error:
        raise ConfigError(
            f"--certificate {path}: cannot be written ({error.strerror}). It is a file that this process may write. Name another."
        ) from error


def _seal(certificate: Mapping[str, Any]) -> str:
    """Returns the digest of all that a certificate says."""
    return digest({"certificate": {key: value for key, value in certificate.items() if key != "seal"}})


def require(config: Config, sizes: Mapping[str, int]) -> None:
    """Checks the certificate that the config names, where it names one, against the config and its mesh.

    Args:
        sizes: of all mesh axes.

    Raises:
        ConfigError: it is missing, forged, did not pass, or is of another task, other settings, versions or another
            mesh.
    """
    if config.certificate is None:
        return
    path = (config.folder / config.certificate).resolve()
    mesh = {axis: size for axis, size in sizes.items() if size > 1}
    again = f"Make it anew: spmdkit verify {config.source or 'CONFIG'} --certificate {path}."
    found = _read(path, f"{config.where('certificate')}: {path}", again)
    if objection := _objection(found, config, mesh):
        raise ConfigError(f"{config.where('certificate')}: {path} {objection} {again}")


def _read(path: Path, where: str, again: str) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{where} does not exist. Training with `certificate` needs the proof first. {again}"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{where} cannot be read ({type(error).__name__}). It is what verify writes. {again}"
        ) from None
    if not isinstance(found, dict) or found.get("format") != FORMAT or not isinstance(found.get("proven"), list):
        raise ConfigError(f"{where} is no certificate of this version. It is what verify writes. {again}")
    return found


def _missed(found: Mapping[str, Any]) -> str:
    """Returns what is wrong with the mutants of a certificate: each has to be caught, but for those that the task has
    no place for."""
    from spmdkit.verify.mutants import MUTANTS

    if not found["mutants_caught"]:
        return "was made without mutants (--no-mutants): nothing shows that the comparison would have seen a mistake."
    tried = {*found["mutants_caught"], *found["mutants_not_applicable"]}
    if missed := [mutant.name for mutant in MUTANTS if mutant.name not in tried]:
        return (
            f"has not caught the mutants {', '.join(missed)}. A comparison that does not see a mistake proves nothing."
        )
    return ""


def _objection(found: Mapping[str, Any], config: Config, mesh: Mapping[str, int]) -> str:
    if found.get("seal") != _seal(found):
        return "is not as verify wrote it: its seal is of another text. A proof is what was run."
    if found.get("passed") is not True:
        return "did not pass: a case or a mutant failed. Only what is proven is trained."
    if found.get("task_digest") != task_digest(config):
        return "is of another task, or of another text of this one. A proof holds for the text that was run."
    here, then = versions(), found["versions"]
    if other := [f"{name} {then.get(name)}, here is {here[name]}" for name in here if then.get(name) != here[name]]:
        return f"was made with {'; '.join(other)}. A proof holds for the versions that it was made with."
    if found.get("spmdkit_digest") != package_digest():
        return "was made with another spmdkit of the same version. A proof holds for the text that was run."
    if mesh and (missed := _missed(found)):
        return missed
    asked, proven = mathematics(config), found.get("mathematics") or {}
    for key in asked:
        if proven.get(key) != asked[key]:
            return f"is of {key} {json.dumps(proven.get(key))}, and the config has {json.dumps(asked[key])}. What a step computes has to be the same."
    case = {"mesh": dict(mesh), "microbatches": config.microbatches}
    if mesh and case not in found["proven"]:
        return f"has no proof for mesh {case['mesh']} with microbatches {case['microbatches']}. It holds for the meshes that it lists."
    return ""
