"""What several processes would do, in threads of this one."""

import threading

from spmdkit.errors import SpmdkitError


def in_threads(act, items, patience_s=20):
    """Returns key -> what `act(item)` returned, or the error of ours that it raised, for each of `items` in a thread of
    its own."""
    results = {}

    def body(key, item):
        try:
            results[key] = act(item)
        except SpmdkitError as error:
            results[key] = error

    threads = [threading.Thread(target=body, args=pair, daemon=True) for pair in items.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=patience_s)
        assert not thread.is_alive()
    return results
