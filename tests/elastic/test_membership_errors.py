"""Which errors tell only of a process that has died, and which end a run whoever has died."""

import pytest

from spmdkit.elastic import membership as membership_module
from spmdkit.elastic.membership import Membership, MembershipChanged
from spmdkit.errors import CheckpointError, ConfigError, NonFiniteError, RendezvousError, UserCodeError

GLOO = RuntimeError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer [127.0.0.1]:9")


class MembershipFiles:
    born, member = 1, 0


def caused(error, by):
    error.__cause__ = by
    return error


@pytest.fixture(params=[True, False], ids=["called", "not called"])
def membership(request, monkeypatch):
    monkeypatch.setattr(membership_module, "MEMBERSHIP_NOTICE_S", 0.0)
    made = Membership(MembershipFiles(), 5)
    if request.param:
        made._update = object()
        made._peer_died.set()
    made.is_called = request.param
    return made


@pytest.mark.parametrize(
    "error",
    [
        GLOO,
        caused(ConfigError("hook 'mine': after_step cannot be traced: JAX raised JaxRuntimeError"), GLOO),
        caused(UserCodeError("hook 'mine' raised"), GLOO),
        RendezvousError("could not read a key in the coordination service: CANCELLED: this generation is over"),
        ValueError("a buffer of a step that has failed"),
        MembershipChanged("another process died"),
    ],
)
def test_errors_of_lost_peers_are_taken(membership, error):
    assert membership.is_membership_change(error) is membership.is_called


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("batch_size"),
        UserCodeError("the loss raised"),
        NonFiniteError("nan"),
        CheckpointError("damaged"),
        KeyboardInterrupt(),
        None,
    ],
)
def test_own_errors_end_the_run(membership, error):
    assert not membership.is_membership_change(error)
