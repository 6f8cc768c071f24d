"""`spmdkit checkpoint ls|inspect|export|verify|rm`: a run's checkpoints, without its task or devices."""

from __future__ import annotations

import datetime
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spmdkit.cli.options import AsJson, one_state
from spmdkit.errors import CheckpointError, ConfigError
from spmdkit.foundation.formatting import visible
from spmdkit.foundation.json_output import print_json

if TYPE_CHECKING:
    from spmdkit.config import Config

app = typer.Typer(help="List, inspect, export, verify and remove checkpoints.", no_args_is_help=True)

RunDir = Annotated[
    str,
    typer.Argument(metavar="RUN", help="A run's directory, its checkpoints/, or the folder of an object store."),
]
Step = Annotated[int | None, typer.Option(help="Step; default: the newest.")]


@app.command("ls", epilog="Example: spmdkit checkpoint ls runs/first")
def checkpoint_ls(run: RunDir, json_: AsJson = False) -> None:
    """List the committed checkpoints of a run."""
    from spmdkit import checkpoint
    from spmdkit.foundation.formatting import format_bytes
    from spmdkit.foundation.run_status import unfinished

    folder = checkpoint.checkpoints_of_run(run)
    rows = checkpoint.ls(folder)
    ignored = checkpoint.ignored_entries(folder)
    attempt = unfinished(Path(run) if isinstance(folder, checkpoint.Remote) else folder.parent)
    if json_:
        step = None if attempt is None or attempt.alive else attempt.step
        print_json({"checkpoints": rows, "ignored": ignored, "left_at_step": step})
        return
    for row in rows:
        values = [f"{k} {v:.6g}" for k, v in (row.get("metrics") or {}).items() if v is not None]
        values += ["best"] * row["best"] + ([] if row["complete"] else [f"DAMAGED: {row['found']}"])
        start = f"{row['step']:>8}  {format_bytes(row['bytes']):>10}  {_local_time(row['time'])}"
        echo(f"{start}  {'  '.join(values)}".rstrip())
    if not rows:
        echo(f"no checkpoint in {folder}")
    for name in ignored:
        aside = checkpoint.DAMAGED_MARK in name
        echo(f"damaged, quarantined: {name}" if aside else f"not a checkpoint, ignored: {name}")
    if attempt is not None:
        echo(f"note: {attempt.message()}")


@app.command("inspect", epilog="Example: spmdkit checkpoint inspect runs/first --step 100")
def checkpoint_inspect(run: RunDir, step: Step = None, json_: AsJson = False) -> None:
    """Show the leaves of a checkpoint."""
    from spmdkit import checkpoint

    contents = checkpoint.inspect(checkpoint.checkpoints_of_run(run), step)
    if json_:
        print_json(contents)
        return
    echo(f"step {contents['step']}")
    for path, leaf in contents["leaves"].items():
        echo(f"  {path}  {leaf['dtype']}[{','.join(map(str, leaf['shape']))}]")


@app.command("export", epilog="Example: spmdkit checkpoint export runs/first params.safetensors")
def checkpoint_export(
    run: RunDir,
    out: Annotated[
        Path | None, typer.Argument(metavar="[OUT]", help="File (safetensors) or folder (orbax) to write.")
    ] = None,
    step: Step = None,
    best: Annotated[bool, typer.Option("--best", help="Use the best step by checkpoint.best.")] = False,
    what: Annotated[
        str,
        typer.Option(help="Comma list: params (those that are evaluated), ema, model_state, training (optimizer's)."),
    ] = "params",
    format: Annotated[str, typer.Option(help="safetensors or orbax.")] = "safetensors",
    max_shard_size: Annotated[
        str, typer.Option(help="A larger model.safetensors is model-0000K-of-0000N.safetensors and an index.")
    ] = "5GB",
    names: Annotated[
        str | None,
        typer.Option(help="Map for transformers: gpt2, llama, qwen2 ... (the model_type of its config.json)."),
    ] = None,
    stablehlo: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write Task.predict_fn by jax.export: a function of the arrays and a batch."),
    ] = None,
) -> None:
    """Write the plain arrays of a checkpoint, for other tools, or its predict_fn."""
    from spmdkit import checkpoint

    one_state(step, best, False, "checkpoint export")

    def evaluated(arrays: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
        from spmdkit.program.eval_params import evaluated_arrays
        from spmdkit.program.opening import task_of

        config = _config_of(run)
        grouped = checkpoint.merged if record.get("groups") else None
        return evaluated_arrays(config, task_of(config), arrays, grouped)

    where, parts = checkpoint.checkpoints_of_run(run), what.split(",")
    if out is None and stablehlo is None:
        raise ConfigError("checkpoint export has nothing to write. Name OUT, --stablehlo FILE, or both.")
    if stablehlo is not None:
        from spmdkit.run.prediction_export import export_predict

        if names is not None:
            raise ConfigError("checkpoint export --stablehlo reads arrays by their paths. Omit --names.")
        export_predict(_config_of(run), parts, stablehlo, echo)
        echo(stablehlo)
    if out is not None:
        chosen = "best" if best else step
        checkpoint.export(where, chosen, out, format, parts, evaluated, names, max_shard_size)
        echo(out if out.exists() else f"{out}.index.json")


def _config_of(run: str) -> Config:
    """Returns the config of a run, which names the task. Raises ConfigError if `run` is not its directory."""
    from spmdkit.config import load_config

    if not (file := Path(run) / "config.yaml").is_file():
        raise ConfigError(
            f"checkpoint export {run}: it has no config.yaml, which names the task. Pass a run's directory."
        )
    return load_config(file)


@app.command("verify", epilog="Example: spmdkit checkpoint verify runs/first")
def checkpoint_verify(run: RunDir, step: Step = None, json_: AsJson = False) -> None:
    """Read every byte of a run's checkpoints, or of one, and verify its checksum; exit code 79 if one is damaged."""
    from spmdkit import checkpoint
    from spmdkit.foundation.formatting import format_bytes

    rows = checkpoint.verify(checkpoint.checkpoints_of_run(run), step)
    if json_:
        print_json({"checkpoints": rows})
    for row in [] if json_ else rows:
        verdict = "good" if row["good"] else f"DAMAGED: {row['found']}"
        echo(f"{row['step']:>8}  {row['leaves']} leaves, {format_bytes(row['bytes'])}  {verdict}")
    if damaged := [str(row["step"]) for row in rows if not row["good"]]:
        raise CheckpointError(
            f"{len(damaged)} of {len(rows)} checkpoints in {run} {'is' if len(damaged) == 1 else 'are'} damaged: "
            f"{', '.join(damaged)}. A checkpoint is used only if it is intact. Training skips damaged ones; to remove "
            "them: spmdkit checkpoint rm."
        )


@app.command("rm", epilog="Example: spmdkit checkpoint rm runs/first 100 200")
def checkpoint_rm(
    run: RunDir, steps: Annotated[list[int], typer.Argument(metavar="STEP...", help="Steps to remove.")]
) -> None:
    """Remove checkpoints of a run that is not training; never the last intact one."""
    from spmdkit import checkpoint

    folder = checkpoint.checkpoints_of_run(run)
    with (
        checkpoint.Lease(folder, secrets.token_hex(8), print_line=echo)
        if isinstance(folder, checkpoint.Remote)
        else checkpoint.run_lock(folder.parent)
    ):
        checkpoint.remove(folder, steps)
        _record_removal(Path(run) if isinstance(folder, checkpoint.Remote) else folder.parent, steps)
    echo(f"removed {', '.join(map(str, steps))} from {folder}")


def _record_removal(run_dir: Path, steps: list[int]) -> None:
    """Writes the event `checkpoint_removed`, so that the next start does not report these steps as missing."""
    from spmdkit.metrics import EventLog

    if not (path := run_dir / "events.jsonl").is_file():
        return
    events = EventLog(path)
    for step in steps:
        events.write("checkpoint_removed", step=step)
    events.close()


def echo(text: object) -> None:
    """Prints a line for the user. Names of files, leaves and metrics are escaped, since a terminal may interpret
    them."""
    print(visible(str(text)))


def _local_time(seconds: float | None) -> str:
    """Returns a time and its age."""
    from spmdkit.foundation.formatting import format_duration

    if seconds is None or not 0 <= seconds < 1e11:
        return f"{'unknown time':<19}"
    moment = datetime.datetime.fromtimestamp(seconds).isoformat(sep=" ", timespec="seconds")
    return f"{moment} ({format_duration(max(0.0, time.time() - seconds))} ago)"
