"""`spmdkit bench communication`: measurements on the user's task."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from spmdkit.cli.options import AsJson, ConfigPath, Overrides
from spmdkit.program import allocator

app = typer.Typer(help="Measure your task.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Makes `communication` a subcommand although it is the only command."""


@app.command(
    epilog=(
        "Example: spmdkit bench communication configs/linear_regression.yaml --reducers int8 --syncs "
        '"local_sgd(every=4)" --steps 80'
    )
)
def communication(
    config: ConfigPath,
    overrides: Overrides = None,
    reducers: Annotated[str, typer.Option(help="As int8,powersgd(rank=4).", metavar="NAMES")] = "bfloat16,int8",
    syncs: Annotated[str, typer.Option(help="As local_sgd(every=16),stale(2).", metavar="NAMES")] = "",
    steps: Annotated[
        int | None, typer.Option(help="Steps to train; default: the config's.", show_default=False)
    ] = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds, starting with the config's.")] = 1,
    within: Annotated[
        float | None,
        typer.Option(
            help="Exit code 1 if a loss exceeds that of sum by more than this share: 0.01.", show_default=False
        ),
    ] = None,
    json_: AsJson = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the page, the JSON and the PNG; default: communication in the run's directory.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Train the task under each reducer and sync, interleaved: bytes sent, time, and final loss, relative to sum. Exit
    code 0 or 1."""
    from spmdkit.cluster import detect_cluster, join
    from spmdkit.config import load_config
    from spmdkit.tools.bench.communication import ComparisonOptions, run_communication

    loaded = load_config(config, overrides or [])
    spec = detect_cluster(os.environ, loaded.cluster.environment)
    retain_memory = allocator.limit_arenas(loaded.devices, os.environ, spec.num_processes)
    cluster = join(spec, loaded.devices, interface=loaded.cluster.interface)
    options = ComparisonOptions(
        reducers=reducers, syncs=syncs, steps=steps, seeds=seeds, within=within, as_json=json_, out=out
    )
    code = run_communication(loaded, cluster, options, retain_memory=retain_memory)
    cluster.shutdown()
    raise SystemExit(code)
