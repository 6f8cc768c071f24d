"""A reducer of a user's own that spoils whatever it is given, named as `tests.support.own_reducer:spoiling`."""

from jax import lax

import spmdkit as sk

SCALE = -3.0


@sk.reducer
def spoiling(takes="sum"):
    def apply(leaves, states, over):
        return [lax.psum(SCALE * x, over.axes) for x in leaves], states

    return sk.Reducer(exact=False, apply=apply, wire=lambda values, num: 8 * (num - 1) / num * values, takes=takes)
