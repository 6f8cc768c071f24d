"""States, meshes and comparisons for the checkpoint tests and their subprocesses."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "params", "opt_state", "model_state", "ema", "rng", "extra"],
    meta_fields=[],
)
@dataclasses.dataclass
class State:
    """A substitute for TrainState."""

    step: Any
    params: Any
    opt_state: Any
    model_state: Any = None
    ema: Any = None
    rng: Any = None
    extra: Any = None


def mesh_of(*shape: int, axes: tuple[str, ...] = ("data", "fsdp")) -> Mesh:
    count = int(np.prod(shape))
    devices = np.array(jax.devices()[:count]).reshape(shape)
    return Mesh(devices, axes[: len(shape)], axis_types=(AxisType.Auto,) * len(shape))


def plain_params(seed: int = 0, width: int = 16) -> dict[str, Any]:
    key = jax.random.key(seed)
    return {
        "blocks": [
            {"kernel": jax.random.normal(key, (8, width)), "bias": jnp.arange(width, dtype=jnp.bfloat16)},
            {"kernel": jax.random.normal(key, (8, width)) * 2, "scale": jnp.float32(0.1)},
        ],
        "nothing": None,
        "unit": {},
        "table": jnp.arange(24, dtype=jnp.int8).reshape(8, 3),
        "flag": jnp.array([True, False]),
        "empty": jnp.zeros((0, 4)),
    }


def train_state(seed: int = 0, step: int = 3, width: int = 16) -> State:
    params = plain_params(seed, width)
    floats = {"blocks": params["blocks"]}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return State(
        step=jnp.int32(step),
        params=params,
        opt_state=optimizer.init(floats),
        ema=jax.tree.map(lambda x: x, floats),
        rng=jnp.array([7, 2**31 + seed], jnp.uint32),
        extra=(),
    )


def place(tree: Any, mesh: Mesh, memory_kind: str | None = None) -> Any:
    """Puts each leaf on `mesh`, with its first dim sharded over all axes if they divide it, otherwise replicated."""
    return jax.tree.map(lambda x: jax.device_put(x, sharding_for(x, mesh, memory_kind)), tree)


def abstract_on(tree: Any, mesh: Mesh, memory_kind: str | None = None) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding_for(x, mesh, memory_kind)), tree
    )


def sharding_for(x: Any, mesh: Mesh, memory_kind: str | None = None) -> NamedSharding:
    divides = x.ndim > 0 and x.shape[0] > 0 and x.shape[0] % mesh.size == 0
    spec = PartitionSpec(mesh.axis_names) if divides else PartitionSpec()
    return NamedSharding(mesh, spec, memory_kind=memory_kind)


def assert_same(got: Any, want: Any) -> None:
    """Asserts that tree structures, dtypes and shapes are equal, and values bitwise equal."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape, (path, a.dtype, b.dtype, a.shape, b.shape)
        assert bits(a) == bits(b), path


def bits(x: Any) -> bytes:
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x).tobytes()
