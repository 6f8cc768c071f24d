"""The example of each public symbol, docs/api_examples.md, runs in a folder with the files of `spmdkit new first`."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdkit as sk
from spmdkit.tools.new import write_project
from tests.docs.pages import DOCS

pytestmark = pytest.mark.slow

FOUND = re.findall(
    r"^## sk\.(\w+)\n+```python\n(.*?)\n```", (DOCS / "api_examples.md").read_text(), re.DOTALL | re.MULTILINE
)


def test_every_symbol_has_an_example():
    assert [name for name, _ in FOUND] == sorted(name for name in sk.__all__ if not name.startswith("__"))


@pytest.mark.parametrize(("name", "code"), FOUND, ids=[name for name, _ in FOUND])
def test_an_example_runs(name, code, tmp_path, monkeypatch):
    if "import pyarrow" in code:
        pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    write_project("first")
    exec(code, {"jax": jax, "jnp": jnp, "np": np, "optax": optax, "sk": sk})
