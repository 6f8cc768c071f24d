"""The processes of a job: detection, rendezvous, and exchange of small values.

In: environment variables (`detect_cluster` -> `ClusterSpec`, pure). Out: `join` -> `Cluster` (starts JAX).
"""

from spmdkit.cluster.cluster import Cluster
from spmdkit.cluster.detection import detect_cluster
from spmdkit.cluster.join import join
from spmdkit.cluster.spec import ClusterSpec

__all__ = ["Cluster", "ClusterSpec", "detect_cluster", "join"]
