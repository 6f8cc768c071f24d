"""What XLA's CPU collectives tell other processes: JAX calls `make_gloo_tcp_collectives` without saying on which
address (jax 0.10.2 to 0.12). As the package for everything else."""

from __future__ import annotations

import functools
from typing import Any

_own: Any = None


def advertise(address: str | None) -> None:
    """Lets Gloo, in this process, give `address` to the others; None: what the host's name resolves to. Before JAX has
    devices."""
    global _own
    from jax._src import xla_bridge

    jaxlib: Any = xla_bridge._jax
    _own = _own or jaxlib.make_gloo_tcp_collectives
    jaxlib.make_gloo_tcp_collectives = _own if address is None else functools.partial(_own, hostname=address)
