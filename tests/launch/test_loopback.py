"""What a local launch listens on, read from the kernel: nothing off the loopback interface, whatever the host's own
name means."""

import sys

import pytest

from tests.launch.test_jax_processes import BEGIN
from tests.support.sockets import listening, own_address, with_its_children
from tests.support.two_hosts import INSIDE, missing

pytestmark = [pytest.mark.processes, pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")]

SCRIPT = (
    BEGIN
    + """
def main(cluster, signals):
    print("sum", total(cluster.process_index))  # Gloo has connected all
    time.sleep(60)
run(main)
"""
)


def test_nothing_of_a_local_launch_listens_off_loopback_though_the_hosts_name_means_its_address_in_a_network(
    start, tmp_path
):
    """Three processes, the launcher and its coordination service; Gloo by itself listens on what the host's name means,
    so that has to be another host's name here."""
    under, own = [], own_address()
    if own and not missing():
        (tmp_path / "hosts").write_text(f"127.0.0.1 localhost\n{own} elsewhere\n")
        under = ["unshare", "-u", "-m", "--propagation", "private", "sh", "-c", INSIDE]
        under += [str(tmp_path / "hosts"), "elsewhere"]
    launched = start(SCRIPT, 3, under=under)
    launched.read_until("sum 3.0", count=3)
    found = listening(with_its_children(launched.popen.pid))
    assert len(found) >= 5, f"three of Gloo, one of process 0, one of the service: {found}"
    assert all(address.is_loopback for address, _ in found), found
