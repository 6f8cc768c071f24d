"""What Gloo advertises: by itself the host's own name, otherwise the address of an interface, or the one that leads to
the coordinator."""

import socket

import pytest

from spmdkit.cluster.interface import Advertised, by_name, choose
from spmdkit.compat import gloo as compat_gloo
from spmdkit.config import parse_config
from spmdkit.errors import ConfigError
from tests.support.sockets import own_address


def named(monkeypatch, address):
    """Lets this host's own name mean an address; None: nothing."""

    def lookup(name):
        if address is None:
            raise socket.gaierror("unknown")
        return address

    monkeypatch.setattr(socket, "gethostbyname", lookup)


@pytest.mark.parametrize(
    ("coordinator", "name_means"),
    [("127.0.0.1:8476", "127.0.1.1"), ("localhost:8476", "10.0.0.7"), ("[::1]:8476", None)],
)
def test_coordinator_on_loopback_means_loopback(monkeypatch, coordinator, name_means):
    named(monkeypatch, name_means)
    assert choose("auto", coordinator) == Advertised("127.0.0.1")


def test_name_of_the_network_is_left_alone(monkeypatch):
    named(monkeypatch, "10.0.0.7")
    assert choose("auto", "192.0.2.99:8476") == Advertised(None)
    assert choose("auto", "no-such-host.invalid:8476") == Advertised(None)


@pytest.mark.parametrize("address", ["127.0.1.1", None])
def test_name_of_loopback_is_replaced(monkeypatch, address):
    named(monkeypatch, address)
    own = own_address()
    if own is None or own.startswith("127."):
        pytest.skip("this machine reaches no other")
    found = choose("auto", "192.0.2.99:8476")
    assert address is not None or by_name() == "127.0.0.1"
    assert found.address == own and f"resolves to {address or '127.0.0.1'}" in found.reason
    assert choose("auto", f"{own}:8476").address == own, "the coordinator's own host as well"


def test_interface_is_named_and_checked():
    assert choose("lo", "192.0.2.99:8476") == Advertised(
        "127.0.0.1", "Gloo advertises 127.0.0.1, from cluster.interface: lo"
    )
    with pytest.raises(ConfigError, match=r"'eth77' has no IPv4 address .*Its interfaces are .*lo.*Name one of them"):
        choose("eth77", "192.0.2.99:8476")
    assert parse_config({"task": "a.py:t", "cluster": {"interface": "eth0"}}).cluster.interface == "eth0"


def test_jax_passes_the_address_to_gloo(monkeypatch):
    from jax._src import xla_bridge

    monkeypatch.setattr(compat_gloo, "_original", None)
    monkeypatch.setattr(xla_bridge._jax, "make_gloo_tcp_collectives", lambda **k: k)
    for address, expected in (
        ("10.0.0.7", {"hostname": "10.0.0.7"}),
        ("10.0.0.8", {"hostname": "10.0.0.8"}),
        (None, {}),
    ):
        compat_gloo.advertise(address)
        made = xla_bridge._jax.make_gloo_tcp_collectives(distributed_client="c")
        assert made == {"distributed_client": "c", **expected}
