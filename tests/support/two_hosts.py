"""Hosts on one machine: network namespaces on a bridge, each with a name and a hosts file. For tests that run as root.

`ip netns exec` would remount /sys and hide the cgroups that slurmd needs, so `nsenter` and `unshare` (util-linux) are
used.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

CLONE_NEWNET = 0x40000000
INSIDE = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'


def missing() -> str:
    """Returns why this machine cannot simulate hosts, or an empty text."""
    if os.geteuid() != 0:
        return "namespaces need root"
    absent = [name for name in ("ip", "nsenter", "unshare") if shutil.which(name) is None]
    if absent:
        return f"no {', '.join(absent)} (packages iproute2, util-linux)"
    name = f"sk{os.getpid()}try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return "" if made.returncode == 0 else f"no namespaces here: {made.stderr.strip()}"


def enter_network(descriptor: int) -> None:
    """Moves this thread into a network namespace (`os.setns`, available in Python since 3.12)."""
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


class Hosts:
    """Hosts by name, 10.77.0.1 and so on. Processes started on them end with the context."""

    def __init__(self, names: Sequence[str], also: Mapping[str, str], folder: Path):
        self.names = list(names)
        self.address = {name: f"10.77.0.{i + 1}" for i, name in enumerate(names)}
        self._hosts = folder / "hosts"
        lines = [f"{ip} {name}" for name, ip in self.address.items()]
        lines += [f"{self.address[of]} {other}" for other, of in also.items()]
        self._hosts.write_text("127.0.0.1 localhost\n127.0.1.1 debian\n" + "\n".join(lines) + "\n")
        self._tag = f"sk{secrets.token_hex(4)}"
        self._started: list[subprocess.Popen[str]] = []

    def space(self, name: str) -> str:
        return f"{self._tag}h{self.names.index(name)}"

    def on(self, name: str, command: Sequence[str], hostname: str = "") -> list[str]:
        """Returns the arguments that run a command on a host."""
        enter = ["nsenter", f"--net=/run/netns/{self.space(name)}", "unshare", "-u", "-m", "--propagation", "private"]
        return [*enter, "sh", "-c", INSIDE, str(self._hosts), hostname or name, *command]

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Sockets that this thread creates in this context belong to a host permanently."""
        with open("/proc/thread-self/ns/net") as home, open(f"/run/netns/{self.space(name)}") as there:
            enter_network(there.fileno())
            try:
                yield
            finally:
                enter_network(home.fileno())

    def start(self, name: str, command: Sequence[str], hostname: str = "", **options) -> subprocess.Popen[str]:
        """Starts a command on a host, with its output as text in one stream."""
        given = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "stdin": subprocess.DEVNULL,
            "text": True,
        } | options
        process = subprocess.Popen(self.on(name, command, hostname), start_new_session=True, **given)
        self._started.append(process)
        return process

    def up(self) -> None:
        run = lambda text: subprocess.run(text.split(), check=True, capture_output=True)
        switch = f"{self._tag}sw"
        for space in (switch, *map(self.space, self.names)):
            run(f"ip netns add {space}")
            run(f"ip -n {space} link set lo up")
        run(f"ip -n {switch} link add br0 type bridge")
        run(f"ip -n {switch} link set br0 up")
        for i, name in enumerate(self.names):
            space, port = self.space(name), f"p{i}"
            run(f"ip -n {space} link add eth0 type veth peer name {port} netns {switch}")
            run(f"ip -n {space} addr add {self.address[name]}/24 dev eth0")
            run(f"ip -n {space} link set eth0 up")
            run(f"ip -n {space} route add default dev eth0")  # leads nowhere; a route lookup returns the address
            run(f"ip -n {switch} link set {port} master br0")
            run(f"ip -n {switch} link set {port} up")

    def cut(self, name: str) -> None:
        """Disconnects a host: no packet is sent or received, and no connection is closed."""
        port = f"p{self.names.index(name)}"
        subprocess.run(["ip", "-n", f"{self._tag}sw", "link", "set", port, "down"], check=True)

    def down(self) -> None:
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        for space in (*map(self.space, self.names), f"{self._tag}sw"):
            for pid in subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True).stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", space], capture_output=True)


@contextlib.contextmanager
def hosts(names: Sequence[str] = ("host0", "host1"), also: Mapping[str, str] | None = None) -> Iterator[Hosts]:
    """Yields hosts. `also`: additional names, as in a cluster's DNS."""
    with tempfile.TemporaryDirectory() as folder:
        made = Hosts(names, also or {}, Path(folder))
        try:
            made.up()
            yield made
        finally:
            made.down()
