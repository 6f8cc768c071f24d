"""Imports go down the layers, which are computed from all imports. Services do not import each other. `import spmdkit`
imports no other package.

All imports count, also those inside functions and those for type checking. A package is a module or a folder of
`spmdkit/`. `python tests/core/test_layers.py --write` writes the layers to docs/why/code.md.
"""

import ast
import functools
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "spmdkit"
PAGE = ROOT / "docs/why/code.md"

SERVICES = ("config", "cluster", "faults", "checkpoint", "metrics", "launch", "communication")
ALLOWED = {("launch", "cluster.service")}
"""(importer, imported): imports between services that the layout permits."""

ISLANDS = {"plan.hlo": "plan"}
"""A folder that imports nothing of the package around it."""


def modules():
    """Returns dotted name below spmdkit -> file; a package under its own name, spmdkit itself as ""."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imported_names(node):
    """Returns the dotted names below spmdkit that an import statement reads."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        assert node.level == 0, f"line {node.lineno}: relative import"
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    return [name.removeprefix("spmdkit").removeprefix(".") for name in names if name.split(".")[0] == "spmdkit"]


def imports(path):
    """Returns the modules of spmdkit that a file imports, also inside functions and for type checking."""
    found, tree = set(), ast.parse(path.read_text())
    for node in ast.walk(tree):
        for name in imported_names(node) if isinstance(node, ast.Import | ast.ImportFrom) else ():
            while name not in MODULES:
                name = name.rpartition(".")[0]
            found.add(name)
    return found


@functools.cache
def imports_of_all():
    """Returns module -> the modules that it imports."""
    return {name: imports(path) - {name} for name, path in MODULES.items()}


def package_of(module):
    return module.split(".")[0]


def package_graph():
    """Returns package -> the packages that it imports. `spmdkit` itself, which only lists names, is not one."""
    graph = {package_of(name): set() for name in MODULES if name}
    for name, imported in imports_of_all().items():
        for other in imported:
            if name and other and package_of(other) != package_of(name):
                graph[package_of(name)].add(package_of(other))
    return graph


def cycle(graph):
    """Returns the members of an import cycle in order, or None."""
    try:
        tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        return error.args[1]
    return None


def layers():
    """Returns package -> layer: one above the highest that it imports."""
    graph, found = package_graph(), {}
    for package in graphlib.TopologicalSorter(graph).static_order():
        found[package] = max((found[other] + 1 for other in graph[package]), default=0)
    return found


def table():
    """Returns the layers as docs/why/code.md shows them."""
    found = layers()
    shown = {name: f"{name}/" if (PACKAGE / name).is_dir() else name for name in found}
    rows = [(n, sorted(shown[r] for r in found if found[r] == n)) for n in range(max(found.values()) + 1)]
    return "".join(f"{n:<2} {'  '.join(names)}\n" for n, names in rows)


def around_table(page):
    """Returns the text of the page before and after the table of layers."""
    head, _, rest = page.partition("## Layers\n")
    before, _, rest = rest.partition("```\n")
    _, _, after = rest.partition("```\n")
    return f"{head}## Layers\n{before}```\n", f"```\n{after}"


def test_packages_have_no_import_cycle():
    assert cycle(package_graph()) is None


def test_files_have_no_import_cycle():
    assert cycle(imports_of_all()) is None


def test_the_package_has_at_most_30_names():
    assert len([path for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]) <= 30


def test_architecture_md_lists_the_layers_of_the_code():
    page = PAGE.read_text()
    before, after = around_table(page)
    assert page == before + table() + after, (
        f"run `python tests/core/test_layers.py --write`; the layers are now\n{table()}"
    )


@pytest.mark.parametrize("service", [name for name in SERVICES if (PACKAGE / name).exists()])
def test_a_service_imports_no_other_service(service):
    found = {(name, other) for name in MODULES if package_of(name) == service for other in imports_of_all()[name]}
    found = {(name, other) for name, other in found if package_of(other) in set(SERVICES) - {service}}
    within = lambda name, folder: f"{name}.".startswith(f"{folder}.")
    assert not {pair for pair in found if not any(within(pair[0], a) and within(pair[1], b) for a, b in ALLOWED)}


@pytest.mark.parametrize(("island", "around"), ISLANDS.items())
def test_an_island_imports_nothing_of_its_package(island, around):
    for name in MODULES:
        if name.startswith(f"{island}."):
            outside = {o for o in imports_of_all()[name] if package_of(o) == around and not o.startswith(island)}
            assert not outside, f"{name} imports {outside}"


def test_imports_are_light_and_change_no_setting():
    code = """
import ctypes, os, sys

import spmdkit as sk

heavy = ("jax", "jaxlib", "numpy", "flax", "optax", "orbax", "grain", "pydantic", "rich", "typer", "tensorflow")
print([name for name in heavy if name in sys.modules])

class Watched(ctypes.CDLL):
    found = []
    def __getattr__(self, name):
        Watched.found.append(name)
        return super().__getattr__(name)

import jax

ctypes.CDLL = Watched
before, environment = dict(jax.config.values), dict(os.environ)
for name in sk.__all__:
    getattr(sk, name)
import spmdkit.cli
from jax._src import xla_bridge
print(xla_bridge.backends_are_initialized(), dict(jax.config.values) == before, dict(os.environ) == environment)
print("mallopt" not in Watched.found)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["[]", "False", "True", "True", "True"]


if __name__ == "__main__":
    print(table(), end="")
    if "--write" in sys.argv:
        before, after = around_table(PAGE.read_text())
        PAGE.write_text(before + table() + after)
