"""`spmdkit doctor`: the hardware and software of the machines, and health checks; on one process or on all processes of
a launch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from spmdkit import compat
from spmdkit.cluster import Cluster, detect_cluster, join
from spmdkit.config import Config
from spmdkit.errors import ConfigError, ExitCode
from spmdkit.foundation.formatting import columns, format_bytes, visible
from spmdkit.foundation.json_output import print_json
from spmdkit.foundation.timeouts import DOCTOR_COLLECTIVE_S
from spmdkit.mesh.mesh import make_mesh, resolve
from spmdkit.metrics.environment import device_groups
from spmdkit.program import allocator, compile_cache
from spmdkit.run.startup import health_checks
from spmdkit.run.startup.health_checks import Verdict
from spmdkit.run.startup.health_checks.bandwidth import table
from spmdkit.tools.start import measure_start


def examine(config: Config | None, burn_text: str | None, as_json: bool) -> int:
    """Joins the processes that the environment names, prints the results on process 0, and returns the exit code.

    Raises:
        ConfigError: `burn_text` is not a time.
    """
    burn_s = None if burn_text is None else seconds_of(burn_text)
    spec = detect_cluster(os.environ, config.cluster.environment if config else "auto")
    cluster = join(
        spec,
        config.devices if config else "auto",
        collective_timeout_s=DOCTOR_COLLECTIVE_S,
        interface=config.cluster.interface if config else "auto",
    )
    report = diagnose(cluster, config, burn_s)
    if cluster.is_main and as_json:
        print_json(report)
    elif cluster.is_main:
        text: Callable[[Any], Any] = lambda value: (
            ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        )
        lines = columns([(name, text(value)) for name, value in report.items() if name not in ("problems", "slow")])
        lines += [f"PROBLEM: {line}" for line in report["problems"]] + [f"slow: {line}" for line in report["slow"]]
        print(visible("\n".join(lines)))
    cluster.shutdown()
    return ExitCode.CHECK_FAILED if report["problems"] else ExitCode.DONE


def examine_start(config: Path | None, overrides: list[str], as_json: bool) -> int:
    """Prints how each second of a start of `train` is spent, and returns the exit code.

    Raises:
        ConfigError: there is no config, or it does not train.
    """
    if config is None:
        raise ConfigError("doctor --start measures a start of train, and needs a config. Try doctor run.yaml --start.")
    found = measure_start(config, overrides)
    if as_json:
        print_json(found)
        return ExitCode.DONE
    rows = [(f"{seconds:.3f} s", f"{seconds / found['total_s']:.0%}", what) for what, seconds in found["rows"]]
    lines = columns([*rows, (f"{found['total_s']:.3f} s", "100%", "from the command to the end of the first step")])
    print(visible("\n".join(lines)))
    return ExitCode.DONE


def seconds_of(text: str) -> float:
    """Returns the seconds of `30s`, `5m`, `1h` or `30`.

    Raises:
        ConfigError: any other form.
    """
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)(s|m|h|)", text.strip())
    seconds = float(match[1]) * UNITS_S[match[2]] if match else 0.0
    if not 0 < seconds <= MAX_S:
        raise ConfigError(
            f"doctor --burn-in {text}: it is a time above 0 and up to a day: a number and s, m or h. Try --burn-in 30s."
        )
    return seconds


UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3600}
MAX_S = 86400.0


def diagnose(cluster: Cluster, config: Config | None = None, burn_s: float | None = None) -> dict[str, Any]:
    """Returns name -> result, with `problems` (defects that make a run unreliable) and `slow`. Called by all processes
    concurrently.

    Args:
        config: its run directory is tested by writing to it, and its mesh is measured.
        burn_s: seconds for which all devices compute the same products.
    """
    devices = cluster.devices
    versions, differ = health_checks.same_versions(cluster)
    hosts = health_checks.probe_hosts(cluster)
    verdict = health_checks.judge_hosts(hosts) + Verdict(wrong=differ)
    report: dict[str, Any] = {
        "python": versions.pop("python"),
        "versions": versions,
        "devices": _devices(cluster),
        "memories": ", ".join(sorted(memory.kind for memory in jax.local_devices()[0].addressable_memories())),
        "allocator": allocator.describe(os.environ),
        "compile cache": _compile_cache(config),
        "hosts": _hosts(hosts),
    }
    if config is not None:
        from spmdkit.program.restore import checkpoints_of

        report["run directory"], wrong = health_checks.write_test(
            cluster, config.resolved_run_dir(), checkpoints_of(config)
        )
        verdict += Verdict(wrong=wrong)
    if any(host["unreached"] for host in hosts):
        return report | {"problems": verdict.wrong, "slow": verdict.slow}  # a collective would hang
    report["reduction"], wrong = _reduction(devices)
    sizes = resolve((config.mesh.sizes() if config else {}) or {"data": -1}, len(devices))
    report["bandwidth"] = table(health_checks.bandwidths(make_mesh(sizes, devices))) or "one device"
    verdict += Verdict(wrong=wrong)
    if burn_s is not None:
        report["burn_in"], outliers = health_checks.burn_in_cluster(cluster, burn_s)
        verdict += outliers
    return report | {"problems": verdict.wrong, "slow": verdict.slow}


def _compile_cache(config: Config | None) -> str:
    """Returns the folder of XLA's compile cache and its contents for this kind of machine, or why there is none."""
    options = config.compile_cache if config is not None else None
    if config is not None and options is None:
        return "off (compile_cache: null)"
    configured = config.folder / options.directory if config and options and options.directory else None
    folder, description = compile_cache.cache_folder(configured, os.environ)
    if folder is None:
        return description
    sizes = [path.stat().st_size for path in folder.glob(f"*{compile_cache.SUFFIX}")]
    return f"{description}, {len(sizes)} programs of {format_bytes(sum(sizes))}"


def _devices(cluster: Cluster) -> str:
    groups = device_groups(cluster.devices)
    text = ", ".join(f"{group['count']} x {group['kind']} ({group['platform']})" for group in groups)
    return f"{text} in {cluster.num_processes} processes" if cluster.num_processes > 1 else text


def _hosts(hosts: list[dict[str, Any]]) -> str:
    """Returns one entry for each process: host, address advertised to Gloo, clock."""
    if len(hosts) == 1:
        return f"{hosts[0]['host']}; to other hosts Gloo would advertise {hosts[0]['address']}"
    return "; ".join(
        f"process {process} on {host['host']}, Gloo advertises {host['address']}, clock "
        f"{'unknown' if host['clock_s'] is None else format(host['clock_s'], '+.3f')} s"
        for process, host in enumerate(hosts)
    )


def _reduction(devices: list[jax.Device]) -> tuple[str, list[str]]:
    """Returns (outcome, problems) of one small sum over all devices."""
    mesh = compat.auto_mesh(np.array(devices), ("data",))
    spec = PartitionSpec("data")
    add = jax.jit(jax.shard_map(lambda x: lax.psum(x, "data"), mesh=mesh, in_specs=spec, out_specs=PartitionSpec()))
    numbers = jax.jit(lambda: jnp.arange(len(devices), dtype=jnp.float32), out_shardings=NamedSharding(mesh, spec))
    total, expected = float(add(numbers())[0]), len(devices) * (len(devices) - 1) / 2
    if total == expected:
        return "right", []
    return f"WRONG: {total}, expected {expected}", [f"a sum over all devices is {total} and not {expected}"]
