"""Every bad config gives exit code 78 and one message with its line, its key, what was found and a repair."""

import pytest

from spmdkit.config import load_config
from spmdkit.errors import ConfigError

# (the lines after `task: my_task.py:task`, which is line 1; what the message has to say)
BAD = {
    "unknown key": ("stepps: 3", ":2: stepps: unknown key. Did you mean 'steps'?"),
    "unknown key far from all": ("zzzz: 3", ":2: zzzz: unknown key. The keys of a config are task, task_args,"),
    "unknown key of a section": ("mesh:\n  data: 2\n  dtaa: 4", ":4: mesh.dtaa: unknown key. Did you mean 'data'?"),
    "unknown key three deep": (
        "eval: {every_steps: 1}\ncheckpoint:\n  best: {metrik: loss, mode: min}",
        ":4: checkpoint.best.metrik: unknown key. Did you mean 'metric'?",
    ),
    "key of another section": ("every_steps: 5", ":2: every_steps: unknown key. Did you mean checkpoint.every_steps or"),
    "key of the top level in a section": ("log: {seed: 5}", ":2: log.seed: unknown key. Did you mean seed at the top level?"),
    "missing key of a section": ("profile: {steps: 2}", ":2: profile.start: is missing: first step that is traced"),
    "quoted number": ('\nsteps: "10"', ":3: steps: needs a whole number of at least 1, found '10' (text). Write steps: 10, wi"),
    "number with underscore": ("steps: 1_000", ":2: steps: needs a whole number of at least 1, found '1_000' (text). Write steps: 1000"),
    "float for int": ("batch_size: 64.0", "found 64.0 (a number). Write batch_size: 64."),
    "half for int": ("batch_size: 6.5", ":2: batch_size: needs a whole number of at least 1, found 6.5 (a number). Try batch_size: 32."),
    "quoted half for int": ("steps: '6.5'", ":2: steps: needs a whole number of at least 1, found '6.5' (text). Try steps: 100."),
    "true for int": ("microbatches: true", ":2: microbatches: needs a whole number of at least 1, or auto, found true. Try microbatches: 1."),
    "list for int": ("steps: [1, 2]", ":2: steps: needs a whole number of at least 1, found [1, 2] (a list). Try steps: 100."),
    "null for int": ("steps: null", ":2: steps: needs a whole number of at least 1, found null. Remove steps to get its default."),
    "zero steps": ("steps: 0", ":2: steps: needs a whole number of at least 1, found 0 (a whole number). Try steps: 1."),
    "huge steps": ("steps: 99999999999", "found 99999999999 (a whole number). It must be at most 2147483647."),
    "negative seed": ("seed: -1", ":2: seed: needs a whole number from 0 to 4294967295, found -1 (a whole number). Try seed: 0."),
    "huge seed": ("seed: 4294967296", "found 4294967296 (a whole number). It must be at most 4294967295. Try seed: 4294967295."),
    "yes for a flag": ("data: {shuffle: yes}", ":2: data.shuffle: needs true or false, found 'yes' (text). Write shuffle: true."),
    "0 for a flag": ("log: {tensorboard: 0}", "log.tensorboard: needs true or false, found 0 (a whole number). Write tensorboard: false."),
    "false for off": ("layout: {fsdp: false}", ":2: layout.fsdp: needs auto or off, found false. Write fsdp: off."),
    "near choice": ("data: {remainder: dropp}", "data.remainder: needs drop or mask, found 'dropp' (text). Did you mean 'drop'?"),
    "far choice": ("on_nonfinite: ignore", ":2: on_nonfinite: needs stop or continue, found 'ignore' (text). Try on_nonfinite: stop."),
    "zero out of range": ("layout: {zero: 4}", ":2: layout.zero: needs 1, 2 or 3, found 4 (a whole number). Try zero: 3."),
    "section is a number": ("mesh: 8", ":2: mesh: needs a mapping with keys out of replica, data, fsdp,"),
    "section is null": ("eval: null", "found null. Remove eval to get its default."),
    "section without value": ("checkpoint:", ":2: checkpoint has no value. Write one after it, or null, or remove the key."),
    "axis 0": ("mesh: {data: 0}", "mesh.data: needs a whole number of at least 1, or -1 for what is left, or null, found 0"),
    "axis -2": ("mesh: {fsdp: -2}", "-1 takes the devices that the other axes leave. Try fsdp: -1."),
    "two -1": ("mesh: {data: -1, fsdp: -1}", ":2: mesh.fsdp: is -1, and so is mesh.data. Only one axis can take"),
    "cpu without number": ("devices: cpu", ":2: devices: needs auto, cpu:N or a list of local device indices, found 'cpu' (text)."),
    "cpu:0": ("devices: cpu:0", "N is from 1 to 4096. Did you mean 'cpu:8'?"),
    "device twice": ("devices: [0, 0]", ":2: devices: needs auto, cpu:N or a list of local device indices, found [0, 0] (a list). An index"),
    "rule that is no pair": ("layout:\n  rules:\n    - [a, [null]]\n    - [b]", ":5: layout.rules[1]: needs a pair [path pattern,"),
    "rule with a bad pattern": ('layout: {rules: [["a(", [null]]]}', "layout.rules[0]: needs a pair"),
    "rule with an unknown axis": ("layout: {rules: [[w, [embed, dtaa]]]}", ":2: layout.rules[0][1][1]: unknown axis 'dtaa'. Did you mean 'data'?"),
    "same rule twice": ("layout: {rules: [[w, [embed]], [w, [mlp]]]}", ":2: layout.rules[1]: has the pattern 'w' (text) of rule [0]."),
    "logical axis on no mesh axis": ("layout: {axes: {mlp: tensr}}", ":2: layout.axes.mlp: needs mesh axes, out of replica, data, fsdp, expert, context, tensor, pipeline, found 'tensr' (text). Did you mean 'tensor'?"),
    "logical axis on one mesh axis twice": ("layout: {axes: {mlp: [data, data]}}", "found ['data', 'data'] (a list). An axis is given twice."),
    "zero without fsdp": ("layout: {zero: 1}", ":2: layout.zero: is 1, and the mesh has no fsdp axis, so it has no effect."),
    "fsdp off without fsdp": ("layout: {fsdp: off}", ":2: layout.fsdp: is off, and the mesh has no fsdp axis, so it has no effect."),
    "min_shard_bytes with fsdp off": (
        "mesh: {fsdp: 8}\nlayout: {fsdp: off, min_shard_bytes: 0}",
        ":3: layout.min_shard_bytes: is 0, and layout.fsdp is off, so it has no effect.",
    ),
    "pipeline without its axis": ("pipeline: {schedule: gpipe}", ":2: pipeline.schedule: is gpipe, and the mesh has no pipeline axis, so it has no effect."),
    "unknown schedule of a pipeline": ("mesh: {pipeline: 2}\npipeline: {schedule: 1fb}", ":3: pipeline.schedule: needs gpipe, 1f1b or interleaved, found '1fb' (text). Did you mean '1f1b'?"),
    "chunks without interleaved": ("mesh: {pipeline: 2}\npipeline: {chunks: 2}", ":3: pipeline.chunks: is 2, and pipeline.schedule is 1f1b, whose stages hold one chunk each."),
    "one chunk": ("mesh: {pipeline: 2}\npipeline: {schedule: interleaved, chunks: 1}", ":3: pipeline.chunks: is 1: interleaved with one chunk per stage is 1f1b. Try chunks: 2"),
    "stages' microbatches that do not divide": (
        "mesh: {pipeline: 2, data: 2}\nmicrobatches: 2\npipeline: {microbatches: 3}\nbatch_size: 32",
        ":5: batch_size: is 32; the mesh cuts a batch into data(2) = 2 and microbatches into 2 and pipeline.microbatches into 3, found a rest of 8. batch_size is a multiple of 12. Try batch_size: 24 or 36.",
    ),
    "stages' microbatches alone": ("mesh: {pipeline: 2}\npipeline: {microbatches: 3}\nbatch_size: 32", "the mesh cuts a batch into 1 and pipeline.microbatches into 3"),
    "attention misspelt": ("attention: {implementation: cudn}", ":2: attention.implementation: needs auto, xla, cudnn or splash, found 'cudn' (text). Did you mean 'cudnn'?"),
    "all-to-all without context": ("attention: {context: all_to_all}", ":2: attention.context: is all_to_all, and the mesh has no context axis, so it has no effect."),
    "order without context": ("mesh: {tensor: 2}\nattention: {order: contiguous}", ":3: attention.order: is contiguous, and the mesh has no context axis, so it has no effect."),
    "order of the all-to-all form": (
        "mesh: {context: 2}\nattention: {context: all_to_all, order: contiguous}",
        ":3: attention.order: is contiguous, and attention.context is all_to_all, which always keeps neighbours together",
    ),
    "placement": ("placement: {optimizer: cpu}", ":2: placement.optimizer: needs device or host, found 'cpu' (text). Try optimizer: device."),
    "unknown reducer": ("reducer: sums", ":2: reducer: needs one of sum, found 'sums' (text). Did you mean 'sum'?"),
    "reducer with options": ("reducer: {sum: {bits: 8}}", ":2: reducer.sum: takes no options, found {'bits': 8} (a mapping). Write reducer: sum."),
    "unknown sync": ("sync: {local_sgd: {every: 16}}", ":2: sync: needs one of every_step, found 'local_sgd' (text)."),
    "sync is a list": ("sync: [every_step]", ":2: sync: needs a name, or a mapping of one name to its options, found ['every_step'] (a list)."),
    "float16": ("precision: float16", "float16 needs loss scaling, which is not built. bfloat16 has float32's range"),
    "float16 in a mapping": ("precision: {compute: float16}", ":2: precision.compute: needs float32, bfloat16 or float64, found 'float16' (text). float16 needs loss"),
    "precision misspelt": ("precision: bflot16", "found 'bflot16' (text). Did you mean 'bfloat16'?"),
    "remat misspelt": ("remat: dot", ":2: remat: needs none, full, dots, dots_no_batch, auto or a mapping {save: [names], offload: [names]}, found 'dot' (text). Did you mean 'dots'?"),
    "remat names nothing": ("remat: {}", ":2: remat: names nothing to keep, and is then full. Write remat: full, or save: [attention]."),
    "remat saves and offloads": ("remat: {save: [a, b], offload: [b]}", ":2: remat.offload[0]: is 'b', and remat.save has it too. A value is kept on the device or on the host. Remove one."),
    "remat offloads twice": ("remat: {offload: [b, b]}", ":2: remat.offload[1]: is 'b' a second time. Remove it."),
    "remat saves nothing": ("remat: {save: []}", ":2: remat.save: needs a list of at least one name, found [] (a list). Try save: [attention]."),
    "remat saves a number": ("remat: {save: [a, 3]}", ":2: remat.save[1]: needs text that is not empty, found 3 (a whole number). Write save: '3', in quotes."),
    "model state group 0": ("model_state: {group: 0}", ":2: model_state.group: needs a whole number of at least 1, found 0"),
    "model state misspelt": ("model_state: globl", "found 'globl' (text). Did you mean 'global'?"),
    "optimizer is a name": ("optimizer: adamw", "found 'adamw' (text). Try optimizer: {name: adamw}."),
    "optimizer without name": ("optimizer: {b1: 0.9}", ":2: optimizer: needs the name of an optax optimizer, found no key name. Try {name: adamw}."),
    "unknown optimizer": ("optimizer:\n  name: adamv\n  learning_rate: 1", ":3: optimizer.name: needs an optax optimizer, found 'adamv' (text). Did you mean 'adam"),
    "optimizer that a config cannot name": ("optimizer: {name: noisy_sgd}", ":2: optimizer.name: optax.noisy_sgd cannot be named in a config: it draws noise"),
    "optimizer argument misspelt": (
        "optimizer:\n  name: adamw\n  learning_rate: 1e-3\n  weight_decai: 1",
        ":5: optimizer.weight_decai: unknown argument of optax.adamw. Did you mean 'weight_decay'?",
    ),
    "optimizer argument of a wrong type": ("optimizer: {name: adamw, learning_rate: 1e-3, b1: high}", ":2: optimizer.b1: needs a finite number, found 'high' (text)."),
    "optimizer argument that is a function": ("optimizer: {name: adamw, learning_rate: 1e-3, mask: x}", ":2: optimizer.mask: needs to be left out in a config"),
    "optimizer dtype": ("optimizer: {name: adam, learning_rate: 1e-3, mu_dtype: bf16}", "optimizer.mu_dtype: needs float32, bfloat16 or float16, found 'bf16'"),
    "no learning rate": ("optimizer: {name: adamw}", ":2: optimizer: optax.adamw needs a learning rate, found none. Try learning_rate: 1e-3."),
    "two learning rates": ("learning_rate: 1e-3\noptimizer: {name: sgd, learning_rate: 1}", ":3: optimizer.learning_rate: is given, and the key learning_rate too."),
    "negative learning rate": ("learning_rate: -1.0", ":2: learning_rate: needs a number of at least 0, or a mapping {name: <optax schedule>, ...}, or null, found -1.0"),
    "true for a learning rate": ("learning_rate: true", ":2: learning_rate: needs a number of at least 0, or a mapping {name: <optax schedule>, ...}, or null, found true. Try learning_rate: 1e-3."),
    "negative learning rate of an optimizer": ("optimizer: {name: sgd, learning_rate: -1}", ":2: optimizer.learning_rate: needs a number of at least 0, found -1"),
    "unknown schedule": ("learning_rate: {name: cosin_decay_schedule}", ":2: learning_rate.name: needs an optax schedule, found 'cosin_decay_schedule' (text). Did you mean 'cosine_decay_schedule'?"),
    "schedule that lacks an argument": ("learning_rate: {name: cosine_decay, init_value: 1e-3}", ":2: learning_rate: optax.cosine_decay_schedule needs decay_steps, found none. Add decay_steps: ..."),
    "schedule with half a step": ("learning_rate: {name: cosine_decay, init_value: 1, decay_steps: 1.5}", "learning_rate.decay_steps: needs a whole number from 0 to 2147483647, found 1.5"),
    "schedule that optax refuses": (
        "learning_rate: {name: warmup_cosine_decay_schedule, init_value: 0, peak_value: 1, warmup_steps: 9, decay_steps: 9}",
        ":2: learning_rate: optax.warmup_cosine_decay_schedule refuses these arguments: The cosine_decay_schedule requires positive",
    ),
    "clip_norm 0": ("clip_norm: 0", ":2: clip_norm: needs a number above 0, or null, found 0 (a whole number)."),
    "clip_norm nan": ("clip_norm: .nan", ":2: clip_norm: needs a number above 0, or null, found nan (a number). NaN and infinity are refused."),
    "ema 1": ("ema: 1.0", ":2: ema: needs a number between 0 and 1, both excluded, or null, found 1.0 (a number). It must be below 1.0. Try ema: 0.999."),
    "ema evaluated but not kept": ("eval: {params: ema}", ":2: eval.params: is ema, and there is no average of parameters. Try ema: 0.999,"),
    "seconds negative": ("checkpoint: {every_seconds: -3}", ":2: checkpoint.every_seconds: needs a number of seconds above 0, or null, found -3"),
    "keep 0": ("checkpoint: {keep: 0}", ":2: checkpoint.keep: needs a whole number of at least 1, found 0 (a whole number). Try keep: 1."),
    "best without evaluations": ("checkpoint:\n  best: {metric: loss, mode: min}", ":3: checkpoint.best: needs evaluations while training, found eval.every_steps: null."),
    "best mode": ("eval: {every_steps: 1}\ncheckpoint: {best: {metric: a, mode: mn}}", ":3: checkpoint.best.mode: needs min or max, found 'mn' (text). Did you mean 'min'?"),
    "profile after the end": ("steps: 10\nprofile: {start: 9, steps: 3}", ":3: profile: asks for steps 9 to 11, found steps: 10. The trace lies within the run. Try profile: {start: 8, steps: 3}."),
    "microbatches do not divide": ("batch_size: 64\nmicrobatches: 3", ":3: microbatches: cuts batch_size 64 into 3 parts, found a rest of 1. microbatches divides batch_size. Try microbatches: 2 or 4, or batch_size: 63 or 66."),
    "batch does not divide over the mesh": (
        "mesh: {data: 4, fsdp: 2}\nbatch_size: 42\nmicrobatches: 2",
        ":3: batch_size: is 42; the mesh cuts a batch into data(4) x fsdp(2) = 8 and microbatches into 2, found a rest of 10. batch_size is a multiple of 16. Try batch_size: 32 or 48.",
    ),
    "task_args is a list": ("task_args: [1]", ":2: task_args: needs a mapping of keyword arguments, found [1] (a list). Try task_args: {width: 64}."),
    "task_args with a number as key": ("task_args: {1: 2}", ":2: task_args.1: needs a key that is text, found 1 (a whole number)."),
    "task_args with no Python name": ("task_args: {my-width: 2}", ":2: task_args.my-width: is no name of a keyword argument of Python."),
    "task_args with infinity deep inside": ("task_args:\n  a:\n    - b: [1, .inf]", ":4: task_args.a[0].b[1]: needs a finite number, found inf."),
    "run_dir with a NUL": ('run_dir: "a\\0b"', ":2: run_dir: needs the path of a directory, or null, found 'a\\x00b' (text). Control characters (NUL,"),
    "run_dir of the shell": ("run_dir: ~/x", "`~` is the shell's and is not expanded here: write the whole path."),
    "run_dir is a number": ("run_dir: 3", ":2: run_dir: needs the path of a directory, or null, found 3 (a whole number). Write run_dir: '3', in quotes."),
    "a number as key": ("1: 2", ":2: 1: needs a key that is text, found 1. Put it in quotes."),
}  # fmt: skip

TASKS = {
    "my_task.py": "needs path/to/file.py:name or package.module:name, found 'my_task.py', which has no name of a Task. Try task: my_task.py:task.",
    "my_task": "found 'my_task', which has no name of a Task. Try task: my_task.py:task.",
    "'my_task.py:'": "'' is no name of Python. Try task: my_task.py:task.",
    "my_task.py:a b": "'a b' is no name of Python.",
    '":task"': "which has no file. Try task: my_task.py:task.",
    "my-task:task": "'my-task' is neither a .py file nor a module. Try task: my-task.py:task.",
    "dir/my_task:task": "Try task: dir/my_task.py:task.",
    "~/a.py:task": "`~` is the shell's. Write the whole path.",
    '""': "found '' (text). Try task: my_task.py:task.",
    "3": "found 3 (a whole number). Write task: '3', in quotes.",
    '"a\\nb.py:t"': "Control characters are refused.",
}  # fmt: skip


def message(tmp_path, text, overrides=()):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert caught.value.exit_code == 78
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return str(caught.value).replace(str(path), "run.yaml")


@pytest.mark.parametrize("name", BAD)
def test_a_bad_config_is_told_with_its_line_and_a_repair(name, tmp_path):
    lines, expected = BAD[name]
    text = message(tmp_path, f"task: my_task.py:task\n{lines}\n")
    assert expected in text
    assert text.startswith("run.yaml:")
    for foreign in ("input_value", "pydantic", "Input should", "http", "Value error"):
        assert foreign not in text


@pytest.mark.parametrize("task", TASKS)
def test_a_bad_task_reference_is_told_with_its_line_and_a_repair(task, tmp_path):
    text = message(tmp_path, f"task: {task}\n")
    assert text.startswith("run.yaml:1: task: needs path/to/file.py:name or package.module:name, found")
    assert TASKS[task] in text


def test_a_missing_task_is_told_with_an_example(tmp_path):
    assert "run.yaml: task: is missing: the user's Task:" in message(tmp_path, "steps: 3\n")
    assert "Add task: my_task.py:task" in message(tmp_path, "steps: 3\n")


def test_all_problems_are_told_at_once_in_the_order_of_the_file(tmp_path):
    text = message(tmp_path, "task: a.py:t\nseed: x\nmesh: {dtaa: 1}\nsteps: 0\neval: {params: emma}\n")
    assert [line.split(": ")[:2] for line in text.splitlines()] == [
        ["run.yaml:2", "seed"],
        ["run.yaml:3", "mesh.dtaa"],
        ["run.yaml:4", "steps"],
        ["run.yaml:5", "eval.params"],
    ]


def test_at_most_ten_problems_are_told_and_the_rest_counted(tmp_path):
    lines = message(tmp_path, "task: a.py:t\n" + "".join(f"key{i}: 1\n" for i in range(14))).splitlines()
    assert len(lines) == 11
    assert lines[-1] == "and 4 more problems; mend these first."
