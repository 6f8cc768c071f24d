"""The address that XLA's CPU collectives advertise: JAX calls `make_gloo_tcp_collectives` without an address (jax
0.10.2 to 0.12)."""

from __future__ import annotations

import functools
from typing import Any

_original: Any = None


def advertise(address: str | None) -> None:
    """Sets the address that Gloo advertises to other processes; None: the address of the host name. Call before JAX
    creates devices."""
    global _original
    from jaxlib import _jax

    _original = _original or _jax.make_gloo_tcp_collectives
    _jax.make_gloo_tcp_collectives = _original if address is None else functools.partial(_original, hostname=address)
