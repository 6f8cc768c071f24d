"""The interface of a preemption source: it queries whether this machine is about to be preempted. One file per source,
with `make(**options) -> PreemptionSource`. Every process of the run queries it in a separate thread. After one notice
all processes save at the same step and exit with 42 (run/hooks/preemption.py). SIGTERM and SIGUSR1 need no source."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from spmdkit.foundation.timeouts import METADATA_TIMEOUT_S


@dataclass(frozen=True)
class PreemptionSource:
    """A query and its interval. `notice` returns the reason for the preemption, or an empty text. It is called again
    after an `OSError` or `ValueError`."""

    notice: Callable[[], str]
    every_s: float = 5.0


def address(default: str, *variables: str) -> str:
    """Returns `http://host` of a metadata server: the first of these variables that is set, or the default."""
    host = next((os.environ[name] for name in variables if os.environ.get(name)), default)
    return (host if "://" in host else f"http://{host}").rstrip("/")


def query(url: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
    """Returns the response of a metadata server, None if the entry does not exist (404). No proxy is used.

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
