"""What a preemption source is: a query whether this machine is about to be preempted. One file each in this folder,
`make(**options) -> PreemptionSource`. It is queried in a separate thread of every process of the run; after one notice
all processes save at one step and exit with 42 (run/hooks/preemption.py). SIGTERM and SIGUSR1 need none."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from spmdkit.foundation.timeouts import METADATA_TIMEOUT_S


@dataclass(frozen=True)
class PreemptionSource:
    """A query and its interval. `notice` returns why this machine is about to go, or an empty text; it is called again
    after an `OSError` or `ValueError`."""

    notice: Callable[[], str]
    every_s: float = 5.0


def address(default: str, *variables: str) -> str:
    """Returns `http://host` of a metadata server: of the first of these variables that is set, or the default."""
    given = next((os.environ[name] for name in variables if os.environ.get(name)), default)
    return (given if "://" in given else f"http://{given}").rstrip("/")


def query(url: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
    """Returns the response of a metadata server, None where there is no such entry (404). No proxy is used.

    Raises:
        OSError: no response, or another status.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(
            urllib.request.Request(url, headers=dict(headers), method=method), timeout=METADATA_TIMEOUT_S
        ) as response:
            text: str = response.read(1 << 16).decode(errors="replace")
            return text.strip()
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise
