"""Simulates the processes of a cluster with threads and a shared store."""

from spmdkit.cluster.cluster import Cluster
from spmdkit.cluster.store import MemoryStore
from tests.support.threads import in_threads


def on_all(num, act, absent=()):
    """Returns the result of `act(cluster)`, or the spmdkit error that it raises, for each process."""
    store = MemoryStore(num)
    same = {"num_processes": num, "devices": [], "store": store, "namespace": "test"}
    clusters = {p: Cluster(process_index=p, **same) for p in range(num) if p not in absent}
    found = in_threads(act, clusters, 60)
    return [found.get(process) for process in range(num)]
