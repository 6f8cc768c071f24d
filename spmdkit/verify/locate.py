"""`locate`: the first value of a step that differs between one device and a mesh, with its line, the difference and the
axis.

Both programs also return every intermediate value (tracing.py). The one-device program also runs with its input moved
by one ulp. A value on the mesh is matched with the one-device value of the same line, operation and order. It is right
if, for some dims or mesh axes, it is

    the same        the one-device value: complete, sharded along any dim, or replicated; rows in another order if the
                    mesh reorders them
    a partial value its sum, mean, maximum or minimum over devices is the one-device value: the reduction is later

From the results that differ, the search walks back to values with right inputs (search.py). The difference is reported
only if it lies in one statement.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import linecache
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from spmdkit.foundation.formatting import shown
from spmdkit.foundation.trees import is_key, named_leaves
from spmdkit.program import compiler
from spmdkit.program.program import Program
from spmdkit.verify.probes import one_ulp
from spmdkit.verify.search import Node, Search, TapValues
from spmdkit.verify.sharding_relation import PARTS
from spmdkit.verify.task_runner import Setting, TaskRunner
from spmdkit.verify.tracing import TappedProgram, ValuePath

PACKAGE = Path(__file__).parents[1]
NUM_MOVED = 2
COLLECTIVES = ("psum", "psum_invariant", "reduce_scatter", "all_gather", "pvary", "pcast", "reduce_sum")
RESHAPES = ("reshape", "broadcast_in_dim", "squeeze", "transpose", "convert_element_type", "slice", "copy")
MOVES = frozenset([*COLLECTIVES, *RESHAPES])
"""Operations that only propagate a wrong value."""

REORDERING = {"context", "expert", "pipeline"}
"""Axes that reorder rows or positions. Microbatches reorder rows too."""


class Location(NamedTuple):
    """The first difference.

    Attributes:
        line: `file.py:12 (function)`.
        primitive, shape: the JAX primitive at this line, and the value's shape on a device.
        how: description of the difference.
        axis: mesh axes over which the value is wrong, or an empty string.
    """

    line: str
    primitive: str
    shape: tuple[int, ...]
    how: str
    axis: str

    @property
    def text(self) -> str:
        return f"{self.line}: {self.primitive} {list(self.shape)} {self.how}"


def tapped(closed: Any, wanted: Sequence[int] | None = None) -> Callable[[Sequence[Any]], TapValues]:
    """Returns a function that runs a traced step with taps; it takes a flat list of arrays on their devices. The step
    is compiled once.

    Args:
        wanted: indices of the requested results; None: all.
    """
    program = TappedProgram(closed, wanted)
    order: list[ValuePath] = []

    @functools.partial(jax.jit, compiler_options={**compiler.quick_options()})
    def run(*given: Any) -> Any:
        results, taps = program(*given)
        order[:] = taps
        plain = [jax.random.key_data(x) if is_key(x) else x for x in results]
        return plain, list(taps.values())

    def side(arguments: Sequence[Any]) -> TapValues:
        results, values = jax.device_get(run(*arguments))
        by_number = dict(zip(program.wanted, results, strict=True))
        return TapValues(program, by_number, dict(zip(order, map(np.asarray, values), strict=True)))

    return side


class Locator:
    """Locates the first difference of a task. It caches the one-device values of the last setting."""

    def __init__(self, task_runner: TaskRunner):
        self._task_runner = task_runner
        self._program: tuple[Setting, Program] | None = None
        self._right: dict[tuple[str, int], tuple[TapValues, list[TapValues]]] = {}

    def __call__(self, setting: Setting, many: Program, quantity: str, batch: int) -> Location | None:
        """Returns where a program on a mesh first differs from one device, or None.

        The values of the loss are searched first, since the backward pass takes several times as long to compile.
        """
        quantities = dict.fromkeys(["loss", quantity]) if quantity in ("loss", "gradient") else [quantity]
        return next((found for q in quantities if (found := self._from(setting, many, q, batch)) is not None), None)

    def _from(self, setting: Setting, many: Program, quantity: str, batch: int) -> Location | None:
        found = tapped(many.traced.jaxpr, _roots(many, quantity))(_step_arguments(many, batch, lambda tree: tree))
        axes = [axis for axis, size in setting.mesh.items() if size > 1]
        reordered = setting.microbatches > 1 or not REORDERING.isdisjoint(axes)
        sizes = {shown(axis): setting.mesh[axis] for axis in axes}
        return locate(*self._one_device(setting, quantity, batch), found, sizes, reordered)

    def _one_device(self, setting: Setting, quantity: str, batch: int) -> tuple[TapValues, list[TapValues]]:
        """Returns the values a quantity is computed from on one device, and those with the input moved by one ulp."""
        one = dataclasses.replace(setting, mesh={}, plain=True)
        if self._program is None or self._program[0] != one:
            self._program, self._right = (one, self._task_runner.program(one, evaluated=False)), {}
        if (quantity, batch) not in self._right:
            program = self._program[1]
            run = tapped(program.traced.jaxpr, _roots(program, quantity))
            ulps = (one_ulp(np.random.default_rng(i), self._task_runner.dtype) for i in range(NUM_MOVED))
            first, *moved = (run(_step_arguments(program, batch, move)) for move in (lambda tree: tree, *ulps))
            self._right[quantity, batch] = first, moved
        return self._right[quantity, batch]


def _step_arguments(program: Program, batch: int, move: Callable[[Any], Any]) -> list[Any]:
    batch_data = [b for _, b in program.batches(stop=batch + 1)][batch]
    examples = jax.tree.map(lambda x: jax.device_put(move(x), x.sharding), batch_data.examples)
    batch_data = dataclasses.replace(batch_data, examples=examples, limit=program.limit)
    state = jax.device_get(program.init())
    placed = jax.device_put(state.replace(params=move(state.params)), program.state_sharding)
    return jax.tree.leaves((placed, batch_data))


ROOTS = {"gradient": "opt_state/gradient", "update": "opt_state/update", "state": "model_state", "loss": "loss"}
"""Quantity that differs -> part of the path of its results."""


def _roots(program: Program, quantity: str) -> list[int]:
    """Returns the indices of the step's results that hold a quantity; all indices if no result holds it."""
    names = [path for path, _ in named_leaves(program.traced.out_info)]
    found = [i for i, name in enumerate(names) if (part := ROOTS.get(quantity)) is not None and f"/{part}" in name]
    return found or list(range(len(names)))


def locate(
    one: TapValues, moved: Sequence[TapValues], many: TapValues, axes: Mapping[str, int], reordered: bool = False
) -> Location | None:
    """Returns where `many`, on a mesh, first differs from `one`; None if no single line is responsible."""
    search, values = Search(one, moved, many, axes, reordered), many.program.values
    first = search.first()
    forward = [node for node in first if not values[node.place].backward] or list(first)
    blamed = [at for node in sorted(forward) for at in _candidates_of(search, node, first[node])]
    if not blamed or not _is_one_statement([values[at.place].line for at in blamed]):
        return None
    node = min(blamed)
    how, axis = search.how(node)
    value = values[node.place]
    return Location(value.line, value.primitive, value.shape, how, axis)


def _candidates_of(search: Search, node: Node, between: list[Node]) -> list[Node]:
    values, relation = search.many.program.values, search.relation(node)
    if relation is not None and relation.kind == "open":
        return []
    if wrong_key_positions := search.wrong_key_positions(node):
        return wrong_key_positions
    if unknown := [n for n in between if not values[n.place].is_key]:
        places = {n.place for n in unknown}
        sources = [
            n for n in unknown if not (values[n.place].primitive in MOVES and set(values[n.place].parents) & places)
        ]
        return [n for n in sources if values[n.place].own] or sources
    wrong_indices = [n for n in search.wrong_indices(node) if values[n.place].line != values[node.place].line]
    if wrong_indices:
        return wrong_indices
    # A partial value is combined with a complete one: the line of the missing reduction is that of the partial value.
    parents = search.parents(node)
    parts = [n for n in parents if (r := search.relation(n)) is not None and r.kind in PARTS]
    return parts if parts and len(parts) < len(values[node.place].parents) else [node]


def _is_one_statement(lines: Sequence[str]) -> bool:
    """Returns whether lines `file.py:12 (function)` belong to one statement."""
    locations = [line.partition(" ")[0].rpartition(":") for line in lines]
    if any(not file for file, _, _ in locations) or len({file for file, _, _ in locations}) != 1:
        return False
    file, numbers = locations[0][0], {int(number) for _, _, number in locations}
    return len(numbers) == 1 or any(numbers <= set(lines) for lines in _statement_lines(file))


@functools.cache
def _statement_lines(file: str) -> list[range]:
    """Returns the line ranges of all simple statements of a file; none if it cannot be read."""
    try:
        tree = ast.parse(
            "".join(linecache.getlines(str(PACKAGE.parent / file) if file.startswith(PACKAGE.name) else file))
        )
    except SyntaxError:
        return []
    simple = [s for s in ast.walk(tree) if isinstance(s, ast.stmt) and not hasattr(s, "body")]
    return [range(s.lineno, (s.end_lineno or s.lineno) + 1) for s in simple]
