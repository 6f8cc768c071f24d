"""The other commands: eval, report, checkpoint, launch, layout, config, and messages of typer. Each mistake has a
repair: commands that end with 0."""

import shlex

import pytest

from tests.bad_input.repairs import COMMANDS, EVALUATED, PREDICTED
from tests.support.messages import Parts

NEVER_TRAINED = {
    "eval without a checkpoint": (79, ("eval", "run.yaml"), Parts(requested="run/checkpoints", found="no checkpoint", rule="Evaluation needs one", repair="spmdkit train")),
    "eval of two states": (78, ("eval", "run.yaml", "--best", "--initial"), Parts(requested="eval", found="--best and --initial", rule="Each selects a state", repair="Omit one")),
    "weights that are not there": (78, ("train", "run.yaml", "init_from=m.safetensors"), Parts(requested="m.safetensors", found="does not exist", rule="relative to the config's folder", repair="Correct it")),
    "weights of no run": (79, ("train", "run.yaml", "init_from=."), Parts(requested="a checkpoint is requested", found="holds none", rule="a record.json in it", repair="Train first")),
    "weights of torch": (78, ("train", "run.yaml", "init_from={file: m.bin}"), Parts(requested="init_from.file", found="'m.bin'", rule=".safetensors", repair="Convert the file")),
    "two sources of weights": (78, ("train", "run.yaml", "init_from={file: m.safetensors, path: run}"), Parts(requested="init_from", found="both", rule="one source", repair="init_from: runs/first@best")),
    "an unknown part of a run": (78, ("train", "run.yaml", "init_from={path: run, what: [parms]}"), Parts(requested="init_from.what", found="'parms'", rule="'params', 'opt_state'", repair="'params'")),
    "a config that is not there": (78, ("train", "nowhere.yaml"), Parts(requested="nowhere.yaml", found="no such file")),
    "report of no run": (78, ("report", "."), Parts(requested="report of .", found=("no metrics.jsonl", "found 2 other entries"), rule="a run's", repair="run_dir")),
    "report of nothing": (78, ("report", "nowhere"), Parts(requested="report of nowhere", found=("no metrics.jsonl", "found no such folder"), rule="a run's", repair="run_dir")),
    "checkpoints of nothing": (78, ("checkpoint", "ls", "nowhere"), Parts(requested="nowhere", found="not a directory", repair="checkpoints/")),
    "inspect what is not there": (79, ("checkpoint", "inspect", "."), Parts(requested="a checkpoint is requested", found="holds none", rule="a record.json in it", repair="Train first")),
    "launch nothing": (78, ("launch", "-n", "2"), Parts(requested="launch", found="nothing to run", rule="two dashes", repair="spmdkit launch -n 2 -- train CONFIG")),
    "launch no process": (78, ("launch", "-n", "0", "--", "train", "run.yaml"), Parts(requested="launch -n 0", rule="at least one process", repair="-n 2")),
    "launch processes without devices": (78, ("launch", "-n", "2", "--devices-per-process", "0", "--", "train", "run.yaml"), Parts(requested="--devices-per-process 0", rule="at least one device", repair="Try 1")),
    "show a config": (78, ("config", "show", "run.yaml", "mesh.dtaa=3"), Parts(requested="override mesh.dtaa=3: mesh.dtaa:", found="unknown key", repair="'data'")),
    "layout of a config": (78, ("layout", "run.yaml", "mesh={data: 2}"), Parts(requested="mesh needs data(2) = 2 devices", found="found 4", rule="equal the device count", repair="data: 4, or data: -1")),
}  # fmt: skip

TRAINED = {
    "eval without data": (78, ("eval", "run.yaml"), Parts(requested="evaluation needs data", found="no eval_data", repair="Task(eval_data=...)")),
    "eval of another model": (79, ("eval", "run.yaml", "ema=0.5"), Parts(requested="run/checkpoints/2 into", found="2 leaves differ (saved 4, requested 6)", repair=("checkpoint's record", "set run_dir"))),
    "inspect a step that is not there": (79, ("checkpoint", "inspect", "run", "--step", "7"), Parts(requested="step 7", found="run/checkpoints has steps 2", rule="a record.json in it", repair="step 2.")),
    "export over a file": (78, ("checkpoint", "export", "run", "task.py"), Parts(requested="task.py", found="exists", rule="Nothing is overwritten", repair="another name")),
    "export in an unknown format": (78, ("checkpoint", "export", "run", "out", "--format", "safetensor"), Parts(requested="'safetensor'", rule="safetensors, orbax", repair="Did you mean 'safetensors'")),
    "export of nothing": (78, ("checkpoint", "export", "run"), Parts(requested="checkpoint export", rule="nothing to write", repair="Name OUT, --stablehlo FILE")),
    "export of a task without its run": (78, ("checkpoint", "export", "run/checkpoints", "--stablehlo", "out"), Parts(requested="checkpoint export run/checkpoints", found="no config.yaml", rule="names the task", repair="Pass a run's directory")),
    "export of no predict_fn": (78, ("checkpoint", "export", "run", "--stablehlo", "out"), Parts(requested="checkpoint export --stablehlo", found="the task has none", repair="Task(predict_fn=...)")),
    "export of two steps": (78, ("checkpoint", "export", "run", "out", "--best", "--step", "2"), Parts(requested="--step 2 and --best", rule="Each selects a state", repair="Omit one")),
    "export of what was not kept": (79, ("checkpoint", "export", "run", "out", "--what", "ema"), Parts(requested="export of ema", found=("params, rng, step", "no ema"), repair="Set ema")),
    "export below a file": (74, ("checkpoint", "export", "run", "task.py/out"), Parts(requested="task.py/out", found="FileExistsError: [Errno 17]", rule="writable", repair="another path")),
}  # fmt: skip

TYPER = {
    "unknown command": (("trian", "run.yaml"), "No such command 'trian'"),
    "unknown option": (("train", "--fast", "run.yaml"), "No such option: --fast"),
    "a setting as an option": (
        ("train", "run.yaml", "--batch-size", "16"),
        "No such option: --batch-size. Settings of a config are set as batch_size=16",
    ),
    "a setting of a section as an option": (("config", "show", "run.yaml", "--mesh.data=2"), "are set as mesh.data=2"),
    "no config": (("train",), "Missing argument 'CONFIG'"),
    "a step that is no number": (("checkpoint", "inspect", "run", "--step", "last"), "Invalid value for '--step'"),
}


PREDICT = "def predict_fn(params, batch): return batch['x'] @ params['w']"


def repair(folder, name):
    """Asserts that the repaired commands end with 0 in a folder with a trained run."""
    folder.write(PREDICT, PREDICTED if "--stablehlo" in COMMANDS[name][0] else EVALUATED)
    folder.stop_before_training(is_new=True)
    for command in COMMANDS[name]:
        folder.repair([], shlex.split(command), "trained")


@pytest.mark.parametrize("name", NEVER_TRAINED)
def test_a_command_where_nothing_was_trained(name, empty, trained):
    code, command, assert_parts = NEVER_TRAINED[name]
    empty.write()
    empty.fails(code, assert_parts, command=command)
    empty.copy_run(trained)
    repair(empty, name)


@pytest.mark.parametrize("name", TRAINED)
def test_a_command_where_something_was_trained(name, folder):
    code, command, assert_parts = TRAINED[name]
    folder.write()
    folder.fails(code, assert_parts, command=command)
    repair(folder, name)


@pytest.mark.parametrize("name", TYPER)
def test_a_command_that_does_not_exist(name, folder):
    command, assert_parts = TYPER[name]
    folder.fails(2, Parts(found=assert_parts, repair="Try 'spmdkit"), command=command)
    repair(folder, name)


def test_each_command_is_repaired():
    assert COMMANDS.keys() == {**NEVER_TRAINED, **TRAINED, **TYPER}.keys()


@pytest.mark.parametrize("command", [(), ("train",), ("checkpoint", "ls"), ("launch",)])
def test_h_is_help(command, empty, capfd):
    assert empty.leaves(*command, "-h") == 0
    assert f"Usage: spmdkit {' '.join(command)}".strip() in capfd.readouterr().out


def test_the_version_is_printed(empty, capfd):
    import spmdkit

    assert empty.leaves("--version") == 0
    assert capfd.readouterr().out == f"spmdkit {spmdkit.__version__}\n"
