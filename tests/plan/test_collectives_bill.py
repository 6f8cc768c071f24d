"""The bill is right: bytes of programs with known traffic equal what is computed by hand, on CPU and on the TPU
compiler."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.plan.collectives_bill import read_bill
from spmdkit.plan.hlo.loops import trip_count, walk
from spmdkit.plan.hlo.text import parse
from spmdkit.plan.lower_bound import lower_bound_bytes
from spmdkit.plan.machine.target import open_target, parse_target
from tests.plan.known_traffic import PROGRAMS, SIZES, compiled
from tests.support.core_runs import program_of


def sent(bill):
    """Returns `op_axes` -> bytes, None where a trip count is unknown."""
    found = {}
    for c in bill.collectives:
        if c.counted:
            key = "_".join([c.op, *c.axes])
            found[key] = None if c.bytes is None or found.get(key, 0) is None else found.get(key, 0) + c.bytes
    return found


def tpu(name):
    return open_target(parse_target(name)).devices


@pytest.mark.parametrize("name", PROGRAMS)
def test_bytes_equal_the_hand_computed_ones(name):
    text = compiled(name, jax.devices()).as_text()
    bill = read_bill(parse(text), SIZES)
    assert sent(bill) == PROGRAMS[name][1]["cpu"]


@pytest.mark.tpu
@pytest.mark.parametrize("name", PROGRAMS)
def test_bytes_equal_the_hand_computed_ones_on_the_tpu_compiler(name):
    bill = read_bill(parse(compiled(name, tpu("tpu:v5e:2x4")).as_text()), SIZES)
    assert sent(bill) == PROGRAMS[name][1]["tpu"]


@pytest.mark.parametrize("name", ["ring_in_a_scan", "nested_scans", "while_with_a_known_bound", "zero_3"])
def test_a_loop_whose_text_tells_no_trip_count_is_counted_from_its_condition(name):
    text = compiled(name, jax.devices()).as_text()
    told, silent = parse(text), parse(text.replace("known_trip_count", "unused"))
    assert told.entry is not None and "known_trip_count" in text
    counts = [
        [trip_count(m, v.instruction, v.site) for v in walk(m) if v.instruction.opcode == "while"]
        for m in (told, silent)
    ]
    assert counts[0] == counts[1] and None not in counts[1]
    assert read_bill(silent, SIZES).collectives == read_bill(told, SIZES).collectives


def test_an_unknown_trip_count_is_said_and_not_guessed():
    bill = read_bill(parse(compiled("while_until_it_converges", jax.devices()).as_text()), SIZES)
    (c,) = bill.collectives
    assert (c.bytes, c.trip_count, c.in_loop) == (None, None, True)
    assert bill.bytes is None and bill.bytes_at_least == c.bytes_at_least == 64 * 128 * 4
    assert bill.by_axes() == {("data",): None} and bill.rows[0].as_json()["bytes"] is None


def test_of_a_conditional_the_dearer_branch_is_counted_and_both_are_listed():
    bill = read_bill(parse(compiled("conditional", jax.devices()).as_text()), SIZES)
    assert [c.branch for c in bill.collectives] == [True, True]
    dear, cheap = sorted(bill.collectives, key=lambda c: -c.bytes)
    assert (dear.counted, cheap.counted) == (True, False)
    assert bill.bytes == dear.bytes and cheap.bytes == 2 * 3 * 128 * 4 // 4


@pytest.mark.parametrize(
    "reducer", ["sum", "ordered", {"hierarchical": {"outer": "ordered"}}, "powersgd", "bfloat16"], ids=str
)
def test_the_formulas_count_a_gradient_of_float64_in_its_own_bytes(reducer):
    """What is compared is the compiled program; the loss and its count are a few bytes more."""
    with jax.enable_x64(True):
        task = sk.Task(
            lambda key: jnp.ones((128, 128)),
            lambda p, x, key: sk.mean((jnp.tanh(x @ p) ** 2).sum(-1)),
            optax.sgd(1.0),
            train_data=np.ones((16, 128)),
        )
        settings = {"mesh": {"replica": 2, "data": 4}, "reducer": reducer, "batch_size": 16}
        program = program_of(task, precision={"compute": "float64", "params": "float64"}, **settings)
        sent = read_bill(parse(program.compiled.as_text()), program.sizes).bytes
        assert lower_bound_bytes(program)["replica x data"] == pytest.approx(sent, abs=400)
        assert f"{lower_bound_bytes(program)['replica x data']} B sent" in program.explain()
    jax.clear_caches()
