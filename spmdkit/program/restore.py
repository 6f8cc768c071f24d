"""Restores state that exists once per replica or group of replicas after their number, the reducer or the sync has
changed.

The reducer's state is [replicas, *leaf]: missing arrays start at zero, extra ones are dropped, and the reducer's
`reshard_state` handles another number of replicas. With groups, the parameters and the leaves that follow them are
[groups, *leaf]: another number of groups starts from the mean of the saved groups, and the state of the sync continues.
Gradients in a delay line (`sync: stale`) are dropped if the delay changes.

While such a leaf is read, each device holds the copies of all old replicas or groups of its shard of the leaf.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from spmdkit.checkpoint import Checkpoints, choose_step, hold_step, location, nest
from spmdkit.checkpoint.weights import FIELDS as WEIGHT_FIELDS
from spmdkit.communication.sync.stale import DelayLineState
from spmdkit.config import Config
from spmdkit.errors import ConfigError
from spmdkit.foundation.formatting import nearest
from spmdkit.foundation.trees import named_leaves
from spmdkit.program.changed_state import ChangedState, Restorable
from spmdkit.program.program import Program
from spmdkit.step.groups import groups
from spmdkit.step.state import TrainState

FIELD, LINE = "reducer/", "opt_state/delay_line/"
OPTIONAL = (FIELD, "sync/", LINE, "opt_state/waiting")
"""Path prefixes of leaves that another run may not need."""


def checkpoints_of(config: Config) -> location.Location:
    """Returns the location of the checkpoints of a config's run."""
    chosen = config.checkpoint.directory if config.checkpoint is not None else None
    return location.resolve(chosen) if chosen is not None else config.resolved_run_dir() / "checkpoints"


def restore_from_run(program: Program, step: int | str | None, what: str | None) -> Any:
    """See `Program.restore`."""
    if what not in (None, *WEIGHT_FIELDS):
        names = f"{', '.join(WEIGHT_FIELDS)}, None.{nearest(str(what), WEIGHT_FIELDS)}"
        raise ConfigError(f"program.restore: unknown what={what!r}. Valid: {names}")
    if what is not None and not jax.tree.leaves(getattr(program.abstract_state, what)):
        raise ConfigError(f"program.restore: what={what!r}, and the state of this program has no {what}. Omit it.")
    directory, num_processes = checkpoints_of(program.config), jax.process_count()
    with (
        contextlib.closing(Checkpoints(directory, is_main=False, num_processes=num_processes)) as checkpoints,
        hold_step(directory, lambda: choose_step(directory, step)) as chosen,
    ):
        if num_processes > 1:  # the choice of process 0
            from jax.experimental import multihost_utils

            chosen = int(multihost_utils.broadcast_one_to_all(np.int32(chosen)))
        if what is None or program.groups is not None or checkpoints.read_record(chosen).get("groups"):
            state, *_ = restored(checkpoints, chosen, program)
            return state if what is None else getattr(state, what)
        others = tuple(path for path in checkpoints.read_tree(chosen) if path.split("/")[0] != what)
        part, _ = checkpoints.restore(chosen, {what: getattr(program.abstract_state, what)}, optional=others)
        return part[what]


def restored(
    checkpoints: Restorable, step: int, program: Program, reset: Sequence[str] | None = None, again: bool = False
) -> tuple[TrainState, dict[str, Any], list[str]]:
    """Returns (state, record of the checkpoint, lines for the user) of a saved step on the program's mesh.

    Args:
        checkpoints: `Checkpoints`, or the snapshot of `spmdkit.elastic.peer_memory`.
        reset: of `train --reset`; None: the leaves of the state must be those of the checkpoint.
        again: as in `ChangedState`.
    """
    changed = None if reset is None else ChangedState(checkpoints, step, program, reset, again)
    if changed is None or not changed.is_changed:
        return _regrouped(checkpoints, step, program)
    state, record, lines = _regrouped(changed, step, program)
    return state, record, [*changed.lines, *lines]


def _regrouped(checkpoints: Restorable, step: int, program: Program) -> tuple[TrainState, dict[str, Any], list[str]]:
    table = {path: shape for path, (shape, _) in checkpoints.read_tree(step).items()}
    num, requested = _saved_groups(program, table), None if program.groups is None else program.groups.num
    old_delay, delay = _saved_delay(table), _delay(program)
    has_sync_state, begins = _sync_kept(program, table)
    abstract = program.abstract_state if num == requested else _of_groups(program, num)
    abstract = abstract.replace(sync=program.abstract_state.sync if has_sync_state else None)
    if old_delay != delay:
        abstract = abstract.replace(opt_state=_without_line(abstract.opt_state, old_delay > 0))
    state, record, lines = _with_reducer(checkpoints, step, program, abstract, table)
    dropped = any(path.startswith("sync/") for path in table) and not has_sync_state
    if num != requested:
        lines.append(
            f"note: step {step} was saved by {num or 'no'} groups of replicas that train separately, this run has "
            f"{requested or 'none'}: "
            + ("all continue from their mean" if num else "each begins with the same parameters")
        )
    if old_delay != delay:
        dropping, none = (f"{old_delay} pending gradients of step {step} are dropped", "there are no pending gradients")
        begin = f"note: gradients are delayed by {delay} steps in this run"
        lines.append(f"{begin}: {dropping if old_delay else none}, and the first {delay} steps change nothing")
    if (begins and num) or dropped:
        changes = [f"the sync state of step {step} is dropped"] * dropped + ["this one's is initialized"] * begins
        lines.append(f"note: {', and '.join(changes)}")
    if num == requested and old_delay == delay and not begins:
        return state, record, lines

    def run(state: TrainState) -> TrainState:
        saved = state.sync
        if old_delay != delay and old_delay:
            state = state.replace(opt_state=state.opt_state.optimizer)
        if num != requested:
            state = groups.regroup_state(state, num is not None, program.groups, program.state_reduction)
        elif begins and program.groups is not None:
            state = state.replace(sync=program.groups.sync.init(groups.mean(program.groups.sent(state.params))))
        if has_sync_state:
            state = state.replace(sync=saved)
        if old_delay != delay and delay:
            zeros = jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), program.abstract_state.opt_state)
            state = state.replace(opt_state=zeros._replace(optimizer=state.opt_state))
        return state

    return jax.jit(run, out_shardings=program.state_sharding)(state), record, lines


def _sync_kept(program: Program, saved: Mapping[str, tuple[int, ...]]) -> tuple[bool, bool]:
    """Returns (whether a checkpoint has the state of the program's sync, whether that state is initialized again)."""
    requested = {path: leaf.shape for path, leaf in named_leaves(program.abstract_state) if path.startswith("sync/")}
    is_complete = all(saved.get(path) == shape for path, shape in requested.items())
    return bool(requested) and is_complete, bool(requested) and not is_complete


def _saved_delay(saved: Mapping[str, tuple[int, ...]]) -> int:
    """Returns the gradient delay of a checkpoint in steps (`sync: stale`)."""
    return len({path.removeprefix(LINE).split("/")[0] for path in saved if path.startswith(LINE)})


def _delay(program: Program) -> int:
    opt_state = program.abstract_state.opt_state
    return len(opt_state.delay_line) if isinstance(opt_state, DelayLineState) else 0


def _without_line(opt_state: Any, delayed: bool) -> Any:
    """Returns the abstract optimizer state as saved, with or without a delay line. A delay line is not read."""
    inner = opt_state.optimizer if isinstance(opt_state, DelayLineState) else opt_state
    return DelayLineState(inner, (), None) if delayed else inner  # type: ignore[arg-type]


def _saved_groups(program: Program, saved: Mapping[str, tuple[int, ...]]) -> int | None:
    """Returns the number of groups in a checkpoint, or None if it has a single copy."""
    lead = 0 if program.groups is None else 1
    for path, leaf in named_leaves(program.abstract_state.params):
        shape = saved.get(f"params/{path}" if path else "params")
        if shape and shape[1:] == leaf.shape[lead:]:
            return shape[0]
    return None


def _of_groups(program: Program, num: int | None) -> TrainState:
    """Returns the abstract state of `num` groups, with the program's shardings except over the axes of the groups."""
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
    checkpoints: Restorable, step: int, program: Program, abstract: TrainState, table: Mapping[str, tuple[int, ...]]
) -> tuple[TrainState, dict[str, Any], list[str]]:
    """Returns the result of `restored` for a change of only the reducer's state."""
    saved = {path: shape for path, shape in table.items() if path.startswith(FIELD)}
    requested = {path: leaf for path, leaf in named_leaves(abstract) if path.startswith(FIELD)}
    readable = {
        path: _as_saved(leaf, saved[path])
        for path, leaf in requested.items()
        if path in saved and saved[path][1:] == leaf.shape[1:]
    }
    read = nest({path.removeprefix(FIELD): leaf for path, leaf in readable.items()})
    optional = OPTIONAL if program.config.ema is not None else (*OPTIONAL, "ema")
    state, record = checkpoints.restore(step, abstract.replace(reducer=read), optional=optional)
    old = dict(zip([path for path, _ in named_leaves(read)], jax.tree.leaves(state.reducer), strict=True))
    resharded = _on_this_mesh(program, requested, {FIELD + path: x for path, x in old.items()})
    reducer_state = jax.tree.unflatten(jax.tree.structure(abstract.reducer), list(resharded.values()))
    return state.replace(reducer=reducer_state), record, _lines(step, saved, requested, readable)


def _as_saved(leaf: jax.ShapeDtypeStruct, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """Returns the abstract array to read for a leaf saved as `shape`: all old replicas, sharded like the leaf."""
    if shape == leaf.shape:
        return leaf
    placed: Any = leaf.sharding
    whole = NamedSharding(placed.mesh, PartitionSpec(None, *placed.spec[1:]), memory_kind=placed.memory_kind)
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=whole)


def _on_this_mesh(
    program: Program, requested: Mapping[str, jax.ShapeDtypeStruct], old: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """Returns path -> array for every requested leaf. Arrays of the same gradient leaf are resharded together."""
    by_leaf: dict[str, dict[str, jax.ShapeDtypeStruct]] = {}
    for path, x in requested.items():
        leaf, _, name = path.rpartition("/")
        by_leaf.setdefault(leaf, {})[name] = x
    arrays: dict[str, jax.Array] = {}
    for leaf, targets in by_leaf.items():
        num = next(iter(targets.values())).shape[0]
        saved = {name: old[f"{leaf}/{name}"] for name in targets if f"{leaf}/{name}" in old}

        def carry(saved: Any, targets: Any = targets, num: int = num) -> Any:
            zeros = {name: jax.numpy.zeros(x.shape, x.dtype) for name, x in targets.items()}
            same = not saved or all(saved[name].shape == targets[name].shape for name in saved)
            return zeros | dict(saved if same else program.reducer.reshard_state(saved, num))

        placed = {name: x.sharding for name, x in targets.items()}
        arrays |= {f"{leaf}/{name}": x for name, x in jax.jit(carry, out_shardings=placed)(saved).items()}
    return {path: arrays[path] for path in requested}


def _lines(
    step: int, saved: Mapping[str, Any], requested: Mapping[str, jax.ShapeDtypeStruct], found: Mapping[str, Any]
) -> list[str]:
    lines = []
    if missing := sum(path not in found for path in requested):
        lines.append(
            f"note: of the reducer's state {missing} of {len(requested)} arrays are not in step {step} and begin at "
            "zero"
        )
    if dropped := sum(path not in found for path in saved):
        lines.append(
            f"note: {dropped} arrays of the reducer's state in step {step} are dropped: this mesh and this reducer do "
            "not use them, and their error is lost"
        )
    return lines
