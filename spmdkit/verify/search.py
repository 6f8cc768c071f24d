"""`Search`: walks from differing results back to the first differing values of a step on a mesh.

A value inside a loop is compared per iteration, since an error in one iteration may come from an earlier one.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from spmdkit.verify.sharding_relation import FAR, PARTS, Relation, difference, distance, find_relation, noise_of
from spmdkit.verify.tracing import TappedProgram, Value, ValuePath

SUMS = ("psum", "reduce_scatter")
"""Name prefixes of the operations that sum over devices."""


class TapValues(NamedTuple):
    """A tapped program, its results by index, and its intermediate values by place."""

    program: TappedProgram
    results: Mapping[int, Any]
    taps: Mapping[ValuePath, np.ndarray]


class Node(NamedTuple):
    """A value in one iteration of each enclosing loop, counted in execution order."""

    place: ValuePath
    turns: tuple[int, ...] = ()


class Search:
    """The search for the first difference between one device and a mesh.

    Args:
        one, many: the values on one device and on the mesh.
        moved: the values on one device with the input moved by one ulp.
        axes: sizes of the mesh axes larger than one.
        reordered: rows may be in another order on the mesh.
    """

    def __init__(
        self,
        one: TapValues,
        moved: Sequence[TapValues],
        many: TapValues,
        axes: Mapping[str, int],
        reordered: bool = False,
    ):
        self.one, self.moved, self.many, self.axes, self._reordered = one, moved, many, axes, reordered
        self._match = _matched(one.program.values, many.program.values)
        self._alike: dict[Any, list[ValuePath]] = {}
        for place in one.taps:
            self._alike.setdefault(one.program.values[place].key, []).append(place)
        self._right: tuple[str, ...] = ("same", *PARTS)
        self._relations: dict[Node, tuple[Relation | None, ValuePath | None]] = {}

    # ---- the walk

    def first(self) -> dict[Node, list[Node]]:
        """Returns the first values that differ, each with the unmatched values it is computed from."""
        first = self._walked()
        values = self.many.program.values
        near = [n for node, between in first.items() for n in (node, *between)]
        is_mean = lambda node: (r := self.relation(node)) is not None and r.kind == "mean"
        added = {
            n: means
            for n in near
            if values[n.place].primitive.startswith(SUMS) and (means := list(filter(is_mean, self.parents(n))))
        }
        if not added:
            return first
        # If the package sums means here as if they were partial sums, an earlier value is too large. If the user's code
        # sums means, the sum is the bug, unless the values are means by coincidence and an earlier value is too large.
        # Gradients are not means by coincidence: each shard divides by its number of rows.
        is_user = all(values[n.place].own for n in added)
        of_gradients = any(values[n.place].backward for means in added.values() for n in means)
        right, self._right = self._right, tuple(kind for kind in self._right if kind != "mean")
        before = self._walked()
        if is_user and (of_gradients or any(map(is_mean, before))):
            self._right = right
            return first
        return before

    def _walked(self) -> dict[Node, list[Node]]:
        first: dict[Node, list[Node]] = {}
        seen: set[Node] = set()
        todo = [node for place in self._wrong_results() for node in self._nodes(place, (), ())]
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            between, below = self._behind(node)
            todo += below
            if not below:
                first[node] = between
        return self._earliest(first)

    def _earliest(self, first: Mapping[Node, list[Node]]) -> dict[Node, list[Node]]:
        """Returns the nodes that are not computed from another node of `first`. An intermediate argmax may be right
        although its operand is wrong."""
        values = self.many.program.values
        before = {place: self.many.program.ancestors(values[place].parents) for place in {n.place for n in first}}

        def is_later(node: Node) -> bool:
            earlier = [n for n in first if n != node and n.place in before[node.place]]
            position = (node.turns, node.place)
            return any(node.place not in before[n.place] or (n.turns, n.place) < position for n in earlier)

        return {node: between for node, between in first.items() if not is_later(node)}

    def _wrong_results(self) -> list[ValuePath]:
        places = []
        for i, x in self.many.results.items():
            y = self.one.results[i]
            ulps = [side.results[i] for side in self.moved]
            if x.shape != y.shape or distance(x, y) > noise_of(y, ulps, FAR):
                places += [place for place in self.many.program.results[i] if place in self.many.program.values]
        return places

    def parents(self, node: Node) -> list[Node]:
        """Returns the values a node is computed from, without the program's arguments."""
        value = self.many.program.values[node.place]
        nodes = []
        for parent in value.parents:
            if parent[0] == -1:
                continue
            turns = node.turns
            if parent in value.carried:
                turns = (*turns[:-1], turns[-1] - 1)
                if turns[-1] < 0:
                    continue
            nodes += self._nodes(parent, value.loops, turns)
        return nodes

    def _nodes(self, place: ValuePath, loops: Sequence[Any], turns: tuple[int, ...]) -> list[Node]:
        """Returns a value at the iterations of the shared loops. In a finished loop, it is the first iteration that
        differs, or the last one."""
        own_loops = self.many.program.values[place].loops
        shared = 0
        while shared < min(len(own_loops), len(loops)) and own_loops[shared] == loops[shared]:
            shared += 1
        shared_turns, rest = turns[:shared], own_loops[shared:]
        if not rest:
            return [Node(place, shared_turns)]
        nodes = [Node(place, (*shared_turns, *more)) for more in np.ndindex(*(loop.length for loop in rest))]
        wrong = (n for n in nodes if (r := self.relation(n)) is not None and r.kind not in ("same", *PARTS))
        return [next(wrong, nodes[-1])] if nodes else []

    def _behind(self, node: Node) -> tuple[list[Node], list[Node]]:
        """Returns (unmatched values between a node and its nearest matched ancestors, nearest ancestors that
        differ)."""
        between, below, seen = [], [], set[Node]()
        todo = self.parents(node)
        while todo:
            parent = todo.pop()
            if parent in seen:
                continue
            seen.add(parent)
            relation = self.relation(parent)
            if relation is None:
                between.append(parent)
                todo += self.parents(parent)
            elif relation.kind not in self._right:
                below.append(parent)
        return between, below

    def wrong_key_positions(self, node: Node) -> list[Node]:
        """Returns the first row positions that differ from one device, among those that the keys of a draw are derived
        from."""
        values, found, seen = self.many.program.values, list[Node](), set[Node]()
        todo = self.parents(node)
        while todo:
            parent = todo.pop()
            value = values[parent.place]
            if parent in seen:
                continue
            seen.add(parent)
            if value.is_key or value.primitive.startswith("random_"):
                todo += self.parents(parent)
            elif self._is_place(parent, ("differs",)):
                found += self._begins(parent)
        return found

    def wrong_indices(self, node: Node) -> list[Node]:
        """Returns the first user-computed counts, indices and masks that differ from one device, among the inputs of a
        value."""
        values = self.many.program.values
        made_of = [parent for parent in self.parents(node) if self._is_place(parent, ("differs", None))]
        found = [
            n for n in dict.fromkeys(m for p in made_of for m in self._begins(p)) if self._is_place(n, ("differs",))
        ]
        return found if all(values[n.place].own for n in found) else []

    def _begins(self, node: Node) -> list[Node]:
        """Returns the first differing row positions that a node is computed from; their inputs are right."""
        before = [n for n in self.parents(node) if self._is_place(n, ("differs", None))]
        return list(dict.fromkeys(m for n in before for m in self._begins(n))) or [node]

    def _is_place(self, node: Node, kinds: tuple[str | None, ...]) -> bool:
        """Returns whether a value holds row positions, and its relation to one device is one of `kinds`. None in
        `kinds` means an unmatched value."""
        value = self.many.program.values[node.place]
        if not (value.is_index and value.shape):
            return False
        relation, other = self._compared(node)
        if other is not None and not value.stacked and self.many.taps[node.place].size > self.one.taps[other].size:
            return False  # replica indices that a vmap maps over: the number of rows is that of one device
        return (None if relation is None else relation.kind) in kinds

    # ---- one value

    def relation(self, node: Node) -> Relation | None:
        """Returns the relation of a value on the mesh to its match on one device; None if it has no match."""
        return self._known(node)[0]

    def _known(self, node: Node) -> tuple[Relation | None, ValuePath | None]:
        """Returns (relation, place of the matching value on one device)."""
        if node not in self._relations:
            self._relations[node] = (None, None)  # ends the recursion for a value that a loop carries unchanged
            is_index = self.many.program.values[node.place].is_index  # differs between devices by design
            self._relations[node] = (Relation("same"), None) if is_index else self._compared(node)
        return self._relations[node]

    def _compared(self, node: Node) -> tuple[Relation | None, ValuePath | None]:
        value = self.many.program.values[node.place]
        if value.is_key or node.place not in self.many.taps:
            return None, None
        match = self._match.get(node.place)
        match = match if match in self.one.taps else None
        first = None if match is None else self._against(node, match)
        if match is not None and (first is None or first.kind != "differs"):
            return first, match
        # Another value of the same line may match. Without a match, the value may match its input's counterpart, as a
        # sum over devices does.
        made_of = [] if match is not None else [self._known(n)[1] for n in self.parents(node)]
        for other in dict.fromkeys([*self._alike.get(value.key, []), *made_of]):
            found = None if other is None or other == match else self._against(node, other)
            if found is not None and found.kind in ("same", *PARTS):
                return found, other
        return first, match

    def _against(self, node: Node, other: ValuePath) -> Relation | None:
        if (found := self._found(node, other)) is None:
            return None
        right = self._of_one(self.one, node, other)
        ulps = [self._of_one(side, node, other) for side in self.moved if other in side.taps]
        stacked = self.many.program.values[node.place].stacked
        return find_relation(
            found, right, stacked, self.axes, lambda least: noise_of(right, ulps, least), self._reordered
        )

    def _found(self, node: Node, other: ValuePath) -> np.ndarray | None:
        """Returns a mesh value at its iteration, stacked over devices; None if the loops on one device differ."""
        value, here = self.many.program.values[node.place], self.many.taps[node.place]
        if [loop.length for loop in value.loops] != [loop.length for loop in self.one.program.values[other].loops]:
            return None
        return here[(slice(None),) * bool(value.stacked) + _index(value, node.turns)]

    def _of_one(self, side: TapValues, node: Node, other: ValuePath) -> np.ndarray:
        value, here = side.program.values[other], side.taps[other]
        array: np.ndarray = (here[0] if value.stacked else here)[_index(value, node.turns)]
        return array

    def how(self, node: Node) -> tuple[str, str]:
        """Returns a description: (how a value differs, over which axes)."""
        relation, other = self._known(node)
        kind, axes = relation or Relation("differs")
        if kind == "mean" and "mean" not in self._right:
            times = math.prod(self.axes.get(axis, 1) for axis in axes.split(" x "))
            return f"is each shard's local mean, summed over {axes}, not averaged: {times} times too large", axes
        words = self._words(node, other) if kind == "sum" else None
        if words is not None and "the size of" in words[0]:  # the same on every device
            return words
        if kind in PARTS:
            return f"is each shard's local {kind}, not reduced over {axes}", axes
        every = " x ".join(self.axes)
        primitive = self.many.program.values[node.place].primitive
        if primitive == "random_bits":
            return "draws different random numbers than one device", every
        if primitive == "iota" and self._is_place(node, ("differs",)):
            return "counts within each shard, not across shards", every
        if other is None:
            other = next((r for n in self.parents(node) if (r := self._known(n)[1]) is not None), None)
        return self._words(node, other) or ("has no counterpart on one device, and later values differ", every)

    def _words(self, node: Node, other: ValuePath | None) -> tuple[str, str] | None:
        """Returns (how a value differs from a one-device value, over which axes); None if they are not comparable."""
        if other is None or node.place not in self.many.taps or (found := self._found(node, other)) is None:
            return None
        stacked, right = self.many.program.values[node.place].stacked, self._of_one(self.one, node, other)
        every = " x ".join(self.axes)
        return difference(found, right, stacked, self.axes) or ("differs from the value on one device", every)


def _index(value: Value, turns: Sequence[int]) -> tuple[int, ...]:
    return tuple(n.length - 1 - turn if n.reverse else turn for n, turn in zip(value.loops, turns, strict=True))


def _matched(one: Mapping[ValuePath, Value], many: Mapping[ValuePath, Value]) -> dict[ValuePath, ValuePath]:
    """Returns place on the mesh -> place on one device, for values with equal keys in the same order."""
    found: dict[ValuePath, ValuePath] = {}
    for backward in (False, True):
        a = [(p, v.key) for p, v in one.items() if v.backward == backward]
        b = [(p, v.key) for p, v in many.items() if v.backward == backward]
        matcher = difflib.SequenceMatcher(None, [key for _, key in a], [key for _, key in b], autojunk=False)
        for i, j, size in matcher.get_matching_blocks():
            found |= {b[j + n][0]: a[i + n][0] for n in range(size)}
    return found
