"""`program.explain()`: what was applied to a step, in order, and why; `spmdkit layout` prints it."""

import jax
import optax

import spmdkit as sk
from spmdkit.cli import main
from spmdkit.plan.collectives_bill import read_bill
from spmdkit.plan.hlo.text import parse
from tests.support.reducer_runs import NUM_VALUES, loss_fn, program, task

ORDER = "mesh layout offload form precision microbatches remat reducer update guard hooks sync"
NUM_SMALL = 128 * 8 + 8


def said(program):
    """Returns name -> text of its line; those of single leaves are together."""
    found: dict[str, str] = {}
    for line in program.explain().partition("\n\n")[0].splitlines():
        name, text = line[:13].strip(), line[14:]
        found[name] = f"{found[name]}\n{text}" if name in found else text
    return found


def has(text, *parts):
    assert all(part in text for part in parts), text


def test_explanation_has_ordered_lines_and_reducer_bytes():
    made = program("data 8", "bfloat16", microbatches=2, remat="dots", precision="bfloat16", clip_norm=1.0)
    found = said(made)
    assert " ".join(name for name in found if name in ORDER) == ORDER
    has(found["mesh"], "data 8: 8 devices")
    has(found["layout"], "3 parameters", "no fsdp axis 1", "task rule 2")
    has(found["largest"].splitlines()[0], "params/up", "float32[128,128]  64.0 KiB")
    has(found["form"], "manual: shard_map over 8 replicas")
    has(
        found["precision"],
        "compute bfloat16, parameters float32, gradients added over devices in bfloat16, floats of a batch cast too",
    )
    has(found["microbatches"], "2 of 32 examples")
    has(found["remat"], "dots: around the whole loss, since the step calls no sk.remat")
    values = NUM_VALUES + NUM_SMALL
    a_replicas = 3 * 1024  # of 17,416 values, filled up
    sent = f"{2 * 7 * 2 * a_replicas} B sent"
    has(found["reducer"], f"{values} values over data (8 replicas), {sent}", "input scale weighted; stores its error")
    has(found["update"], "clipped to a global norm of 1, then the task's optimizer")
    has(found["hooks"], "none in the step")
    has(found["sync"], "every_step")


def test_explanation_names_model_axes_rules_and_hooks():
    late = sk.Hook("late", order=5, in_step=lambda old, new, metrics: (new, metrics))
    early = sk.Hook("early", order=1, in_step=lambda old, new, metrics: (new, metrics))
    made = program("replica 2 x fsdp 2 x tensor 2", own=task(hooks=[late, early, sk.Hook("beside")]))
    found = said(made)
    has(found["layout"], "task rule 2, fsdp auto 1", "zero 3: fsdp shards optimizer state, gradients, parameters")
    has(found["form"], "mapped: vmap over 2 replicas; the partitioner shards the rest (fsdp, tensor)")
    # up and down are cut by fsdp x tensor and by tensor, the bias by fsdp
    values = NUM_VALUES // 4 + 128 * 8 // 2 + 8 // 2
    has(found["reducer"], f"{values} values over replica (2 replicas)", "over fsdp the partitioner reduces")
    has(found["hooks"], "in this order: early, late; outside of the step: beside")


def test_explanation_names_groups_and_the_form():
    alone = {"mesh": {"replica": 2, "data": 4}, "sync": {"local_sgd": {"every": 16}}}
    found = said(program(alone, own=task(optax.sgd(0.1), num=64)))
    has(found["sync"], "local_sgd: 2 groups along replica", "averaged after every 16 steps")
    has(found["form"], "mapped: vmap over 4 replicas inside each group")
    has(found["reducer"], "over data (4 replicas)")

    def names_an_axis(params, batch, key):
        return loss_fn(params, jax.lax.pmean(batch, "data"), key)

    found = said(program({"mesh": {}}, own=task(loss_fn=names_an_axis)))
    has(found["form"], "mapped: vmap over 1 replica", "; the step names a replica axis")
    has(said(program({"mesh": {}}))["form"], "plain: one replica")
    has(found["reducer"], "sum: not used, since nothing is reduced over replicas")


def test_explained_bytes_equal_the_compiled_step():
    made = program("data 8", own=task(num=64))
    text = said(made)["reducer"]
    sent = int(text.split(" B sent")[0].split()[-1])
    total = sum(c.bytes for c in read_bill(parse(made.compiled.as_text()), made.sizes).collectives)
    assert sent == 2 * 7 / 8 * 4 * (NUM_VALUES + NUM_SMALL)
    assert 0 <= total - sent <= 64  # loss, metric and counts are added with it


def test_layout_prints_table_and_explanation(tmp_path, capsys):
    (tmp_path / "t.py").write_text("from tests.support.reducer_runs import task as made\ntask = made()\n")
    (tmp_path / "c.yaml").write_text(
        "task: t.py:task\nbatch_size: 64\nmesh: {data: 8}\ndata: {drop_remainder: false}\n"
    )
    try:
        main(["layout", str(tmp_path / "c.yaml")])
    except SystemExit as stop:
        assert not stop.code
    out = capsys.readouterr().out
    table, _, explained = out.partition("\n\n")
    assert table.startswith("mesh ") and "params/up" in table
    assert explained.startswith("mesh ") and "\nreducer       sum: " in explained
