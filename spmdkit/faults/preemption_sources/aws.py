"""AWS's instance metadata: gives notice two minutes before a spot instance is interrupted. Uses version 2 only: first a
token, then `spot/instance-action`, which is 404 without a notice.
Source: docs.aws.amazon.com/AWSEC2/latest/UserGuide, "Spot Instance interruption notices", "Use IMDSv2"."""

from __future__ import annotations

import json
import time
from urllib.error import HTTPError

from spmdkit.faults.preemption_sources.base import PreemptionSource, address, query

TOKEN_S = 21600


def make(every_s: float = 5.0) -> PreemptionSource:
    """Returns the source of this machine; AWS_EC2_METADATA_SERVICE_ENDPOINT selects another server."""
    token: dict[str, float] = {}  # the current token -> its expiry time

    def headers(base: str) -> dict[str, str]:
        if time.monotonic() > max(token.values(), default=0.0):
            ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
            text = query(f"{base}/latest/api/token", ttl, "PUT") or ""
            token.clear()
            token[text] = time.monotonic() + TOKEN_S / 2
        return {"X-aws-ec2-metadata-token": next(iter(token))}

    def notice() -> str:
        base = address("169.254.169.254", "AWS_EC2_METADATA_SERVICE_ENDPOINT")
        try:
            response = query(f"{base}/latest/meta-data/spot/instance-action", headers(base))
        except HTTPError as error:
            if error.code == 401:  # the token has expired: the next query requests a new one
                token.clear()
            raise
        if response is None:
            return ""
        action = json.loads(response)
        return (
            f"AWS will {action['action']} this machine at {action['time']}"
            if action["action"] in ("terminate", "stop", "hibernate")
            else ""
        )

    return PreemptionSource(notice, every_s)
