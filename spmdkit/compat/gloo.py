"""The address that XLA's CPU collectives advertise: JAX calls `make_gloo_tcp_collectives` without an address (jax
0.10.2 to 0.12)."""

from __future__ import annotations

import functools
from typing import Any

_own: Any = None


def advertise(address: str | None) -> None:
    """Sets the address that Gloo advertises to other processes; None: the address of the host name. Call before JAX
    creates devices."""
    global _own
    from jax._src import xla_bridge

    jaxlib: Any = xla_bridge._jax
    _own = _own or jaxlib.make_gloo_tcp_collectives
    jaxlib.make_gloo_tcp_collectives = _own if address is None else functools.partial(_own, hostname=address)
