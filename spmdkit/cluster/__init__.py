"""Who am I among which processes: environment -> `ClusterSpec` (pure), then `join` -> `Cluster` (starts JAX)."""

from spmdkit.cluster.cluster import Cluster
from spmdkit.cluster.detection import detect_cluster
from spmdkit.cluster.join import join
from spmdkit.cluster.spec import ClusterSpec

__all__ = ["Cluster", "ClusterSpec", "detect_cluster", "join"]
