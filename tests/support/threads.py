"""Simulates several processes with threads of this process."""

import threading

from spmdkit.errors import SpmdkitError


def in_threads(act, items, patience_s=20):
    """Runs `act(item)` for each of `items` in a separate thread, and returns key -> its result, or the spmdkit error
    that it raised."""
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
