"""The address of this host that Gloo advertises to the other processes.

Gloo's default is the address of the host's name, often 127.0.1.1, which no other host can reach: the first collective
fails. JAX has no setting for it (0.10.2 to 0.12), but its call of XLA has a parameter (compat/gloo.py).

`cluster.interface` names a network interface, the same on every host. With `auto`, a coordinator on loopback implies
loopback. Otherwise, if the host's name resolves to loopback or does not resolve, Gloo advertises the address from which
this host reaches the coordinator.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from typing import NamedTuple

from spmdkit.cluster.spec import split_address
from spmdkit.errors import ConfigError

SIOCGIFADDR = 0x8915
"""linux/sockios.h: the IPv4 address of an interface."""
LOOPBACK = "127.0.0.1"


class Advertised(NamedTuple):
    """The address that Gloo advertises (None: Gloo resolves the host's name), and the reason for the log."""

    address: str | None
    reason: str = ""


def by_name() -> str:
    """Returns the address of the host's name, which is Gloo's default; loopback if the name does not resolve."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return LOOPBACK


def choose(interface: str, coordinator: str) -> Advertised:
    """Returns the address that this process advertises; `interface`: `auto` or a name; `coordinator`: `host:port`.

    Raises:
        ConfigError: the interface does not exist or has no address.
    """
    if interface != "auto":
        address = _of_interface(interface)
        return Advertised(address, f"Gloo advertises {address}, from cluster.interface: {interface}")
    host, port = split_address(coordinator)
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing: the kernel selects the route and thereby the address
            address = str(probe.getsockname()[0])
    except OSError:
        return Advertised(None)
    if _is_loopback(address):
        return Advertised(LOOPBACK)
    if not _is_loopback(by_name()):
        return Advertised(None)
    return Advertised(
        address,
        f"Gloo advertises {address}, since the name of this host, {socket.gethostname()}, resolves to {by_name()}",
    )


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _of_interface(name: str) -> str:
    known = [other for _, other in socket.if_nameindex()]
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            response = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(response[20:24])
    except OSError as error:
        raise ConfigError(
            f"cluster.interface: {name!r} has no IPv4 address on {socket.gethostname()} ({error.strerror or error}). "
            f"Its interfaces are {', '.join(known)}. Name one of them, the same on every host, or set interface: auto."
        ) from None
