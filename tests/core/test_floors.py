"""Imports only go down the floors, which are computed from them; services do not know each other; `import spmdkit`
costs nothing.

All imports count: those inside of functions and those for type checking too. A room is a module or a folder of
`spmdkit/`. After a change that is meant, `python tests/core/test_floors.py --write` puts the floors into
ARCHITECTURE.md.
"""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "spmdkit"
PAGE = ROOT / "ARCHITECTURE.md"

SERVICES = ("config", "cluster", "faults", "checkpoint", "metrics", "launch", "communication")
ALLOWED = {("launch", "cluster.service")}
"""(who, what): what services import of each other all the same."""

STILL: set[tuple[str, str]] = set()
"""Imports that should go. Nothing is added here; a line goes with its import."""

ISLANDS = {"plan.hlo": "plan"}
"""A folder that knows nothing of the one around it."""


def modules():
    """Returns dotted name below spmdkit -> file; a package under its own name, spmdkit itself as ""."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def named(node):
    """Returns the dotted names below spmdkit that an import statement reads."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        assert node.level == 0, f"line {node.lineno}: relative import"
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    return [name.removeprefix("spmdkit").removeprefix(".") for name in names if name.split(".")[0] == "spmdkit"]


def imports(path):
    """Returns the modules of spmdkit that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        for name in named(node) if isinstance(node, ast.Import | ast.ImportFrom) else ():
            while name not in MODULES:
                name = name.rpartition(".")[0]
            found.add(name)
    return found


IMPORTS = {name: imports(path) - {name} for name, path in MODULES.items()}


def room_of(module):
    return module.split(".")[0]


def room_graph():
    """Returns room -> the rooms that it imports, without what should go; spmdkit itself, which only lists names, is
    none."""
    graph = {room_of(name): set() for name in MODULES if name}
    for name, imported in IMPORTS.items():
        for other in imported:
            if name and other and room_of(other) != room_of(name) and (name, other) not in STILL:
                graph[room_of(name)].add(room_of(other))
    return graph


def circle(graph):
    """Returns the members of a circle in their order, or None."""
    try:
        tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        return error.args[1]
    return None


def floors():
    """Returns room -> floor: one above the highest that it imports."""
    graph, found = room_graph(), {}
    for room in graphlib.TopologicalSorter(graph).static_order():
        found[room] = max((found[other] + 1 for other in graph[room]), default=0)
    return found


def table():
    """Returns the floors as ARCHITECTURE.md shows them."""
    found = floors()
    shown = {room: f"{room}/" if (PACKAGE / room).is_dir() else room for room in found}
    rows = [(n, sorted(shown[r] for r in found if found[r] == n)) for n in range(max(found.values()) + 1)]
    return "".join(f"{n:<2} {'  '.join(names)}\n" for n, names in rows)


def around_table(page):
    """Returns the text of the page before and after the table of floors."""
    head, _, rest = page.partition("## Floors\n")
    before, _, rest = rest.partition("```\n")
    _, _, after = rest.partition("```\n")
    return f"{head}## Floors\n{before}```\n", f"```\n{after}"


def test_no_two_rooms_import_each_other_in_a_circle():
    assert circle(room_graph()) is None


def test_no_two_files_import_each_other_in_a_circle():
    graph = {name: {other for other in imported if (name, other) not in STILL} for name, imported in IMPORTS.items()}
    assert circle(graph) is None


def test_the_floors_of_architecture_md_are_those_of_the_code():
    page = PAGE.read_text()
    before, after = around_table(page)
    assert page == before + table() + after, f"run `python tests/core/test_floors.py --write`; they are now\n{table()}"


@pytest.mark.parametrize("service", [name for name in SERVICES if (PACKAGE / name).exists()])
def test_a_service_imports_no_other(service):
    found = {(name, other) for name in MODULES if room_of(name) == service for other in IMPORTS[name]}
    found = {(name, other) for name, other in found if room_of(other) in set(SERVICES) - {service}}
    within = lambda name, folder: f"{name}.".startswith(f"{folder}.")
    assert not {pair for pair in found if not any(within(pair[0], a) and within(pair[1], b) for a, b in ALLOWED)}


@pytest.mark.parametrize(("island", "around"), ISLANDS.items())
def test_an_island_knows_nothing_of_the_folder_around_it(island, around):
    for name in MODULES:
        if name.startswith(f"{island}."):
            outside = {o for o in IMPORTS[name] if room_of(o) == around and not o.startswith(island)}
            assert not outside, f"{name} imports {outside}"


def test_what_should_go_is_not_gone_yet():
    gone = {(name, other) for name, other in STILL if other not in IMPORTS.get(name, ())}
    assert not gone, f"remove {sorted(gone)} from STILL"


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout


def test_importing_spmdkit_imports_no_jax_and_no_other_heavy_package():
    heavy = "('jax', 'jaxlib', 'numpy', 'flax', 'optax', 'orbax', 'grain', 'pydantic', 'rich', 'typer', 'tensorflow')"
    assert run_python(f"import sys, spmdkit; print([m for m in {heavy} if m in sys.modules])").strip() == "[]"


def test_using_every_public_name_creates_no_device_and_changes_no_setting_nor_the_allocator():
    code = """
import ctypes, os, jax

class Watched(ctypes.CDLL):
    found = []
    def __getattr__(self, name):
        Watched.found.append(name)
        return super().__getattr__(name)

ctypes.CDLL = Watched
before, environment = dict(jax.config.values), dict(os.environ)
import spmdkit as sk
for name in sk.__all__:
    getattr(sk, name)
import spmdkit.cli
from jax._src import xla_bridge
print(xla_bridge.backends_are_initialized(), dict(jax.config.values) == before, dict(os.environ) == environment)
print("mallopt" not in Watched.found)
"""
    assert run_python(code).split() == ["False", "True", "True", "True"]


if __name__ == "__main__":
    print(table(), end="")
    if "--write" in sys.argv:
        before, after = around_table(PAGE.read_text())
        PAGE.write_text(before + table() + after)
