"""A certificate: what `verify` has proven, of which task and which mathematics, on which meshes. `train` can require one.

It holds for the text of the task, for the settings that decide what is computed, and for the meshes that it lists. It does not hold
for sizes: `verify` runs a small model, so whole numbers among `task_args`, batch sizes, steps and learning rates may differ.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from spmdkit import files, kinds, secret
from spmdkit.config import Config
from spmdkit.errors import ConfigError

FORMAT = 1
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
    return json.loads(json.dumps(secret.without(found)))


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _without_sizes(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_sizes(v) for k, v in value.items() if not _is_size(v)}
    return value


def task_digest(config: Config) -> str:
    """Returns the digest of the task's file, of those of a reducer and a sync of the user's own, and of the files beside the task that they import, directly or not."""
    target, _ = config.task_reference()
    if target.endswith(".py"):
        first = Path(target)
    else:
        try:
            spec = importlib.util.find_spec(target)
        except (ImportError, ValueError):
            spec = None
        if spec is None or spec.origin is None:
            return ""
        first = Path(spec.origin)
    texts = {}
    own = [kinds.split(choice)[0] for choice in (config.reducer, config.sync) if kinds.is_own(choice)]
    todo = [first, *(config.folder / name.rpartition(":")[0] for name in own)]
    while todo:
        path = todo.pop()
        if path.name in texts or not path.is_file():
            continue
        texts[path.name] = text = path.read_text(encoding="utf-8", errors="replace")
        todo += [first.parent / f"{name}.py" for name in _imported(text)]
    return digest(texts)


def package_digest() -> str:
    """Returns the digest of spmdkit's own files."""
    folder = Path(files.PACKAGE)
    return digest(
        {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))}
    )


def _imported(text: str) -> list[str]:
    """Returns the first part of every module name that a file imports."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except SyntaxError:
        return []
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return sorted({name.split(".")[0] for name in names})


def digest(value: Any) -> str:
    """Returns 16 hex digits that change when anything in a plain value does."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def write(path: Path, report: Mapping[str, Any]) -> None:
    """Writes the certificate of a report, passed or not.

    Raises:
        ConfigError: the file cannot be written.
    """
    from spmdkit.version import __version__

    proven = [{"mesh": c["mesh"], "microbatches": c["microbatches"]} for c in report["cases"] if c["passed"]]
    versions = {"spmdkit": __version__, "python": platform.python_version()}
    certificate = {
        "format": FORMAT,
        "passed": report["passed"],
        **{key: report[key] for key in ("task", "task_digest", "mathematics", "dtype", "tolerances")},
        "proven": proven,
        "mutants_caught": [m["name"] for m in report["mutants"] if m["caught"]],
        "versions": versions | {name: metadata.version(name) for name in PACKAGES},
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, f"{json.dumps(certificate, indent=2)}\n".encode())
    except OSError as error:
        raise ConfigError(
            f"--certificate {path}: cannot be written ({error.strerror}). It is a file that this process may write. Name another."
        ) from error


def require(config: Config, sizes: Mapping[str, int]) -> None:
    """Checks the certificate that the config names, where it names one, against the config and its mesh.

    Args:
        sizes: of all mesh axes.

    Raises:
        ConfigError: it is missing, did not pass, or is of another task, other settings or another mesh.
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
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{where} cannot be read ({type(error).__name__}). It is what verify writes. {again}"
        ) from None
    if not isinstance(found, dict) or found.get("format") != FORMAT or not isinstance(found.get("proven"), list):
        raise ConfigError(f"{where} is no certificate of this version. It is what verify writes. {again}")
    return found


def _objection(found: Mapping[str, Any], config: Config, mesh: Mapping[str, int]) -> str:
    if found.get("passed") is not True:
        return "did not pass: a case or a mutant failed. Only what is proven is trained."
    if found.get("task_digest") != task_digest(config):
        return "is of another task, or of another text of this one. A proof holds for the text that was run."
    asked, proven = mathematics(config), found.get("mathematics") or {}
    for key in asked:
        if proven.get(key) != asked[key]:
            return f"is of {key} {json.dumps(proven.get(key))}, and the config has {json.dumps(asked[key])}. What a step computes has to be the same."
    case = {"mesh": dict(mesh), "microbatches": config.microbatches}
    if mesh and case not in found["proven"]:
        return f"has no proof for mesh {case['mesh']} with microbatches {case['microbatches']}. It holds for the meshes that it lists."
    return ""
