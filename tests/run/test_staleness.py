"""Stale gradients and an optimizer with moments: one line at the start, at a staleness of the published experiment."""

import json
from pathlib import Path

import jax.numpy as jnp
import optax
import pytest

import spmdkit as sk
from spmdkit.run.startup.staleness import LIMITS, MOST, expected_staleness, staleness_notes
from tests.support.small_runs import train

OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
    "adafactor": optax.adafactor(0.1),
    "rmsprop": optax.rmsprop(0.1),
}
KIND = {"rmsprop": "adam"}
SERVER = [
    ({"workers": 2}, 2),
    ({"workers": 2, "overlap": False}, 1),
    ({"workers": 5, "overlap": False}, 4),
    ({"workers": 5, "max_staleness": 1}, 1),
    ({"workers": 3, "aggregate": 3}, 0),
    ({"workers": 1, "max_staleness": 0}, 0),
]


def config(sync):
    return sk.Config(task="a.py:t", sync=sync)


@pytest.mark.parametrize(
    ("sync", "staleness"),
    [
        *(({"parameter_server": {**options, "transport": "threads"}}, found) for options, found in SERVER),
        ("every_step", 0),
        ({"stale": 3}, 3),
        ({"stale": {"k": 3}}, 3),
        ({"local_sgd": {"every": 4}}, 0),
        ("mine.py:lookahead", 0),
    ],
)
def test_staleness_of_a_config(sync, staleness):
    assert expected_staleness(config(sync)) == staleness


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_line_is_logged_above_the_limit(kind):
    state = OPTIMIZERS[kind].init({"w": jnp.ones((256, 256))})
    name = KIND.get(kind, kind)
    limit = LIMITS.get(name, 100)
    assert staleness_notes(config({"stale": limit}), state) == []
    notes = staleness_notes(config({"stale": limit + 1}), state)
    assert len(notes) == (kind != "sgd")
    assert all(f"up to {limit + 1} updates late" in note and f"state of {name}" in note for note in notes)


def test_run_logs_the_line_once(tmp_path, capsys):
    train(tmp_path, steps=1, sync={"stale": 8}, checkpoint=None)
    assert capsys.readouterr().out.count("note: gradients are up to 8 updates late") == 1


def test_limits_are_those_of_the_experiment():
    rows = json.loads((Path(__file__).parents[2] / "benchmarks/results/staleness.json").read_text())["rows"]
    for kind, limit in LIMITS.items():
        row = min((row for row in rows if row["optimizer"] == kind), key=lambda row: row["rate"])
        ratios = {int(name[3:]): float(text.split()[0]) for name, text in row.items() if name[3:].isdecimal()}
        converges = [s for s in ratios if all(ratios[t] <= MOST for t in ratios if t <= s)]
        assert limit == max(converges, default=0), (kind, ratios)
