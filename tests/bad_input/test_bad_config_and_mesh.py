"""Mistakes in the config: found before a device is touched, or when the mesh and the layout meet the model."""

import pytest

from tests.support.command_line import Case

FLAT = {"mesh": "{fsdp: 4}"}

CASES = {
    # ---- the file ----------------------------------------------------------------------------------------------------
    "unknown key": Case(("run.yaml:8: stepps: unknown key. Did you mean 'steps'?",), config={"stepps": "3"}),
    "unknown key of a section": Case(("run.yaml:8: data.shufle: unknown key. Did you mean 'shuffle'?",), config={"data": "{shufle: true}"}),
    "unknown key three deep": Case(("run.yaml:7: checkpoint.best.metric: is missing: name of an evaluation metric, for example loss. Add", "run.yaml:7: checkpoint.best.metrik: unknown key. Did you mean 'metric'?"), config={"eval": "{every_steps: 1}", "checkpoint": "{best: {metrik: loss, mode: min}}"}),
    "text for a number": Case(("run.yaml:3: steps:", "integer", "found '10' (text)", "Write steps: 10, without quotes."), config={"steps": "'10'"}),
    "a list for a number": Case(("run.yaml:4: batch_size:", "integer", "found [8] (a list)", "Try batch_size: 32."), config={"batch_size": "[8]"}),
    "yes for true": Case(("run.yaml:8: data.shuffle:", "boolean", "found 'yes' (text)", "Try shuffle: true."), config={"data": "{shuffle: yes}"}),
    "a number for a section": Case(("run.yaml:6: mesh:", "a mapping with keys out of replica, data,", "found 8 (a whole number)", "Put its keys below mesh:, indented"), config={"mesh": "8"}),
    "a misspelt choice": Case(("run.yaml:8: precision:", "float32, bfloat16 or a mapping", "found 'bflot16' (text)", "Did you mean 'bfloat16'?"), config={"precision": "bflot16"}),
    "no YAML": Case(("run.yaml:8: not YAML:", "found '}'", "Look at the indentation", "the brackets around this line."), config={"layout": "{rules: [}"}),
    "two problems at once": Case(("run.yaml:8: seed:", "integer", "found 'x' (text)", "Try seed: 0.", "run.yaml:9: stepps: unknown key. Did you mean 'steps'?"), config={"seed": "x", "stepps": "3"}),
    "an override with a typo": Case(("override chekpoint.keep=2: chekpoint: unknown key. Did you mean 'checkpoint'?",), overrides=("chekpoint.keep=2",)),
    "an override without a value": Case(("override steps: needs key=value, found no `=`. Write steps=...",), overrides=("steps",)),
    "unknown reducer": Case(("run.yaml:8: reducer: needs one of bfloat16, ordered, sum, found 'smu' (text). Did you mean 'sum'?",), config={"reducer": "smu"}),
    "unknown sync": Case(("run.yaml:8: sync: needs one of every_step, local_sgd, found 'local_sdg' (text). Did you mean 'local_sgd'?",), config={"sync": "{local_sdg: {every: 4}}"}),
    "unknown optimizer": Case(("run.yaml:8: optimizer.name: needs an optax optimizer, found 'adamv' (text). Did you mean 'adam'?", "sgd, sign_sgd, signum, sm3, yogi. Any other can be made in the task: Task(optimizer=...)."), config={"optimizer": "{name: adamv, learning_rate: 1e-3}"}),
    "float16": Case(("run.yaml:8: precision:", "float16 needs loss scaling, which is not built", "Try precision: bfloat16."), config={"precision": "float16"}),
    "microbatches do not divide the batch": Case(("run.yaml:8: microbatches: cuts batch_size 8 into 3 parts, found a rest of 2. microbatches divides batch_size. Try microbatches: 2 or 4, or batch_size: 6 or 9.",), config={"microbatches": "3"}),
    "a profile after the last step": Case(("run.yaml:8: profile: asks for steps 9 to 11, found steps: 4. The trace lies within the run. Try profile: {start: 2, steps: 3}.",), config={"profile": "{start: 9}"}),
    "average evaluated but not kept": Case(("run.yaml:8: eval.params: is ema, and there is no average of parameters. Try ema: 0.999, or params: params.",), config={"eval": "{params: ema}"}),
    # ---- devices and mesh --------------------------------------------------------------------------------------------
    "devices cpu:0": Case(("run.yaml:5: devices:", "N from 1 to 4096", "found 'cpu:0' (text)", "Try devices: cpu:8."), config={"devices": "cpu:0"}),
    "more devices than there are": Case(("devices: cpu:16 needs 16 in process 0, found 8 cpu device(s). JAX creates its devices once, at its", "at its first use. Ask for at most 8, or call spmdkit before anything computes with JAX."), config={"devices": "cpu:16"}),
    "a device index out of range": Case(("devices: [0, 99] names device 99, found 8 cpu device(s) in process 0. They are counted from 0. Use indices up to 7, or devices: auto for all.",), config={"devices": "[0, 99]", "mesh": "{data: 2}"}),
    "mesh too large": Case(("mesh needs data(4) x tensor(3) = 12 devices, found 4. The product must equal the device count. Try tensor: 1, or tensor: -1 to fill.",), config={"mesh": "{data: 4, tensor: 3}"}),
    "mesh too small": Case(("mesh needs data(2) = 2 devices, found 4. The product must equal the device count. Try data: 4, or data: -1 to fill.",), config={"mesh": "{data: 2}"}),
    "mesh that -1 cannot fill": Case(("mesh asks data(-1) x fsdp(3), found 4 devices: 3 does not divide 4. The axis that is -1 takes what the others leave. Try fsdp: 2.",), config={"mesh": "{data: -1, fsdp: 3}"}),
    "two -1": Case(("run.yaml:6: mesh.fsdp: is -1, and so is mesh.data. Only one axis can take what the others leave. Give one a number.",), config={"mesh": "{data: -1, fsdp: -1}"}),
    "batch that the mesh does not cut": Case(("run.yaml:4: batch_size: is 10; the mesh cuts a batch into data(4) = 4, found a rest of 2. batch_size is a multiple of 4. Try batch_size: 8 or 12.",), config={"batch_size": "10"}),
    "batch that a filled mesh does not cut": Case(("run.yaml:4: batch_size: is 6; the mesh cuts a batch into data(2) x fsdp(2) = 4, found a rest of 2. batch_size is a multiple of 4. Try batch_size: 4 or 8.",), config={"batch_size": "6", "mesh": "{data: 2, fsdp: -1}"}),
    "an axis that cuts nothing": Case(("mesh.tensor is 2, but no parameter is cut over tensor: 2 devices would repeat each other's work. Name it in layout.rules (e.g. a dim 'mlp' or 'tensor'), or use data: 2.",), config={"mesh": "{data: 2, tensor: 2}"}),
    # ---- layout ------------------------------------------------------------------------------------------------------
    "unknown axis in a rule": Case(("run.yaml:8: layout.rules[0][1][1]: unknown axis 'mpl'. Did you mean 'mlp'? Known are batch, embed,", "expert, layers, sequence, norm_sequence, replica, data, pipeline, fsdp, context, tensor; layout.axes adds."), config={**FLAT, "layout": "{rules: [[w, [embed, mpl]]]}"}),
    "unknown axis in a rule of the task": Case(("layout: task rule 'w' cuts dim 1 of 'w' by 'mpl', which is no mesh axis and no logical axis. Known:", "norm_sequence, pipeline, replica, sequence, tensor, vocab. Did you mean 'mlp'? New names go into layout.axes."), task={"rules": "[('w', ['embed', 'mpl'])]"}),
    "a rule that matches nothing": Case(("layout.rules: pattern 'ww' matches none of the 2 parameters. A pattern has to match a whole path. Did you mean 'w'?",), config={**FLAT, "layout": "{rules: [[ww, [embed, null]]]}"}),
    "a rule of the task that matches nothing": Case(("the task's rules: pattern 'kernel' matches none of the 2 parameters. A pattern has to match a whole path. The parameters are: b, w.",), task={"rules": "[('kernel', ['embed', None])]"}),
    "a rule of the task without dims": Case(("Task.rules holds 'w'. A rule is a pair (path pattern, a name or None for each dim). Write for example ('blocks/.*/kernel', ('embed', 'mlp')).",), task={"rules": "['w']"}),
    "a rule of the task that is no pattern": Case(("the task's rules: pattern 'w(' is no regular expression (missing ), unterminated subpattern at position 1). Mend it.",), task={"rules": "[('w(', ['embed', None])]"}),
    "two rules for one parameter": Case(("layout.rules: parameter 'w' is claimed by 'w' and by '.'. One rule for a parameter. Make one of the patterns narrower.",), config={**FLAT, "layout": "{rules: [[w, [embed, null]], ['.', [null]]]}"}),
    "a rule with too few dims": Case(("layout: rule 'w' names 1 dims ['embed'] for parameter 'w' of shape (4, 8). One name (or null) for each of the 2 dims.",), config={**FLAT, "layout": "{rules: [[w, [embed]]]}"}),
    "a dim that the axis does not divide": Case(("layout: rule 'w' cuts dim 1 of 'w' (length 8) over fsdp = 3: 8 is not divisible by 3. Try length 9, or null for this dim.",), config={"devices": "cpu:3", "batch_size": "6", "mesh": "{fsdp: 3}", "layout": "{rules: [[w, [null, embed]]]}"}),
    "an axis on two dims": Case(("layout: rule 'w' uses mesh axis 'fsdp' twice on 'w' (dims 0 and 1). An axis can cut one dim of a leaf. Set one of the two dims to null.",), config={**FLAT, "layout": "{rules: [[w, [embed, fsdp]]]}"}),
    "a large parameter on every device": Case(("layout: parameter 'w' (128 B, shape (4, 8)) would be copied to all 4 fsdp devices (copy:", "(100 B) has to be asked for. Add the rule ['w', [null, null]], or one that cuts it."), config={**FLAT, "layout": "{fsdp: off, replicate_above_bytes: 100}"}),
    "model state policy without model state": Case(("model_state: replica has no effect: init returns no state. Return sk.Variables(params, state).",), config={"model_state": "replica"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_in_the_config_is_told_and_nothing_is_lost(name, folder):
    CASES[name].run(folder)


def test_a_config_that_is_not_there(folder):
    folder.fails(78, "nowhere.yaml", command=("train", "nowhere.yaml"))
