"""A sync of a user's own, named as `tests.support.own_sync:mean_of_groups`."""

import spmdkit as sk


@sk.synchronization
def mean_of_groups(every):
    agree = lambda params, kept, mean: (mean(params), kept)
    return sk.Sync(every=every, agree=agree, view=lambda params, kept, mean: mean(params))
