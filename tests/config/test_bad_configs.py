"""Every bad config gives exit code 78 and one message with its line, its key, what was found and a repair."""

import pytest

from spmdkit.config import load_config
from spmdkit.errors import ConfigError

# (the lines after `task: my_task.py:task`, which is line 1; then parts of the message: asked, rule, found, repair)
BAD = {
    "unknown key": ("stepps: 3", ":2: stepps:", "unknown key.", "Did you mean 'steps'?"),
    "unknown key far from all": ("zzzz: 3", ":2: zzzz:", "unknown key.", "The keys of a config are task"),
    "unknown key three deep": ("eval: {every_steps: 1}\ncheckpoint:\n  best: {metrik: loss, mode: min}", ":4: checkpoint.best.metrik: unknown key", "Did you mean 'metric'?"),
    "key of another section": ("every_steps: 5", ":2: every_steps:", "unknown key.", "Did you mean checkpoint.every_steps or eval.every_steps or log.every_steps"),
    "key of the top level in a section": ("log: {seed: 5}", ":2: log.seed:", "unknown key.", "Did you mean seed at the top level?"),
    "missing key of a section": ("profile: {}", ":2: profile.steps:", "is missing: first and last step of the trace", "Add steps: [20, 25]"),
    "best of a metric without a direction": ("eval: {every_steps: 1}\ncheckpoint: {best: {metric: accuracy}}", ":3: checkpoint.best", "should be min or max", "ends with loss", "Try mode: max."),
    "the root as run_dir": ("run_dir: /", ":2: run_dir:", "'/' (text) is the root of the file system", "A run has its own folder", "Try run_dir: runs/first."),
    "a bucket as run_dir": ("run_dir: s3://bucket/runs/x", ":2: run_dir:", "is a URL", "run_dir is a folder of this machine", "Try run_dir: runs/first with checkpoint.directory: s3://bucket/runs/x."),
    "run_dir out of the project": ("run_dir: ../elsewhere", ":2: run_dir:", "'../elsewhere' (text) leads out of the project, to /", "A relative path stays in /", "Try run_dir: runs/first"),
    "run_dir with half a character": ('run_dir: "a\\ud800b"', ":2: run_dir:", "or lone surrogates", "Try run_dir: runs/first."),
    "quoted number": ("\nsteps: \"10\"", ":3: steps:", "a valid integer", "found '10' (text)", "Write steps: 10, without quotes."),
    "float for int": ("batch_size: 64.0", ":2: batch_size:", "a valid integer", "found 64.0 (a number)", "Try batch_size: 32."),
    "true for int": ("microbatches: true", ":2: microbatches:", "a whole number from 1 to", "found true", "Try microbatches: 1."),
    "zero steps": ("steps: 0", ":2: steps:", "greater than or equal to 1", "found 0 (a whole number)", "Try steps: 1."),
    "huge steps": ("steps: 99999999999", ":2: steps:", "less than or equal to 2147483647", "found 99999999999 (a whole number)", "Try steps: 2147483647."),
    "negative seed": ("seed: -1", ":2: seed:", "greater than or equal to 0", "found -1 (a whole number)", "Try seed: 0."),
    "yes for a flag": ("data: {shuffle: yes}", ":2: data.shuffle:", "a valid boolean", "found 'yes' (text)", "Try shuffle: true."),
    "false for off": ("layout: {fsdp: false}", ":2: layout.fsdp:", "'auto' or 'off'", "found false", "Write fsdp: off."),
    "far choice": ("on_nonfinite: ignore", ":2: on_nonfinite:", "skip, rollback, continue or a mapping", "found 'ignore' (text)", "Try on_nonfinite: stop."),
    "section is a number": ("mesh: 8", ":2: mesh:", "a mapping with keys out of", "found 8 (a whole number)", "Put its keys below mesh:, indented, or remove it."),
    "section without value": ("checkpoint:", ":2:", "checkpoint has no value.", "Write one after it, or null, or remove the key."),
    "two -1": ("mesh: {data: -1, fsdp: -1}", ":2: mesh.fsdp:", "is -1, and so is mesh.data.", "At most one axis can be -1", "Give one a number."),
    "cpu:0": ("devices: cpu:0", ":2: devices:", "cpu:N with N from 1 to", "found 'cpu:0' (text)", "Try devices: cpu:8."),
    "devices: gpu:2": ("devices: gpu:2", ":2: devices:", "auto (all accelerators", "local device indices", "found 'gpu:2' (text)", "Try devices: [0, 1]."),
    "devices: cuda": ("devices: cuda", ":2: devices:", "auto (all accelerators", "found 'cuda' (text)", "Try devices: auto."),
    "device twice": ("devices: [0, 0]", ":2: devices:", "a list that names each only once", "found [0, 0] (a list)", "Try devices: cpu:8."),
    "rule that is no pair": ("layout:\n  rules:\n    - [a, [null]]\n    - [b]", ":5: layout.rules[1]:", "a pair [regular expression", "found ['b'] (a list)", "Try rules: [[\"blocks/.*/kernel\", [\"embed\", \"mlp\"]]]."),
    "rule with a bad pattern": ("layout: {rules: [[\"a(\", [null]]]}", ":2: layout.rules[0]:", "a regular expression (missing ), unterminated", "found ['a(', [null]] (a list)", "Try rules: [[\"blocks/.*/kernel\", [\"embed\", \"mlp\"]]]."),
    "rule with an unknown axis": ("layout: {rules: [[w, [embed, dtaa]]]}", ":2: layout.rules[0][1][1]:", "unknown axis 'dtaa'.", "Did you mean 'data'?", "Known are batch, embed, mlp, heads, kv_heads"),
    "same rule twice": ("layout: {rules: [[w, [embed]], [w, [mlp]]]}", ":2: layout.rules[1]:", "has the pattern 'w' (text) of rule", "One rule claims a leaf.", "Remove one."),
    "logical axis on no mesh axis": ("layout: {axes: {mlp: tensr}}", ":2: layout.axes.mlp:", "replica, data, pipeline,", "found 'tensr' (text)", "Did you mean 'tensor'?"),
    "logical axis on one mesh axis twice": ("layout: {axes: {mlp: [data, data]}}", ":2: layout.axes.mlp:", "a list that names each only once", "found ['data', 'data'] (a list)", "Try mlp: fsdp."),
    "zero without fsdp": ("layout: {zero: 1}", ":2: layout.zero:", "is 1, and the mesh has no", "Remove it, or name the axis, for example mesh: {fsdp: -1}."),
    "fsdp off without fsdp": ("layout: {fsdp: off}", ":2: layout.fsdp:", "is off, and the mesh has no", "Remove it, or name the axis, for example mesh: {fsdp: -1}."),
    "min_shard_bytes with fsdp off": ("mesh: {fsdp: 8}\nlayout: {fsdp: off, min_shard_bytes: 0}", ":3: layout.min_shard_bytes:", "is 0, and layout.fsdp is off, so", "Remove it, or set fsdp: auto."),
    "pipeline without its axis": ("pipeline: {schedule: gpipe}", ":2: pipeline.schedule:", "is gpipe, and the mesh has no", "Remove it, or name the axis, for example mesh: {pipeline: 2}."),
    "chunks without interleaved": ("mesh: {pipeline: 2}\npipeline: {chunks: 2}", ":3: pipeline.chunks:", "is 2, and pipeline.schedule is 1f1b, with", "Remove it, or set schedule: interleaved."),
    "one chunk": ("mesh: {pipeline: 2}\npipeline: {schedule: interleaved, chunks: 1}", ":3: pipeline.chunks:", "is 1: interleaved with one chunk per", "Try chunks: 2, or schedule: 1f1b."),
    "stages' microbatches alone": ("mesh: {pipeline: 2}\npipeline: {microbatches: 3}\nbatch_size: 32", ":4: batch_size:", "is 32; the mesh splits a", "found a remainder of 2. batch_size must be a multiple of 3", "Try batch_size: 30 or 33."),
    "order of the all-to-all form": ("mesh: {context: 2}\nattention: {context: all_to_all, order: contiguous}", ":3: attention.order:", "is contiguous, and attention.context is all_to_all, which", "Remove it, or set context: ring."),
    "unknown reducer": ("reducer: sums", ":2: reducer:", "one of ", "bfloat16, ", "ordered, ", "sum, topk", "found 'sums' (text)", "Did you mean 'sum'?"),
    "reducer with options": ("reducer: {sum: {bits: 8}}", ":2: reducer:", "sum takes no options", "found {'bits': 8}", "Write sum alone."),
    "unknown sync": ("sync: {local_sdg: {every: 16}}", ":2: sync:", "one of", "found 'local_sdg' (text)"),
    "sync is a list": ("sync: [every_step]", ":2: sync:", "a name, or a mapping of", "found ['every_step'] (a list)", "Try sync: every_step."),
    "float16": ("precision: float16", ":2: precision:", "bfloat16, which has float32's range: float16", "found 'float16' (text)", "Try precision: bfloat16."),
    "remat misspelt": ("remat: dot", ":2: remat:", "none, full, dots, dots_no_batch, minimal,", "found 'dot' (text)", "Did you mean 'dots'?"),
    "tiles of another implementation": ("attention: {implementation: xla, block_q: 512}", ":2: attention.block_q:", "is 512, and attention.implementation is xla, without such tiles", "Remove it, or set implementation: splash."),
    "remat names nothing": ("remat: {}", ":2: remat:", "names nothing to save, which is the same", "Write remat: full, or save: [attention]."),
    "remat saves and offloads": ("remat: {save: [a, b], offload: [b]}", ":2: remat.offload[0]:", "is 'b', and remat.save has it too.", "A value is kept on the device", "Remove one."),
    "remat saves nothing": ("remat: {save: []}", ":2: remat.save:", "have at least 1 item after", "found [] (a list)", "Try save: [attention]."),
    "model state group 0": ("model_state: {group: 0}", ":2: model_state.group:", "greater than or equal to 1", "found 0 (a whole number)", "Try group: 1."),
    "optimizer is a name": ("optimizer: adamw", ":2: optimizer:", "a mapping", "found 'adamw' (text)", "Try optimizer: {name: adamw}."),
    "unknown optimizer": ("optimizer:\n  name: adamv\n  learning_rate: 1", ":3: optimizer.name:", "an optax optimizer", "found 'adamv' (text)", "Did you mean 'adam'?", "Known are adabelief, adadelta, adafactor, adagrad, adam", "Any other can be made in the"),
    "optimizer that a config cannot name": ("optimizer: {name: noisy_sgd}", ":2: optimizer.name:", "optax.noisy_sgd cannot be named in a config", "Any other can be made in the"),
    "optimizer argument misspelt": ("optimizer:\n  name: adamw\n  learning_rate: 1e-3\n  weight_decai: 1", ":5: optimizer.weight_decai:", "unknown argument of optax.adamw.", "Did you mean 'weight_decay'?", "Its arguments are b1, b2, eps, eps_root"),
    "optimizer argument of a wrong type": ("optimizer: {name: adamw, learning_rate: 1e-3, b1: high}", ":2: optimizer:", "optax.adamw refuses", "'b1': 'high'", "Change them."),
    "optimizer argument that is a function": ("optimizer: {name: adamw, learning_rate: 1e-3, mask: x}", ":2: optimizer.mask:", "is a function or a tree", "found 'x' (text)", "Leave it out.", "Any other can be made in the"),
    "two learning rates": ("learning_rate: 1e-3\noptimizer: {name: sgd, learning_rate: 1}", ":3: optimizer.learning_rate:", "is given, and the key learning_rate too.", "Only one can have an effect.", "Remove one of them."),
    "negative learning rate": ("learning_rate: -1.0", ":2: learning_rate:", "a number of at least 0", "found -1.0 (a number)", "Try learning_rate: 1e-3."),
    "negative learning rate of an optimizer": ("optimizer: {name: sgd, learning_rate: -1}", ":2: optimizer.learning_rate:", "a number of at least 0", "found -1 (a whole number)", "Try 1e-3."),
    "unknown schedule": ("learning_rate: {name: cosin_decay_schedule}", ":2: learning_rate.name:", "an optax schedule", "found 'cosin_decay_schedule' (text)", "Did you mean 'cosine_decay_schedule'?", "Known are constant_schedule, cosine_decay_schedule, cosine_onecycle_schedule, exponential_decay, join_schedules, linear_onecycle_schedule", "Any other can be made in the"),
    "schedule that optax refuses": ("learning_rate: {name: warmup_cosine_decay_schedule, init_value: 0, peak_value: 1, warmup_steps: 9, decay_steps: 9}", ":2: learning_rate:", "optax.warmup_cosine_decay_schedule refuses", "'warmup_steps': 9", "The cosine_decay_schedule requires positive", "Change them."),
    "clip_norm 0": ("clip_norm: 0", ":2: clip_norm:", "greater than 0", "found 0 (a whole number)", "Try clip_norm: 1.0."),
    "ema evaluated but not kept": ("eval: {params: ema}", ":2: eval.params:", "is ema, and there is no average", "Try ema: 0.999, or params: params."),
    "best without evaluations": ("checkpoint:\n  best: {metric: loss, mode: min}", ":3: checkpoint.best:", "evaluations while training", "found eval.every_steps: null", "Try eval: {every_steps: 100}."),
    "profile after the end": ("steps: 10\nprofile: {steps: [9, 11]}", ":3: profile.steps:", "covers steps 9 to 11", "found steps: 10", "The trace lies within the run.", "Try profile: {steps: [8, 10]}."),
    "microbatches do not divide": ("batch_size: 64\nmicrobatches: 3", ":3: microbatches:", "splits batch_size 64 into 3 parts", "found a remainder of 1. microbatches must divide batch_size", "Try microbatches: 2 or 4, or batch_size: 63 or 66."),
    "batch does not divide over the mesh": ("mesh: {data: 4, fsdp: 2}\nbatch_size: 42\nmicrobatches: 2", ":3: batch_size:", "is 42; the mesh splits a", "found a remainder of 10. batch_size must be a multiple of 16", "Try batch_size: 32 or 48."),
    "task_args is a list": ("task_args: [1]", ":2: task_args:", "a mapping", "found [1] (a list)", "Try task_args: {width: 64}."),
    "task_args with a number as key": ("task_args: {1: 2}", ":2: task_args.1:", "a key that is text", "found 1 (a whole number)", "Put it in quotes."),
    "task_args with no Python name": ("task_args: {my-width: 2}", ":2: task_args.my-width:", "is not a valid name of a keyword argument", "Rename it."),
    "task_args with infinity deep inside": ("task_args:\n  a:\n    - b: [1, .inf]", ":4: task_args.a[0].b[1]:", "a finite number", "found inf", "NaN and infinity are refused.", "Write a number."),
    "run_dir with a NUL": ("run_dir: \"a\\0b\"", ":2: run_dir:", "a path without control characters (NUL", "found 'a\\x00b' (text)", "Try run_dir: runs/first."),
    "run_dir of the shell": ("run_dir: ~/x", ":2: run_dir:", "an expanded path: `~` is not", "found '~/x' (text)", "Try run_dir: /home/me/runs/first."),
    "a number as key": ("1: 2", ":2: 1:", "a key that is text", "found 1", "Put it in quotes."),
}  # fmt: skip

TASKS = {
    "my_task.py": "needs path/to/file.py:name or package.module:name, found 'my_task.py', which has no name of a Task. Try task: my_task.py:task.",
    "'my_task.py:'": "'' is no name of Python. Try task: my_task.py:task.",
    "my_task.py:a b": "'a b' is no name of Python.",
    '":task"': "which has no file. Try task: my_task.py:task.",
    "my-task:task": "'my-task' is neither a .py file nor a module. Try task: my-task.py:task.",
    "~/a.py:task": "`~` is the shell's. Write the whole path.",
    '""': "found '' (text). Try task: my_task.py:task.",
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


GOLDEN = {
    "stepps: 3": "run.yaml:2: stepps: unknown key. Did you mean 'steps'?",
    "steps: x": "run.yaml:2: steps: should be a valid integer, found 'x' (text). Try steps: 100.",
    "mesh: {data: 0}": "run.yaml:2: mesh.data: should be at least 1, or -1 to fill with the remaining devices, found 0 (a whole number). "
    "Try data: -1.",
    "layout: {fsdp: of}": "run.yaml:2: layout.fsdp: should be 'auto' or 'off', found 'of' (text). Did you mean 'off'?",
    "layout: {zero: 1}": "run.yaml:2: layout.zero: is 1, and the mesh has no fsdp axis, so it has no effect. Remove it, or name the axis, "
    "for example mesh: {fsdp: -1}.",
}


@pytest.mark.parametrize("lines", GOLDEN)
def test_a_handful_of_messages_to_the_letter(lines, tmp_path):
    assert message(tmp_path, f"task: my_task.py:task\n{lines}\n") == GOLDEN[lines]


@pytest.mark.parametrize("name", BAD)
def test_a_bad_config_is_reported_with_its_line(name, tmp_path):
    lines, *parts = BAD[name]
    text = message(tmp_path, f"task: my_task.py:task\n{lines}\n")
    for part in parts:
        assert part in text
    assert text.startswith("run.yaml:")
    for foreign in ("input_value", "pydantic", "Input should", "http", "Value error", "default factory"):
        assert foreign not in text


@pytest.mark.parametrize("task", TASKS)
def test_a_bad_task_reference_is_reported(task, tmp_path):
    text = message(tmp_path, f"task: {task}\n")
    assert text.startswith("run.yaml:1: task: ")
    assert TASKS[task] in text


def test_a_missing_task_is_told_with_an_example(tmp_path):
    assert "run.yaml: task: is missing: the user's Task:" in message(tmp_path, "steps: 3\n")
    assert "Add task: my_task.py:task" in message(tmp_path, "steps: 3\n")


def test_all_problems_are_reported_in_file_order(tmp_path):
    text = message(tmp_path, "task: a.py:t\nseed: x\nmesh: {dtaa: 1}\nsteps: 0\neval: {params: emma}\n")
    assert [line.split(": ")[:2] for line in text.splitlines()] == [
        ["run.yaml:2", "seed"],
        ["run.yaml:3", "mesh.dtaa"],
        ["run.yaml:4", "steps"],
        ["run.yaml:5", "eval.params"],
    ]


def test_at_most_ten_problems_are_reported(tmp_path):
    lines = message(tmp_path, "task: a.py:t\n" + "".join(f"key{i}: 1\n" for i in range(14))).splitlines()
    assert len(lines) == 11
    assert lines[-1] == "and 4 more problems; fix these first."
