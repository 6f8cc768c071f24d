"""Restoring what is kept once for each replica or group of replicas, where their number, the reducer or the sync has changed.

Everything else in a train state has one shape on every mesh; `Checkpoints.restore` puts it on the new one. The reducer's state is
[replicas, *leaf]: what is missing begins at zero, what is left over is dropped with one line, and another number of replicas is the
reducer's `carry_over`, leaf by leaf. With groups, parameters and all that follows them are [groups, *leaf]: groups of another number begin
with the mean of those that were saved.

While a leaf of another number is read, each device holds the copies of all old replicas or groups of its part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from spmdkit.checkpoint import Checkpoints, nest
from spmdkit.program.program import Program
from spmdkit.step import groups
from spmdkit.step.state import TrainState
from spmdkit.tree import named_leaves

FIELD = "reducer/"


def restored(checkpoints: Checkpoints, step: int, program: Program) -> tuple[TrainState, dict[str, Any], list[str]]:
    """Returns (state, the record of the checkpoint, lines for the user) of a saved step on the program's mesh.

    Raises:
        CheckpointError: see `Checkpoints.restore`.
    """
    table = {path: shape for path, (shape, _) in checkpoints.read_tree(step).items()}
    num, asked = _saved_groups(program, table), None if program.groups is None else program.groups.num
    if num == asked:
        return _with_reducer(checkpoints, step, program, program.abstract_state, table)
    state, record, lines = _with_reducer(checkpoints, step, program, _of_groups(program, num), table)
    run = lambda state: groups.regrouped(state, num is not None, program.groups, program.said_of_state)
    lines.append(
        f"note: step {step} was saved by {num or 'no'} groups of replicas that train alone, here are {asked or 'none'}: "
        + ("all go on from their mean" if num else "each begins with the same parameters")
    )
    return jax.jit(run, out_shardings=program.state_sharding)(state), record, lines


def _saved_groups(program: Program, saved: Mapping[str, tuple[int, ...]]) -> int | None:
    """Returns the number of groups whose parameters a checkpoint holds, None where it holds one copy."""
    lead = 0 if program.groups is None else 1
    for path, leaf in named_leaves(program.abstract_state.params):
        shape = saved.get(f"params/{path}" if path else "params")
        if shape and shape[1:] == leaf.shape[lead:]:
            return shape[0]
    return None


def _of_groups(program: Program, num: int | None) -> TrainState:
    """Returns the abstract state of `num` groups, each leaf cut as the program's is but for the groups' axes."""
    lead = 0 if program.groups is None else 1

    def leaf(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        placed: Any = x.sharding
        shape, spec = x.shape[lead:], placed.spec[lead:]
        if num is not None:
            shape, spec = (num, *shape), (None, *spec)
        sharding = NamedSharding(placed.mesh, PartitionSpec(*spec), memory_kind=placed.memory_kind)
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)

    state = program.abstract_state
    fields = {name: jax.tree.map(leaf, getattr(state, name)) for name in groups.GROUPED}
    return state.replace(**fields, sync=None)


def _with_reducer(
    checkpoints: Checkpoints, step: int, program: Program, abstract: TrainState, table: Mapping[str, tuple[int, ...]]
) -> tuple[TrainState, dict[str, Any], list[str]]:
    """Returns what `restored` does, where all but the reducer's state is saved as it is asked for."""
    saved = {path: shape for path, shape in table.items() if path.startswith(FIELD)}
    asked = {path: leaf for path, leaf in named_leaves(abstract) if path.startswith(FIELD)}
    found = {
        path: _as_saved(leaf, saved[path])
        for path, leaf in asked.items()
        if path in saved and saved[path][1:] == leaf.shape[1:]
    }
    read = nest({path.removeprefix(FIELD): leaf for path, leaf in found.items()})
    state, record = checkpoints.restore(step, abstract.replace(reducer=read), optional=(FIELD, "sync/"))
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
