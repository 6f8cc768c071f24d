"""Processes of a cluster played by threads, with one store."""

import threading

from spmdkit.cluster.cluster import Cluster
from spmdkit.cluster.store import MemoryStore


def on_all(num, fn):
    """Returns what `fn(cluster)` gives on each of so many processes."""
    store, found, errors = MemoryStore(num), [None] * num, []

    def run(index):
        try:
            found[index] = fn(Cluster(process_index=index, num_processes=num, devices=[], store=store, namespace="t"))
        except BaseException as error:  # noqa: BLE001  told below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors
    return found
