"""User-defined reducers, named as `tests.support.own_reducer:right`: a correct one, and incorrect ones."""

import jax
import jax.numpy as jnp
from jax import lax

import spmdkit as sk

SCALE = -3.0


def wire(values, num):
    """An all_reduce of float32."""
    return 2 * (num - 1) / num * 4 * values


def made(add, **changes):
    """Returns a reducer that sums each leaf with `add(leaf, axes)`."""

    def apply(leaves, states, over):
        return [add(x, over.axes) for x in leaves], states

    return sk.Reducer(**{"exact": True, "apply": apply, "wire": wire, **changes})


@sk.reducer
def right():
    return made(lax.psum)


@sk.reducer
def spoiling(input_scale="sum"):
    return made(lambda x, axes: lax.psum(SCALE * x, axes), exact=False, input_scale=input_scale)


@sk.reducer
def half():
    return made(lambda x, axes: lax.psum(x / 2, axes))


@sk.reducer
def unequal():
    """The result on replica i is scaled by 1 + i / 1000."""
    return made(lambda x, axes: lax.psum(x, axes) * (1 + lax.axis_index(axes).astype(x.dtype) / 1000))


@sk.reducer
def twice():
    """Computes the difference of two sums."""
    return made(lambda x, axes: lax.psum(2 * x, axes) - lax.psum(lax.optimization_barrier(x), axes))


@sk.reducer
def in_parts():
    """Sends its rows one at a time."""
    return made(lambda x, axes: jax.lax.map(lambda row: lax.psum(row, axes), x) if jnp.ndim(x) else lax.psum(x, axes))
