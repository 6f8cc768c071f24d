"""`spmdkit`: the command line. Each command parses its arguments, calls one function, and prints the result.

Input: arguments. Output: text or JSON on standard output, and an exit code of `spmdkit.errors`. A user's mistake is a
message on standard error, never a traceback.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spmdkit.cli import bench, checkpoint, launch
from spmdkit.cli.checkpoint import echo
from spmdkit.cli.options import AsJson, Commands, ConfigPath, Overrides, one_state
from spmdkit.errors import SpmdkitError
from spmdkit.faults import run_process
from spmdkit.foundation.constants import ERROR_FILE
from spmdkit.foundation.formatting import visible
from spmdkit.foundation.json_output import print_json

if TYPE_CHECKING:
    from spmdkit.cluster import Cluster
    from spmdkit.config import Config

app = typer.Typer(
    help="Functional SPMD training on JAX: pure functions, parallelism from a config file.",
    cls=Commands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
config_app = typer.Typer(cls=Commands, help="Check, show and describe configs.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(bench.app, name="bench")


def _print_version(requested: bool) -> None:
    if requested:
        from spmdkit.foundation.version import __version__

        print(f"spmdkit {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Handles the options before a command."""


@app.command(epilog="Example: spmdkit train configs/linear_regression.yaml steps=50")
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    allow_change: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="Allow resuming even though this changed: seed, train_data, ..., checkpoints (they are missing).",
        ),
    ] = None,
    reset: Annotated[
        list[str] | None,
        typer.Option(metavar="PART", help="Initialize a part again on resume: opt_state, ema, or 'head/.*'"),
    ] = None,
) -> None:
    """Train a config, from its newest checkpoint or from the start."""
    from spmdkit.cluster import detect_cluster
    from spmdkit.run.evaluator import evaluate_each
    from spmdkit.run.loop import train as run

    with _failures_reported():
        loaded = _load(config, overrides)
        spec = detect_cluster(os.environ, loaded.cluster.environment)
        if spec.role == "evaluator":
            evaluate_each(loaded, spec)
            return
        run(loaded, allow_change=allow_change or (), reset=reset or ())


@contextmanager
def _failures_reported() -> Iterator[None]:
    """Context manager: a failure before the rendezvous is reported to the processes that wait in it. A launcher ends
    them itself."""
    try:
        yield
    except SpmdkitError as error:
        from spmdkit.cluster import detect_cluster, rendezvous

        if not rendezvous.has_begun() and ERROR_FILE not in os.environ:
            with suppress(SpmdkitError):
                spec = detect_cluster(os.environ)
                if spec.coordinator is not None and spec.num_processes > 1:
                    rendezvous.report_failure(spec, str(error))
        raise


@app.command(epilog="Example: spmdkit eval configs/linear_regression.yaml")
def eval(
    config: ConfigPath,
    overrides: Overrides = None,
    step: Annotated[
        int | None, typer.Option(help="Evaluate this step; default: the newest.", show_default=False)
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="Evaluate the best step by checkpoint.best.")] = False,
    initial: Annotated[
        bool, typer.Option("--initial", help="Evaluate the state before step 1, of init_from or init.")
    ] = False,
    set_: Annotated[
        str | None,
        typer.Option("--set", metavar="NAME", help="Evaluate one of several sets; default: all.", show_default=False),
    ] = None,
    json_: AsJson = False,
) -> None:
    """Evaluate the newest checkpoint of a config's run, the best one, that of a step, or the state before step 1."""
    from spmdkit.run.hooks.finite import check_evaluation
    from spmdkit.run.loop import evaluate as run

    one_state(step, best, initial, "eval")
    loaded, cluster = _join(config, overrides)
    step, values = run(loaded, cluster, step=step, best=best, initial=initial, name=set_)
    if cluster.is_main:
        plain = {name: x if isinstance(x, float) else x.tolist() for name, x in values.items()}  # arrays of sk.bincount
        if json_:
            print_json({"step": step, **plain})
        else:
            shown = (f"{name} {x:.6g}" if isinstance(x, float) else f"{name} {x}" for name, x in plain.items())
            echo(f"step {step} eval  " + "  ".join(shown))
    cluster.shutdown()
    check_evaluation(loaded, step, values)


@app.command(epilog="Example: spmdkit predict configs/digits_cnn.yaml --out digits.npz")
def predict(
    config: ConfigPath,
    out: Annotated[Path, typer.Option(metavar="FILE", help="New file: .npz (arrays by their paths), or .npy.")],
    overrides: Overrides = None,
    step: Annotated[int | None, typer.Option(help="Use this step; default: the newest.", show_default=False)] = None,
    best: Annotated[bool, typer.Option("--best", help="Use the best step by checkpoint.best.")] = False,
    initial: Annotated[bool, typer.Option("--initial", help="Use the state before step 1.")] = False,
    data: Annotated[str, typer.Option(help="eval_data or train_data.")] = "eval_data",
) -> None:
    """Write what Task.predict_fn returns for each row of a data set, in the order of the rows, from a checkpoint."""
    from spmdkit.run import prediction

    one_state(step, best, initial, "predict")
    prediction.check_out(out)
    loaded, cluster = _join(config, overrides)
    results = prediction.predict(loaded, data, step=step, best=best, initial=initial, cluster=cluster)
    if cluster.is_main:
        prediction.write(results, out)
        echo(out)
    cluster.shutdown()


@app.command(epilog="Example: spmdkit layout configs/fsdp.yaml")
def layout(config: ConfigPath, overrides: Overrides = None) -> None:
    """Show the sharding of each leaf of the train state, what was applied to the step, and why. Allocates nothing."""
    import dataclasses

    from spmdkit.mesh.layout import table
    from spmdkit.mesh.mesh import describe_mesh
    from spmdkit.run.loop import open_on_all_processes

    program = open_on_all_processes(*_join(config, overrides))
    print(f"mesh {describe_mesh(program.sizes)}, step compiled in the {program.form} form")
    notes = {f"params/{path}": f"; {text}" for path, text in program.leaf_notes.items()}
    leaves = [dataclasses.replace(leaf, reason=leaf.reason + notes.get(leaf.path, "")) for leaf in program.layout]
    echo("\n".join([*table(leaves), "", program.explain()]))


@app.command(epilog="Example: spmdkit explain configs/fsdp.yaml")
def explain(config: ConfigPath, overrides: Overrides = None) -> None:
    """Show what was applied to the step and why, and how rows enter the loss, metrics and model state. Compiles
    nothing."""
    from spmdkit.run.loop import open_on_all_processes

    echo(open_on_all_processes(*_join(config, overrides)).explain())


@app.command(epilog="Example: spmdkit plan configs/fsdp.yaml --target cpu:8")
def plan(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG",
            help=(
                "Config file (YAML); a plan.json to show; or train.py:make, a function make(devices) that returns a "
                "jitted step and its arguments."
            ),
            show_default=False,
        ),
    ],
    overrides: Overrides = None,
    target: Annotated[
        str | None,
        typer.Option(
            help=(
                "tpu:v5p:4x4x4, tpu:v5p:4x4x4*2 (two slices), v5p-256, gpu:h100:64, gpu:h200:8x8, a3-megagpu-8g:4, "
                "cpu:8 or here; several, comma-separated, give a table; default: the config's devices."
            )
        ),
    ] = None,
    save_compiled: Annotated[
        Path | None,
        typer.Option(help="Write the compiled step; train with compile_cache.saved=DIR starts from it.", metavar="DIR"),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=VALUES",
            help=(
                "Plan several values of a key: batch_size=32,64, task_args.context=1024,4096; the largest batch: "
                "batch_size=auto; scaling: devices=8,16,32 with a family as target, such as gpu:h100."
            ),
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the charts of a sweep (PNG, extra plot).", metavar="FILE")
    ] = None,
    tokens: Annotated[
        float | None,
        typer.Option(help="Length of a training run, such as 1e12: its time and price.", show_default=False),
    ] = None,
    prices: Annotated[
        Path | None, typer.Option(help="Prices of chips (YAML) that replace spmdkit's list prices.", metavar="FILE")
    ] = None,
    json_: AsJson = False,
    html: Annotated[Path | None, typer.Option(help="Also write the plan as an HTML page.", metavar="FILE")] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(help="Also write a timeline of the longest loop, JSON for ui.perfetto.dev.", metavar="FILE"),
    ] = None,
    search: Annotated[bool, typer.Option("--search", help="Search for the fastest mesh that fits.")] = False,
    search_over: Annotated[
        str,
        typer.Option(
            help="What the search varies, comma-separated: mesh, context, expert, pipeline, batch, microbatches, "
            "remat, zero, offload, precision, attention, scan, compiler."
        ),
    ] = "mesh",
    compile: Annotated[int, typer.Option(help="Number of candidates to compile.")] = 8,
    write: Annotated[Path | None, typer.Option(help="Write the best config.", metavar="FILE")] = None,
    diff: Annotated[
        Path | None,
        typer.Option(help="Another config or plan.json: show the differences from CONFIG to it.", metavar="OTHER"),
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="First measure this machine; later plans use the measurements too.")
    ] = False,
) -> None:
    """Predict the cost of a config: memory, bytes sent, step time. Runs nothing; the target machine need not be
    available."""
    from spmdkit.plan.command import PlanOptions, run_plan

    options = PlanOptions(
        target=target,
        as_json=json_,
        html=html,
        timeline=timeline,
        calibrate=calibrate,
        search=search,
        search_over=search_over,
        compile=compile,
        write=write,
        diff=diff,
        save_compiled=save_compiled,
        sweep=sweep,
        plot=plot,
        tokens=tokens,
        prices=prices,
    )
    run_plan(config, overrides or [], options)


@app.command(epilog="Example: spmdkit tune configs/linear_regression.yaml --seconds 60")
def tune(
    config: ConfigPath,
    overrides: Overrides = None,
    seconds: Annotated[float, typer.Option(help="Time limit of the search.")] = 300.0,
    target: Annotated[
        str | None,
        typer.Option(help="A machine that is not at hand, as for plan: compares predicted times.", show_default=False),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(help="File of the best config; default: NAME_tuned.yaml next to CONFIG.", metavar="FILE"),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure although a result is stored.")] = False,
    json_: AsJson = False,
) -> None:
    """Find settings that make the step faster and keep its loss and gradient: microbatches, remat, attention tiles,
    prefetch, stacked layers, compiler options. Measured on the devices at hand."""
    from spmdkit.tools.tune.command import TuneOptions, run_tune

    options = TuneOptions(seconds=seconds, target=target, write=write, again=again, as_json=json_)
    run_tune(_load(config, overrides), options)


@app.command(epilog="Example: spmdkit verify configs/linear_regression.yaml --microbatches 1,2")
def verify(
    config: ConfigPath,
    overrides: Overrides = None,
    all_meshes: Annotated[bool, typer.Option("--all", help="Try every mesh of the devices.")] = False,
    microbatches: Annotated[
        str | None, typer.Option(help="Numbers to test, as 1,2,4. Default: 1 and the config's.")
    ] = None,
    devices: Annotated[int | None, typer.Option(help="Fake devices. Default: the config's, or 8.")] = None,
    max_axis: Annotated[int, typer.Option(help="Largest axis of --all.")] = 4,
    steps: Annotated[int, typer.Option(help="Steps before the parameters are compared.")] = 3,
    float64: Annotated[bool, typer.Option("--float64", help="Compute in 64 bits.")] = False,
    mutants: Annotated[bool, typer.Option(help="Also check that injected bugs are detected.")] = True,
    jobs: Annotated[int, typer.Option(help="Processes.")] = 2,
    resume: Annotated[Path | None, typer.Option(help="File of finished cases, which are not run again.")] = None,
    locate: Annotated[bool, typer.Option("--locate", help="Report the first differing line for mutants too.")] = False,
    html: Annotated[Path | None, typer.Option(help="Also write the report as an HTML page.", metavar="FILE")] = None,
    json_: AsJson = False,
) -> None:
    """Check that each mesh computes what one device does: loss, gradient, update, evaluation. Exit code 0 or 1."""
    from spmdkit.verify.report import VerifyOptions, run_verify

    options = VerifyOptions(
        all_meshes=all_meshes,
        devices=devices,
        max_axis=max_axis,
        microbatches=microbatches,
        steps=steps,
        float64=float64,
        jobs=jobs,
        mutants=mutants,
        batch_size_given=any(text.partition("=")[0].strip() == "batch_size" for text in overrides or []),
        resume=resume,
        locate=locate,
    )
    raise SystemExit(run_verify(_load(config, overrides), options, as_json=json_, html=html))


app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Example: spmdkit launch -n 2 -- train configs/linear_regression.yaml devices=cpu:2",
)(launch.launch)


@app.command(epilog="Example: spmdkit drill configs/linear_regression.yaml devices=cpu:2 --fault kill:1@20")
def drill(
    config: ConfigPath,
    overrides: Overrides = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND:PROCESS@WHEN",
            help=(
                "kill stop term hang slow nan bit-flip truncate corrupt disk-full service object-store clock memory, "
                "and as root on Linux partition partition-send partition-peer delay loss rate (of the network), of a "
                "process or random, at a step (120), in a phase (import restore data step hook evaluation save end), "
                "after seconds (30s) or random."
            ),
        ),
    ] = None,
    kill: Annotated[list[str] | None, typer.Option(metavar="PROCESS@WHEN", help="Short for --fault kill:...")] = None,
    num: Annotated[int, typer.Option("-n", help="Processes on this machine.")] = 2,
    devices_per_process: Annotated[int | None, typer.Option(help="Devices of each process.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of random choices.")] = 0,
    count: Annotated[int, typer.Option(help="Number of injections of each fault.")] = 1,
    matrix: Annotated[
        bool,
        typer.Option(
            "--matrix", help="Every kind of fault in every phase, with 1, 2 and 4 processes; continues a stopped one."
        ),
    ] = False,
    cells: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Cells of --matrix, for example 'kill@*/2'.")
    ] = None,
    json_: AsJson = False,
) -> None:
    """Inject faults into a job on this machine, and measure detection, recovery and repeated work. Exit code 0 or 1."""
    from spmdkit.tools.drill.command import run_drill
    from spmdkit.tools.drill.job import DrillRequest
    from spmdkit.tools.drill.matrix import run_matrix

    faults = [*(fault or []), *(f"kill:{text}" for text in kill or [])]
    requested = DrillRequest(config, overrides or [], faults, num, devices_per_process, seed, count, json_)
    raise SystemExit(run_matrix(requested, cells or ()) if matrix else run_drill(requested))


@app.command(epilog="Example: spmdkit report runs/first")
def report(run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory.")]) -> None:
    """Write report.html of a run."""
    from spmdkit.metrics.report.run import write_report

    echo(write_report(run_dir))


@app.command(epilog="Example: spmdkit profile runs/first")
def profile(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory.")],
    top: Annotated[int, typer.Option(min=1, help="Number of operations.")] = 15,
    json_: AsJson = False,
) -> None:
    """Summarize a run's profiler trace: top operations with their lines, collectives, exposed communication."""
    from spmdkit.tools.profile import print_summary, summarize

    summary = summarize(run_dir, top)
    if json_:
        print_json(summary)
    else:
        print_summary(summary)


@app.command(epilog="Example: spmdkit watch runs/first")
def watch(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory.")],
    every: Annotated[float, typer.Option(help="Seconds between two looks at the files.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the current state and exit.")] = False,
) -> None:
    """Show a run in the terminal until it ends. Only reads files."""
    from spmdkit.tools.watch import watch as run

    run(run_dir, every, once)


@app.command(epilog="Example: spmdkit sweep configs/linear_regression.yaml learning_rate=0.05,0.1 steps=50")
def sweep(
    config: ConfigPath,
    values: Annotated[list[str], typer.Argument(metavar="KEY=VALUES...", help="Values of a key, by commas.")],
    max_parallel: Annotated[int, typer.Option(help="Processes at a time.")] = 1,
    json_: AsJson = False,
) -> None:
    """Train every combination of some values, a process for each run. The same command continues a sweep."""
    from spmdkit.tools.sweep import print_table, run_sweep

    rows = run_sweep(config, values, max_parallel)
    if json_:
        print_json({"runs": rows})
    else:
        print_table(rows)
    raise SystemExit(next((row["exit_code"] for row in rows if row["exit_code"]), 0))


@app.command(epilog="Example: spmdkit new digits")
def new(name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the new folder.")]) -> None:
    """Write a task, a config and a test into a new folder."""
    from spmdkit.tools.new import write_project

    echo(write_project(name))


@app.command(epilog="Example: spmdkit migrate ds_config.json --devices 8 > config.yaml")
def migrate(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="An accelerate YAML, a DeepSpeed JSON or a MaxText YAML.")
    ],
    project: Annotated[
        str | None,
        typer.Option(help="accelerate, deepspeed or maxtext; default: detected from the settings.", show_default=False),
    ] = None,
    devices: Annotated[int, typer.Option(help="Number of devices of the job, for sizes per device.")] = 1,
    accept_lost: Annotated[bool, typer.Option("--accept-lost", help="Exit code 0 although settings are lost.")] = False,
) -> None:
    """Print the config of another project as an spmdkit config, with a line for each setting: lost (changes training),
    mapped or automatic. Exit code 1 if one is lost, or if the config is not accepted yet."""
    from spmdkit.tools.migrate import migrate as run

    migrated = run(file, project, devices)
    print(migrated.text, end="")
    if migrated.lost and not accept_lost:
        found = f"{len(migrated.lost)} setting(s) change training"
        repair = "The top of the config lists them with the repairs. Set them by hand, or accept it with --accept-lost."
        names = ", ".join(migrated.lost)
        print(visible(f"migrate {file}: {found} and have no counterpart: {names}. {repair}"), file=sys.stderr)
    if migrated.problem:
        print(visible(f"migrate {file}: the config is not accepted yet: {migrated.problem}"), file=sys.stderr)
    raise SystemExit(int(bool(migrated.problem) or (bool(migrated.lost) and not accept_lost)))


@app.command(epilog="Example: spmdkit doctor --burn-in 5s")
def doctor(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="[CONFIG]", help="Also checks its run directory and mesh.", show_default=False),
    ] = None,
    overrides: Overrides = None,
    burn_in: Annotated[
        str | None,
        typer.Option(metavar="TIME", help=("Duration for which all devices compute the same products: 30s, 5m.")),
    ] = None,
    start: Annotated[
        bool, typer.Option("--start", help="Print how each second of a start of train is spent, to its first step.")
    ] = False,
    json_: AsJson = False,
) -> None:
    """Describe the machines and check their health; exit code 1 if a check fails. Also under launch."""
    from spmdkit.tools.doctor import examine, examine_start

    if start:
        raise SystemExit(examine_start(config, overrides or [], as_json=json_))
    raise SystemExit(examine(_load(config, overrides) if config else None, burn_in, as_json=json_))


@config_app.command("check", epilog="Example: spmdkit config check configs/linear_regression.yaml")
def config_check(config: ConfigPath, overrides: Overrides = None) -> None:
    """Check a config without touching a device or importing the task."""
    _load(config, overrides)
    echo(f"{config}: ok")


@config_app.command("show", epilog="Example: spmdkit config show configs/linear_regression.yaml steps=50")
def config_show(
    config: ConfigPath,
    overrides: Overrides = None,
    origin: Annotated[
        bool, typer.Option("--origin", help="Print each setting as key=value, with the file and line that set it.")
    ] = False,
) -> None:
    """Print the resolved config with every default."""
    from spmdkit.config import origins, to_yaml

    loaded = _load(config, overrides)
    if not origin:
        print(to_yaml(loaded), end="")
        return
    rows = origins(loaded)
    width = min(60, max(len(text) for text, _ in rows))
    echo("\n".join(f"{text:{width}}  # {place}" for text, place in rows))


@config_app.command("schema", epilog="Example: spmdkit config schema > schema.json")
def config_schema() -> None:
    """Print the JSON schema of a config, for editors: # yaml-language-server: $schema=schema.json"""
    from spmdkit.config.editor_schema import editor_schema

    print(json.dumps(editor_schema(), indent=1))


def _load(path: Path, overrides: list[str] | None) -> Config:
    from spmdkit.config import load_config

    return load_config(path, overrides or [])


def _join(path: Path, overrides: list[str] | None) -> tuple[Config, Cluster]:
    """Returns the checked config and the joined processes. The config is checked before processes wait for each
    other."""
    from spmdkit.cluster import detect_cluster, join

    config = _load(path, overrides)
    spec = detect_cluster(os.environ, config.cluster.environment)
    return config, join(spec, config.devices, interface=config.cluster.interface)


@functools.cache
def _command() -> Any:
    """Returns the parser of all commands. It takes 20 ms to build, and a process may run several commands."""
    return typer.main.get_command(app)


def main(arguments: list[str] | None = None) -> Any:
    """Runs the command line, and returns or exits with the exit code. Files that it writes are not world-readable."""
    os.umask(os.umask(0o077) | 0o027)
    return run_process(lambda: _command()(arguments, prog_name="spmdkit"))
