"""Imports only go down the floors, services do not know each other, and `import spmdkit` costs nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "spmdkit"

FLOORS = {
    0: ["errors", "compat", "compile_log", "files", "jaxprs", "keys", "tree", "words"],
    1: ["config", "hardware"],
    2: ["cluster"],
    3: ["mesh", "compiler"],
    4: ["scope", "layout", "reducers", "dependence", "summed"],
    5: ["ops", "means"],
    6: ["sums", "agree", "returned", "forms", "gradient", "replica"],
    7: ["state", "step", "task", "checks"],
    8: ["data", "checkpoint", "metrics", "faults"],
    9: [
        "auto",
        "state_layout",
        "step_record",
        "variables",
        "unused",
        "feed",
        "padding",
        "xla_defects",
        "evaluation",
        "program",
    ],
    10: ["run", "verify", "plan", "loop", "doctor"],
    11: ["launch", "cli", "testing", "__main__"],
}
"""The table of ARCHITECTURE.md, with the modules that exist."""

SERVICES = FLOORS[8]
FLOOR_OF = {name: floor for floor, names in FLOORS.items() for name in names}


def modules():
    """Returns name -> files: a module, or all files of a folder."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if name != "__init__":
            found.setdefault(name, []).append(path)
    return found


def imports(path):
    """Yields the modules of spmdkit that a file imports at any place in it, but for type checking."""
    tree = ast.parse(path.read_text())
    only_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in only_types:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module == "spmdkit":
            names = [f"spmdkit.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module or ""]
        else:
            continue
        yield from (name.split(".")[1] for name in names if name.startswith("spmdkit."))


@pytest.mark.parametrize("name", modules())
def test_a_module_imports_only_from_its_own_floor_and_below(name):
    assert name in FLOOR_OF, f"spmdkit/{name} has no floor yet: put it into the table"
    for path in modules()[name]:
        for imported in imports(path):
            if imported == name or imported.startswith("_"):
                continue
            assert FLOOR_OF[imported] <= FLOOR_OF[name], f"{path.name} imports {imported}, which is above it"
            if name in SERVICES:
                assert imported not in SERVICES, f"{path.name}: service {name} imports service {imported}"


def test_the_table_names_only_what_exists():
    assert set(FLOOR_OF) <= modules().keys()


def test_no_two_modules_import_each_other():
    graph = {name: {i for p in paths for i in imports(p)} - {name} for name, paths in modules().items()}
    for name, imported in graph.items():
        for other in imported & graph.keys():
            assert name not in graph[other], f"{name} and {other} import each other"


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout


def test_importing_spmdkit_imports_no_jax_and_no_other_heavy_package():
    heavy = "('jax', 'jaxlib', 'numpy', 'flax', 'optax', 'orbax', 'grain', 'pydantic', 'rich', 'typer', 'tensorflow')"
    assert run_python(f"import sys, spmdkit; print([m for m in {heavy} if m in sys.modules])").strip() == "[]"


def test_using_every_public_name_creates_no_device_and_changes_no_setting():
    code = """
import os, jax
before, environment = dict(jax.config.values), dict(os.environ)
import spmdkit as sk
for name in sk.__all__:
    getattr(sk, name)
import spmdkit.cli
from jax._src import xla_bridge
print(xla_bridge.backends_are_initialized(), dict(jax.config.values) == before, dict(os.environ) == environment)
"""
    assert run_python(code).split() == ["False", "True", "True"]
