"""The compiled reduction of the gradient of a byte-level GPT with width 128 and four layers, without a step: the bytes
that a reducer sends."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from spmdkit.communication.reducers.base import LeafShapes, ReducedLeaf, ReduceGroup, Reducer, inner_axes, shard_dim
from spmdkit.config import load_config
from spmdkit.foundation import plugins
from spmdkit.foundation.trees import named_leaves
from spmdkit.mesh.mesh import AXES, REPLICA_AXES, make_mesh
from spmdkit.plan.collectives_bill import Bill, read_bill
from spmdkit.plan.hlo.text import parse
from spmdkit.program.compiler import own_options
from spmdkit.program.opening import task_of

CONFIG = Path(__file__).parents[2] / "configs" / "mirrored.yaml"
WIDTH = ["task_args.width=128", "task_args.layers=4", "task_args.train_bytes=65536", "task_args.eval_bytes=4096"]

CHOICES: dict[str, Any] = {"sparse_rows": {"sparse_rows": {"leaves": "embed", "rows": 16}}}
"""Reducer -> its choice, if it needs options."""


def reducer_of(name: str) -> Reducer:
    """Returns the reducer with a name."""
    made: Reducer = plugins.make("reducers", CHOICES.get(name, name))
    return made


@functools.cache
def gradient() -> dict[str, jax.ShapeDtypeStruct]:
    """Returns path -> float32[...] of the parameters, abstract."""
    config = load_config(CONFIG, WIDTH)
    return dict(named_leaves(jax.eval_shape(task_of(config).init, jax.random.key(0))))


def compiled_bill(name: str, devices: Sequence[Any], sizes: Mapping[str, int]) -> Bill:
    """Returns the compiled collectives of a reducer on a mesh of `replica` and `data`."""
    reducer, leaves = reducer_of(name), list(gradient().values())
    num = sizes["replica"] * sizes["data"]
    mesh = make_mesh(dict.fromkeys(AXES, 1) | dict(sizes), devices)

    def local(own: Any, states: Any) -> Any:
        over = ReduceGroup(REPLICA_AXES, num, lambda: jax.random.key(0), tuple(gradient()))
        total, new = reducer.apply([x[0] for x in own], jax.tree.map(lambda x: x[0], states), over)
        return total, jax.tree.map(lambda x: x[None], new)

    specs = [_state_spec(reducer, leaf.shape, sizes) for leaf in leaves]
    states = [_state(reducer, leaf, sizes) for leaf in leaves]
    rows = PartitionSpec(REPLICA_AXES)
    of_states = [dict.fromkeys(state, spec) for state, spec in zip(states, specs, strict=True)]
    run = jax.shard_map(local, mesh=mesh, in_specs=(rows, of_states), out_specs=(PartitionSpec(), of_states))
    placed = lambda lead, x, spec: jax.ShapeDtypeStruct((lead, *x.shape), x.dtype, sharding=NamedSharding(mesh, spec))
    lead = sizes["replica"] if reducer.per_shard_state else num
    kept = [{key: placed(lead, x, spec) for key, x in state.items()} for state, spec in zip(states, specs, strict=True)]
    lowered = jax.jit(run).lower([placed(num, x, rows) for x in leaves], kept)
    compiled = lowered.compile(compiler_options=dict(own_options(devices[0])))
    return read_bill(parse(compiled.as_text()), sizes)


def _state(reducer: Reducer, leaf: jax.ShapeDtypeStruct, sizes: Mapping[str, int]) -> LeafShapes:
    is_cut = not reducer.per_shard_state or shard_dim(leaf.shape, sizes["data"]) is not None
    return reducer.init(leaf) if is_cut else {}


def _state_spec(reducer: Reducer, shape: Sequence[int], sizes: Mapping[str, int]) -> PartitionSpec:
    """Returns the partition spec of the state of a leaf, as in `spmdkit.step.lowering.kept_spec`."""
    if not reducer.per_shard_state:
        return PartitionSpec(REPLICA_AXES)
    dims: list[Any] = [None] * len(shape)
    dim = shard_dim(shape, sizes["data"])
    if dim is not None:
        dims[dim] = inner_axes(REPLICA_AXES)[0]
    return PartitionSpec("replica", *dims)


def sent_by_formula(name: str, sizes: Mapping[str, int]) -> float:
    """Returns the bytes by the reducer's formula."""
    axes = {axis: size for axis, size in sizes.items() if size > 1}
    return reducer_of(name).bytes_sent([ReducedLeaf(path, x.shape, axes, ()) for path, x in gradient().items()])
