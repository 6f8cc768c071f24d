"""`locate`: the first value of a step that differs between one device and a mesh, with its line, how it differs, and the axis.

Both programs are run with every intermediate value as a result (tapped.py), the one device's also with its input moved by one ulp. A value of
the mesh is matched with the one of the same text, line and order. What devices hold is right where it is, for some dims or mesh axes,

    the same        the value of one device, whole, cut, or the same on all of them; rows in another order are the same value
    a part          what adds up to it, or has it for its mean: a sum that is still to come

and differs otherwise. From the results that differ, one walks back through values that differ or have no match, to where what they are made of
is right: the mistake is between. It is told only where that is one line; more than one, or none, is "not located".
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from spmdkit.program.program import Program
from spmdkit.tree import is_key, named_leaves
from spmdkit.verify.instruments import one_ulp
from spmdkit.verify.relation import FAR, Relation, difference, distance, noise_of, related
from spmdkit.verify.subject import Setting, Subject
from spmdkit.verify.tapped import Place, Tapped, Value

NUM_MOVED = 2
MOVES = frozenset(
    [
        "psum",
        "psum_invariant",
        "reduce_scatter",
        "all_gather",
        "reshape",
        "broadcast_in_dim",
        "squeeze",
        "transpose",
        "convert_element_type",
        "slice",
        "copy",
        "pvary",
        "pcast",
        "reduce_sum",
    ]
)
"""Operations that hand on what came wrong before them."""

NEAR = 3
"""Lines apart that are one place: a statement over several lines, a factor and where it is multiplied."""


class Located(NamedTuple):
    """Where the first difference is.

    Attributes:
        line: `file.py:12 (function)`.
        primitive, shape: JAX's operation there, and the value's shape on a device.
        how: in words.
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


class Taps(NamedTuple):
    """A program with taps, and what they gave."""

    program: Tapped
    results: list[Any]
    taps: Mapping[Place, np.ndarray]


def tapped(closed: Any) -> Callable[[Sequence[Any]], Taps]:
    """Returns the function that runs a traced step with taps, on a flat list of arrays on their devices. It compiles once."""
    program = Tapped(closed)
    order: list[Place] = []

    @jax.jit
    def run(*given: Any) -> Any:
        results, taps = program(*given)
        order[:] = taps
        plain = [jax.random.key_data(x) if is_key(x) else x for x in results]
        return plain, list(taps.values())

    def side(arguments: Sequence[Any]) -> Taps:
        results, values = jax.device_get(run(*arguments))
        return Taps(program, results, dict(zip(order, map(np.asarray, values), strict=True)))

    return side


Right = tuple[Taps, list[Taps]]
"""One device, and the same with its input moved by an ulp."""


def right(subject: Subject, setting: Setting, batch: int) -> Right:
    """Returns the values of one device for a setting of a mesh, in one of the subject's batches."""
    program = subject.program(dataclasses.replace(setting, mesh={}, plain=True), evaluated=False)
    run = tapped(program.traced.jaxpr)
    moves = [lambda tree: tree, *(one_ulp(np.random.default_rng(i), subject.dtype) for i in range(NUM_MOVED))]
    one, *moved = (run(_given(program, batch, move)) for move in moves)
    return one, moved


def _given(program: Program, batch: int, move: Callable[[Any], Any]) -> list[Any]:
    """Returns a step's arguments, flat: the first state and a batch, moved by `move`."""
    given = [b for _, b in program.batches(stop=batch + 1)][batch]
    examples = jax.tree.map(lambda x: jax.device_put(move(x), x.sharding), given.examples)
    given = dataclasses.replace(given, examples=examples, limit=program.limit)
    state = jax.device_get(program.init())
    placed = jax.device_put(state.replace(params=move(state.params)), program.state_sharding)
    return jax.tree.leaves((placed, given))


def locate_in(known: Right, setting: Setting, many: Program, quantity: str, batch: int) -> Located | None:
    """Returns where a program of a subject on a mesh first differs from one device; None where it cannot be told.

    Args:
        known: `right` of the same setting and batch.
        many: the program; its jaxpr is evaluated, so that a mutant's mistake is in it.
        quantity: the first that differs.
    """
    found = tapped(many.traced.jaxpr)(_given(many, batch, lambda tree: tree))
    axes = {axis: size for axis, size in setting.mesh.items() if size > 1}
    return locate(*known, found, axes, _roots(many, quantity))


ROOTS = {"gradient": "opt_state/gradient", "update": "opt_state/update", "state": "model_state", "loss": "loss"}
"""Quantity that differs -> what its results have in their path."""


def _roots(program: Program, quantity: str) -> list[int]:
    """Returns the numbers of a step's results that hold a quantity, all of them where none does."""
    names = [path for path, _ in named_leaves(program.traced.out_info)]
    found = [i for i, name in enumerate(names) if (part := ROOTS.get(quantity)) is not None and f"/{part}" in name]
    return found or list(range(len(names)))


def locate(
    one: Taps, moved: Sequence[Taps], many: Taps, axes: Mapping[str, int], roots: Sequence[int] | None = None
) -> Located | None:
    """Returns where `many`, on a mesh, first differs from `one`; None where no single line is to blame.

    Args:
        moved: one device with its input moved by one ulp: what they differ by is noise.
        axes: sizes of the mesh axes that are larger than one.
        roots: which results to begin with; None: all that differ.
    """
    return _Search(one, moved, many, axes, roots).find()


class _Search:
    def __init__(
        self,
        one: Taps,
        moved: Sequence[Taps],
        many: Taps,
        axes: Mapping[str, int],
        roots: Sequence[int] | None = None,
    ):
        self.one, self.moved, self.many, self.axes, self.roots = one, moved, many, axes, roots
        self.match = _matched(one.program.values, many.program.values)
        self._right: tuple[str, ...] = ("same", "sum", "mean")
        self._relations: dict[Place, tuple[Relation | None, Place | None]] = {}

    def find(self) -> Located | None:
        """Returns the one place where what differs begins; None where there is none, or more than one."""
        first = self._first()
        near = [p for place, between in first.items() for p in (place, *between)]
        added = [p for p in near if self.many.program.values[p].primitive.startswith("psum")]
        if any((r := self.relation(q)) is not None and r.kind == "mean" for p in added for q in self._parents(p)):
            self._right = (
                "same",
                "sum",
            )  # what is added here as if it were sums has been made too large somewhere before
            first = self._first()
        return self._told(first)

    def _parents(self, place: Place) -> list[Place]:
        return [p for p in self.many.program.values[place].parents if p[0] != -1]

    def _first(self) -> dict[Place, list[Place]]:
        """Returns the first values that differ, each with the values before it that nothing stands for."""
        roots = self._wrong_results()
        values = self.many.program.values
        first: dict[Place, list[Place]] = {}
        seen: set[Place] = set()
        todo = [p for p in roots if p in values]
        while todo:
            place = todo.pop()
            if place in seen:
                continue
            seen.add(place)
            between, below = self._behind(place)
            todo += below
            if not below:
                first[place] = between
        return first

    def _wrong_results(self) -> list[Place]:
        """Returns the places of the results that differ from those of one device."""
        found = []
        for i in range(len(self.many.results)) if self.roots is None else self.roots:
            x, y = self.many.results[i], self.one.results[i]
            ulps = [side.results[i] for side in self.moved]
            if x.shape != y.shape or distance(x, y) > noise_of(y, ulps, FAR):
                found += self.many.program.results[i]
        return found

    def relation(self, place: Place) -> Relation | None:
        """Returns how a value of the mesh is made of that of one device; None where nothing there stands for it."""
        return self._known(place)[0]

    def _known(self, place: Place) -> tuple[Relation | None, Place | None]:
        """Returns (relation, the place on one device whose value it is made of)."""
        if place not in self._relations:
            self._relations[place] = (None, None)  # a loop's own value
            self._relations[place] = self._look(place)
        return self._relations[place]

    def _look(self, place: Place) -> tuple[Relation | None, Place | None]:
        if place[0] == -1:
            return Relation("same"), None
        value = self.many.program.values[place]
        if value.is_index:
            return Relation("same"), None  # another on each device by its nature
        if place not in self.many.taps:
            return None, None
        if (other := self.match.get(place)) is not None and other in self.one.taps:
            return self._against(place, other), other
        # Without a match: what it is made of may be what it is, too, as a sum over devices is.
        for other in dict.fromkeys(self._known(p)[1] for p in value.parents if p in self.many.program.values):
            if other is not None and (found := self._against(place, other)).kind in ("same", "sum", "mean"):
                return found, other
        return None, None

    def _against(self, place: Place, other: Place) -> Relation:
        right = self.one.taps[other]
        ulps = [side.taps[other] for side in self.moved if other in side.taps]
        stacked = self.many.program.values[place].stacked
        return related(self.many.taps[place], right, stacked, self.axes, lambda least: noise_of(right, ulps, least))

    def _behind(self, place: Place) -> tuple[list[Place], list[Place]]:
        """Returns (values that nothing stands for, between a value and what is right before it; values that differ before it)."""
        between, below, seen = [], [], set[Place]()
        todo = list(self.many.program.values[place].parents)
        while todo:
            parent = todo.pop()
            if parent in seen or parent[0] == -1:
                continue
            seen.add(parent)
            relation = self.relation(parent)
            if relation is None:
                between.append(parent)
                todo += self.many.program.values[parent].parents
            elif relation.kind not in self._right:
                below.append(parent)
        return between, below

    def _told(self, first: Mapping[Place, list[Place]]) -> Located | None:
        """Returns the one place in the text that all first differences are about."""
        values = self.many.program.values
        forward = [p for p in first if not values[p].backward] or list(first)
        blamed = [at for place in sorted(forward) for at in self._blamed(place, first[place])]
        if not blamed or not _together([values[at].line for at in blamed]):
            return None
        place = min(blamed)
        how, axis = self._how(place)
        return Located(values[place].line, values[place].primitive, values[place].shape, how, axis)

    def _blamed(self, place: Place, between: list[Place]) -> list[Place]:
        """Returns the values that a first difference comes from."""
        values, relation = self.many.program.values, self.relation(place)
        if relation is not None and relation.kind == "open":
            return []
        if unknown := [p for p in between if not values[p].is_key]:
            made = [p for p in unknown if not (values[p].primitive in MOVES and set(values[p].parents) & set(unknown))]
            return [p for p in made if values[p].own] or made
        # A sum that is still to come, used beside what is whole: the line that leaves it so.
        found = {p: self.relation(p) for p in values[place].parents if p[0] != -1}
        parts = [p for p, r in found.items() if r is not None and r.kind in ("sum", "mean")]
        return parts if parts and len(parts) < len(values[place].parents) else [place]

    def _how(self, place: Place) -> tuple[str, str]:
        relation, right = self._known(place)
        if relation is not None and relation.kind in ("sum", "mean"):
            return f"is each shard's own {relation.kind} over {relation.axes}, used as if it were of all", relation.axes
        value, found = self.many.program.values[place], self.many.taps.get(place)
        if right is None:
            right = next((r for p in value.parents if p in self.many.program.values and (r := self._known(p)[1])), None)
        every = " x ".join(self.axes)
        if right is None or found is None:
            return "stands for nothing on one device, and what follows differs", every
        return difference(found, self.one.taps[right], value.stacked, self.axes) or ("is another value", every)


def _together(lines: Sequence[str]) -> bool:
    """Returns whether lines `file.py:12 (function)` are of one file, and near each other: one statement, most often."""
    places = [line.partition(" ")[0].rpartition(":") for line in lines]
    if any(not file for file, _, _ in places) or len({file for file, _, _ in places}) != 1:
        return False
    numbers = [int(number) for _, _, number in places]
    return max(numbers) - min(numbers) <= NEAR


# ---- matching ---------------------------------------------------------------------------------------------------------


def _matched(one: Mapping[Place, Value], many: Mapping[Place, Value]) -> dict[Place, Place]:
    """Returns place on the mesh -> place on one device, of values of the same text in the same order."""
    found: dict[Place, Place] = {}
    for backward in (False, True):
        a = [(p, v.key) for p, v in one.items() if v.backward == backward]
        b = [(p, v.key) for p, v in many.items() if v.backward == backward]
        ids: dict[Any, int] = {}
        numbers = [[ids.setdefault(key, len(ids)) for _, key in side] for side in (a, b)]
        matcher = difflib.SequenceMatcher(None, numbers[0], numbers[1], autojunk=False)
        for i, j, size in matcher.get_matching_blocks():
            found |= {b[j + n][0]: a[i + n][0] for n in range(size)}
    return found
