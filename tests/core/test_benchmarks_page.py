"""docs/measured/benchmarks.md: whoever doubts a table finds the command that makes it, and the command is there."""

import importlib
import re
import shlex
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from spmdkit.config import load_config
from tests.support.scripts import load_script

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "measured" / "benchmarks.md").read_text()
COMMAND = re.compile(r"`((?:\S*python |make |spmdkit )[^`]+)`")
DOCS = sorted((ROOT / "docs").rglob("*.md"))
COMMANDS = [" ".join(command.split()) for command in COMMAND.findall(PAGE)]


@pytest.fixture(scope="module")
def results():
    return load_script(ROOT / "benchmarks" / "results.py")


def test_generated_tables_are_those_of_the_results(results):
    assert [path.name for path in DOCS if results.updated(path.read_text()) != path.read_text()] == []


def test_a_saved_result_becomes_a_table(results, tmp_path):
    rows = [{"model": "mlp", "ms": 12.5, "ratio": results.interval([0.9, 1.0, 1.1])}, {"model": "lstm"}]
    results.save("speed", rows, "make bench", note="Idle machine.", folder=tmp_path)
    page = results.updated("<!-- results: speed -->\nold\n<!-- end of results -->\n", tmp_path)
    assert "`make bench`, 20" in page and "Idle machine." in page and "old" not in page
    assert page.splitlines()[-5:] == [
        "| model | ms | ratio |",
        "| --- | ---: | ---: |",
        "| mlp | 12.5 | 1.000 (0.900 to 1.100) |",
        "| lstm |  |  |",
        "<!-- end of results -->",
    ]


def test_an_interval_that_contains_the_goal_meets_it(results):
    ratios = [0.88, 0.91, 0.92, 0.93, 0.93, 0.94, 0.95, 0.96, 0.97, 1.1]
    found = results.interval(ratios)
    assert found == results.interval(ratios) and found["median"] == 0.935 and found["rounds"] == 10
    assert results.is_met(found, 0.93) and not results.is_met(found, 0.90)


def test_a_comparison_keeps_the_rows_of_other_cells(results, tmp_path, monkeypatch):
    compare = load(monkeypatch, "compare")
    monkeypatch.setattr(compare.results, "FOLDER", tmp_path)
    row = lambda model, devices, ms: {"model": model, "devices": devices, "peer, ms": ms}
    results.save("peers", [row("lstm", 1, 1.0), row("gpt_1m", 1, 2.0)], "make bench-peers", folder=tmp_path)
    found = compare.merged([row("lstm", 1, 3.0), row("gpt_1m", 2, 4.0)], ["lstm/1", "gpt_1m/2"])
    assert found == [row("gpt_1m", 1, 2.0), row("gpt_1m", 2, 4.0), row("lstm", 1, 3.0)]


@pytest.mark.parametrize("model", ["gpt_1m", "lstm", "resnet"])
def test_frameworks_start_from_the_same_parameters(monkeypatch, model):
    models, flax_models = load(monkeypatch, "models"), load(monkeypatch, "flax_models")
    sizes = models.MODELS[model]
    with jax.numpy_dtype_promotion("standard"):  # flax's pooling divides by an integer
        expected = jax.eval_shape(flax_models.Net(sizes).init, jax.random.key(0), models.rows(sizes)[0])["params"]
    found = flax_models.variables(models.parameters(sizes), sizes)
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, expected)


def load(monkeypatch, name):
    """Returns a module of benchmarks/peers, in which modules import each other as the script does."""
    for folder in (ROOT / "benchmarks", ROOT / "benchmarks" / "peers"):
        monkeypatch.syspath_prepend(folder)
    for module in ("compare", "flax_models", "models", "results", "worker"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return importlib.import_module(name)


def test_each_section_with_a_table_has_a_command():
    sections = {part.partition("\n")[0]: part for part in PAGE.split("\n## ")[1:]}
    assert [title for title, part in sections.items() if "\n| ---" in part and not COMMAND.search(part)] == []


@pytest.mark.parametrize("command", sorted({*COMMANDS}))
def test_a_command_names_existing_scripts_and_options(command):
    words = shlex.split(command.removeprefix("SPMDKIT_COMPILE_CACHE=off "))
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M), words[1]
    elif words[0] == "spmdkit":
        configs = [word for word in words if word.endswith(".yaml") and "/" in word]
        overrides = [word for word in words if "=" in word and not word.startswith("-")]
        for path in configs:
            load_config(ROOT / path, overrides)
    else:
        (script,) = [word for word in words if word.endswith(".py")]
        text = (ROOT / script).read_text()
        if "pytest" not in words:
            assert [w for w in words if w.startswith("--") and f'"{w}"' not in text and f" {w}" not in text] == []


def test_the_readme_lists_every_script():
    text = (ROOT / "benchmarks" / "README.md").read_text()
    scripts = {path.name for path in (ROOT / "benchmarks").glob("*.py")} - {"results.py"}
    listed = set(re.findall(r"`(\w+\.py)`", text))
    assert (sorted(scripts - listed), sorted(listed - scripts)) == ([], [])
