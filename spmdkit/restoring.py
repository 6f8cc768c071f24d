"""Restoring what is kept once for each replica, where the number of replicas, the reducer or its options have changed.

Everything else in a train state has one shape on every mesh; `Checkpoints.restore` puts it on the new one. The reducer's state is
[replicas, *leaf]: what is missing begins at zero, what is left over is dropped with one line, and another number of replicas is the
reducer's `carry_over`, leaf by leaf.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from spmdkit.checkpoint import Checkpoints, nest
from spmdkit.program import Program
from spmdkit.state import TrainState
from spmdkit.tree import named_leaves

FIELD = "reducer/"


def restored(checkpoints: Checkpoints, step: int, program: Program) -> tuple[TrainState, dict[str, Any], list[str]]:
    """Returns (state, the record of the checkpoint, lines for the user) of a saved step on the program's mesh.

    Raises:
        CheckpointError: see `Checkpoints.restore`.
    """
    abstract = program.abstract_state
    saved = {path: shape for path, (shape, _) in checkpoints.read_tree(step).items() if path.startswith(FIELD)}
    asked = {path: leaf for path, leaf in named_leaves(abstract) if path.startswith(FIELD)}
    found = {
        path: _as_saved(leaf, saved[path])
        for path, leaf in asked.items()
        if path in saved and saved[path][1:] == leaf.shape[1:]
    }
    read = nest({path.removeprefix(FIELD): leaf for path, leaf in found.items()})
    state, record = checkpoints.restore(step, abstract.replace(reducer=read), optional=FIELD)
    old = dict(zip([path for path, _ in named_leaves(read)], jax.tree.leaves(state.reducer), strict=True))
    made = _on_this_mesh(program, asked, {FIELD + path: x for path, x in old.items()})
    kept = jax.tree.unflatten(jax.tree.structure(abstract.reducer), list(made.values()))
    return state.replace(reducer=kept), record, _lines(step, saved, asked, found)


def _as_saved(leaf: jax.ShapeDtypeStruct, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """Returns what to read for a leaf that was saved as `shape`: the copies of all replicas on every new one, cut as the leaf is."""
    if shape == leaf.shape:
        return leaf
    placed: Any = leaf.sharding
    whole = NamedSharding(placed.mesh, PartitionSpec(None, *placed.spec[1:]), memory_kind=placed.memory_kind)
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=whole)


def _on_this_mesh(
    program: Program, asked: Mapping[str, jax.ShapeDtypeStruct], old: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """Returns path -> array for every leaf that is asked for; those of one leaf of the gradient are carried over together."""
    by_leaf: dict[str, dict[str, jax.ShapeDtypeStruct]] = {}
    for path, x in asked.items():
        leaf, _, name = path.rpartition("/")
        by_leaf.setdefault(leaf, {})[name] = x
    made: dict[str, jax.Array] = {}
    for leaf, wanted in by_leaf.items():
        num = next(iter(wanted.values())).shape[0]
        have = {name: old[f"{leaf}/{name}"] for name in wanted if f"{leaf}/{name}" in old}

        def carry(have: Any, wanted: Any = wanted, num: int = num) -> Any:
            zeros = {name: jax.numpy.zeros(x.shape, x.dtype) for name, x in wanted.items()}
            same = not have or all(have[name].shape == wanted[name].shape for name in have)
            return zeros | dict(have if same else program.reducer.carry_over(have, num))

        placed = {name: x.sharding for name, x in wanted.items()}
        made |= {f"{leaf}/{name}": x for name, x in jax.jit(carry, out_shardings=placed)(have).items()}
    return {path: made[path] for path in asked}


def _lines(
    step: int, saved: Mapping[str, Any], asked: Mapping[str, jax.ShapeDtypeStruct], found: Mapping[str, Any]
) -> list[str]:
    lines = []
    if missing := sum(path not in found for path in asked):
        lines.append(
            f"note: of the reducer's state {missing} of {len(asked)} arrays are not in step {step} and begin at zero"
        )
    if dropped := sum(path not in found for path in saved):
        lines.append(
            f"note: {dropped} arrays of the reducer's state in step {step} are dropped: on this mesh and with this reducer nothing "
            "keeps them, and what they owed is lost"
        )
    return lines
