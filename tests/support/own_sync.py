"""User-defined syncs, named as `tests.support.own_sync:mean_of_groups`: a correct one, and incorrect ones."""

import jax
import jax.numpy as jnp

import spmdkit as sk


def made(every, agree):
    """Returns a sync in which groups continue from `agree(params [groups, ...], mean) -> params [...]`."""
    view = lambda params, kept, mean: mean(params)
    return sk.Sync(every=every, agree=lambda params, kept, mean: (agree(params, mean), kept), view=view)


@sk.sync
def mean_of_groups(every):
    return made(every, lambda params, mean: mean(params))


@sk.sync
def of_the_first(every):
    return made(every, lambda params, mean: jax.tree.map(lambda x: x[0], params))


@sk.sync
def too_late(every):
    return made(every + 1, lambda params, mean: mean(params))


@sk.sync
def median(every):
    """Gathers the parameters of all groups, although the mean needs only one all_reduce."""
    return made(every, lambda params, mean: jax.tree.map(lambda x: jnp.median(x, axis=0), params))


@sk.sync
def row_by_row(every):
    """Computes the mean one row at a time, in a loop."""
    of_rows = lambda x, mean: jax.lax.map(mean, jnp.swapaxes(x, 0, 1))
    return made(every, lambda params, mean: jax.tree.map(lambda x: of_rows(x, mean), params))
