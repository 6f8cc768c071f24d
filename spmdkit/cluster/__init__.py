"""Who am I among which processes: environment -> `ClusterSpec` (pure), then `join` -> `Cluster` (starts JAX)."""

from spmdkit.cluster.cluster import Cluster
from spmdkit.cluster.environment import ClusterSpec, environment
from spmdkit.cluster.join import join

__all__ = ["Cluster", "ClusterSpec", "environment", "join"]
