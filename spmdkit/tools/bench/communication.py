"""`spmdkit bench communication`: the command, and its JSON, table and files."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from spmdkit.cluster import Cluster
from spmdkit.config import Config
from spmdkit.errors import ConfigError, ExitCode
from spmdkit.foundation import files
from spmdkit.foundation.formatting import columns, format_bytes, format_seconds, format_value, visible
from spmdkit.foundation.json_output import print_json
from spmdkit.mesh.mesh import describe_mesh
from spmdkit.metrics.report.communication import communication_page
from spmdkit.program import allocator
from spmdkit.program.compile_cache import enable_cache
from spmdkit.tools.bench import figures, plot
from spmdkit.tools.bench.interleaved import Trained, train_interleaved
from spmdkit.tools.bench.programs import Opened, Opener, side_by_side
from spmdkit.tools.bench.variants import Row, rows_of

NAME = "communication"
"""Name of the folder in a run directory, and of the files in it."""


@dataclass(frozen=True)
class ComparisonOptions:
    """The options of the command.

    Attributes:
        reducers, syncs: as on the command line; see `variants.read`.
        steps: number of steps to train; None: the config's.
        seeds: number of seeds, starting with the config's.
        within: maximum relative increase of the loss over that of `sum`; None: no limit.
        out: folder of the files; None: `communication` in the run directory.
    """

    reducers: str = "bfloat16,int8"
    syncs: str = ""
    steps: int | None = None
    seeds: int = 1
    within: float | None = None
    as_json: bool = False
    out: Path | None = None


def run_communication(config: Config, cluster: Cluster, options: ComparisonOptions, retain_memory: bool = False) -> int:
    """Trains, prints the table and writes the files. Returns 0, or 1 if a loss is above the limit `within`.

    Args:
        retain_memory: the memory of a step is reused by the next, as in `train`; only after
        `allocator.limit_arenas`.

    Raises:
        SpmdkitError: `sum` cannot be trained, or the options are invalid.
    """
    rows = rows_of(options.reducers, options.syncs, Row(config.reducer, config.sync))
    steps = config.num_steps if options.steps is None else options.steps
    if steps < 1 or options.seeds < 1:
        raise ConfigError(f"--steps {steps} --seeds {options.seeds}: both are at least 1. Try --steps 200 --seeds 1.")
    out = _folder(config, options) if cluster.is_main else None
    with enable_cache(config.compile_cache, config.folder):
        result = compare(config, cluster, rows, steps, options.seeds, retain_memory)
    beyond = figures.above(result["rows"], options.within)
    result |= {"within": options.within, "above": beyond}
    if out is not None:
        written = _write(result, out)
        if options.as_json:
            print_json(files.strict_json(result))
        else:
            for line in [*table(result), *written]:
                print(visible(line))
        for name in beyond:
            _print_line(f"{name}: the loss is more than {options.within:.2%} above that of sum")
    return int(ExitCode.CHECK_FAILED) if beyond else 0


def compare(
    config: Config, cluster: Cluster, rows: Sequence[Row], steps: int, seeds: int, retain_memory: bool = False
) -> dict[str, Any]:
    """Returns all measurements as plain values. The first of `rows` is `sum`."""
    opener = Opener(config, cluster.devices, steps)
    print_line = _print_line if cluster.is_main else lambda line: None
    opened = list[Opened]()
    for row in rows:
        opened.append(x := opener.open(row, config.seed))
        print_line(f"{row.name}: {f'refused: {x.refused}' if x.refused else 'compiled'}")
    if retain_memory and cluster.devices[0].platform == "cpu":
        allocator.disable_trimming()
    runs = list[dict[int, tuple[Trained, Trained]]]()
    all_seeds = range(config.seed, config.seed + seeds)
    for seed in all_seeds:
        of_seed = opened
        if seed != config.seed:
            of_seed = [x if x.program is None else opener.open(x.row, seed, reads=False) for x in opened]
        runs.append(_trained(of_seed, cluster, steps))
        print_line(f"seed {seed}: trained {steps} steps each")
    main = opened[0]
    assert main.program is not None and main.traffic is not None
    result = [
        figures.row_figures(x, [s[i] for s in runs if i in s], main.traffic["bytes_per_step"])
        for i, x in enumerate(opened)
    ]
    figures.add_loss_increase(result)
    return {
        "config": str(config.source) if config.source else None,
        "mesh": dict(main.program.sizes),
        "devices": len(cluster.devices),
        "device": cluster.devices[0].device_kind,
        "processes": cluster.num_processes,
        "replicas": main.program.num_replicas,
        "batch_size": config.largest_batch,
        "steps": steps,
        "seeds": list(all_seeds),
        "loss_is": "evaluation" if main.program.has_eval else "training, mean of the last tenth of the steps",
        "rows": result,
        "jax": jax.__version__,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _trained(opened: Sequence[Opened], cluster: Cluster, steps: int) -> dict[int, tuple[Trained, Trained]]:
    """Returns row number -> (the trained row, `sum` as trained alternately with it), for the rows with a program."""
    runs = dict[int, tuple[Trained, Trained]]()
    for group in side_by_side(opened, cluster.devices):
        trained = [Trained(x.program, steps) for x in group if x.program is not None]
        train_interleaved(trained)
        first = trained[0]
        for row, run in zip(group, trained, strict=True):
            runs.setdefault(opened.index(row), (run, first))
    return runs


def table(result: dict[str, Any]) -> list[str]:
    """Returns the lines of the table, with aligned columns; rejections and notes are below."""
    head = ["", "bytes/step", "of sum", "time/step", "of sum (95 %)", "loss", "over sum"]
    cells = [head, *([row["name"], *_cells(row)] for row in result["rows"] if not row["refused"])]
    seeds = len(result["seeds"])
    title = f"{result['devices']} x {result['device']}, {describe_mesh(result['mesh'])}, batch {result['batch_size']}, "
    title += f"{result['steps']} steps, {seeds} seed{'s' * (seeds > 1)}; loss: {result['loss_is']}"
    lines = [title, *columns(cells, right=range(1, len(head)))]
    for row in result["rows"]:
        lines += [f"{row['name']}: refused: {row['refused']}"] if row["refused"] else []
        lines += [f"{row['name']}: {note}" for note in row.get("notes", ())]
    return lines


def _cells(row: dict[str, Any]) -> list[str]:
    known: Callable[[Any, Callable[[Any], str]], str] = lambda value, form: "?" if value is None else form(value)
    spread = f" ({row['time_interval'][0]:.2f} to {row['time_interval'][1]:.2f})" if row["time_interval"] else ""
    return [
        known(row["bytes_per_step"], format_bytes),
        known(row["bytes_over_sum"], lambda x: f"{x:.4f}"),
        known(row["step_s"], format_seconds),
        known(row["time_over_sum"], lambda x: f"{x:.2f}") + spread,
        known(row["loss_mean"], format_value),
        known(row["loss_more_mean"], lambda x: f"{x:+.2%}"),
    ]


def _folder(config: Config, options: ComparisonOptions) -> Path:
    folder = options.out or config.resolved_run_dir() / NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be made ({error.strerror}). The table and the plot are written there. Try --out DIR."
        ) from None
    return folder


def _write(result: dict[str, Any], out: Path) -> list[str]:
    """Writes the JSON, the page and the plot. Returns a line for each: its path, or why it is missing."""
    files.write_json(out / f"{NAME}.json", result)
    files.write_text(out / f"{NAME}.html", communication_page(files.strict_json(result)))
    return [str(out / f"{NAME}.html"), plot.write(result, out / f"{NAME}.png")]


def _print_line(line: str) -> None:
    print(visible(line), file=sys.stderr, flush=True)
