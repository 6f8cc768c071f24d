"""Google Cloud's metadata server: `instance/preempted` is TRUE 30 s before a spot machine is stopped,
`instance/maintenance-event` is TERMINATE_ON_HOST_MAINTENANCE up to an hour before maintenance without migration.
Source: cloud.google.com/compute/docs/instances/preemptible, .../metadata/getting-live-migration-notice."""

from __future__ import annotations

from spmdkit.faults.preemption_sources.base import PreemptionSource, address, query

HEADERS = {"Metadata-Flavor": "Google"}


def make(every_s: float = 5.0) -> PreemptionSource:
    """Returns the source of this machine; GCE_METADATA_HOST selects another server, as in Google's libraries."""

    def notice() -> str:
        base = f"{address('metadata.google.internal', 'GCE_METADATA_HOST')}/computeMetadata/v1/instance"
        if query(f"{base}/preempted", HEADERS) == "TRUE":
            return "Google Cloud preempts this machine"
        if (query(f"{base}/maintenance-event", HEADERS) or "").startswith("TERMINATE"):
            return "Google Cloud stops this machine for maintenance"
        return ""

    return PreemptionSource(notice, every_s)
