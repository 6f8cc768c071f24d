"""The bill is right: bytes of programs with known traffic equal what is computed by hand, on CPU and on the TPU
compiler."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.plan.collectives_bill import read_bill
from spmdkit.plan.hlo.text import parse
from spmdkit.plan.lower_bound import lower_bound_bytes
from spmdkit.plan.machine.target import open_target, parse_target
from tests.plan.known_traffic import PROGRAMS, SIZES, compiled, sent
from tests.support.core_runs import program_of


@pytest.mark.parametrize("name", PROGRAMS)
def test_bytes_equal_the_hand_computed_ones(name):
    bill = read_bill(parse(compiled(name, jax.devices()).as_text()), SIZES)
    assert sent(bill) == PROGRAMS[name][1]["cpu"]


@pytest.mark.tpu
@pytest.mark.parametrize("name", PROGRAMS)
def test_bytes_on_the_tpu_compiler_equal_them_too(name):
    bill = read_bill(parse(compiled(name, open_target(parse_target("tpu:v5e:2x4")).devices).as_text()), SIZES)
    assert sent(bill) == PROGRAMS[name][1]["tpu"]


@pytest.mark.parametrize("name", ["ring_in_a_scan", "nested_scans", "while_with_a_known_bound", "zero_3"])
def test_trip_counts_from_the_condition_of_a_loop(name):
    text = compiled(name, jax.devices()).as_text()
    assert "known_trip_count" in text
    bill = read_bill(parse(text.replace("known_trip_count", "unused")), SIZES)
    assert bill.collectives == read_bill(parse(text), SIZES).collectives and sent(bill) == PROGRAMS[name][1]["cpu"]


def test_trip_counts_from_the_scan_of_the_jaxpr():
    text = compiled("ring_in_a_scan", jax.devices()).as_text()
    module = parse(text.replace("known_trip_count", "unused").replace("direction=LT", "direction=EQ"))
    (loop,) = (i for i in module.instructions() if i.opcode == "while")
    assert read_bill(module, SIZES).bytes is None
    assert sent(read_bill(module, SIZES, scans={loop.op_name: 4})) == PROGRAMS["ring_in_a_scan"][1]["cpu"]


def test_an_unknown_trip_count_is_not_guessed():
    bill = read_bill(parse(compiled("while_until_it_converges", jax.devices()).as_text()), SIZES)
    (c,) = bill.collectives
    assert (c.bytes, c.trip_count, c.in_loop) == (None, None, True)
    assert bill.bytes is None and bill.bytes_at_least == c.bytes_at_least == 64 * 128 * 4
    assert bill.by("axes") == {("data",): None} and bill.rows[0].as_json()["bytes"] is None


def test_the_most_expensive_branch_is_counted():
    bill = read_bill(parse(compiled("conditional", jax.devices()).as_text()), SIZES)
    assert [c.branch for c in bill.collectives] == [True, True]
    dear, cheap = sorted(bill.collectives, key=lambda c: -c.bytes)
    assert (dear.counted, cheap.counted) == (True, False)
    assert bill.bytes == dear.bytes and cheap.bytes == 2 * 3 * 128 * 4 // 4


@pytest.mark.parametrize("reducer", ["sum", "powersgd"])
def test_formulas_count_float64_in_its_own_bytes(reducer):
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
