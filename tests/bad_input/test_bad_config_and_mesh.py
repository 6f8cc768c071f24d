"""Mistakes in the config: found before a device is touched, or when the mesh and the layout meet the model."""

import pytest

from tests.support.command_line import Case
from tests.support.messages import Says

FLAT = {"mesh": "{fsdp: 4}"}

CASES = {
    # ---- the file ----------------------------------------------------------------------------------------------------
    "unknown key": Case(Says(asked="run.yaml:8: stepps:", found="unknown key", repair="'steps'"), config={"stepps": "3"}),
    "unknown key of a section": Case(Says(asked="run.yaml:8: data.shufle:", found="unknown key", repair="'shuffle'"), config={"data": "{shufle: true}"}),
    "unknown key three deep": Case(Says(asked=("run.yaml:7: checkpoint.best.metric:", "run.yaml:7: checkpoint.best.metrik:"), found=("is missing", "unknown key"), repair="'metric'"), config={"eval": "{every_steps: 1}", "checkpoint": "{best: {metrik: loss, mode: min}}"}),
    "text for a number": Case(Says(asked="run.yaml:3: steps:", found="found '10' (text)", rule="integer", repair="Write steps: 10, without quotes"), config={"steps": "'10'"}),
    "a list for a number": Case(Says(asked="run.yaml:4: batch_size:", found="found [8] (a list)", rule="integer", repair="Try batch_size: 32"), config={"batch_size": "[8]"}),
    "yes for true": Case(Says(asked="run.yaml:8: data.shuffle:", found="found 'yes' (text)", rule="boolean", repair="Try shuffle: true"), config={"data": "{shuffle: yes}"}),
    "a number for a section": Case(Says(asked="run.yaml:6: mesh:", found="found 8", rule=("mapping", "replica, data"), repair="below mesh:, indented"), config={"mesh": "8"}),
    "a misspelt choice": Case(Says(asked="run.yaml:8: precision:", found="'bflot16'", rule="float32, bfloat16", repair="'bfloat16'"), config={"precision": "bflot16"}),
    "no YAML": Case(Says(asked="run.yaml:8: not YAML:", found="found '}'", repair=("indentation", "brackets")), config={"layout": "{rules: [}"}),
    "two problems at once": Case(Says(asked=("run.yaml:8: seed:", "run.yaml:9: stepps:"), found=("found 'x' (text)", "unknown key"), rule="integer", repair=("Try seed: 0", "'steps'")), config={"seed": "x", "stepps": "3"}),
    "an override with a typo": Case(Says(asked="override chekpoint.keep=2: chekpoint:", found="unknown key", repair="'checkpoint'"), overrides=("chekpoint.keep=2",)),
    "an override without a value": Case(Says(asked="override steps:", found="no `=`", rule="key=value", repair="steps="), overrides=("steps",)),
    "unknown reducer": Case(Says(asked="run.yaml:8: reducer:", found="'smu'", rule=("one of", "bfloat16, ", "ordered, ", "sum"), repair="'sum'"), config={"reducer": "smu"}),
    "unknown sync": Case(Says(asked="run.yaml:8: sync:", found="'local_sdg'", rule="every_step, local_sgd", repair="'local_sgd'"), config={"sync": "{local_sdg: {every: 4}}"}),
    "unknown optimizer": Case(Says(asked="run.yaml:8: optimizer.name:", found="found 'adamv'", rule=("optax optimizer", "sm3, yogi"), repair=("'adam'", "Task(optimizer=...)")), config={"optimizer": "{name: adamv, learning_rate: 1e-3}"}),
    "float16": Case(Says(asked="run.yaml:8: precision:", found="float16", rule="loss scaling", repair="precision: bfloat16"), config={"precision": "float16"}),
    "microbatches do not divide the batch": Case(Says(asked=("run.yaml:8: microbatches:", "batch_size 8 into 3"), found="rest of 2", rule="divides batch_size", repair=("microbatches: 2 or 4", "batch_size: 6 or 9")), config={"microbatches": "3"}),
    "a profile after the last step": Case(Says(asked=("run.yaml:8: profile:", "9 to 11"), found="steps: 4", rule="within the run", repair="profile: {start: 2, steps: 3}"), config={"profile": "{start: 9}"}),
    "average evaluated but not kept": Case(Says(asked=("run.yaml:8: eval.params:", "is ema"), found="no average", repair=("ema: 0.999", "params: params")), config={"eval": "{params: ema}"}),
    # ---- devices and mesh --------------------------------------------------------------------------------------------
    "devices cpu:0": Case(Says(asked="run.yaml:5: devices:", found="'cpu:0'", rule="from 1 to 4096", repair="devices: cpu:8"), config={"devices": "cpu:0"}),
    "more devices than there are": Case(Says(asked=("devices: cpu:16", "16 in process 0"), found="found 8 cpu", rule="creates its devices once", repair="at most 8"), config={"devices": "cpu:16"}),
    "a device index out of range": Case(Says(asked="devices: [0, 99]", found=("99", "found 8 cpu"), rule="from 0", repair=("up to 7", "devices: auto")), config={"devices": "[0, 99]", "mesh": "{data: 2}"}),
    "mesh too large": Case(Says(asked="mesh needs data(4) x tensor(3) = 12 devices", found="found 4", rule="equal the device count", repair="tensor: 1, or tensor: -1"), config={"mesh": "{data: 4, tensor: 3}"}),
    "mesh too small": Case(Says(asked="mesh needs data(2) = 2 devices", found="found 4", rule="equal the device count", repair="data: 4, or data: -1"), config={"mesh": "{data: 2}"}),
    "mesh that -1 cannot fill": Case(Says(asked="data(-1) x fsdp(3)", found=("found 4 devices", "3 does not divide 4"), rule="-1 fills the rest", repair="fsdp: 2"), config={"mesh": "{data: -1, fsdp: 3}"}),
    "two -1": Case(Says(asked="run.yaml:6: mesh.fsdp:", found=("-1", "mesh.data"), rule="one axis", repair="a number"), config={"mesh": "{data: -1, fsdp: -1}"}),
    "batch that the mesh does not cut": Case(Says(asked=("run.yaml:4: batch_size:", "is 10", "data(4) = 4"), found="a rest of 2", rule="a multiple of 4", repair="batch_size: 8 or 12"), config={"batch_size": "10"}),
    "batch that a filled mesh does not cut": Case(Says(asked=("run.yaml:4: batch_size:", "is 6", "data(2) x fsdp(2) = 4"), found="a rest of 2", rule="a multiple of 4", repair="batch_size: 4 or 8"), config={"batch_size": "6", "mesh": "{data: 2, fsdp: -1}"}),
    "an axis that cuts nothing": Case(Says(asked="mesh.tensor is 2", found="no parameter is sharded over tensor", rule="repeat each other's work", repair=("layout.rules", "data: 2")), config={"mesh": "{data: 2, tensor: 2}"}),
    # ---- layout ------------------------------------------------------------------------------------------------------
    "unknown axis in a rule": Case(Says(asked="run.yaml:8: layout.rules[0][1][1]:", found="unknown axis 'mpl'", rule=("batch, embed", "norm_sequence, replica, data"), repair=("'mlp'", "layout.axes")), config={**FLAT, "layout": "{rules: [[w, [embed, mpl]]]}"}),
    "unknown axis in a rule of the task": Case(Says(asked="dim 1 of 'w' by 'mpl'", found="neither a mesh axis nor a logical axis", rule="norm_sequence, pipeline, replica", repair=("'mlp'", "layout.axes")), task={"rules": "[('w', ['embed', 'mpl'])]"}),
    "a rule that matches nothing": Case(Says(asked="layout.rules: pattern 'ww'", found="none of the 2 parameters", rule="whole path", repair="'w'"), config={**FLAT, "layout": "{rules: [[ww, [embed, null]]]}"}),
    "a rule of the task that matches nothing": Case(Says(asked="the task's rules: pattern 'kernel'", found="none of the 2 parameters", rule="whole path", repair="b, w"), task={"rules": "[('kernel', ['embed', None])]"}),
    "a rule of the task without dims": Case(Says(asked="Task.rules", found="'w'", rule="a pair (path pattern", repair="('blocks/.*/kernel', ('embed', 'mlp'))"), task={"rules": "['w']"}),
    "a rule of the task that is no pattern": Case(Says(asked="the task's rules: pattern 'w('", found=("missing )", "position 1"), rule="regular expression", repair="Fix it"), task={"rules": "[('w(', ['embed', None])]"}),
    "two rules for one parameter": Case(Says(asked="layout.rules: parameter 'w'", found="'w' and '.'", rule="A parameter has one rule", repair="narrower"), config={**FLAT, "layout": "{rules: [[w, [embed, null]], ['.', [null]]]}"}),
    "a rule with too few dims": Case(Says(asked="rule 'w' names 1 dims ['embed']", found="shape (4, 8)", repair="each of the 2 dims"), config={**FLAT, "layout": "{rules: [[w, [embed]]]}"}),
    "a dim that the axis does not divide": Case(Says(asked="rule 'w' shards dim 1 of 'w'", found=("length 8", "fsdp = 3"), rule="not divisible by 3", repair=("length 9", "null for this dim")), config={"devices": "cpu:3", "batch_size": "6", "mesh": "{fsdp: 3}", "layout": "{rules: [[w, [null, embed]]]}"}),
    "an axis on two dims": Case(Says(asked="rule 'w' uses mesh axis 'fsdp' twice", found="dims 0 and 1", rule="one dim of a leaf", repair="null"), config={**FLAT, "layout": "{rules: [[w, [embed, fsdp]]]}"}),
    "a large parameter on every device": Case(Says(asked="parameter 'w' (128 B, shape (4, 8))", found="all 4 fsdp devices", rule="100 B", repair="['w', [null, null]]"), config={**FLAT, "layout": "{fsdp: off, replicate_above_bytes: 100}"}),
    "model state policy without model state": Case(Says(asked="model_state: replica", found="no effect", rule="init returns no state", repair="sk.Variables(params, state)"), config={"model_state": "replica"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_in_the_config_is_told_and_nothing_is_lost(name, folder):
    CASES[name].run(folder)


def test_a_config_that_is_not_there(folder):
    folder.fails(78, Says(asked="nowhere.yaml", found="no such file"), command=("train", "nowhere.yaml"))
