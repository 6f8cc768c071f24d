"""Collective matmul of the MLP of one tensor-parallel layer (7B, 16 sequences of 4,096 tokens), by `plan`'s step time.

    python benchmarks/collective_matmul.py [TARGET ...]

Compiles for machines that are not there (extras tpu and gpu-plan). Forms: the gathered rows in one, two or four parts,
as in `spmdkit.ops.tensor`; and a ring of `ppermute`s with partial products in one or both directions (Wang et al.,
"Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models", ASPLOS 2023).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
from spmdkit.plan.machine.compiler_process import compiler_environment

os.environ |= compiler_environment(Path(tempfile.mkdtemp()))

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from results import save

from spmdkit.mesh import mesh as meshes
from spmdkit.plan.collectives_bill import read_bill
from spmdkit.plan.hlo.text import parse
from spmdkit.plan.machine.target import open_target, parse_target
from spmdkit.plan.step_time import predict_time
from spmdkit.program import compiler

TARGETS = {"tpu:v5p:2x2x2": (0, 1, 3, 2), "tpu:v6e:4x4": (0, 1, 2, 3), "gpu:h100:8": (0, 1, 2, 3)}
"""Machine -> the order of the devices of `tensor` in the ring, so that neighbors are linked."""
ROWS, TOKENS, WIDTH, HIDDEN, TENSOR = 16, 4096, 4096, 11008, 4
SPECS = P("data", "tensor", None), P(None, "tensor"), P(None, "tensor"), P("tensor", None)
SHAPES = (ROWS, TOKENS, WIDTH), (WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)


def mlp(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """Returns the partial sum of a device for all tokens of `x`."""
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def in_parts(num: int) -> Callable[..., jax.Array]:
    """Returns the MLP with a gather and a reduce-scatter for each of `num` parts of the rows."""

    def layer(x: jax.Array, *weights: jax.Array) -> jax.Array:
        whole = [mlp(lax.all_gather(part, "tensor", axis=1, tiled=True), *weights) for part in jnp.split(x, num)]
        return jnp.concatenate([lax.psum_scatter(y, "tensor", scatter_dimension=1, tiled=True) for y in whole])

    return layer


def ring(order: tuple[int, ...], ways: int) -> Callable[..., jax.Array]:
    """Returns the MLP in which chunks of tokens and their partial sums pass along a ring, in one or both directions."""

    def shifted(x: jax.Array, by: int) -> jax.Array:
        return lax.ppermute(x, "tensor", [(order[p], order[(p + by) % TENSOR]) for p in range(TENSOR)])

    def one_way(own: jax.Array, by: int, weights: tuple[jax.Array, ...]) -> jax.Array:
        chunk, total = own, None
        for step in range(TENSOR):  # the chunk that arrives last is the device's own
            chunk = shifted(chunk, by) if step < TENSOR - 1 else own
            partial = mlp(chunk, *weights)
            total = partial if total is None else shifted(total, by) + partial
        return total

    def layer(x: jax.Array, *weights: jax.Array) -> jax.Array:
        parts = zip(jnp.split(x, ways), (1, -1), strict=False)
        return jnp.concatenate([one_way(part, by, weights) for part, by in parts])

    return layer


def measure(name: str) -> list[dict[str, object]]:
    """Returns a row for each form on one machine: milliseconds of the forward pass, and of the exposed links."""
    target = open_target(parse_target(name))
    sizes = meshes.resolve({"data": len(target.devices) // TENSOR, "tensor": TENSOR}, len(target.devices))
    mesh = meshes.make_mesh(sizes, target.devices)
    devices, axes = list(mesh.devices.flat), {axis: size for axis, size in sizes.items() if size > 1}
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(SHAPES, SPECS, strict=True)
    ]
    order = TARGETS.get(name, tuple(range(TENSOR)))
    forms = {f"{num} part{'s' * (num > 1)} of rows": in_parts(num) for num in (1, 2, 4) if num <= ROWS // sizes["data"]}
    forms |= {"ring": ring(order, 1), "ring, both directions": ring(order, 2)}
    rows: list[dict[str, object]] = []
    for form, layer in forms.items():
        mapped = jax.shard_map(layer, mesh=mesh, in_specs=SPECS, out_specs=SPECS[0], check_vma=False)
        text = jax.jit(mapped).lower(*arguments).compile(compiler_options=compiler.options(devices, {})).as_text()
        module = parse(text)
        time = predict_time(target, module, read_bill(module, axes, ()), devices)
        exposed_s = sum(link.exposed_s for link in time.links.values())
        row = {"machine": name, "form": form, "ms": f"{time.step_s * 1e3:.2f}", "exposed, ms": f"{exposed_s * 1e3:.2f}"}
        rows.append(row | {"main memory, GB": f"{time.memory_bytes / 1e9:.1f}"})
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


if __name__ == "__main__":
    found: list[dict[str, object]] = []
    for name in sys.argv[1:] or TARGETS:
        found += measure(name)
        save("collective_matmul", found, "python benchmarks/collective_matmul.py", note="Predicted times.")
    print(json.dumps({"benchmark": "collective_matmul", "rows": found}))
