"""Mistakes in the config: found before a device is touched, or when the mesh and the layout meet the model."""

import pytest
from command_line import Case

FLAT = {"mesh": "{fsdp: 4}"}

CASES = {
    # ---- the file ----------------------------------------------------------------------------------------------------
    "unknown key": Case(("run.yaml",), config={"stepps": "3"}),
    "unknown key of a section": Case((), config={"data": "{shufle: true}"}),
    "unknown key three deep": Case((), config={"eval": "{every_steps: 1}", "checkpoint": "{best: {metrik: loss, mode: min}}"}),
    "text for a number": Case((), config={"steps": "'10'"}),
    "a list for a number": Case((), config={"batch_size": "[8]"}),
    "yes for true": Case((), config={"data": "{shuffle: yes}"}),
    "a number for a section": Case((), config={"mesh": "8"}),
    "a misspelt choice": Case((), config={"precision": "bflot16"}),
    "no YAML": Case((), config={"layout": "{rules: [}"}),
    "two problems at once": Case((), config={"seed": "x", "stepps": "3"}),
    "an override with a typo": Case((), overrides=("chekpoint.keep=2",)),
    "an override without a value": Case((), overrides=("steps",)),
    "unknown reducer": Case((), config={"reducer": "smu"}),
    "unknown sync": Case((), config={"sync": "{local_sgd: {every: 4}}"}),
    "unknown optimizer": Case((), config={"optimizer": "{name: adamv, learning_rate: 1e-3}"}),
    "float16": Case((), config={"precision": "float16"}),
    "microbatches do not divide the batch": Case((), config={"microbatches": "3"}),
    "a profile after the last step": Case((), config={"profile": "{start: 9}"}),
    "average evaluated but not kept": Case((), config={"eval": "{params: ema}"}),
    # ---- devices and mesh --------------------------------------------------------------------------------------------
    "devices cpu:0": Case((), config={"devices": "cpu:0"}),
    "more devices than there are": Case((), config={"devices": "cpu:16"}),
    "a device index out of range": Case((), config={"devices": "[0, 99]", "mesh": "{data: 2}"}),
    "mesh too large": Case((), config={"mesh": "{data: 4, tensor: 3}"}),
    "mesh too small": Case((), config={"mesh": "{data: 2}"}),
    "mesh that -1 cannot fill": Case((), config={"mesh": "{data: -1, fsdp: 3}"}),
    "two -1": Case((), config={"mesh": "{data: -1, fsdp: -1}"}),
    "batch that the mesh does not cut": Case((), config={"batch_size": "10"}),
    "batch that a filled mesh does not cut": Case((), config={"batch_size": "6", "mesh": "{data: 2, fsdp: -1}"}),
    "an axis that cuts nothing": Case((), config={"mesh": "{data: 2, tensor: 2}"}),
    # ---- layout ------------------------------------------------------------------------------------------------------
    "unknown axis in a rule": Case((), config={**FLAT, "layout": "{rules: [[w, [embed, mpl]]]}"}),
    "unknown axis in a rule of the task": Case((), task={"rules": "[('w', ['embed', 'mpl'])]"}),
    "a rule that matches nothing": Case((), config={**FLAT, "layout": "{rules: [[ww, [embed, null]]]}"}),
    "a rule of the task that matches nothing": Case((), task={"rules": "[('kernel', ['embed', None])]"}),
    "a rule of the task without dims": Case((), task={"rules": "['w']"}),
    "a rule of the task that is no pattern": Case((), task={"rules": "[('w(', ['embed', None])]"}),
    "two rules for one parameter": Case((), config={**FLAT, "layout": "{rules: [[w, [embed, null]], ['.', [null]]]}"}),
    "a rule with too few dims": Case((), config={**FLAT, "layout": "{rules: [[w, [embed]]]}"}),
    "a dim that the axis does not divide": Case((), config={"devices": "cpu:3", "batch_size": "6", "mesh": "{fsdp: 3}", "layout": "{rules: [[w, [null, embed]]]}"}),
    "an axis on two dims": Case((), config={**FLAT, "layout": "{rules: [[w, [embed, fsdp]]]}"}),
    "a large parameter on every device": Case((), config={**FLAT, "layout": "{fsdp: off, replicate_above_bytes: 100}"}),
    "model state policy without model state": Case((), config={"model_state": "replica"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_in_the_config_is_told_and_nothing_is_lost(name, folder):
    CASES[name].run(folder)


def test_a_config_that_is_not_there(folder):
    folder.fails(78, "nowhere.yaml", command=("train", "nowhere.yaml"))
