"""Simulated hosts for network faults: each process of the job runs in a separate network namespace, connected by a
switch in user space (virtual_switch.py; not every kernel has netem).

The namespaces have no names and no files: open descriptors hold them, so they end with the drill. The machine's network
is not modified; the launcher also runs in a namespace. Linux, as root.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from spmdkit.errors import ConfigError
from spmdkit.faults.injection.fault import NETWORK, Fault
from spmdkit.launch.process import start

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TAP, IFF_NO_PI, IFF_UP = 0x400454CA, 2, 0x1000, 1
SIOCGIFFLAGS, SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK = 0x8913, 0x8914, 0x8916, 0x891C
TUN = "/dev/net/tun"
LAUNCHER = "10.77.0.254"
MAX_HOSTS = 200
ALL_LOST, LOSS, DELAY_S, RATE_BYTES_PER_S = 1.0, 0.02, 0.05, 1e6

Rules = list[tuple[int, int, float, float, float]]
"""(from, to, fraction lost, added seconds, bytes per second or 0 for no limit), as virtual_switch.py reads them."""


def missing_support() -> str:
    """Returns why this machine cannot simulate hosts; empty if it can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces exist on Linux only"
    if os.geteuid() != 0:
        return "network namespaces need root"
    return "" if os.access(TUN, os.R_OK | os.W_OK) else f"there is no {TUN}"


def host_address(process: int) -> str:
    """Returns the address of the host of a process."""
    return f"10.77.0.{process + 1}"


def rules_of(kind: str, process: int, num_processes: int) -> Rules:
    """Returns the rules of the switch for the frames of a process; port `num_processes` is the launcher, which hosts
    the coordination service."""
    others = [port for port in range(num_processes + 1) if port != process]
    if kind == "partition-send":
        return [(process, other, ALL_LOST, 0.0, 0.0) for other in others]
    if kind == "partition-peer":
        others = [(process + 1) % num_processes]
    mild = {"loss": (LOSS, 0.0, 0.0), "delay": (0.0, DELAY_S, 0.0), "rate": (0.0, 0.0, RATE_BYTES_PER_S)}
    what = mild.get(kind, (ALL_LOST, 0.0, 0.0))
    return [rule for other in others for rule in ((process, other, *what), (other, process, *what))]


class Network:
    """The hosts of one drill."""

    def __init__(self, spaces: Sequence[int], switch: subprocess.Popen[Any]):
        *self._spaces, self._own = spaces
        self._switch = switch

    @contextlib.contextmanager
    def host(self, process: int) -> Iterator[None]:
        """Enters the host of a process: children started by this thread run there."""
        _enter(self._spaces[process])
        try:
            yield
        finally:
            _enter(self._own)

    def inject(self, kind: str, process: int) -> str:
        """Injects a fault into the network of a process; returns why it failed, empty if it did not."""
        return self._set_rules(rules_of(kind, process, len(self._spaces)))

    def restore(self) -> None:
        """Removes all network faults."""
        self._set_rules([])

    def _set_rules(self, rules: Rules) -> str:
        assert self._switch.stdin is not None
        try:
            # Unbuffered: closing it then raises nothing.
            os.write(self._switch.stdin.fileno(), json.dumps(rules).encode() + b"\n")
        except OSError:
            return "the switch between the hosts has exited, so no frame passes"
        return ""


@contextlib.contextmanager
def network_for(faults: Sequence[Fault], num_processes: int) -> Iterator[Network | None]:
    """Yields simulated hosts for the processes of a drill; None without network faults. The calling thread runs in a
    namespace of the drill until the end.

    Raises:
        ConfigError: there is a network fault, and this machine cannot simulate hosts.
    """
    network_fault = next((fault for fault in faults if fault.kind in NETWORK), None)
    if network_fault is None:
        yield None
        return
    why = missing_support() or (
        "" if 2 <= num_processes <= MAX_HOSTS else f"-n {num_processes} has no network between processes"
    )
    if why:
        raise ConfigError(
            f"--fault {network_fault}: {why}. Network faults need one simulated host per process. Run as root on "
            f"Linux with -n 2 or more, or try --fault stop:{network_fault.process or 0}@20, which also stops "
            "heartbeats."
        )
    with contextlib.ExitStack() as stack:
        home = _this_space()
        stack.callback(os.close, home)
        stack.callback(_enter, home)
        spaces, taps = [], []
        for address in (*map(host_address, range(num_processes)), LAUNCHER):
            _checked(_libc().unshare(CLONE_NEWNET), "unshare")
            spaces.append(_this_space())
            taps.append(_device(address))
            for descriptor in (spaces[-1], taps[-1]):
                stack.callback(os.close, descriptor)
        program = [sys.executable, "-I", "-S", str(Path(__file__).with_name("virtual_switch.py")), *map(str, taps)]
        switch = start(program, stdin=subprocess.PIPE, pass_fds=taps, start_new_session=True)
        stack.callback(switch.wait)
        assert switch.stdin is not None
        stack.callback(switch.stdin.close)
        yield Network(spaces, switch)


def _device(address: str) -> int:
    """Sets up loopback and a TAP device in this namespace; returns the descriptor of the TAP device."""
    tap = os.open(TUN, os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", b"tap0", IFF_TAP | IFF_NO_PI))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for request, number in ((SIOCSIFADDR, address), (SIOCSIFNETMASK, "255.255.255.0")):
            inet = struct.pack("H2x4s8x", socket.AF_INET, socket.inet_aton(number))
            fcntl.ioctl(control, request, struct.pack("16s16s8x", b"tap0", inet))
        for name in (b"lo", b"tap0"):
            before = fcntl.ioctl(control, SIOCGIFFLAGS, struct.pack("16s24x", name))
            (flags,) = struct.unpack_from("H", before, 16)
            fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH22x", name, flags | IFF_UP))
    return tap


def _this_space() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _enter(space: int) -> None:
    _checked(_libc().setns(space, CLONE_NEWNET), "setns")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int, name: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
