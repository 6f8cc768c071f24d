"""Syncs of a user's own, named as `tests.support.own_sync:mean_of_groups`: one that is right, and others that are
not."""

import jax
import jax.numpy as jnp

import spmdkit as sk


def made(every, agree):
    """Returns a sync whose groups go on from `agree(params [groups, ...], mean) -> params [...]`."""
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
    """Sends the parameters of each group to all, where a mean is one all_reduce."""
    return made(every, lambda params, mean: jax.tree.map(lambda x: jnp.median(x, axis=0), params))


@sk.sync
def row_by_row(every):
    """Takes the mean of one row after the other, in a loop."""
    of_rows = lambda x, mean: jax.lax.map(mean, jnp.swapaxes(x, 0, 1))
    return made(every, lambda params, mean: jax.tree.map(lambda x: of_rows(x, mean), params))
