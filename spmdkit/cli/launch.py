"""`spmdkit launch`: its options and their valid combinations."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from spmdkit.errors import ConfigError


def launch(
    context: typer.Context,
    num: Annotated[int, typer.Option("-n", help="Number of processes, on this machine or in total.")],
    devices_per_process: Annotated[int | None, typer.Option(help="Devices of each process.")] = None,
    max_restarts: Annotated[int, typer.Option(help="Maximum number of restarts of all processes after a failure.")] = 0,
    grace_s: Annotated[
        float | None, typer.Option(help="Seconds to save and exit after a signal; default: 15, with --on 120.")
    ] = None,
    on: Annotated[
        str | None, typer.Option(help="Cluster engine: slurm, kubernetes, kubeflow, tpu, ray or ssh.", metavar="ENGINE")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Option of the engine.", metavar="NAME=VALUE")
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the job, with --on.")] = "spmdkit",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --on: print what would be run, and exit.")] = False,
    elastic: Annotated[
        str | None,
        typer.Option(
            metavar="MIN:MAX",
            help="Restart with the remaining processes and the same global batch.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run an spmdkit command, or your script (-- script.py ...), in several processes, here or on a cluster. The first
    failure ends all processes."""
    from spmdkit.launch import launch as run

    _check_launch(context.args, on, elastic, max_restarts, devices_per_process, bool(settings) or dry_run)
    if on is not None:
        from spmdkit.launch.engines.submit import launch_on

        raise SystemExit(launch_on(on, context.args, num, settings or (), name, max_restarts, grace_s, dry_run))
    elasticity = None
    if elastic is not None:
        from spmdkit.elastic.sizes import Elastic
        from spmdkit.launch.membership import Elasticity
        from spmdkit.launch.precompile import Precompile

        sizes = Elastic(context.args, elastic, num, devices_per_process)
        devices_per_process = sizes.devices_per_process
        precompile = (
            Precompile(ahead, context.args, devices_per_process) if (ahead := sizes.sizes_to_precompile()) else None
        )
        elasticity = Elasticity(sizes.resize, sizes.requested, sizes.standby, precompile)
    script = [] if context.args[0].endswith(".py") else ["-m", "spmdkit"]
    code = run(
        [sys.executable, *script, *context.args],
        num,
        devices_per_process,
        grace_s=15.0 if grace_s is None else grace_s,
        max_restarts=max_restarts,
        elasticity=elasticity,
    )
    raise SystemExit(code)


def _check_launch(
    command: list[str], on: str | None, elastic: str | None, max_restarts: int, devices: int | None, is_for_engine: bool
) -> None:
    """Rejects options of `launch` that cannot be combined."""
    if not command:
        raise ConfigError(
            "launch: nothing to run. The command follows two dashes. Try spmdkit launch -n 2 -- train CONFIG."
        )
    if on is not None and devices is not None:
        raise ConfigError("--devices-per-process with --on: processes have the devices of their hosts. Omit it.")
    if on is not None and elastic is not None:
        raise ConfigError(
            f"--elastic with --on {on}: the engine sets the number of processes. Omit it, or launch on this machine."
        )
    if on is None and is_for_engine:
        raise ConfigError("--set and --dry-run need --on ENGINE. Omit them, or add --on slurm.")
    if elastic is not None and max_restarts < 1:
        raise ConfigError(
            f"launch --elastic {elastic}: nothing is restarted without --max-restarts. Try --max-restarts 10."
        )
