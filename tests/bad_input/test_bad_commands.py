"""The other commands: eval, report, checkpoint, launch, layout, config, and what typer says by itself."""

import pytest

NEVER_TRAINED = {
    "eval without a checkpoint": (79, ("eval", "run.yaml"), ("run/checkpoints holds no checkpoint. Evaluation needs one. Train first: spmdkit train",)),
    "report of no run": (78, ("report", "."), ("report of .: no metrics.jsonl there, found 2 other entries. A report is made from a run's", "the run_dir of the config that was trained (by default runs/<config name> beside it).")),
    "report of nothing": (78, ("report", "nowhere"), ("report of nowhere: no metrics.jsonl there, found no such folder. A report is made from a run's", "the run_dir of the config that was trained (by default runs/<config name> beside it).")),
    "checkpoints of nothing": (78, ("checkpoint", "ls", "nowhere"), ("nowhere is no directory. Give a run's directory, which holds checkpoints/.",)),
    "inspect what is not there": (79, ("checkpoint", "inspect", "."), ("a checkpoint was asked for, but . holds none. A checkpoint is a folder named by its step with a record.json in it. Train first, or name the checkpoints folder of another run.",)),
    "export what is not there": (79, ("checkpoint", "export", ".", "out.safetensors"), ("a checkpoint was asked for, but", "with a record.json in it. Train first, or name the checkpoints folder of another run.")),
    "launch nothing": (78, ("launch", "-n", "2"), ("launch: nothing to run. The command follows two dashes. Try spmdkit launch -n 2 -- train CONFIG.",)),
    "launch nothing after the dashes": (78, ("launch", "-n", "2", "--"), ("launch: nothing to run. The command follows two dashes. Try spmdkit launch -n 2 -- train CONFIG.",)),
    "launch no process": (78, ("launch", "-n", "0", "--", "train", "run.yaml"), ("launch -n 0: at least one process is needed. Try -n 2.",)),
    "launch processes without devices": (78, ("launch", "-n", "2", "--devices-per-process", "0", "--", "train", "run.yaml"), ("--devices-per-process 0: at least one device. Try 1.",)),
    "check a config": (78, ("config", "check", "run.yaml", "stepps=3"), ("override stepps=3: stepps: unknown key. Did you mean 'steps'?",)),
    "show a config": (78, ("config", "show", "run.yaml", "mesh.dtaa=3"), ("override mesh.dtaa=3: mesh.dtaa: unknown key. Did you mean 'data'?",)),
    "layout of a config": (78, ("layout", "run.yaml", "mesh={data: 2}"), ("mesh needs data(2) = 2 devices, found 4. The product must equal the device count. Try data: 4, or data: -1 to fill.",)),
}  # fmt: skip

TRAINED = {
    "eval without data": (78, ("eval", "run.yaml"), ("evaluation needs data: the task has no eval_data. Give Task(eval_data=...).",)),
    "eval of another model": (79, ("eval", "run.yaml", "ema=0.5"), ("run/checkpoints/2 into this task's state: 2 leaves differ (saved 4, asked 6).", "it (it is in the checkpoint's record), or set run_dir to a new folder to start anew.")),
    "inspect a step that is not there": (79, ("checkpoint", "inspect", "run", "--step", "7"), ("step 7 was asked for, but run/checkpoints has steps 2. A checkpoint is a folder named by its step with a record.json in it. Ask for step 2.",)),
    "export over a file": (78, ("checkpoint", "export", "run", "task.py"), ("task.py: it exists. Nothing is overwritten. Choose another name or remove it.",)),
    "export in an unknown format": (78, ("checkpoint", "export", "run", "out", "--format", "safetensor"), ("export knows safetensors, orbax, not 'safetensor'. Did you mean 'safetensors'?",)),
    "export of what was not kept": (79, ("checkpoint", "export", "run", "out", "--which", "ema"), ("export of ema from", "it holds params, rng, step, no ema. Set ema in the config to keep averaged parameters.")),
    "export below a file": (74, ("checkpoint", "export", "run", "task.py/out"), ("task.py/out failed (FileExistsError: [Errno 17] File exists: '", "Its folder must be writable and have room for the parameters. Choose another place.")),
}  # fmt: skip

TYPER = {
    "unknown command": (("trian", "run.yaml"), "No such command 'trian'"),
    "unknown option": (("train", "--fast", "run.yaml"), "No such option: --fast"),
    "no config": (("train",), "Missing argument 'CONFIG'"),
    "a step that is no number": (("checkpoint", "inspect", "run", "--step", "last"), "Invalid value for '--step'"),
}


@pytest.mark.parametrize("name", NEVER_TRAINED)
def test_a_command_where_nothing_was_trained(name, empty):
    code, command, says = NEVER_TRAINED[name]
    empty.write()
    empty.fails(code, *says, command=command)


@pytest.mark.parametrize("name", TRAINED)
def test_a_command_where_something_was_trained(name, folder):
    code, command, says = TRAINED[name]
    folder.write()
    folder.fails(code, *says, command=command)


@pytest.mark.parametrize("name", TYPER)
def test_a_command_that_does_not_exist(name, empty):
    command, says = TYPER[name]
    empty.fails(2, says, "Try 'spmdkit", command=command)


def test_the_version_is_printed(empty, capfd):
    import spmdkit

    assert empty.leaves("--version") == 0
    assert capfd.readouterr().out == f"spmdkit {spmdkit.__version__}\n"
