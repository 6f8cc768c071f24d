"""Which address of this host Gloo gives to the other processes: by itself what the host's own name resolves to, often
127.0.1.1, where no other host reaches it.

Coordinator and service connect all the same, and the first collective dies on the other hosts ("Connection refused,
remote=[127.0.1.1]"). JAX has no setting for it (0.10.2 to 0.12); its call of XLA takes one (compat/gloo.py).
`cluster.interface` names a network interface, the same on every host. auto: where the coordinator is on loopback all
processes are on this host and meet there, since Gloo listens on what it advertises; where the coordinator is another
host's or this one's own address, and the name resolves to loopback or to nothing, it is the address by which this host
reaches the coordinator.
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
    """What other processes are told.

    Attributes:
        address: to be handed to Gloo; None: it finds it by the host's name.
        said: why, for the log; empty where nothing is to be said.
    """

    address: str | None
    said: str = ""


def by_name() -> str:
    """Returns the address that the host's own name resolves to, which Gloo takes by itself; loopback where it resolves
    to nothing."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return LOOPBACK


def choose(interface: str, coordinator: str) -> Advertised:
    """Returns what this process is to advertise.

    Args:
        interface: auto, or the name of a network interface.
        coordinator: `host:port`.

    Raises:
        ConfigError: there is no such interface, or it has no address.
    """
    if interface != "auto":
        address = _of_interface(interface)
        return Advertised(address, f"Gloo advertises {address}, as cluster.interface: {interface} says")
    host, port = split_address(coordinator)
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as way:
            way.connect(place)  # sends nothing: the kernel chooses the way and with it the address
            address = str(way.getsockname()[0])
    except OSError:
        return Advertised(None)
    if _is_loopback(address):
        return Advertised(LOOPBACK)
    if not _is_loopback(by_name()):
        return Advertised(None)
    return Advertised(
        address,
        f"Gloo advertises {address}, since this host's own name, {socket.gethostname()}, means {by_name()} here",
    )


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _of_interface(name: str) -> str:
    known = [other for _, other in socket.if_nameindex()]
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            found = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(found[20:24])
    except OSError as error:
        raise ConfigError(
            f"cluster.interface: {name!r} has no IPv4 address on {socket.gethostname()} ({error.strerror or error}). Its interfaces are {', '.join(known)}. "
            "Name one of them, the same on every host, or set interface: auto."
        ) from None
