"""`spmdkit tune`: runs the command, stores its result, and writes the best config.

A result is stored by program (config and source text), device and versions, in the folder of the compile cache or else
in the run directory. The same command then reads it, until one of them changes (`--again` measures).
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from spmdkit.config import Config, replace_keys, to_yaml
from spmdkit.errors import ConfigError
from spmdkit.foundation import files
from spmdkit.foundation.formatting import columns, format_seconds, visible
from spmdkit.foundation.json_output import print_json
from spmdkit.foundation.version import __version__
from spmdkit.plan.command import choose_target, write_config
from spmdkit.plan.machine.calibrate import with_measured
from spmdkit.plan.machine.target import Target, with_fake_devices
from spmdkit.plan.planner import log
from spmdkit.program import source_digest
from spmdkit.program.compile_cache import cache_folder
from spmdkit.tools.tune.search import on_devices, on_target


@dataclass(frozen=True)
class TuneOptions:
    """The options of the command.

    Attributes:
        seconds: limit of the search; a variant that has begun ends within its own limit.
        target: a machine that is not at hand, as for `plan`; None: the devices that `train` uses.
        write: file of the best config; None: `NAME_tuned.yaml` next to the config.
        again: measure although a result is stored.
    """

    seconds: float = 300.0
    target: str | None = None
    write: Path | None = None
    again: bool = False
    as_json: bool = False


def run_tune(config: Config, options: TuneOptions) -> None:
    """Searches, or reads the stored result; prints it, and writes the best config if one is faster.

    Raises:
        ConfigError: the unchanged config cannot be measured, or a file cannot be written.
    """
    if not options.seconds > 0:
        raise ConfigError(f"--seconds is {options.seconds:g}. The search needs time. Try --seconds 300.")
    path = _stored(config, options)
    result = None if options.again else _read(path)
    reused = result is not None
    if result is None:
        result = tune(config, options)
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(path, result)
    written = None
    if result["best"] is not None:
        source = config.source or Path("config.yaml")
        written = options.write or source.with_name(f"{source.stem}_tuned.yaml")
        write_config(replace_keys(config, result["best"]["changes"]), config, head(result), written)
    result |= {"reused": reused, "stored": str(path), "written": None if written is None else str(written)}
    if options.as_json:
        print_json(result)
        return
    for line in table(result):
        print(visible(line))


def tune(config: Config, options: TuneOptions) -> dict[str, Any]:
    """Returns the variants with their measurements, and `best`: the chosen one, or None if the unchanged config
    wins."""
    begun = time.monotonic()
    if options.target is None:
        variants, device = on_devices(config, options.seconds)
        name, how = f"{device['num']} x {device['device']}", "measured"
    else:
        target = _opened(config, options.target)
        variants, name, how = on_target(config, target, options.seconds), target.name, "predicted"
    last = variants[-1] if variants and variants[-1].setting == "all" else None
    is_faster = last is not None and last.status == "faster"
    return {
        "config": str(config.source) if config.source else None,
        "device": name,
        "how": how,
        "seconds": time.monotonic() - begun,
        "versions": _versions(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "variants": [variant.as_json() for variant in variants],
        "best": last.as_json() if is_faster and last is not None else None,
    }


def table(result: Mapping[str, Any]) -> list[str]:
    """Returns the lines of the result."""
    head = ("setting", "value", "time/unchanged (95 %)", "step", "")
    rows = [(row["setting"], row["name"], _ratio(row), _step(row), _status(row)) for row in result["variants"]]
    lines = [f"{result['device']}, {result['how']} {result['date']}", *columns([head, *rows])]
    best = result["best"]
    if best is None:
        return [*lines, "The unchanged config wins: no variant is faster beyond the noise."]
    return [*lines, f"best: {best['name']}, {_ratio(best)} of the unchanged config's time", result["written"]]


def head(result: Mapping[str, Any]) -> str:
    """Returns the comment at the start of the written config."""
    best = result["best"]
    differences = [best["figures"].get(f"{name}_difference") for name in ("loss", "gradient")]
    lines = [
        f"{best['name']}: {_ratio(best)} of the time of the unchanged config",
        f"({_step(best)} a step, {result['how']} on {result['device']}, spmdkit tune, {result['date']}).",
    ]
    if None not in differences:
        lines.append(f"Relative difference of the loss {differences[0]:.1e}, of the gradient {differences[1]:.1e}.")
    return "".join(f"# {line}\n" for line in lines)


def _ratio(row: Mapping[str, Any]) -> str:
    figures: Mapping[str, Any] = row["figures"]
    if "ratio" not in figures:
        return ""
    spread = f" ({figures['low']:.3f} to {figures['high']:.3f})" if "low" in figures else ""
    return f"{figures['ratio']:.3f}{spread}"


def _step(row: Mapping[str, Any]) -> str:
    return format_seconds(row["figures"]["step_s"]) if "step_s" in row["figures"] else ""


def _status(row: Mapping[str, Any]) -> str:
    return f"{row['status']}: {row['reason']}" if row["reason"] else str(row["status"])


def _opened(config: Config, name: str) -> Target:
    machine = choose_target(config, name)
    return with_measured(machine if machine.devices else with_fake_devices(machine))[0]


def _versions() -> dict[str, str]:
    return {"spmdkit": __version__} | {name: metadata.version(name) for name in ("jax", "jaxlib")}


def _stored(config: Config, options: TuneOptions) -> Path:
    """Returns the file of the result. The folder of the compile cache is that of one kind of machine."""
    text = to_yaml(replace_keys(config, {"run_dir": None}), absolute_paths=True)
    facts = [text, source_digest.digests(config), source_digest.package_digests(), _versions(), options.target]
    facts += [os.environ.get(name) for name in ("XLA_FLAGS", "JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES")]
    key = hashlib.blake2b(json.dumps(facts).encode(), digest_size=10).hexdigest()
    cache, folder = config.compile_cache, None
    if cache is not None:
        folder, _ = cache_folder(config.folder / cache.directory if cache.directory else None, os.environ)
    return (folder or config.resolved_run_dir()) / f"tune-{key}.json"


def _read(path: Path) -> dict[str, Any] | None:
    """Returns a stored result, or None."""
    try:
        result: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    log(f"the stored result of {result['date']} is used; --again measures")
    return result
