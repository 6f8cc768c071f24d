"""The examples of the gallery: a form of two steps, equality with one device, and the results on docs/gallery.md."""

import ast
import json
import re

import jax
import numpy as np
import pytest

import spmdkit as sk
from tests.examples.conftest import EXAMPLES

ROOT = EXAMPLES.parent
NAMES = ["contrastive", "diffusion_digits", "graph_network", "lora", "minimal_gpt", "pinn", "ppo_cartpole"]
NAMES += ["recurrent", "speech_ctc", "vit_digits"]
SHORT = [name for name in NAMES if name != "lora"]  # test_lora.py has its short form
RESULTS = json.loads((ROOT / "docs/gallery/results.json").read_text())
LINES = 150
PICTURE_BYTES = 40 * 1024


def two_steps(row, name, *overrides):
    """Returns (losses, parameters) after the short form of an example."""
    program = sk.build(ROOT / f"configs/{name}.yaml", overrides=[*row.short, *overrides])
    state, losses = program.init(), []
    for _, batch in program.batches():
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, jax.device_get(state.params)


@pytest.mark.parametrize("name", SHORT)
def test_the_short_form_trains(load_example, name):
    losses, _ = two_steps(load_example("gallery").ROWS[name], name)
    assert len(losses) == 2 and np.isfinite(losses).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_the_short_form_equals_one_device(load_example, name):
    row = load_example("gallery").ROWS[name]
    losses, params = two_steps(row, name)
    expected, expected_params = two_steps(row, name, "mesh={}")
    np.testing.assert_allclose(losses, expected, rtol=1e-5, atol=2e-6)  # PPO's loss is a difference of terms near 1
    for leaf, other in zip(jax.tree.leaves(params), jax.tree.leaves(expected_params), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(RESULTS))
def test_the_result_is_that_of_the_page(load_example, name, tmp_path):
    gallery = load_example("gallery")
    result, _ = gallery.train(name, tmp_path)
    assert gallery.measured(name, result) == pytest.approx(RESULTS[name]["value"], abs=gallery.ROWS[name].tolerance)


def test_the_page_has_every_result(load_example):
    gallery = load_example("gallery")
    assert sorted(gallery.ROWS) == NAMES and set(RESULTS) <= set(NAMES)
    assert gallery.PAGE.read_text() == gallery.page(RESULTS)
    for name in RESULTS:
        row = gallery.ROWS[name]
        picture = gallery.FOLDER / f"{name}.png"
        assert (RESULTS[name]["sample"] is None) == (row.size is not None) == picture.exists()
        assert not picture.exists() or picture.stat().st_size <= PICTURE_BYTES


@pytest.mark.parametrize("name", sorted(RESULTS))
def test_an_example_is_short_and_states_its_result(name):
    text = (EXAMPLES / f"{name}.py").read_text()
    assert len(text.splitlines()) <= LINES
    expected = re.search(
        r"Expected: \D*?(\d[\d.]*\d).*?(\d[\d.]*) minutes? on two CPU cores",
        ast.get_docstring(ast.parse(text)),
        re.DOTALL,
    )
    assert expected is not None
    decimals = len(expected[1].partition(".")[2])
    assert round(RESULTS[name]["value"], decimals) == float(expected[1])
    assert RESULTS[name]["minutes"] == pytest.approx(float(expected[2]), rel=0.5, abs=0.2)
